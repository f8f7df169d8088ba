// SPDX-License-Identifier: Apache-2.0
// Every wrong request to the real program: exit status 2, one sentence on standard error that names file, field and
// expectation, nothing on standard output, and no file left under or beside the name of the output.
#include <bit>
#include <cstring>
#include <functional>
#include <limits>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <faultline/tensor/safetensors.hpp>

#include "paths.hpp"
#include "support.hpp"

namespace faultline::test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;

/// Runs attribute on the file with more options, and checks all but what the sentence says.
std::string refusal(const Folder& folder, const std::string& file, std::vector<std::string> options = {}) {
    const std::vector<std::string> before = folder.files();
    std::vector<std::string> words{"attribute", file, "-o", folder / "out.h5"};
    words.insert(words.end(), options.begin(), options.end());
    const Outcome run = run_program(words);
    EXPECT_EQ(run.status, 2) << run.err;
    EXPECT_THAT(run.out, IsEmpty());
    EXPECT_EQ(lines(run.err).size(), 1u) << run.err;
    EXPECT_THAT(run.err, StartsWith("faultline attribute: "));
    EXPECT_EQ(folder.files(), before) << "a file was left behind";
    return run.err;
}

struct Case {
    const char* name;
    std::function<void(TensorSet&)> spoil;
    std::vector<std::string> expected;  ///< parts of the sentence, the file's name always among them
    std::vector<std::string> options = {};
};

void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

void replace(TensorSet& set, const std::string& name, std::vector<std::int64_t> shape, double value = 0.5,
             Dtype dtype = Dtype::f32) {
    std::int64_t count = 1;
    for (const std::int64_t extent : shape) count *= extent;
    set.tensors.erase(name);
    if (dtype == Dtype::i32) {
        const std::vector<std::int32_t> values(static_cast<std::size_t>(count), static_cast<std::int32_t>(value));
        set.add(make_tensor<std::int32_t>(name, std::move(shape), values));
        return;
    }
    const std::vector<float> values(static_cast<std::size_t>(count), static_cast<float>(value));
    set.add(make_tensor<float>(name, std::move(shape), values));
}

/// One bf16 element of a tensor.
void poke(TensorSet& set, const std::string& name, std::size_t element, std::uint16_t bits) {
    std::memcpy(set.tensors.at(name).bytes.data() + 2 * element, &bits, 2);
}

class BadCapture : public ::testing::TestWithParam<Case> {};

TEST_P(BadCapture, IsRefusedInOneSentence) {
    const Folder folder;
    TensorSet set;
    add_layer(set, "layer7");  // [1, 2, 24, 16], one key head
    GetParam().spoil(set);
    const std::string file = folder / "run7.safetensors";
    write_safetensors(file, set);
    const std::string sentence = refusal(folder, file, GetParam().options);
    EXPECT_THAT(sentence, HasSubstr("run7.safetensors"));
    for (const std::string& part : GetParam().expected) EXPECT_THAT(sentence, HasSubstr(part));
}

constexpr std::uint16_t bf16_nan = 0x7FC0, bf16_infinity = 0x7F80;
constexpr float infinity = std::numeric_limits<float>::infinity();

