// SPDX-License-Identifier: Apache-2.0
// Every way in which a plan file can be wrong, and the sentence that says so: file, line and column, field, what was
// expected.
#include <filesystem>
#include <fstream>
#include <string>

#include <gtest/gtest.h>

#include <faultline/base/error.hpp>
#include <faultline/plan/plan_toml.hpp>
#include <faultline/plan/presets.hpp>

#include "error_of.hpp"

namespace faultline {
namespace {

struct Case {
    const char* toml;
    std::string sentence;
};

std::string all_presets() {
    std::string list;
    for (const std::string_view name : preset_names()) (list += list.empty() ? "" : ", ") += name;
    return list;
}

void expect_errors(std::initializer_list<Case> cases) {
    for (const Case& c : cases) EXPECT_EQ(error_of(c.toml), c.sentence) << c.toml;
}

TEST(PlanErrors, NotToml) {
    EXPECT_EQ(
        error_of("name = "),
        "f.toml:1:8: not TOML: Error while parsing key-value pair: encountered end-of-file: expected a plan in TOML 1.0");
    EXPECT_EQ(
        error_of("name = \"a\"\nname = \"b\""),
        "f.toml:2:8: not TOML: Error while parsing key-value pair: cannot redefine existing string 'name': expected a plan in TOML 1.0");
    EXPECT_TRUE(error_of("\x80\xFF").starts_with("f.toml:1:1: not TOML: ")) << error_of("\x80\xFF");
    // Two texts on which toml++ 3.3 by itself aborts or reaches what it calls unreachable (plan/tomlplusplus.hpp).
    EXPECT_TRUE(error_of("[[[a]]]").starts_with("f.toml:1:3: not TOML: ")) << error_of("[[[a]]]");
    EXPECT_TRUE(error_of("a = 1\u00F9").starts_with("f.toml:1:6: not TOML: ")) << error_of("a = 1\u00F9");
    EXPECT_TRUE(error_of("a = " + std::string(100000, '[')).starts_with("f.toml:1:")) << "deep nesting ends early";
}

TEST(PlanErrors, UnknownKeys) {
    expect_errors({
        {"nam = \"x\"",
         "f.toml:1:1: nam: no such field: expected one of name, base, description, source, schedule, tiles, sites (did you mean \"name\"?)"},
        {"\n  xyzzy = 1",
         "f.toml:2:3: xyzzy: no such field: expected one of name, base, description, source, schedule, tiles, sites"},
        {"[schedule]\nblok_q = 1",
         "f.toml:2:1: schedule.blok_q: no such field: expected a known name (did you mean \"block_q\"?)"},
        {"[sites.p_cst]\nformat = \"bf16\"",
         "f.toml:1:8: sites.p_cst: no such site: expected a known name (did you mean \"p_cast\"?)"},
        {"[sites.p_cast]\nformt = \"bf16\"",
         "f.toml:2:1: sites.p_cast.formt: no such field: expected one of format, rounding, accumulation (did you mean \"format\"?)"},
        {"[[tiles]]\nhead = 64",
         "f.toml:2:1: tiles[0].head: no such field: expected one of head_dim, causal, window, block_q, block_k, bwd_block_q, bwd_block_k, "
         "delta_threads, exp_poly_every, exp_poly_count, exp_poly_skip"},
        {"sites.p_cast.format = { precision = 4, emin = -6, emax = 8, bias = 7 }",
         "f.toml:1:61: sites.p_cast.format.bias: no such field: expected one of precision, emin, emax, subnormals, infinities, nans, "
         "saturates"},
        {"sites.dv_accumulate.accumulation = { term = 4 }",
         "f.toml:1:38: sites.dv_accumulate.accumulation.term: no such field: expected one of terms, fraction_bits, output, "
         "a_min_exponent, b_min_exponent, input_fraction_bits, zero (did you mean \"terms\"?)"},
    });
    const std::string far = error_of("[sites.wibble_wobble_wibble]");
    EXPECT_TRUE(
        far.starts_with("f.toml:1:8: sites.wibble_wobble_wibble: no such site: expected one of q_cast, k_cast, "))
        << far;
}

TEST(PlanErrors, NamesFromTheFileDoNotReachTheTerminal) {
    EXPECT_EQ(
        error_of("\"\\u001b[2J\" = 1"),
        "f.toml:1:1: \\x1b[2J: no such field: expected one of name, base, description, source, schedule, tiles, sites");
    EXPECT_EQ(error_of("sites.\"\\n\" = 1").substr(0, 39), "f.toml:1:7: sites.\\n: no such site: exp");
    EXPECT_EQ(error_of("schedule.key_order = \"\\u0007\""),
              "f.toml:1:22: schedule.key_order: no such value \"\\x07\": expected one of ascending, descending");
}

TEST(PlanErrors, WrongTypes) {
    expect_errors({
        {"name = 3", "f.toml:1:8: name: is an integer: expected a string"},
        {"description = []", "f.toml:1:15: description: is an array: expected a string"},
        {"source = true", "f.toml:1:10: source: is a boolean: expected a string"},
        {"schedule = 1", "f.toml:1:12: schedule: is an integer: expected a table of the schedule's fields"},
        {"sites = \"all\"", "f.toml:1:9: sites: is a string: expected a table of sites"},
        {"sites.p_cast = \"bf16\"",
         "f.toml:1:16: sites.p_cast: is a string: expected a table with format, rounding, accumulation"},
        {"tiles = 1", "f.toml:1:9: tiles: is an integer: expected an array of tables, [[tiles]]"},
        {"tiles = [1]", "f.toml:1:10: tiles[0]: is an integer: expected a table with head_dim and block sizes"},
        {"schedule.block_q = 64.0", "f.toml:1:20: schedule.block_q: is a number with a point: expected an integer"},
        {"schedule.block_q = \"64\"", "f.toml:1:20: schedule.block_q: is a string: expected an integer"},
        {"schedule.block_q = 1979-05-27", "f.toml:1:20: schedule.block_q: is a date: expected an integer"},
        {"schedule.block_q = 07:32:00", "f.toml:1:20: schedule.block_q: is a time: expected an integer"},
        {"schedule.block_q = 1979-05-27T07:32:00Z",
         "f.toml:1:20: schedule.block_q: is a date and time: expected an integer"},
        {"schedule.stable_beta = \"7\"", "f.toml:1:24: schedule.stable_beta: is a string: expected a number"},
        {"schedule.p_saved = 1", "f.toml:1:20: schedule.p_saved: is an integer: expected true or false"},
        {"schedule.key_order = 1",
         "f.toml:1:22: schedule.key_order: is an integer: expected a string, one of ascending, descending"},
        {"base = 1", "f.toml:1:8: base: is an integer: expected a string, one of " + all_presets()},
        {"sites.p_cast.format = 8",
         "f.toml:1:23: sites.p_cast.format: is an integer: expected a format's name or a table with precision, emin, emax"},
        {"sites.p_cast.rounding = 1",
         "f.toml:1:25: sites.p_cast.rounding: is an integer: expected a string, one of nearest_even, nearest_away, toward_zero, "
         "upward, downward, to_odd, stochastic"},
        {"sites.delta.accumulation = 1",
         "f.toml:1:28: sites.delta.accumulation: is an integer: expected an accumulation's name or a table with the numbers of a matrix unit"},
        {"sites.delta.accumulation.terms = \"x\"",
         "f.toml:1:34: sites.delta.accumulation.terms: is a string: expected an integer"},
    });
}

TEST(PlanErrors, UnknownValues) {
    expect_errors({
        {"base = \"fa9\"", "f.toml:1:8: base: no such value \"fa9\": expected a known name (did you mean \"fa1\"?)"},
        {"schedule.key_order = \"descend\"",
         "f.toml:1:22: schedule.key_order: no such value \"descend\": expected one of ascending, descending (did you mean \"descending\"?)"},
        {"sites.p_cast.format = \"bf15\"",
         "f.toml:1:23: sites.p_cast.format: no such format \"bf15\": expected one of exact, binary64, fp32, tf32, bf16, fp16, e5m2, "
         "e4m3, e3m2, e2m3, e2m1 (did you mean \"bf16\"?)"},
        {"sites.p_cast.rounding = \"RZ\"",
         "f.toml:1:25: sites.p_cast.rounding: no such value \"RZ\": expected one of nearest_even, nearest_away, toward_zero, upward, "
         "downward, to_odd, stochastic"},
        {"sites.dv_accumulate.accumulation = \"hoper-mma-bf16\"",
         "f.toml:1:36: sites.dv_accumulate.accumulation: no such accumulation \"hoper-mma-bf16\": expected a known name (did you mean \"hopper-mma-bf16\"?)"},
        {"sites.dv_accumulate.accumulation.output = \"f32\"",
         "f.toml:1:43: sites.dv_accumulate.accumulation.output: no such value \"f32\": expected one of f32_rz, e8m13_rz, f16_rne"},
    });
}

TEST(PlanErrors, ValuesOutOfRange) {
    const std::string long_name = "name = \"" + std::string(201, 'a') + "\"";
    expect_errors({
        {"name = \"\"", "f.toml:1:8: name: expected 1 to 200 bytes, none of them a slash or a control character"},
        {"name = \"a/b\"", "f.toml:1:8: name: expected 1 to 200 bytes, none of them a slash or a control character"},
        {long_name.c_str(), "f.toml:1:8: name: expected 1 to 200 bytes, none of them a slash or a control character"},
        {"schedule.block_q = 99999999999",
         "f.toml:1:20: schedule.block_q: is 99999999999: expected an integer of 32 bits"},
        {"schedule.stable_beta = inf", "f.toml:1:24: schedule.stable_beta: is not finite: expected a finite number"},
        {"schedule.stable_beta = nan", "f.toml:1:24: schedule.stable_beta: is not finite: expected a finite number"},
        {"schedule.block_q = -1", "f.toml:1:20: schedule.block_q: is -1: expected 0 to 1048576"},
        {"schedule.key_splits = 2147483647", "f.toml:1:23: schedule.key_splits: is 2147483647: expected 1 to 4096"},
        {"schedule.block_k = 1048577", "f.toml:1:20: schedule.block_k: is 1048577: expected 0 to 1048576"},
        {"schedule.delta_threads = 2048",
         "f.toml:1:26: schedule.delta_threads: is 2048: expected a power of two from 1 to 1024"},
        {"[[tiles]]\nhead_dim = 64\nblock_k = 1048577",
         "f.toml:3:11: tiles[0].block_k: is 1048577: expected 0 to 1048576"},
        {"[[tiles]]\nhead_dim = 64\n[[tiles]]\nhead_dim = 64\ncausal = true",
         "f.toml:3:1: tiles[1].head_dim: is 64: expected a head that tiles[0] does not fit already, since the first case that fits decides"},
        {"[[tiles]]\nhead_dim = 65537", "f.toml:2:12: tiles[0].head_dim: is 65537: expected 1 to 65536"},
        {"base = \"fa2\"\n[schedule]\np_saved = true",
         "f.toml:3:11: schedule.p_saved: is true: expected normalize = \"before_pv\", because the backward can use only a normalised p again"},
        {"[sites.merge]\nformat = \"bf16\"",
         "f.toml:1:1: sites.merge: has a rule, and the plan's schedule never reaches it: expected no rule, or a schedule with that step"},
        {"schedule.key_splits = 0", "f.toml:1:23: schedule.key_splits: is 0: expected 1 to 4096"},
        {"[[tiles]]\nblock_q = 1", "f.toml:1:1: tiles[0].head_dim: is missing: expected 1 to 65536"},
        {"[[tiles]]\nhead_dim = 64\nblock_k = -64", "f.toml:3:11: tiles[0].block_k: is -64: expected 0 to 1048576"},
        {"[[tiles]]\nhead_dim = 64\ndelta_threads = 3",
         "f.toml:3:17: tiles[0].delta_threads: is 3: expected a power of two from 1 to 1024"},
        {"sites.p_cast.accumulation = \"fp32-fma\"",
         "f.toml:1:29: sites.p_cast.accumulation: the site does not sum: expected format and rounding alone"},
        {"sites.p_cast.format = { precision = 4 }",
         "f.toml:1:23: sites.p_cast.format.emin: is missing: expected an integer"},
        {"sites.p_cast.format = { precision = 1, emin = -6, emax = 8 }",
         "f.toml:1:23: sites.p_cast.format: precision is 1: expected 2 to 53 significant bits, the hidden bit included"},
        {"sites.dv_accumulate.accumulation = { terms = 0 }",
         "f.toml:1:36: sites.dv_accumulate.accumulation: matrix unit: terms is 0: expected 1 to 1024 products per fused add"},
    });
}

TEST(PlanErrors, WhatNoKernelCanHave) {
    const std::string together = ": expected max_offset and a lazy maximum's max_threshold to be together less than ";
    const std::vector<std::pair<const char*, std::string>> all{
        // log2 of float's largest is 128 - 2^-24 log2(e), of e4m3's 448 8.807, of fp16's 65504 15.9993.
        {"base = \"fa2\"\nschedule.max_offset = 1000",
         "2:23: schedule.max_offset: lets p reach 2^1000" + together + "128, log2 of the largest number at sites.exp"},
        {"base = \"fa4\"\nschedule.max_threshold = 200", "2:26: schedule.max_threshold: lets p reach 2^200" + together +
                                                             "128, log2 of the largest number at sites.exp"},
        {"base = \"fa3-fp8\"\nschedule.max_offset = 9",
         "2:23: schedule.max_offset: lets p reach 2^9" + together + "8.81, log2 of the largest number at sites.p_cast"},
        {"base = \"fa3-fp8\"\n[schedule]\nmax_policy = \"lazy\"",
         "2:1: schedule.max_offset: lets p reach 2^16" + together + "8.81, log2 of the largest number at sites.p_cast"},
        {"base = \"fa4\"\nschedule.max_offset = 8\nsites.p_cast.format = \"fp16\"",
         "2:23: schedule.max_offset: lets p reach 2^16" + together + "16, log2 of the largest number at sites.p_cast"},
        {"base = \"fa4\"\nschedule.max_offset = 8\nsites.row_sum.format = \"fp16\"",
         "2:23: schedule.max_offset: lets p reach 2^16" + together + "16, log2 of the largest number at sites.row_sum"},
        {"base = \"fa2\"\nschedule.max_offset = -127",
         "2:23: schedule.max_offset: is -127: expected -126 or more, so that the largest p is a normal number at "
         "sites.exp"},
        // One tile, behind a sink.
        {"[schedule]\nmax_policy = \"lazy\"\nmax_threshold = 200\n[sites]\nexp = { format = \"fp32\" }",
         "3:17: schedule.max_threshold: lets p reach 2^200" + together +
             "128, log2 of the largest number at sites.exp"},
        {"base = \"fa4\"\nschedule.scale_at = \"scores\"",
         "2:1: schedule.max_policy: is \"lazy\": expected scale_at = \"exponent\", as the kernels that have it do; it is "
         "implemented for no other place of the scale"},
        {"base = \"fa3-fp8\"\nschedule.scale_at = \"scores\"",
         "2:1: schedule.max_offset: is set: expected exp_base = \"two\", scale_at = \"exponent\" and normalize = "
         "\"after_pv\" with it, as the kernels that have an offset do; it is implemented for no other form"},
        {"[schedule]\nscale_at = \"scores\"\nlse_form = \"log2\"",
         "3:12: schedule.lse_form: is \"log2\": expected exp_base = \"two\", scale_at = \"exponent\" and normalize = "
         "\"after_pv\" or \"before_pv\", where the maximum is scaled to log2 units for lse; it is implemented for no "
         "other form"},
        {"base = \"fa4\"\nschedule.max_threshold = -1",
         "2:26: schedule.max_threshold: is -1: expected 0 or more log2 units by which the maximum may lag"},
        {"base = \"fa2\"\n[schedule]\nmax_policy = \"stable\"\nstable_tolerance = -1",
         "4:20: schedule.stable_tolerance: is -1: expected 0 or more, how far below the maximum a score repeats it"},
        {"base = \"fa2\"\n[schedule]\nmax_policy = \"stable\"\nstable_beta = 0.5",
         "4:15: schedule.stable_beta: is 0.5: expected more than 1, so that a repeated maximum is moved off the scores"},
        {"base = \"fa2\"\nschedule.max_offset = nan",
         "2:23: schedule.max_offset: is not finite: expected a finite number"},
        {"base = \"math\"\nschedule.ds_scale = \"before\"",
         "2:21: schedule.ds_scale: scales the score gradient: expected \"after\" with scale_at = \"inputs\", where q and "
         "k carry the scale"},
        {"base = \"math\"\nschedule.row_sum_adds = \"rounded\"",
         "2:25: schedule.row_sum_adds: adds p after its cast: expected normalize = \"after_pv\" with it, because p is "
         "cast when the sum has divided it"},
        {"schedule.key_splits = 2",
         "1:23: schedule.key_splits: is above 1: expected block_k above 0, because the splits are runs of key tiles"},
        {"base = \"fa2\"\n[schedule]\nnormalize = \"before_pv\"\nblock_k = 0\n[[tiles]]\nhead_dim = 64\nblock_k = 32",
         "1:1: tiles[0]: makes a plan in which schedule.normalize is \"before_pv\": expected block_k = 0, because the row "
         "sum is known only after the last key"},
        {"base = \"fa2\"\nsites.scale.rounding = \"stochastic\"",
         "2:24: sites.scale.rounding: is \"stochastic\": expected another one, because the scale is one number for the "
         "whole call"},
    };
    for (const auto& [text, error] : all) EXPECT_EQ(error_of(text), "f.toml:" + error) << text;
}

// The last that fit: 448 is e4m3's largest, and 2^8 with a lag below 0.807 stays under it.
TEST(PlanErrors, AnOffsetThatFitsIsTaken) {
    EXPECT_EQ(error_of("base = \"fa3-fp8\"\n[schedule]\nmax_policy = \"lazy\"\nmax_threshold = 0.8"), "no error");
    EXPECT_EQ(error_of("base = \"fa4\"\nschedule.max_threshold = 127.5"), "no error");
    EXPECT_EQ(error_of("base = \"fa2\"\nschedule.max_offset = -126"), "no error");
}

class PlanFiles : public testing::Test {
  protected:
    std::filesystem::path write(const std::string& name, const std::string& text) {
        const std::filesystem::path file = std::filesystem::path(testing::TempDir()) / name;
        std::ofstream(file, std::ios::binary) << text;
        return file;
    }
    static std::string error_of_file(const std::filesystem::path& file) {
        try {
            (void)read_plan(file);
        } catch (const RequestError& error) {
            return error.what();
        }
        return "no error";
    }
};

TEST_F(PlanFiles, AreNamedInErrors) {
    const auto file = write("wrong.toml", "[schedule]\nblock_q = \"x\"");
    EXPECT_EQ(error_of_file(file), file.string() + ":2:11: schedule.block_q: is a string: expected an integer");
    EXPECT_EQ(read_plan(write("good.toml", "[schedule]\nblock_q = 8")).name, "good");
}

TEST_F(PlanFiles, ThatCannotBeRead) {
    const auto nowhere = std::filesystem::path(testing::TempDir()) / "nowhere.toml";
    EXPECT_EQ(error_of_file(nowhere), nowhere.string() + ": no such file: expected a plan in TOML");
    const auto folder = std::filesystem::path(testing::TempDir()) / "folder.toml";
    std::filesystem::create_directory(folder);
    EXPECT_EQ(error_of_file(folder), folder.string() + ": is not a regular file: expected a plan in TOML");
    for (const char* nothing : {"", "\n# nothing\n"}) {
        const auto empty = write("empty.toml", nothing);
        EXPECT_EQ(error_of_file(empty), empty.string() +
                                            ": has no field: expected a plan in TOML, or base = \"exact\" for one "
                                            "that rounds nothing");
    }
    const auto large = write("large.toml", std::string((1 << 20) + 1, '#'));
    EXPECT_EQ(error_of_file(large), large.string() + ": has more than 1 MiB: expected a plan in TOML");
}

TEST_F(PlanFiles, ABaseIsFoundFromTheFileThatNamesIt) {
    std::filesystem::create_directory(std::filesystem::path(testing::TempDir()) / "bases");
    RoundingPlan found = plan("fa3");
    found.name = "identified-mine";
    found.description = "of the base alone";
    found.schedule.ds_scale = DsScale::before;
    (void)write("bases/first.toml", to_toml(found));
    (void)write("bases/second.toml", "base = \"first.toml\"\n[schedule]\nblock_q = 32");
    const RoundingPlan read =
        read_plan(write("third.toml", "base = \"bases/second.toml\"\nsites.p_cast.format = \"fp16\""));
    RoundingPlan expected = found;
    expected.schedule.block_q = 32;
    for (TileCase& tile : expected.tiles) tile.block_q.reset();
    Rule rule = expected[Site::p_cast];
    rule.format = fp16;
    expected.set(Site::p_cast, rule);
    EXPECT_TRUE(read.same_numerics(expected));
    EXPECT_EQ(read.name, "third");
    EXPECT_EQ(read.description, "");
}

TEST_F(PlanFiles, BasesThatAreNotThereOrComeBack) {
    const auto missing = write("missing.toml", "name = \"x\"\nbase = \"gone.toml\"");
    EXPECT_EQ(
        error_of_file(missing),
        missing.string() +
            ":2:8: base: no such file \"gone.toml\": expected a preset or a plan's file, by its path from this one");
    const std::string comes_back = " has this plan as its base in turn: expected a base that does not come back to it";
    const auto itself = write(
        "itself.toml", "base = \"../" + std::filesystem::path(testing::TempDir()).parent_path().filename().string() +
                           "/itself.toml\"");
    EXPECT_EQ(error_of_file(itself).substr(itself.string().size(), 12), ":1:8: base: ");
    EXPECT_TRUE(error_of_file(itself).ends_with(comes_back)) << error_of_file(itself);
    const auto one = write("one.toml", "base = \"two.toml\""), two = write("two.toml", "base = \"one.toml\"");
    EXPECT_EQ(error_of_file(one), two.string() + ":1:8: base: \"one.toml\"" + comes_back);
    const auto wrong = write("wrong-base.toml", "[schedule]\nblock_q = -1");
    EXPECT_EQ(error_of_file(write("on-wrong.toml", "base = \"wrong-base.toml\"")), error_of_file(wrong));
    EXPECT_TRUE(error_of("base = \"fa2.toml\"").starts_with("f.toml:1:8: base: no such value \"fa2.toml\": "));
    // A chain that no path shows to be one ends as well.
    (void)write("b0.toml", "base = \"fa2\"");
    std::string before = "b0.toml";
    for (int i = 1; i < 70; ++i) {
        std::string name("b");
        name += std::to_string(i);
        name += ".toml";
        (void)write(name, std::string("base = \"").append(before).append("\""));
        before = name;
    }
    EXPECT_NE(error_of_file(std::filesystem::path(testing::TempDir()) / "b69.toml")
                  .find("expected a base that ends in a preset"),
              std::string::npos);
}

}  // namespace
}  // namespace faultline
