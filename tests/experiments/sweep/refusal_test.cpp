// SPDX-License-Identifier: Apache-2.0
// Sweep files that cannot be run: one sentence with file and field, exit 2, and nothing is there that was not.
#include <gmock/gmock.h>

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
        Bad{"SeedTwice", "[matrix]\nsource = [\"ds:fixed:1\"]\nseeds = [1, 1]\n", "matrix.seeds: 1: is there twice"},
        Bad{"RecipeKey", "[matrix]\nsource = [\"ds:fixed:1\"]\n[train]\nlr = \"fast\"\n",
            "train.lr: is a string (\"fast\"): expected a positive number"},
        Bad{"SeedOfTheRecipe", "[matrix]\nsource = [\"ds:fixed:1\"]\n[train]\nseed = 1\n", "train.seed: is of one run"},
        Bad{"Heads", "[matrix]\nsource = [\"ds:fixed:1\"]\n[train]\ndata = \"DATA\"\nwidth = 16\nheads = 3\n",
            "source "},
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
