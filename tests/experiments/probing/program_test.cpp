// SPDX-License-Identifier: Apache-2.0
// faultline probe as a user meets it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <faultline/record/manifest.hpp>
#include <faultline/record/record_reader.hpp>
#include <faultline/record/run_file.hpp>

#include "support.hpp"

namespace faultline::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::StartsWith;

std::string refusal(const Folder& folder, const std::vector<std::string>& options) {
    const std::vector<std::string> before = folder.files();
    std::vector<std::string> words{"probe"};
    words.insert(words.end(), options.begin(), options.end());
    const Outcome run = run_program(words);
    EXPECT_EQ(run.status, 2) << run.err;
    EXPECT_THAT(run.out, IsEmpty());
    EXPECT_EQ(lines(run.err).size(), 1u) << run.err;
    EXPECT_THAT(run.err, StartsWith("faultline probe: "));
    EXPECT_EQ(folder.files(), before) << "a file was left behind";
    return run.err;
}

/// A run of 100 steps whose loss and gradient norm rise where `sick` says.
std::string made_run(const Folder& folder, const std::string& name, bool sick, const std::string& data = "",
                     std::int64_t steps = 100, double last = 2) {
    const std::string path = folder / name;
    Manifest manifest = make_manifest("run", "test", "", 0);
    if (!data.empty()) manifest.inputs = {{"text", data}};
    RunFile file = RunFile::create(path, manifest);
    const std::vector<std::int64_t> layers{0}, heads{0, 1};
    file.coordinate("steps/layer", layers);
    file.coordinate("steps/head", heads);
    const std::vector<Axis> none, layer_head{{"layer", 1}, {"head", 2}};
    const auto loss = file.series("loss", Dtype::f64, none);
    const auto norm = file.series("grad_norm", Dtype::f64, none);
    const auto sum = file.series("zero_sum", Dtype::f64, layer_head);
    const auto magnitude = file.series("zero_sum_abs", Dtype::f64, layer_head);
    file.start();
    for (std::int64_t step = 0; step < steps; ++step) {
        file.set(loss, step == steps - 1 && !sick ? last : sick && step >= 60 ? 5.0 : 2.0);
        file.set(norm, sick && step >= 40 ? 9.0 : 1.0);
        const std::vector<double> r{0.5, step % 2 == 0 ? 1.0 : -1.0}, all{1.0, 2.0};
        file.set(sum, std::span<const double>(r));
        file.set(magnitude, std::span<const double>(all));
        file.end_step(step);
    }
    file.close();
    return path;
}

TEST(ProbeProgram, ACaptureAsTableJsonAndFile) {
    const Folder folder;
    const std::string file = small_capture(folder);
    const Outcome text = run_program({"probe", file, "--layers", "layer1", "-o", folder / "p.h5"});
    ASSERT_EQ(text.status, 0) << text.err;
    EXPECT_THAT(text.out, AllOf(HasSubstr("layer1  conservation"), HasSubstr("layer1  similarity"),
                                HasSubstr("toy: delta - exact")));
    const RecordReader record(folder / "p.h5");
    EXPECT_EQ(record.manifest().kind, "probe");
    EXPECT_EQ(record.manifest().inputs.size(), 1u);
    const std::vector<Axis> axes = record.axes("layer1/similarity/cosine");
    ASSERT_EQ(axes.size(), 3u);
    EXPECT_EQ(axes[0].name, "head");
    EXPECT_EQ(axes[1].name, "term");
    EXPECT_EQ(axes[2].name, "other_term");
    const Outcome json = run_program({"probe", file, "--json", "--probe", "saturation"});
    ASSERT_EQ(json.status, 0) << json.err;
    const auto object = nlohmann::json::parse(json.out);
    EXPECT_EQ(object["schema"], "faultline.probe/1");
    ASSERT_EQ(object["results"].size(), 2u);
    EXPECT_EQ(object["results"][1]["values"]["max logit"]["unit"], "logit");
}

TEST(ProbeProgram, RunsAreWarnedOf) {
    const Folder folder;
    const std::string a = made_run(folder, "a.h5", false), b = made_run(folder, "b.h5", false),
                      sick = made_run(folder, "sick.h5", true);
    const Outcome run = run_program({"probe", a, b, sick, "--json"});
    ASSERT_EQ(run.status, 0) << run.err;
    const auto results = nlohmann::json::parse(run.out)["results"];
    const auto warning = results.back();
    EXPECT_EQ(warning["probe"], "early-warning");
    EXPECT_EQ(warning["values"]["divergence"]["values"],
              nlohmann::json::parse("[null, null, 72]"));        // 13th of the risen losses
    EXPECT_EQ(warning["values"]["grad_norm"]["values"][2], 30);  // alarm at 42
    EXPECT_EQ(warning["values"]["grad_norm"]["values"][4], 0);
    // zero_sum of head 0 is +0.5 in each of 100 steps, of head 1 +1 and -1 in turn.
    const auto coherence = results[1];
    EXPECT_EQ(coherence["probe"], "coherence/zero_sum");
    EXPECT_EQ(coherence["values"]["mean sign"]["values"], nlohmann::json::parse("[1.0, 0.0]"));
    EXPECT_EQ(results[0]["values"]["running sum, at the end"]["values"], nlohmann::json::parse("[50.0, 0.0]"));
}