INSTANTIATE_TEST_SUITE_P(
    Tensors, BadCapture,
    ::testing::Values(
        Case{"MissingKey",
             [](TensorSet& s) { s.tensors.erase("layer7.k"); },
             {"tensor \"layer7.k\" is missing", "expected"}},
        Case{"NoLayer",
             [](TensorSet& s) {
                 s.tensors.clear(), replace(s, "weights", {2, 2});
             },
             {"expected LAYER.q"}},
        Case{
            "HeadDim",
            [](TensorSet& s) {
                replace(s, "layer7.k", {1, 1, 24, 8});
            },
            {"tensor \"layer7.k\": shape [1, 1, 24, 8] does not match \"layer7.q\" [1, 2, 24, 16]: expected head_dim to agree"}},
        Case{"Batch",
             [](TensorSet& s) {
                 replace(s, "layer7.k", {3, 1, 24, 16});
             },
             {"\"layer7.k\"", "expected batch to agree"}},
        Case{"Sequence",
             [](TensorSet& s) {
                 replace(s, "layer7.v", {1, 1, 23, 16});
             },
             {"\"layer7.v\"", "seq to agree"}},
        Case{"GradientShape",
             [](TensorSet& s) {
                 replace(s, "layer7.do", {1, 2, 24, 8});
             },
             {"\"layer7.do\"", "expected head_dim to agree"}},
        Case{"GroupedHeads",
             [](TensorSet& s) {
                 replace(s, "layer7.q", {1, 3, 24, 16}), replace(s, "layer7.k", {1, 2, 24, 16});
             },
             {"2 key heads for the 3 query heads", "divides 3"}},
        Case{"Rank",
             [](TensorSet& s) { replace(s, "layer7.q", {384}); },
             {"\"layer7.q\": shape [384]", "expected [batch, heads, seq, head_dim]"}},
        Case{"ZeroHeads",
             [](TensorSet& s) {
                 replace(s, "layer7.q", {1, 0, 24, 16});
             },
             {"\"layer7.q\"", "heads is 0", "expected 1 or more"}},
        Case{"ZeroRows",
             [](TensorSet& s) {
                 replace(s, "layer7.q", {1, 2, 0, 16});
             },
             {"seq is 0"}},
        Case{"IntegerInput",
             [](TensorSet& s) {
                 replace(s, "layer7.q", {1, 2, 24, 16}, 1, Dtype::i32);
             },
             {"dtype int32", "floating-point"}},
        Case{"NaN",
             [](TensorSet& s) { poke(s, "layer7.q", 16 * 24 + 16 * 3 + 5, bf16_nan); },
             {"\"layer7.q\": element [0, 1, 3, 5] is NaN", "expected finite"}},
        Case{"Infinity",
             [](TensorSet& s) { poke(s, "layer7.do", 0, bf16_infinity); },
             {"\"layer7.do\": element [0, 0, 0, 0] is infinite"}},
        Case{"ObservedShape",
             [](TensorSet& s) {
                 replace(s, "layer7.toy.dq", {1, 2, 24, 8});
             },
             {"\"layer7.toy.dq\"", "expected [1, 2, 24, 16]"}},
        Case{"LseShape",
             [](TensorSet& s) {
                 replace(s, "layer7.toy.lse", {1, 2, 23});
             },
             {"\"layer7.toy.lse\"", "expected [1, 2, 24]"}},
        Case{"SingleKey",
             [](TensorSet& s) { s.tensors.clear(), add_layer(s, "layer7", {.n_q = 1, .n_k = 1}); },
             {"\"layer7.k\"", "--allow single-key"}},
        Case{"CausalWithoutKeys",
             [](TensorSet& s) { s.tensors.clear(), add_layer(s, "layer7", {.n_q = 24, .n_k = 8}); },
             {"\"layer7.q\"", "the first 16 rows see no key", "--allow masked-rows"}},
        Case{"MaskedRow",
             [](TensorSet& s) {
                 replace(s, "layer7.mask", {24, 24}, -infinity);
             },
             {"\"layer7.mask\": row 0 of head 0", "--allow masked-rows"}},
        Case{"MaskMinimum",
             [](TensorSet& s) {
                 replace(s, "layer7.mask", {24, 24}, std::numeric_limits<float>::lowest());
             },
             {"\"layer7.mask\"", "-3.402823e+38", "--allow mask-min"}},
        Case{"MaskHalfMinimum",
             [](TensorSet& s) {
                 replace(s, "layer7.mask", {24, 24}, -65504);
             },
             {"\"layer7.mask\"", "--allow mask-min"}},
        Case{"MaskNaN",
             [](TensorSet& s) {
                 replace(s, "layer7.mask", {24, 24}, NAN);
             },
             {"\"layer7.mask\": element [0, 0] is NaN"}},
        Case{"MaskInfinity",
             [](TensorSet& s) {
                 replace(s, "layer7.mask", {24, 24}, infinity);
             },
             {"\"layer7.mask\": element [0, 0] is infinite"}},
        Case{"MaskShape",
             [](TensorSet& s) {
                 replace(s, "layer7.mask", {24, 23});
             },
             {"\"layer7.mask\"", "expected [1, 2 or 1, 24, 24]"}},
        Case{"CausalText",
             [](TensorSet& s) { s.metadata["causal"] = "maybe"; },
             {"metadata \"causal\": \"maybe\"", "expected true or false"}},
        Case{"ScaleText",
             [](TensorSet& s) { s.metadata["scale"] = "-1"; },
             {"metadata \"scale\": \"-1\"", "expected a positive number"}},
        Case{"UnknownLayer",
             [](TensorSet&) {},
             {"no layer is called \"layer8\"", "expected layer7", "did you mean \"layer7\"?"},
             {"--layers", "layer8"}},
        Case{"UnknownHead", [](TensorSet&) {}, {"--heads: 2: expected 0 to 1"}, {"--heads", "2"}}),
    [](const auto& instance) { return std::string(instance.param.name); });

