// SPDX-License-Identifier: Apache-2.0
// Sweep files that cannot be run: one sentence with file and field, exit 2, and nothing is there that was not.
#include <fstream>
#include <iterator>

#include <gmock/gmock.h>

#include <faultline/gpt_device/device_trainer.hpp>

#include "paths.hpp"
#include "small_sweep.hpp"

namespace faultline::test {
namespace {

using ::testing::HasSubstr;

struct Bad {
    const char* name;
    const char* text;
    const char* said;  ///< after the file's name
};
void PrintTo(const Bad& bad, std::ostream* out) { *out << bad.name; }

class BadSweep : public ::testing::TestWithParam<Bad> {};

TEST_P(BadSweep, IsRefusedBeforeAnythingRuns) {
    const Folder folder;
    (void)small_sweep(folder, 20);
    std::string text = GetParam().text;
    if (const std::size_t at = text.find("DATA"); at != std::string::npos) text.replace(at, 4, folder / "text");
    folder.write("bad.toml", text);
    const std::string said = refused("sweep", {folder / "bad.toml", "-o", folder / "s"}, &folder);
    EXPECT_THAT(said, HasSubstr((folder / "bad.toml") + ": " + GetParam().said));
}

INSTANTIATE_TEST_SUITE_P(
    Files, BadSweep,
    ::testing::Values(
        Bad{"NoToml", "[matrix\n", "line "}, Bad{"NoMatrix", "[train]\nsteps = 3\n", "has no table [matrix]"},
        Bad{"UnknownTable", "[matrix]\nsource = [\"none\"]\n[trian]\n", "line 3: \"trian\""},
        Bad{"UnknownKey", "[matrix]\nsuorce = [\"none\"]\n", "matrix.suorce: unknown key: expected"},
        Bad{"WrongType", "[matrix]\nsource = \"none\"\n",
            "matrix.source: is a string (\"none\"): expected a list of strings"},
        Bad{"NoSource", "[matrix]\nseeds = [0]\n", "matrix.source: is missing or empty"},
        Bad{"LawWithoutSite", "[matrix]\nlaw = [\"fixed\"]\nmagnitude = [0.1]\n", "matrix.site: is missing or empty"},
        Bad{"UnknownSource", "[matrix]\nsource = [\"detla:fixed:1\"]\n[train]\ndata = \"DATA\"\n",
            "matrix.source: fault \"detla:fixed:1\""},
        Bad{"UnknownLaw", "[matrix]\nsite = [\"ds\"]\nlaw = [\"fxied\"]\nmagnitude = [1]\n[train]\ndata = \"DATA\"\n",
            "matrix.source: fault \"ds:fxied:1\""},
        Bad{"UnknownIntervention", "[matrix]\nsource = [\"ds:fixed:1\"]\nintervention = [\"pray\"]\n",
            "matrix.intervention: intervention \"pray\""},
        Bad{"SeedOfAnotherType", "[matrix]\nsource = [\"ds:fixed:1\"]\nseeds = [0, \"a\"]\n",
            "matrix.seeds: item 2 is a string (\"a\"): expected a list of integers"},
        Bad{"SourceTwice", "[matrix]\nsource = [\"ds:fixed:1\", \"ds:fixed:1\"]\n[train]\ndata = \"DATA\"\n",
            "matrix.source: \"ds:fixed:1\": is there twice: expected it once"},
        Bad{"SourceTwiceInOtherWords",
            "[matrix]\nsource = [\"ds:fixed:0.3\", \"ds:fixed:0.30\"]\n[train]\ndata = \"DATA\"\n",
            "matrix.source: \"ds:fixed:0.30\": is there twice, as \"ds:fixed:0.3\" too"},
        Bad{"InterventionTwiceInOtherWords",
            "[matrix]\nsource = [\"ds:fixed:1\"]\nintervention = [\"guard\", \"guard:threshold=100\"]\n",
            "matrix.intervention: \"guard:threshold=100\": is there twice, as \"guard\" too"},
        Bad{"InterventionWithoutASource",
            "[matrix]\nsource = [\"none\"]\nintervention = [\"guard\"]\n[train]\ndata = \"DATA\"\n",
            "matrix.intervention: \"guard\": meets no source but none"},
        Bad{"ColumnOfNoModel",
            "[matrix]\nsource = [\"ffn_output:fixed:1:column=16\"]\n[train]\ndata = \"DATA\"\nwidth = 16\n",
            "source \"ffn_output:fixed:1:column=16\", intervention \"none\": fault \"ffn_output:fixed:1:column=16\": column "
            "16: expected less than the 16 columns of ffn_output"},
        Bad{"MoreRunsThanASweepHas",
            "[matrix]\nsource = [\"ds:fixed:1\"]\ncontrol = [\"none\"]\nseeds = [0, 1]\n[vary]\nlr = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]\n"
            "weight-decay = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]\nclip = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]\n"
            "z-loss = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]\nwarmup = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]\n",
            "matrix and vary: make some 600000 runs: expected at most 100000, or several sweeps"},
        Bad{"VariedMomentumOfAdamw",
            "[matrix]\nsource = [\"ds:fixed:1\"]\n[train]\ndata = \"DATA\"\n[vary]\nmomentum = [0.1, 0.2]\n",
            "vary.momentum: means nothing with optimizer adamw: expected none"},
        Bad{"FinalRateOfAConstantSchedule",
            "[matrix]\nsource = [\"ds:fixed:1\"]\n[train]\ndata = \"DATA\"\n[[recipe]]\nname = \"a\"\nfinal-lr = 0.1\n",
            "recipe \"a\".final-lr: means nothing with schedule constant: expected none"},
        Bad{"StepOfNoRun",
            "[matrix]\nsource = [\"ds:fixed:1:from=5\"]\n[train]\ndata = \"DATA\"\n[vary]\nsteps = [6, 5]\n",
            "recipe \"steps=5\": source \"ds:fixed:1:from=5\", intervention \"none\": fault \"ds:fixed:1:from=5\": from: 5: "
            "expected a step of the run, 0 to 4"},
        Bad{"SourceOfAllLayers",
            "[matrix]\nsource = [\"ds:fixed:1\", \"ds:fixed:1:layers=0\"]\n[train]\ndata = \"DATA\"\n[vary]\nlayers = [2, 1]\n",
            "matrix.source: \"ds:fixed:1:layers=0\": is there twice, as \"ds:fixed:1\" too"},
        Bad{"MagnitudeOfNothing",
            "[matrix]\nsite = [\"ds\"]\nlaw = [\"fixed\"]\nmagnitude = [0]\n[train]\ndata = \"DATA\"\n",
            "matrix.source: \"ds:fixed:0\": magnitude 0: changes nothing"},
        Bad{"PlanOfTheRecipe",
            "[matrix]\nsource = [\"plan:fa2\"]\n[train]\ndata = \"DATA\"\n[vary]\nattention = [\"fast\", \"fa2\"]\n",
            "recipe \"attention=fa2\": source \"plan:fa2\", intervention \"none\": plan \"fa2\" in every layer: does nothing"},
        Bad{"RepairAsAControl",
            "[matrix]\nsource = [\"none\"]\ncontrol = [\"repair:from=2\"]\n[train]\ndata = \"DATA\"\n",
            "matrix.control: \"repair:from=2\": does nothing: a control has no fault"},
        Bad{"TwoClips",
            "[matrix]\nsource = [\"ds:fixed:1\"]\nintervention = [\"qk_clip\"]\n[train]\ndata = \"DATA\"\n[vary]\n"
            "qk-clip = [0, 50]\n",
            "recipe \"qk-clip=50\": intervention \"qk_clip\": the run has qk-clip 50"},
        Bad{"ThreadsOfARecipe", "[matrix]\nsource = [\"ds:fixed:1\"]\n[train]\nthreads = 2\n",
            "train.threads: is no run's own: expected threads in [sweep], or --threads"},
        Bad{"FaultOfARecipe", "[matrix]\nsource = [\"ds:fixed:1\"]\n[vary]\ninject = [\"ds:fixed:1\"]\n",
            "vary.inject: is a source: expected it in matrix.source"},
        Bad{"PlanTwice",
            "[matrix]\nsource = [\"plan:fa2\", \"plan:fa2:layers=0\", \"plan:fa2\"]\n[train]\ndata = \"DATA\"\n",
            "matrix.source: \"plan:fa2\": is there twice: expected"},
        Bad{"RecipeWithASlash", "[matrix]\nsource = [\"ds:fixed:1\"]\n[[recipe]]\nname = \"a/b\"\n",
            "recipe: name: \"a/b\": expected a name without /"},
        Bad{"OptionOfSbatch", "[matrix]\nsource = [\"ds:fixed:1\"]\n[sweep]\nsbatch = [\"account\"]\n",
            "sweep.sbatch: \"account\": expected an option of sbatch, as --account=x"},
        Bad{"CardsForTheCpu",
            "[matrix]\nsource = [\"ds:fixed:1\"]\n[train]\ndata = \"DATA\"\n[sweep]\ndevices = [\"0\"]\n",
            "sweep.devices: no run of this sweep is on a card"},
        Bad{"SeedTwice", "[matrix]\nsource = [\"ds:fixed:1\"]\nseeds = [1, 1]\n", "matrix.seeds: 1: is there twice"},
        Bad{"RecipeKey", "[matrix]\nsource = [\"ds:fixed:1\"]\n[train]\nlr = \"fast\"\n",
            "train.lr: is a string (\"fast\"): expected a positive number"},
        Bad{"SeedOfTheRecipe", "[matrix]\nsource = [\"ds:fixed:1\"]\n[train]\nseed = 1\n", "train.seed: is of one run"},
        Bad{"Heads", "[matrix]\nsource = [\"ds:fixed:1\"]\n[train]\ndata = \"DATA\"\nwidth = 16\nheads = 3\n",
            "train.heads: 3: expected a divisor of the width 16"},
        Bad{"RateOutOfRange",
            "[matrix]\nsource = [\"ds:fixed:1\"]\n[train]\ndata = \"DATA\"\n[vary]\nlr = [0.1, 1e-300]\n",
            "vary.lr: 1e-300: expected a number that fp32 has"},
        Bad{"CosineWithinTheWarmup",
            "[matrix]\nsource = [\"ds:fixed:1\"]\n[train]\ndata = \"DATA\"\nsteps = 9\nschedule = \"cosine\"\n"
            "[vary]\nwarmup = [2, 8]\n",
            "train.schedule: cosine: does nothing: the warm-up leaves 1 of 9 steps"},
        Bad{"AttentionOverruled",
            "[matrix]\nsource = [\"ds:fixed:1\"]\n[train]\ndata = \"DATA\"\nlayers = 1\nlayer-attention = [\"0/0=fa2\", "
            "\"0=math\"]\n",
            "train.layer-attention: \"0/0=fa2\": does nothing"},
        Bad{"LayerOfNoModel",
            "[matrix]\nsource = [\"ds:fixed:1:layers=2\"]\n[train]\ndata = \"DATA\"\n[vary]\nlayers = [3, 2]\n",
            "recipe \"layers=2\": source \"ds:fixed:1:layers=2\", intervention \"none\": fault \"ds:fixed:1:layers=2\": "
            "layer 2: expected a layer from 0 to 1 at ds"},
        Bad{"HeadOfNoModel",
            "[matrix]\nsource = [\"ffn_output:fixed:1:heads=2\"]\n[train]\ndata = \"DATA\"\nheads = 2\n",
            "source \"ffn_output:fixed:1:heads=2\", intervention \"none\": fault \"ffn_output:fixed:1:heads=2\": head 2: "
            "expected a head from 0 to 1 at ffn_output"},
        Bad{"VaryNoList", "[matrix]\nsource = [\"ds:fixed:1\"]\n[vary]\nlr = 1\n", "vary.lr: expected a list"},
        Bad{"VaryUnknown", "[matrix]\nsource = [\"ds:fixed:1\"]\n[vary]\nrl = [1]\n", "vary.rl: unknown key"},
        Bad{"RecipeWithoutName", "[matrix]\nsource = [\"ds:fixed:1\"]\n[[recipe]]\nlr = 0.1\n",
            "recipe: number 1: has no name"},
        Bad{"SameRecipes",
            "[matrix]\nsource = [\"ds:fixed:1\"]\n[train]\ndata = \"DATA\"\n[[recipe]]\nname = \"a\"\n[[recipe]]\nname = \"b\"\n",
            "recipe \"b\": none, none, seed 0: is the run that recipe \"a\" has"},
        Bad{"ActionOnTheDevice",
            "[matrix]\nsource = [\"ds:fixed:1\"]\nintervention = [\"guard:action=fp32_ffn\"]\n[train]\ndata = "
            "\"DATA\"\ndevice = \"cuda\"\n",
            "source \"ds:fixed:1\", intervention \"guard:action=fp32_ffn\": device cuda: the feed-forward is not"},
        Bad{"RecipeOnTheDevice",
            "[matrix]\nsource = [\"ds:fixed:1\"]\n[train]\ndata = \"DATA\"\ndevice = \"cuda\"\nwidth = 20\n",
            "source \"none\", intervention \"none\": device cuda: width: 20: expected a multiple of 8"},
        Bad{"MissingData", "[matrix]\nsource = [\"ds:fixed:1\"]\n[train]\ndata = \"/no/such/text\"\n", "train.data: "},
        Bad{"LaunchOption", "[matrix]\nsource = [\"ds:fixed:1\"]\n[sweep]\njobs = \"all\"\n",
            "sweep.jobs: is a string"}),
    [](const auto& instance) { return instance.param.name; });

TEST(Sweep, RefusesWhatIsNoSweep) {
    const Folder folder;
    EXPECT_THAT(refused("sweep", {}, &folder), HasSubstr("no file: expected FILE.toml"));
    EXPECT_THAT(refused("sweep", {folder / "missing.toml"}, &folder), HasSubstr("missing.toml"));
    EXPECT_THAT(refused("sweep", {"status", folder / "."}, &folder), HasSubstr("has no cells.json"));
    // A folder with somebody's files in it is not written into.
    const std::string file = small_sweep(folder, 20);
    EXPECT_THAT(refused("sweep", {file, "-o", folder / "."}, &folder), HasSubstr("is there and is no sweep's folder"));
    EXPECT_THAT(refused("sweep", {file, "--device", "cuda"}, &folder), HasSubstr("device = \"cuda\" in its [train]"));
}

TEST(Sweep, RefusesOptionsThatItWouldNotHeed) {
    const Folder folder;
    const std::string file = small_sweep(folder, 20);
    const auto said = [&](std::vector<std::string> more) {
        more.insert(more.begin(), {file, "-o", folder / "s"});
        return refused("sweep", more, &folder);
    };
    for (const char* option : {"--no-submit", "--partition=p", "--gres=gpu:1", "--time=01:00:00", "--sbatch=--quiet"})
        EXPECT_THAT(said({option}), HasSubstr("is Slurm's: expected --slurm with it"));
    EXPECT_THAT(said({"--devices", "0,x"}), HasSubstr("--devices: \"x\": expected numbers or UUIDs of cards"));
    EXPECT_THAT(said({"--devices", "0,0"}), HasSubstr("--devices: \"0\": expected each card once"));
    EXPECT_THAT(said({"--devices", "0"}), HasSubstr("--devices: no run of this sweep is on a card"));
    EXPECT_THAT(said({"--mps"}), HasSubstr("--mps: no run of this sweep is on a card"));
    EXPECT_THAT(said({"--mps", "--slurm"}), HasSubstr("--mps: Slurm starts the runs"));
    EXPECT_THAT(said({"--devices", "0", "--slurm"}), HasSubstr("--devices: Slurm gives cards to its tasks"));
    for (const char* time : {"xx", "1:2:3:4", "1-", ":1", "1:", "-1", "1h"})
        EXPECT_THAT(said({"--slurm", "--no-submit", std::string("--time=") + time}), HasSubstr("a time as sbatch"));
    EXPECT_THAT(said({"--slurm", "--no-submit", "--partition", "a\nb"}), HasSubstr("expected one line"));
    EXPECT_THAT(refused("sweep", {file, "-o", folder / "none/s"}, &folder), HasSubstr("does not exist: expected an"));
}

// A build with device code would begin to run it.
TEST(Sweep, RefusesOptionsThatNothingReads) {
    const Folder folder;
    const std::string file = small_sweep(folder, 4);
    ASSERT_EQ(run_program({"sweep", file, "-o", folder / "s", "--quiet"}).status, 0);
    for (const char* const verb : {"status", "merge"}) {
        EXPECT_THAT(refused("sweep", {verb, folder / "s", "--jobs", "3"}, &folder),
                    HasSubstr(fmt::format("--jobs: means nothing for {}, which runs nothing", verb)));
        EXPECT_THAT(refused("sweep", {verb, folder / "s", "--slurm"}, &folder),
                    HasSubstr("--slurm: means nothing for"));
    }
    EXPECT_THAT(refused("sweep", {"merge", folder / "s", "--every"}, &folder), HasSubstr("--every: means nothing"));
    EXPECT_THAT(refused("sweep", {file, "-o", folder / "s", "--every"}, &folder), HasSubstr("--every: means nothing"));
    EXPECT_THAT(refused("sweep", {file, "-o", folder / "s", "--force"}, &folder),
                HasSubstr("--force: means nothing for a sweep: a run is made anew where its record is removed"));
}

TEST(Sweep, ForCardsIsRefusedByABuildWithoutDeviceCodeAndLaidOutForOthers) {
    if (gpt::device_trainer_is_built()) GTEST_SKIP() << "this build has device code";
    const Folder folder;
    const std::string file = small_sweep(folder, 20, "", "device = \"cuda\"");
    for (const std::vector<std::string>& how : {std::vector<std::string>{}, {"--slurm"}}) {
        std::vector<std::string> words{file, "-o", folder / "s"};
        words.insert(words.end(), how.begin(), how.end());
        EXPECT_THAT(refused("sweep", words, &folder), HasSubstr("this build has no device code"));
    }
    const Outcome run = run_program({"sweep", file, "-o", folder / "it's", "--slurm", "--no-submit", "--time=1-12",
                                     "--sbatch=--account=x", "--sbatch=--mail-type=FAIL,END"});
    EXPECT_EQ(run.status, 0) << run.err;
    // Lines that a shell reads as they were meant.
    EXPECT_THAT(run.out, HasSubstr("  sbatch --array=0-1 '" + (folder / "it'\\''s") + "/slurm/array0.sh'\n"));
    EXPECT_THAT(run.out, HasSubstr("  sbatch '" + (folder / "it'\\''s") + "/slurm/merge.sh'\n"));
    std::ifstream in(folder / "it's/slurm/array0.sh");
    const std::string script{std::istreambuf_iterator<char>(in), {}};
    EXPECT_THAT(script, HasSubstr("\n#SBATCH --job-name=it-s\n"));
    EXPECT_THAT(script, HasSubstr("\n#SBATCH --time=1-12\n#SBATCH --account=x\n#SBATCH --mail-type=FAIL,END\n"));
}

TEST(Sweep, ItsConfigurationsAreRead) {
    int read = 0;
    for (const auto& entry : std::filesystem::directory_iterator(source_dir() / "experiments/configs")) {
        if (!entry.path().filename().string().starts_with("sweep-")) continue;
        const Folder folder;
        const Outcome run = run_program({"sweep", entry.path().string(), "-o", folder / "s", "--slurm", "--no-submit"});
        if (run.err.find("perl-doc") != std::string::npos) GTEST_SKIP() << run.err;
        EXPECT_EQ(run.status, 0) << run.err;
        ++read;
    }
    EXPECT_GE(read, 1);
}

}  // namespace
}  // namespace faultline::test
