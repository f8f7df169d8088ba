// SPDX-License-Identifier: Apache-2.0
// What all commands share: configuration, formats of output, signals.
#include <chrono>
#include <csignal>
#include <cstdio>
#include <fstream>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>
#include <nlohmann/json.hpp>

#include <faultline/format/names.hpp>
#include <faultline/plan/presets.hpp>
#include <faultline/plan/site.hpp>
#include <faultline/record/record_reader.hpp>
#include <faultline/tensor/safetensors.hpp>

#include "paths.hpp"
#include "support.hpp"

namespace faultline::test {
namespace {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

TEST(Configuration, CommandLineBeatsSetBeatsFile) {
    const Folder folder;
    folder.write(
        "run.toml",
        "[attribute]\nplan = \"fa3\"\nthreads = 3\nseed = 5\nlayers = [\"a\", \"b\"]\ncausal = false\n[sites]\njson = true\n");
    const Outcome run = run_program({"attribute", "--config", folder / "run.toml", "--set", "threads=4", "--set",
                                     "plan=fa1", "--plan", "fa2", "--print-config"});
    EXPECT_EQ(run.status, 0) << run.err;
    EXPECT_THAT(run.out, AllOf(HasSubstr("plan = \"fa2\"\n"), HasSubstr("threads = 4\n"), HasSubstr("seed = 5\n"),
                               HasSubstr("layers = [\"a\", \"b\"]\n"), HasSubstr("causal = false\n"),
                               HasSubstr("json = false\n")));
}

TEST(Configuration, SetTakesOneStringForAList) {
    for (const char* assignment : {"correction=none", "correction=\"none\"", "correction=[\"none\"]"}) {
        const Outcome run = run_program({"attribute", "--set", assignment, "--print-config"});
        EXPECT_EQ(run.status, 0) << run.err;
        EXPECT_THAT(run.out, HasSubstr("correction = [\"none\"]\n")) << assignment;
    }
}

TEST(Configuration, PrintedAndReadBackIsTheSame) {
    const Folder folder;
    const Outcome first = run_program({"attribute",
                                       "a \"quoted\"\\name.safetensors",
                                       "--plan",
                                       "fa3",
                                       "--layers",
                                       "x,y",
                                       "--layers",
                                       "z",
                                       "--heads",
                                       "0,1",
                                       "--outputs",
                                       "dq",
                                       "--sites",
                                       "delta",
                                       "--correction",
                                       "stable_max:7,1e-3",
                                       "--correction",
                                       "two_sum",
                                       "--no-causal",
                                       "--scale",
                                       "0.125",
                                       "--verify-truth",
                                       "3",
                                       "--seed",
                                       "9",
                                       "--allow",
                                       "mask-min",
                                       "-o",
                                       "x.h5",
                                       "--force",
                                       "--json",
                                       "--quiet",
                                       "--full",
                                       "--threads",
                                       "2",
                                       "--print-config"});
    ASSERT_EQ(first.status, 0) << first.err;
    EXPECT_THAT(first.out,
                AllOf(HasSubstr("layers = [\"x\", \"y\", \"z\"]"),
                      HasSubstr("correction = [\"stable_max:7,1e-3\", \"two_sum\"]"), HasSubstr("scale = 0.125\n")));
    folder.write("run.toml", first.out);
    const Outcome second = run_program({"attribute", "--config", folder / "run.toml", "--print-config"});
    EXPECT_EQ(second.status, 0) << second.err;
    EXPECT_EQ(second.out, first.out);
}

// The manifest's config_toml is a configuration: the run can be made again from the file it wrote.
TEST(Configuration, OfAFileMakesTheSameRunAgain) {
    const Folder folder;
    const std::vector<std::string> words{"attribute", small_capture(folder), "--json",      "--quiet", "--outputs",
                                         "dq",        "--correction",        "delta_exact", "--sites", "delta,dq_cast"};
    std::vector<std::string> with_file = words;
    with_file.insert(with_file.end(), {"-o", folder / "first.h5"});
    const Outcome first = run_program(with_file);
    ASSERT_EQ(first.status, 0) << first.err;
    folder.write("again.toml", RecordReader(folder / "first.h5").manifest().config_toml);
    const Outcome second = run_program({"attribute", "--config", folder / "again.toml", "-o", folder / "second.h5"});
    EXPECT_EQ(second.status, 0) << second.err;
    EXPECT_EQ(second.out, first.out);
}

TEST(Lists, HaveEverySitePlanAndFormat) {
    const json site_list = json::parse(run_program({"sites", "--json"}).out);
    EXPECT_EQ(site_list["schema"], "faultline.sites/1");
    ASSERT_EQ(site_list["sites"].size(), site_count);
    for (std::size_t i = 0; i < site_count; ++i) EXPECT_EQ(site_list["sites"][i]["name"], sites()[i].name);
    const json plan_list = json::parse(run_program({"plans", "--json"}).out);
    ASSERT_EQ(plan_list["plans"].size(), presets().size());
    for (std::size_t i = 0; i < presets().size(); ++i) {
        EXPECT_EQ(plan_list["plans"][i]["name"], presets()[i].name);
        EXPECT_EQ(plan_list["plans"][i]["source"], presets()[i].source);
    }
    const json format_list = json::parse(run_program({"formats", "--json"}).out);
    EXPECT_EQ(format_list["formats"].size(), all_formats().size() + 6);  // and the six block-scaled ones
    for (const json& format : format_list["formats"]) {
        if (format["name"] == "e4m3") {
            EXPECT_EQ(format["max"], "448");
        }
        if (format["name"] == "bf16") {
            EXPECT_EQ(format["precision"], "8");
        }
    }
}

TEST(Lists, KeepWithinALine) {
    for (const std::vector<std::string>& words :
         std::vector<std::vector<std::string>>{{"sites"}, {"formats"}, {"plans"}, {"plans", "--diff", "fa2", "fa3"}})
        for (const std::string& line : lines(run_program(words).out)) EXPECT_LE(line.size(), 110u) << line;
}

TEST(Lists, AreWrittenAsFiles) {
    const Folder folder;
    for (const char* command : {"sites", "formats", "plans"}) {
        const std::string path = folder / (std::string(command) + ".h5");
        ASSERT_EQ(run_program({command, "-o", path}).status, 0);
        const RecordReader file(path);
        EXPECT_EQ(file.manifest().kind, command);
        EXPECT_FALSE(file.read_strings("name").empty());
    }
}

TEST(Plans, OneIsPrintedAsAFileThatReadsBackAlike) {
    const Folder folder;
    const Outcome shown = run_program({"plans", "fa2"});
    ASSERT_EQ(shown.status, 0);
    folder.write("copy.toml", shown.out);
    EXPECT_THAT(run_program({"plans", "--diff", "fa2", folder / "copy.toml"}).out, HasSubstr("round alike"));
    EXPECT_THAT(run_program({"plans", "--diff", "fa2,fa2-unfused"}).out, HasSubstr("schedule.argument"));
}

TEST(Plans, DifferencesSayWhatIsThere) {
    const Folder folder;
    const std::string tiles = run_program({"plans", "--diff", "fa2,thunderkittens"}).out;
    EXPECT_THAT(tiles, HasSubstr("  256: 192x128, backward 64x128\n"));
    EXPECT_THAT(tiles, HasSubstr("  64: 128x128, backward 128x128\n"));
    // A dash where the field changes nothing: math's scores are scaled, its delta is of P and dP.
    EXPECT_THAT(run_program({"plans", "--diff", "fa2,math"}).out, ContainsRegex("schedule.delta_order +octets +-\n"));
    EXPECT_THAT(run_program({"plans", "--diff", "fa2,math"}).out, ContainsRegex("sites.bwd_exp.format +fp32 +-\n"));
    EXPECT_THAT(run_program({"plans", "--diff", "math,llmc"}).out, Not(HasSubstr("delta_order")));
    for (const std::vector<std::string>& words :
         std::vector<std::vector<std::string>>{{"plans"}, {"plans", "fa2"}, {"plans", "--diff", "fa2,fa3"}}) {
        std::vector<std::string> written = words;
        written.insert(written.end(), {"-o", folder / "written.h5", "--force"});
        EXPECT_EQ(run_program(written).out, run_program(words).out);
    }
    EXPECT_THAT(run_program({"plans", "--diff", "fa2"}).err, HasSubstr("--diff: 1 plan: expected two"));
    EXPECT_THAT(run_program({"plans", "--diff", "fa2,fa3,fa4"}).err, HasSubstr("--diff: 3 plans: expected two"));
}

TEST(Inspect, ShowsACaptureSoundOrNot) {
    const Folder folder;
    const std::string file = small_capture(folder);
    const Outcome text = run_program({"inspect", file});
    EXPECT_EQ(text.status, 0) << text.err;
    EXPECT_THAT(text.out, AllOf(HasSubstr("layer0  2 heads (1 of keys), 24 queries x 24 keys, head_dim 16, causal"),
                                HasSubstr("toy (o, dq)"), HasSubstr("bfloat16")));
    const json object = json::parse(run_program({"inspect", file, "--json"}).out);
    EXPECT_EQ(object["layers"][1]["name"], "layer1");
    // Scores are sums of 16 products of deviates scaled by 4 each, over sqrt(16).
    EXPECT_GT(object["layers"][1]["max_logit"].get<double>(), 16 * object["layers"][0]["max_logit"].get<double>() / 4);
    EXPECT_EQ(object["layers"][0]["tensors"].size(), 6u);
}

TEST(Inspect, SaysOfAllSequencesAndOfWhatElseTheProblemHas) {
    const Folder folder;
    const std::string file = folder / "made.safetensors";
    ASSERT_EQ(run_program({"generate", "paged,varlen,softcap,sink-logit,dropout", "-o", file, "--quiet"}).status, 0);
    const std::string text = run_program({"inspect", file}).out;
    EXPECT_THAT(text, HasSubstr("paged  4 sequences, 2 heads (2 of keys), 1 to 8 queries x 9 to 128 keys,"));
    EXPECT_THAT(text, HasSubstr("scale 0.125, softcap 30\n"));
    EXPECT_THAT(text, HasSubstr("scale 0.125, sink\n"));
    EXPECT_THAT(text, HasSubstr("scale 0.125, dropout\n"));
    const json layers = json::parse(run_program({"inspect", file, "--json"}).out)["layers"];
    for (const json& layer : layers) {
        EXPECT_EQ(layer["sequences"], layer["name"] == "paged" || layer["name"] == "varlen" ? 4 : 1) << layer["name"];
        if (layer["name"] == "softcap") {
            EXPECT_LE(layer["max_logit"].get<double>(), 30.0);  // of the capped scores
        }
    }
}

TEST(Inspect, ShowsAFileOfOurs) {
    const Folder folder;
    ASSERT_EQ(
        run_program({"attribute", small_capture(folder), "-o", folder / "out.h5", "--quiet", "--correction", "none"})
            .status,
        0);
    const Outcome text = run_program({"inspect", folder / "out.h5"});
    EXPECT_EQ(text.status, 0) << text.err;
    EXPECT_THAT(text.out, AllOf(HasSubstr("attribution"), HasSubstr("layer0/counterfactual"), HasSubstr("xxh3-128:"),
                                HasSubstr("--correction none")));
    const json object = json::parse(run_program({"inspect", folder / "out.h5", "--json"}).out);
    EXPECT_EQ(object["manifest"]["kind"], "attribution");
}

TEST(Terminal, NoEscapeSequencesInAFileAndNothingSaidWhenQuiet) {
    const Folder folder;
    const Outcome run = run_program({"attribute", small_capture(folder), "--quiet"}, {{"TERM", "xterm"}});
    EXPECT_EQ(run.status, 0);
    EXPECT_THAT(run.err, IsEmpty());
    EXPECT_THAT(run.out, Not(HasSubstr("\x1b")));
}

// `faultline … | head -1`: the reader goes away, which is no failure and leaves the file whole.
TEST(Signals, AReaderThatGoesAwayIsNoError) {
    const Folder folder;
    const std::string command = "set -o pipefail; '" + program() + "' attribute '" + small_capture(folder) +
                                "' --full --quiet -o '" + (folder / "out.h5") + "' | head -n 1 > /dev/null";
    const int status = std::system(("bash -c \"" + command + "\"").c_str());
    EXPECT_EQ(WEXITSTATUS(status), 0);
    EXPECT_TRUE(RecordReader(folder / "out.h5").contains("layer1/counterfactual/alone"));
}

// Ctrl-C: the layers that are whole are written, complete = 0, the rest is named, status 1.
TEST(Signals, InterruptLeavesAReadableFileAndSaysHowToGoOn) {
    const Folder folder;
    TensorSet set;
    for (int layer = 0; layer < 40; ++layer) add_layer(set, "layer" + std::to_string(layer), {.n_q = 96, .n_k = 96});
    const std::string file = folder / "long.safetensors";
    write_safetensors(file, set);
    const std::string out = folder / "out.h5", err = folder / "err";
    const pid_t child = ::fork();
    if (child == 0) {
        (void)std::freopen(err.c_str(), "w", stderr);
        (void)std::freopen("/dev/null", "w", stdout);
        ::execl(program().c_str(), "faultline", "attribute", file.c_str(), "-o", out.c_str(),
                static_cast<char*>(nullptr));
        ::_exit(127);
    }
    // The partial file appears when the work begins; a moment later some layers are whole and others are not.
    while (!std::filesystem::exists(out + ".partial")) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    std::this_thread::sleep_for(std::chrono::milliseconds(700));
    ::kill(child, SIGINT);
    int status = 0;
    ::waitpid(child, &status, 0);
    ASSERT_TRUE(WIFEXITED(status));
    const RecordReader record(out);
    const std::string complete = record.attribute("", "complete").value_or("");
    if (WEXITSTATUS(status) == 0) {  // the machine was faster than we were
        EXPECT_EQ(complete, "1");
        GTEST_SKIP() << "all layers were done before the interrupt";
    }
    EXPECT_EQ(WEXITSTATUS(status), 1);
    EXPECT_EQ(complete, "0");
    std::ifstream in(err);
    const std::string said((std::istreambuf_iterator<char>(in)), {});
    EXPECT_THAT(said, AllOf(HasSubstr("interrupted after "), HasSubstr("--layers "), HasSubstr("layer39")));
    EXPECT_THAT(folder.files(), Not(::testing::Contains("out.h5.partial")));
}

// Recomputing every element of such a layer takes minutes.
TEST(Signals, InterruptEndsTheVerificationOfTheTruth) {
    const Folder folder;
    TensorSet set;
    add_layer(set, "layer0", {.heads = 4, .n_q = 256, .n_k = 256, .d = 64, .d_v = 64});
    const std::string file = folder / "long.safetensors", out = folder / "out.h5";
    write_safetensors(file, set);
    const pid_t child = ::fork();
    if (child == 0) {
        (void)std::freopen("/dev/null", "w", stderr);
        (void)std::freopen("/dev/null", "w", stdout);
        ::execl(program().c_str(), "faultline", "attribute", file.c_str(), "-o", out.c_str(), "--verify-truth",
                "9223372036854775807", "--correction", "none", "--sites", "p_cast", static_cast<char*>(nullptr));
        ::_exit(127);
    }
    while (!std::filesystem::exists(out + ".partial")) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    std::this_thread::sleep_for(std::chrono::milliseconds(1500));
    ::kill(child, SIGINT);
    const auto asked = std::chrono::steady_clock::now();
    int status = 0;
    ::waitpid(child, &status, 0);
    ASSERT_TRUE(WIFEXITED(status));
    EXPECT_EQ(WEXITSTATUS(status), 1);
    EXPECT_LT(std::chrono::steady_clock::now() - asked, std::chrono::seconds(20));  // a row under sanitizers: 50 ms
}

TEST(Selftest, TheDevicesFormHasTheCpusBits) {
    const Outcome run = run_program({"selftest", "--plans", "fa2,repo-2510.04212", "--queries", "24", "--json"});
    EXPECT_EQ(run.status, 0) << run.err;
    const json plans = json::parse(run.out)["selftest"];
    ASSERT_EQ(plans.size(), 2U);
    for (const json& plan : plans) {
        EXPECT_EQ(plan["differing"], "0");
        EXPECT_GT(std::stol(plan["elements"].get<std::string>()), 100000);
    }
    EXPECT_EQ(run_program({"selftest", "--plans", "fa22"}).status, 2);
    for (const auto& [words, why] : std::vector<std::pair<std::vector<std::string>, std::string>>{
             {{"--parts", "plan"}, "\"plan\": expected one of plans, truth, copies, kernels, rules, functions"},
             {{"--parts", "rules"}, "\"rules\" is a part of a card's: expected --device cuda with it"},
             {{"--parts", "truth", "--plans", "fa2"}, "--plans: expected the part plans in --parts, too"}}) {
        std::vector<std::string> command{"selftest"};
        command.insert(command.end(), words.begin(), words.end());
        const Outcome refused = run_program(command);
        EXPECT_EQ(refused.status, 2) << refused.err;
        EXPECT_THAT(refused.err, testing::HasSubstr(why));
    }
}

}  // namespace
}  // namespace faultline::test