// What is refused by default is taken when asked for.
TEST(Allowed, DegenerateInputsWhenNamed) {
    const Folder folder;
    const std::string file = folder / "run7.safetensors";
    const auto run = [&](const std::function<void(TensorSet&)>& make, const char* allow) {
        TensorSet set;
        make(set);
        write_safetensors(file, set);
        return run_program(
            {"attribute", file, "--json", "--quiet", "--correction", "none", "--sites", "o_cast", "--allow", allow});
    };
    const Outcome single = run([](TensorSet& s) { add_layer(s, "layer7", {.n_q = 1, .n_k = 1}); }, "single-key");
    EXPECT_EQ(single.status, 0) << single.err;
    const Outcome masked = run([](TensorSet& s) { add_layer(s, "layer7", {.n_q = 24, .n_k = 8}); }, "masked-rows");
    EXPECT_EQ(masked.status, 0) << masked.err;
    const auto half_masked = [](TensorSet& s, float value) {
        add_layer(s, "layer7");
        std::vector<float> mask(24 * 24, 0);
        for (std::size_t i = 0; i < mask.size(); ++i)
            if (i % 24 > 11) mask[i] = value;
        s.add(make_tensor<float>("layer7.mask", {24, 24}, mask));
    };
    const Outcome minimum =
        run([&](TensorSet& s) { half_masked(s, std::numeric_limits<float>::lowest()); }, "mask-min");
    const Outcome minus_infinity = run([&](TensorSet& s) { half_masked(s, -infinity); }, "mask-min");
    EXPECT_EQ(minimum.status, 0) << minimum.err;
    EXPECT_EQ(minimum.out, minus_infinity.out);  // finfo.min is read as -infinity
}

// --- the bytes of a file --------------------------------------------------------------------------------------------

std::string safetensors(const std::string& header, std::size_t data, std::uint64_t claimed = 0) {
    const std::uint64_t length = claimed != 0 ? claimed : header.size();
    std::string bytes(8, '\0');
    std::memcpy(bytes.data(), &length, 8);
    return bytes + header + std::string(data, '\0');
}