// Healthy runs of other data or another length have another range: whoever reads lead times by it is told.
TEST(ProbeProgram, RunsOfOtherDataOrLengthAreSaid) {
    const Folder folder;
    const auto note = [&](const std::vector<std::string>& runs) {
        std::vector<std::string> words{"probe", "--probe", "early-warning", "--json"};
        words.insert(words.end(), runs.begin(), runs.end());
        const Outcome run = run_program(words);
        EXPECT_EQ(run.status, 0) << run.err;
        return nlohmann::json::parse(run.out)["results"][0]["note"].get<std::string>();
    };
    const std::string a = made_run(folder, "a.h5", false, "xxh3-128:1"),
                      same = made_run(folder, "b.h5", true, "xxh3-128:1"), unknown = made_run(folder, "c.h5", false),
                      other = made_run(folder, "d.h5", false, "xxh3-128:2"),
                      shorter = made_run(folder, "e.h5", false, "xxh3-128:1", 80),
                      ended = made_run(folder, "f.h5", false, "xxh3-128:1", 70, NAN);
    EXPECT_THAT(note({a, same, unknown, ended}),
                AllOf(Not(HasSubstr("different data")), Not(HasSubstr("differ in length"))));
    EXPECT_THAT(note({a, same, other}),
                AllOf(HasSubstr("the runs are of different data"), Not(HasSubstr("differ in length"))));
    EXPECT_THAT(note({a, same, shorter}),
                AllOf(Not(HasSubstr("different data")), HasSubstr("the runs differ in length, 80 to 100 steps")));
}

TEST(ProbeProgram, LayersAndHeadsOfARun) {
    const Folder folder;
    const std::string path = made_run(folder, "1.h5", false);
    const Outcome run = run_program({"probe", path, "--heads", "1", "--json", "-o", folder / "p.h5"});
    EXPECT_EQ(run.status, 0) << run.err;
    const auto results = nlohmann::json::parse(run.out)["results"];
    EXPECT_EQ(results[0]["columns"], nlohmann::json::parse("[\"layer 0 head 1\"]"));
    EXPECT_EQ(results[0]["values"]["running sum, at the end"]["values"], nlohmann::json::parse("[0.0]"));
    const RecordReader record(folder / "p.h5");
    EXPECT_EQ(record.read("run/conservation/head").to_double(), std::vector<double>{1});
    // A run called 1 stays a name.
    EXPECT_EQ(record.read_strings("runs/early-warning/run"), std::vector<std::string>{"1"});
}

TEST(ProbeProgram, ASeriesOfAnotherShapeIsRefused) {
    const Folder folder;
    const std::string path = folder / "a.h5";
    RunFile file = RunFile::create(path, make_manifest("run", "test", "", 0));
    const std::vector<std::int64_t> layers{0};
    file.coordinate("steps/layer", layers);
    const std::vector<Axis> none, layer{{"layer", 1}};
    const auto loss = file.series("loss", Dtype::f64, none);
    const auto sum = file.series("zero_sum", Dtype::f64, layer);
    const auto magnitude = file.series("zero_sum_abs", Dtype::f64, layer);
    file.start();
    const std::vector<double> one{1};
    file.set(loss, 2.0);
    file.set(sum, std::span<const double>(one));
    file.set(magnitude, std::span<const double>(one));
    file.end_step(0);
    file.close();
    EXPECT_THAT(refusal(folder, {path}),
                HasSubstr("a.h5: dataset steps/zero_sum: is over (step 1, layer 1): expected (step 1, layer, head)"));
}