TEST(BadFile, IsRefusedInOneSentence) {
    const Folder folder;
    const std::string entry = R"({"layer0.q":{"dtype":"BF16","shape":[2,4],"data_offsets":[0,16]}})";
    const std::vector<std::pair<std::string, std::string>> files{
        {"empty.safetensors", ""},
        {"short.safetensors", "abc"},
        {"truncated.safetensors", safetensors(entry, 9)},
        {"header-longer.safetensors", safetensors(entry, 16, 1'000'000)},
        {"header-huge.safetensors", safetensors(entry, 16, ~std::uint64_t{0} >> 1)},
        {"not-json.safetensors", safetensors("{\"layer0.q\":", 16)},
        {"overlapping.safetensors",
         safetensors(
             R"({"a.q":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]},"a.k":{"dtype":"BF16","shape":[2],"data_offsets":[2,6]}})",
             6)},
        {"out-of-range.safetensors", safetensors(R"({"a.q":{"dtype":"BF16","shape":[2],"data_offsets":[0,400]}})", 4)},
        {"unknown-dtype.safetensors", safetensors(R"({"a.q":{"dtype":"Q7","shape":[2],"data_offsets":[0,4]}})", 4)},
        {"shape-and-length.safetensors",
         safetensors(R"({"a.q":{"dtype":"BF16","shape":[3],"data_offsets":[0,4]}})", 4)},
        {"noise.h5", "not an HDF5 file"},
        {"noise.npy", "not a numpy file"},
        {"noise.bin", "nothing that we know"}};
    for (const auto& [name, bytes] : files) {
        SCOPED_TRACE(name);
        folder.write(name, bytes);
        const std::string sentence = refusal(folder, folder / name);
        EXPECT_THAT(sentence, HasSubstr(name));
        EXPECT_THAT(sentence, HasSubstr("expected"));
    }
    EXPECT_THAT(refusal(folder, folder / "absent.safetensors"), HasSubstr("absent.safetensors: cannot be opened"));
}

// --- plans, settings, options ---------------------------------------------------------------------------------------

TEST(BadRequest, NamesThePlan) {
    const Folder folder;
    const std::string file = small_capture(folder);
    EXPECT_THAT(refusal(folder, file, {"--plan", "fa22"}),
                ::testing::AllOf(HasSubstr("--plan"), HasSubstr("\"fa22\""), HasSubstr("did you mean \"fa2\"?")));
    folder.write("mine.toml", "name = \"mine\"\n[sites.p_cast]\nformat = 7\n");
    EXPECT_THAT(refusal(folder, file, {"--plan", folder / "mine.toml"}),
                ::testing::AllOf(HasSubstr("mine.toml"), HasSubstr("p_cast"), HasSubstr("expected")));
    folder.write("mine.toml", "name = \"mine\"\n[sites.p_kast]\nformat = \"bf16\"\n");
    EXPECT_THAT(refusal(folder, file, {"--plan", folder / "mine.toml"}),
                ::testing::AllOf(HasSubstr("mine.toml"), HasSubstr("p_kast"), HasSubstr("p_cast")));
    EXPECT_THAT(refusal(folder, file, {"--plan", folder / "absent.toml"}), HasSubstr("absent.toml"));
}

TEST(BadRequest, NamesTheSettingAndWhereItCameFrom) {
    const Folder folder;
    const std::string file = small_capture(folder);
    EXPECT_THAT(refusal(folder, file, {"--sites", "dqcast"}),
                ::testing::AllOf(HasSubstr("--sites: \"dqcast\""), HasSubstr("did you mean \"dq_cast\"?")));
    EXPECT_THAT(refusal(folder, file, {"--outputs", "dz"}),
                HasSubstr("--outputs: \"dz\": expected one of o, dq, dk, dv"));
    EXPECT_THAT(refusal(folder, file, {"--correction", "zero_sum_unifrm"}),
                ::testing::AllOf(HasSubstr("--correction"), HasSubstr("zero_sum_uniform")));
    EXPECT_THAT(refusal(folder, file, {"--correction", "fp32_backward:layer9"}),
                ::testing::AllOf(HasSubstr("\"layer9\""), HasSubstr("layer0, layer1")));
    EXPECT_THAT(refusal(folder, file, {"--report", folder / "r.txt"}), HasSubstr("expected a name for an HTML page"));
    // A value that was forgotten is not the next option.
    EXPECT_THAT(refusal(folder, file, {"--report", "--quiet"}),
                HasSubstr("--report: \"--quiet\": begins with \"--\" as an option: expected a value (\"./--quiet\""));
    EXPECT_THAT(refusal(folder, file, {"-o", "--json"}), HasSubstr("--output: \"--json\": begins with"));
    EXPECT_THAT(refusal(folder, file, {"--allow", "nan"}),
                HasSubstr("--allow: \"nan\": expected one of single-key, masked-rows, mask-min"));
    EXPECT_THAT(refusal(folder, file, {"--threads", "two"}),
                HasSubstr("--threads: \"two\": expected an integer from 0 to 4096"));
    EXPECT_THAT(refusal(folder, file, {"--threads", "4294967297"}), HasSubstr("expected an integer from 0 to 4096"));
    EXPECT_THAT(refusal(folder, file, {"--seed", "9223372036854775808"}),
                HasSubstr("--seed: \"9223372036854775808\": expected an integer of 0 or more, below 2^63"));
    EXPECT_THAT(refusal(folder, file, {"--heads", "4294967297"}),
                HasSubstr("--heads: \"4294967297\": expected a list of integers from 0 to 2147483647"));
    EXPECT_THAT(refusal(folder, file, {"--heads", "7"}),
                HasSubstr("--heads: 7: expected 0 to 1, the heads of layer0 in "));
    EXPECT_THAT(refusal(folder, file, {"--plan", ""}), HasSubstr("--plan: \"\": expected a string that is not empty"));
    EXPECT_THAT(refusal(folder, file, {"--config", ""}), HasSubstr("--config: \"\": expected the name of a TOML file"));
    EXPECT_THAT(refusal(folder, file, {"--config", "a.toml", "--config", "b.toml"}),
                HasSubstr("--config: is given 2 times: expected one file"));
    EXPECT_THAT(refusal(folder, file, {"--correction", "none", "--correction", "all"}),
                HasSubstr("--correction: \"none\": expected no other correction beside it"));
    EXPECT_THAT(refusal(folder, file, {"--inject", ""}),
                HasSubstr("--inject: \"\": expected SITE:LAW:MAGNITUDE, not empty"));
    EXPECT_THAT(refusal(folder, file, {"--scale"}), HasSubstr("--scale: has no value: expected X"));
    EXPECT_EQ(run_program({"attribute", file, "-o", ""}).status, 2);
    EXPECT_THAT(refusal(folder, file, {"--threads", "-1"}), HasSubstr("--threads"));
    EXPECT_THAT(refusal(folder, file, {"--scale", "0"}), HasSubstr("--scale: \"0\": expected a positive number"));
    const Outcome no_device = run_program({"attribute", file, "--device", "cuda"});  // no card where the tests run
    EXPECT_EQ(no_device.status, 1);
    EXPECT_THAT(no_device.err, HasSubstr("faultline attribute: device cuda: "));
    EXPECT_THAT(no_device.err, HasSubstr(": expected "));
    const Outcome only_cpu = run_program({"generate", "--device", "cuda"});
    EXPECT_EQ(only_cpu.status, 2);
    EXPECT_THAT(only_cpu.err, HasSubstr("--device: generate runs on the CPU alone: expected cpu"));
    EXPECT_THAT(refusal(folder, file, {"--device", "tpu"}), HasSubstr("--device: \"tpu\": expected one of cpu, cuda"));
    EXPECT_THAT(refusal(folder, file, {"--plna", "fa2"}),
                HasSubstr("\"--plna\": unknown option: expected one that --help lists (did you mean \"--plan\"?)"));
    EXPECT_THAT(refusal(folder, file, {"--set", "plna=fa2"}),
                ::testing::AllOf(HasSubstr("--set: \"plna\": unknown key"), HasSubstr("plan")));
    EXPECT_THAT(refusal(folder, file, {"--set", "threads=many"}),
                HasSubstr("--set threads: \"many\": expected an integer"));
    EXPECT_THAT(refusal(folder, file, {"--set", "threads"}), HasSubstr("expected KEY=VALUE"));
    EXPECT_THAT(refusal(folder, file, {"other.safetensors"}),
                HasSubstr("\"other.safetensors\": one argument too many"));
}