// Steps that are not finite are left out and counted; the sums keep them.
TEST(ProbeProgram, ARunThatBecameNotANumber) {
    const Folder folder;
    const std::string path = folder / "a.h5";
    RunFile file = RunFile::create(path, make_manifest("run", "test", "", 0));
    const std::vector<std::int64_t> one{0};
    file.coordinate("steps/layer", one);
    file.coordinate("steps/head", one);
    const std::vector<Axis> none, layer_head{{"layer", 1}, {"head", 1}};
    const auto loss = file.series("loss", Dtype::f64, none);
    const auto sum = file.series("zero_sum", Dtype::f64, layer_head);
    const auto magnitude = file.series("zero_sum_abs", Dtype::f64, layer_head);
    file.start();
    for (std::int64_t step = 0; step < 4; ++step) {
        const std::vector<double> r{step < 2 ? 0.25 : NAN}, all{step < 2 ? 1.0 : NAN};
        file.set(loss, 2.0);
        file.set(sum, std::span<const double>(r));
        file.set(magnitude, std::span<const double>(all));
        file.end_step(step);
    }
    file.close();
    const Outcome run = run_program({"probe", path, "--json"});
    EXPECT_EQ(run.status, 0) << run.err;
    const auto results = nlohmann::json::parse(run.out)["results"];
    EXPECT_EQ(results[0]["values"]["|sum| over sum of |ds|, mean over steps"]["values"][0], 0.25);
    EXPECT_EQ(results[0]["values"]["steps left out, not finite"]["values"][0], 2);
    EXPECT_TRUE(results[0]["values"]["running sum, largest magnitude"]["values"][0].is_null());
    EXPECT_EQ(results[1]["values"]["left out, not finite"]["values"][0], 2);
}

TEST(ProbeProgram, Listing) {
    const Outcome run = run_program({"probe", "--list"});
    EXPECT_EQ(run.status, 0) << run.err;
    EXPECT_THAT(run.out, AllOf(HasSubstr("conservation"), HasSubstr("early-warning")));
}

TEST(ProbeProgram, WrongRequestsAreOneSentence) {
    const Folder folder;
    const std::string file = small_capture(folder), run = made_run(folder, "a.h5", false);
    folder.write("text.safetensors", "not a tensor file");
    folder.write("text.h5", "not HDF5");
    EXPECT_THAT(refusal(folder, {}), HasSubstr("FILE: is missing"));
    EXPECT_THAT(refusal(folder, {folder / "none.safetensors"}), HasSubstr("none.safetensors"));
    EXPECT_THAT(refusal(folder, {folder / "text.safetensors"}), HasSubstr("text.safetensors"));
    EXPECT_THAT(refusal(folder, {folder / "text.h5"}), HasSubstr("text.h5"));
    EXPECT_THAT(refusal(folder, {file, run}), HasSubstr("expected files of one kind"));
    EXPECT_THAT(refusal(folder, {file, "--probe", "conversation"}), HasSubstr("conservation"));
    EXPECT_THAT(refusal(folder, {file, "--probe", "directions"}), HasSubstr("is no probe of a capture"));
    EXPECT_THAT(refusal(folder, {run, "--probe", "similarity"}), HasSubstr("is no probe of a run"));
    EXPECT_THAT(refusal(folder, {file, "--layers", "layer9"}), HasSubstr("layer9"));
    EXPECT_THAT(refusal(folder, {file, "--heads", "99"}), HasSubstr("--heads: 99"));
    EXPECT_THAT(refusal(folder, {file, "--plan", "fa9"}), HasSubstr("fa9"));
    EXPECT_THAT(refusal(folder, {file, "--row", "1000"}), HasSubstr("--row: 1000"));
    EXPECT_THAT(refusal(folder, {file, "--window", "100000"}), HasSubstr("--window: 100000"));
    EXPECT_THAT(refusal(folder, {run, "--window", "100000"}), HasSubstr("--window: 100000"));
    EXPECT_THAT(refusal(folder, {file, "--terms", "1"}), HasSubstr("terms"));
    EXPECT_THAT(refusal(folder, {file, "--allow", "all"}), HasSubstr("allow"));
    EXPECT_THAT(refusal(folder, {file, "-o", file, "--force"}), HasSubstr("is what files reads"));
    // What a kind of file has no use for; the file of a configuration may hold it.
    EXPECT_THAT(refusal(folder, {run, "--plan", "llmc"}),
                AllOf(HasSubstr("--plan: means nothing for a run"), HasSubstr("expected files of kind capture")));
    EXPECT_THAT(refusal(folder, {run, "--directions", "9"}), HasSubstr("expected files of kind capture, checkpoint"));
    EXPECT_THAT(refusal(folder, {file, "--set", "rise=1"}), HasSubstr("--set rise: means nothing for a capture"));
    folder.write("all.toml", "[probe]\nplan = \"llmc\"\nrise = 0.5\n");
    EXPECT_EQ(run_program({"probe", run, "--config", folder / "all.toml"}).status, 0);
    EXPECT_THAT(refusal(folder, {run, "--layers", "layer7"}),
                HasSubstr("--layers: \"layer7\": expected layer0 to layer0"));
    EXPECT_THAT(refusal(folder, {run, "--heads", "2"}), HasSubstr("--heads: 2: expected 0 to 1"));
}

}  // namespace
}  // namespace faultline::test