TEST(BadRequest, NamesFileTableAndKeyOfAConfiguration) {
    const Folder folder;
    const std::string file = small_capture(folder);
    const auto with = [&](const std::string& toml) {
        folder.write("run.toml", toml);
        const std::string sentence = refusal(folder, file, {"--config", folder / "run.toml"});
        EXPECT_THAT(sentence, HasSubstr("run.toml"));
        return sentence;
    };
    EXPECT_THAT(with("[attribute]\nthreads = \"2\"\n"),
                HasSubstr("attribute.threads: is a string (\"2\"): expected an integer from 0 to 4096"));
    EXPECT_THAT(with("[attribute]\nthreads = -2\n"),
                HasSubstr("attribute.threads: is an integer (-2): expected an integer from 0 to 4096"));
    EXPECT_THAT(with("[attribute]\nthreads = 4294967297\n"),
                HasSubstr("attribute.threads: is an integer (4294967297): expected an integer from 0 to 4096"));
    EXPECT_THAT(with("[attribute]\nlayers = \"layer0\"\n"),
                HasSubstr("attribute.layers: is a string (\"layer0\"): expected a list of strings"));
    EXPECT_THAT(with("[attribute]\nheads = [0.5]\n"),
                HasSubstr("attribute.heads: item 1 is a number (0.5): expected a list of integers"));
    EXPECT_THAT(with("[attribute]\nscale = inf\n"),
                HasSubstr("attribute.scale: is a number that is not finite: expected a positive number"));
    EXPECT_THAT(with("[attribute]\njson = 1\n"),
                HasSubstr("attribute.json: is an integer (1): expected true or false"));
    EXPECT_THAT(with("[attribute]\nplna = \"fa2\"\n"), HasSubstr("attribute.plna: unknown key"));
    EXPECT_THAT(with("[atribute]\n"),
                ::testing::AllOf(HasSubstr("\"atribute\""), HasSubstr("did you mean \"attribute\"?")));
    EXPECT_THAT(with("attribute = 3\n"), HasSubstr("attribute: is an integer: expected a table"));
    EXPECT_THAT(with("[attribute\n"), HasSubstr("line 1"));
    EXPECT_THAT(with("[attribute]\noutputs = [\"dz\"]\n"),
                HasSubstr("attribute.outputs: \"dz\": expected one of o, dq, dk, dv"));
    EXPECT_THAT(with("[identify]\nthreads = 2\n"),
                HasSubstr("has no table [attribute]: expected the settings of this command"));
    EXPECT_THAT(refusal(folder, file, {"--config", folder / "absent.toml"}),
                HasSubstr("absent.toml: cannot be opened"));
}

TEST(BadRequest, OutputThatIsThereIsNotReplaced) {
    const Folder folder;
    const std::string file = small_capture(folder);
    folder.write("out.h5", "mine");
    EXPECT_THAT(refusal(folder, file),
                ::testing::AllOf(HasSubstr("--output"), HasSubstr("exists already"), HasSubstr("--force")));
    const Outcome folderless = run_program({"attribute", file, "-o", folder / "no/out.h5"});
    EXPECT_EQ(folderless.status, 2);
    EXPECT_THAT(folderless.err, HasSubstr("no"));
}

TEST(BadRequest, CommandsThemselves) {
    EXPECT_EQ(run_program({}).status, 2);
    const Outcome unknown = run_program({"atribute"});
    EXPECT_EQ(unknown.status, 2);
    EXPECT_THAT(unknown.err, ::testing::AllOf(StartsWith("faultline: \"atribute\": expected a known name"),
                                              HasSubstr("did you mean \"attribute\"?")));
    EXPECT_THAT(lines(unknown.err), ::testing::SizeIs(1));
    EXPECT_EQ(run_program({"attribute"}).status, 2);
    EXPECT_EQ(run_program({"plans", "fa22"}).status, 2);
    EXPECT_EQ(run_program({"plans", "--diff", "fa2"}).status, 2);
}

// A full disk is not the request's fault.
TEST(FailedWork, StandardOutputThatCannotBeWritten) {
    if (!std::filesystem::exists("/dev/full")) GTEST_SKIP() << "there is no /dev/full";
    const std::string command = program() + " sites > /dev/full 2> /dev/null";
    const int status = std::system(command.c_str());
    EXPECT_EQ(WEXITSTATUS(status), 1);
}

}  // namespace
}  // namespace faultline::test
