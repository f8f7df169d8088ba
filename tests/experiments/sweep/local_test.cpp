// SPDX-License-Identifier: Apache-2.0
// A sweep as local processes: from the file to the table; run again, killed, interrupted, with runs that fail, by two launchers
// at once.
#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <thread>

#include <sys/wait.h>
#include <unistd.h>

#include <gmock/gmock.h>

#include <faultline/base/error.hpp>
#include <faultline/record/record_reader.hpp>
#include <faultline/sweep/cell_state.hpp>
#include <faultline/sweep/launch.hpp>

#include "small_sweep.hpp"

namespace faultline::test {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using ::testing::HasSubstr;

std::string slurp(const std::string& path) {
    std::ifstream in(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
}

/// Until it holds, a minute at most.
bool wait_for(const std::function<bool()>& what) {
    for (int i = 0; i < 6000; ++i) {
        if (what()) return true;
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    return false;
}

/// Processes at work, by what their locks say.
std::vector<int> at_work(const std::string& folder) {
    std::vector<int> processes;
    const Outcome said = run_program({"sweep", "status", folder, "--json"});
    if (said.status != 0) return {};  // the launcher has not written its list yet
    const json status = json::parse(said.out);
    for (const json& run : status["runs"])
        if (run["state"] == "at work")
            if (const std::string what = run.value("what", ""); what.find("process ") != std::string::npos)
                processes.push_back(std::stoi(what.substr(what.find("process ") + 8)));
    return processes;
}

// What a run left is whole, or its run is not done, and what to do is said; the others are merged.
TEST(Sweep, ARecordThatCannotBeReadIsOneRunsTrouble) {
    const Folder folder;
    const std::string file = small_sweep(folder, 4), out = folder / "s";
    const Outcome whole = run_program({"sweep", file, "-o", out, "--quiet"});
    ASSERT_EQ(whole.status, 0) << whole.err;
    const std::string record = run_files(out, ".h5").front(), bytes = slurp(record);
    const std::string name = fs::path(record).stem().string();
    ASSERT_THAT(name, ::testing::StartsWith("delta"));
    std::ofstream(record, std::ios::binary) << bytes.substr(0, bytes.size() / 2);
    const json status = status_of(out);
    EXPECT_EQ(status["complete"], false);
    EXPECT_EQ(status["counts"]["done"], 1);
    EXPECT_EQ(status["counts"]["failed"], 1);
    for (const std::vector<std::string>& how :
         {std::vector<std::string>{"sweep", file, "-o", out, "--quiet"}, {"sweep", "merge", out, "--quiet"}}) {
        const Outcome run = run_program(how);
        EXPECT_EQ(run.status, 1);
        EXPECT_THAT(run.err, ::testing::AllOf(HasSubstr(name + ": "), HasSubstr("where the file is removed the run is "
                                                                                "made anew")));
        EXPECT_THAT(run.out, HasSubstr("no fault\n  none"));
        EXPECT_EQ(slurp(record).size(), bytes.size() / 2);  // it is the user's to remove
    }
    fs::remove(record);
    const Outcome merged = run_program({"sweep", "merge", out, "--quiet"});
    EXPECT_EQ(merged.status, 1);
    EXPECT_THAT(merged.err, HasSubstr("1 of 2 runs are done"));
    EXPECT_THAT(merged.err, HasSubstr("what is done is merged"));
    const Outcome again = run_program({"sweep", file, "-o", out, "--quiet"});
    EXPECT_EQ(again.status, 0) << again.err;
    EXPECT_EQ(again.out, whole.out);
    EXPECT_EQ(run_program({"sweep", "merge", out, "--quiet"}).status, 0);
}

// A record under another run's name is whole, and of another configuration: its run is not done, and no table has its numbers.
TEST(Sweep, ARecordOfAnotherRunIsNoResult) {
    const Folder folder;
    const std::string file = small_sweep(folder, 4), out = folder / "s";
    const Outcome whole = run_program({"sweep", file, "-o", out, "--quiet"});
    ASSERT_EQ(whole.status, 0) << whole.err;
    const std::vector<std::string> records = run_files(out, ".h5");  // the fault's, then the control's
    ASSERT_EQ(records.size(), 2U);
    fs::copy_file(records.front(), records.back(), fs::copy_options::overwrite_existing);
    EXPECT_EQ(status_of(out)["counts"]["failed"], 1);
    const Outcome run = run_program({"sweep", file, "-o", out, "--quiet"});
    EXPECT_EQ(run.status, 1);
    const std::string name = fs::path(records.back()).stem().string();
    EXPECT_THAT(run.err, ::testing::AllOf(HasSubstr("is the run of another configuration: expected that of " + name),
                                          HasSubstr("where the file is removed the run is made anew"),
                                          ::testing::Not(HasSubstr("\\"))));
    EXPECT_THAT(run.out, ::testing::AllOf(HasSubstr("not complete: 1 of 2 runs are done"),
                                          ::testing::Not(HasSubstr("no fault\n  none"))));
    fs::remove(records.back());
    EXPECT_EQ(run_program({"sweep", file, "-o", out, "--quiet"}).out, whole.out);
}

// Data, the model's plans and a source's are found from the sweep's folder, by the process of a run too; runs are called the
// same wherever the folder is.
TEST(Sweep, FilesAreNamedFromTheFolderOfTheSweep) {
    const Folder folder;
    std::vector<std::string> names;
    for (const char* place : {"here", "there"}) {
        fs::create_directories(folder / (std::string(place) + "/plans"));
        const std::string under = std::string(place) + "/";
        folder.write(under + "text", text_of_letters());
        folder.write(under + "plans/mine.toml",
                     "name = \"mine\"\nbase = \"exact\"\n[sites.o_cast]\nformat = \"bf16\"\n");
        folder.write(under + "plans/other.toml",
                     "name = \"other\"\nbase = \"exact\"\n[sites.lse]\nformat = \"bf16\"\n");
        folder.write(under + "sweep.toml",
                     "[matrix]\nsource = [\"plan:plans/other.toml:layers=0\"]\n[train]\ndata = \"text\"\nlayers = 2\n"
                     "width = 16\nheads = 2\ncontext = 16\nbatch = 2\nsteps = 3\nvalidation-batches = 1\n"
                     "attention = \"plans/mine.toml\"\nlayer-attention = [\"1=plans/other.toml\"]\n");
        const std::string out = folder / (under + "out");
        const Outcome run = run_program({"sweep", folder / (under + "sweep.toml"), "-o", out, "--quiet"});
        ASSERT_EQ(run.status, 0) << run.err;
        ASSERT_EQ(run_files(out, ".h5").size(), 2U);
        names.push_back(fs::path(run_files(out, ".h5")[1]).filename().string());
        EXPECT_THAT(RecordReader(run_files(out, ".h5")[0]).manifest().config_toml, HasSubstr("mine"));
        for (const char* verb : {"merge", "run"}) {  // by the folder, where the file is a copy
            const Outcome again = run_program({"sweep", verb, out, "--quiet"});
            EXPECT_EQ(again.status, 0) << verb << ": " << again.err;
        }
        EXPECT_EQ(run_files(out, ".h5").size(), 2U);
    }
    EXPECT_EQ(names[0], names[1]);
    fs::remove(folder / "there/plans/mine.toml");
    EXPECT_THAT(refused("sweep", {folder / "there/sweep.toml", "-o", folder / "new"}, nullptr),
                HasSubstr(folder / "there/plans/mine.toml"));
}

TEST(Sweep, MakesItsRunsOnceAndPrintsTheTableOfDissociate) {
    const Folder folder;
    const std::string file = small_sweep(folder, 20, "intervention = [\"none\", \"project\"]\nseeds = [0, 1]");
    const Outcome run = run_program({"sweep", file, "-o", folder / "s", "--quiet"});
    ASSERT_EQ(run.status, 0) << run.err;
    EXPECT_EQ(run.err, "");
    // The same matrix by the other command, in one process: the same bits, so the same table.
    std::vector<std::string> words{"dissociate", "--quiet", "--seeds", "0,1", "--source", "delta:multiplicative:0.2"};
    for (const char* intervention : {"none", "project"}) words.insert(words.end(), {"--intervention", intervention});
    for (const auto& [key, value] : std::map<std::string, std::string>{{"layers", "2"},
                                                                       {"width", "16"},
                                                                       {"heads", "2"},
                                                                       {"context", "16"},
                                                                       {"batch", "2"},
                                                                       {"steps", "20"},
                                                                       {"validation-batches", "1"},
                                                                       {"data", folder / "text"}})
        words.insert(words.end(), {"--" + key, value});
    EXPECT_EQ(run.out, run_program(words).out);

    const json status = status_of(folder / "s");
    EXPECT_EQ(status["complete"], true);
    EXPECT_EQ(status["counts"]["done"], 8);
    const std::vector<std::string> records = run_files(folder / "s", ".h5");
    ASSERT_EQ(records.size(), 8U);
    EXPECT_THAT(fs::path(records[0]).filename().string(),
                ::testing::MatchesRegex("delta-multiplicative-0.2__none__seed0__[0-9a-f]{12}.h5"));
    // Again: nothing is made, and the same is said.
    const auto before = fs::last_write_time(records[0]);
    const Outcome again = run_program({"sweep", folder / "s", "--quiet"});
    EXPECT_EQ(again.status, 0) << again.err;
    EXPECT_EQ(again.out, run.out);
    EXPECT_EQ(fs::last_write_time(records[0]), before);
    // One more seed: the rest is kept.
    const std::string larger = small_sweep(folder, 20, "intervention = [\"none\", \"project\"]\nseeds = [0, 1, 2]");
    EXPECT_EQ(run_program({"sweep", larger, "-o", folder / "s", "--quiet"}).status, 0);
    EXPECT_EQ(run_files(folder / "s", ".h5").size(), 12U);
    EXPECT_EQ(fs::last_write_time(records[0]), before);
}

// Its launcher is killed, which asks the runs to end, and later a run itself: what is there then is taken up, and is what a
// sweep that never stopped leaves.
TEST(Sweep, KilledAndTakenUpIsTheSweepThatNeverStopped) {
    const Folder folder;
    const std::string file = small_sweep(folder, 600, "seeds = [0, 1]");
    const std::vector<std::string> cut{"sweep", file, "-o", folder / "cut", "--quiet", "--jobs", "2"};
    ASSERT_EQ(run_program({"sweep", file, "-o", folder / "whole", "--quiet"}).status, 0);
    {
        Child launcher(cut, folder / "err");
        ASSERT_TRUE(wait_for([&] { return run_files(folder / "cut", ".checkpoint.safetensors").size() >= 2; }));
        launcher.signal(SIGKILL);
        EXPECT_EQ(launcher.wait(), -SIGKILL);
    }
    ASSERT_TRUE(wait_for([&] { return at_work(folder / "cut").empty(); })) << "runs outlive their launcher";
    EXPECT_GE(status_of(folder / "cut")["counts"]["stopped"], 1);
    int killed = 0;
    {
        Child launcher(cut, folder / "err");
        std::vector<int> processes;
        ASSERT_TRUE(wait_for([&] { return !(processes = at_work(folder / "cut")).empty(); }));
        ASSERT_EQ(::kill(processes.front(), SIGKILL), 0);
        killed = launcher.wait();
    }
    EXPECT_EQ(killed, 1);  // the run that was killed is named, the others were made
    EXPECT_THAT(slurp(folder / "err"), HasSubstr("killed by signal 9 (Killed)"));
    EXPECT_EQ(status_of(folder / "cut")["counts"]["failed"], 1);
    const Outcome rest = run_program(cut);
    EXPECT_EQ(rest.status, 0) << rest.err;
    EXPECT_EQ(series_of(folder / "cut"), series_of(folder / "whole"));
    std::string logs;
    for (const std::string& log : run_files(folder / "cut", ".log")) logs += slurp(log);
    EXPECT_THAT(logs, HasSubstr(": taken up at step "));
}

TEST(Sweep, InterruptedSavesEveryRun) {
    const Folder folder;
    const std::string file = small_sweep(folder, 1000000, "seeds = [0, 1]");
    Child launcher({"sweep", file, "-o", folder / "s", "--jobs", "2"}, folder / "err");
    ASSERT_TRUE(wait_for([&] { return run_files(folder / "s", ".h5").size() == 2; }));
    launcher.signal(SIGINT);
    EXPECT_EQ(launcher.wait(), 1);
    EXPECT_THAT(slurp(folder / "err"), HasSubstr("0 of 4 runs are done, 2 stopped, 2 to do; the same command goes on"));
    EXPECT_EQ(run_files(folder / "s", ".checkpoint.safetensors").size(), 2U);
    for (const std::string& log : run_files(folder / "s", ".log"))
        EXPECT_THAT(slurp(log), HasSubstr("the state is saved"));
    EXPECT_FALSE(fs::exists(folder / "s/sweep.h5"));
}

// A run that fails leaves its reason and stops no other; when what was in its way is gone it is made.
TEST(Sweep, AFailureIsNamedAndStopsNoOther) {
    const Folder folder;
    const std::string file = small_sweep(folder, 20, "seeds = [0, 1]");
    ASSERT_EQ(run_program({"sweep", file, "-o", folder / "s", "--quiet"}).status, 0);
    const std::string record = run_files(folder / "s", ".h5").front();
    const std::string result = record.substr(0, record.size() - 3) + ".json";
    fs::remove(record);
    fs::create_directory(record);  // no file can have this name now
    fs::remove(result);
    const std::string other = run_files(folder / "s", ".h5").back();
    fs::remove(other);
    const Outcome run = run_program({"sweep", file, "-o", folder / "s", "--quiet"});
    EXPECT_EQ(run.status, 1);
    EXPECT_THAT(run.err, HasSubstr(fs::path(record).stem().string() + ": "));
    EXPECT_THAT(run.err, HasSubstr("3 of 4 runs are done, 1 failed"));
    EXPECT_TRUE(fs::exists(other));
    EXPECT_THAT(run_program({"sweep", "status", folder / "s"}).out, HasSubstr("  failed      "));
    fs::remove(record);
    EXPECT_EQ(run_program({"sweep", file, "-o", folder / "s", "--quiet"}).status, 0);
    EXPECT_TRUE(fs::is_regular_file(record));
}

// delta times 1e45 leaves the range of fp32: the run ends there, which is its result.
TEST(Sweep, AValueThatIsNotFiniteIsAResult) {
    const Folder folder;
    const std::string file = small_sweep(folder, 20);
    std::string text = slurp(file);
    text.replace(text.find("delta:multiplicative:0.2"), 24, "delta:fixed:1e45");
    folder.write("sweep.toml", text);
    const Outcome run = run_program({"sweep", file, "-o", folder / "s", "--quiet"});
    EXPECT_EQ(run.status, 0) << run.err;
    EXPECT_THAT(run.out, HasSubstr("is not finite"));
    EXPECT_EQ(status_of(folder / "s")["counts"]["not finite"], 1);
    EXPECT_EQ(run_program({"sweep", file, "-o", folder / "s", "--quiet"}).out, run.out);
}

TEST(Sweep, TwoLaunchersMakeEveryRunOnce) {
    const Folder folder;
    const std::string file = small_sweep(folder, 100, "seeds = [0, 1, 2]");
    const std::vector<std::string> words{"sweep", file, "-o", folder / "s", "--quiet", "--jobs", "2"};
    Child one(words, folder / "err1"), two(words, folder / "err2");
    const int first = one.wait(), second = two.wait();
    // Who ends first may leave runs to the other, and says so.
    EXPECT_TRUE(first == 0 || second == 0) << slurp(folder / "err1") << slurp(folder / "err2");
    EXPECT_EQ(status_of(folder / "s")["complete"], true);
    for (const std::string& record : run_files(folder / "s", ".h5"))
        EXPECT_EQ(RecordReader(record).read("steps/step").shape, std::vector<std::int64_t>{100});
}

// Each process sees one card, and with more processes than cards they share them evenly. Processes that say which one they see
// stand for runs, which would need the cards; they wait until all four have said it.
TEST(Sweep, EachRunSeesOneOfTheDevices) {
    const Folder folder;
    fs::create_directories(folder / "s/runs");
    std::vector<sweep::Cell> cells;
    for (std::uint64_t seed = 0; seed < 4; ++seed) {
        cells.push_back({"", "none", "none", seed, 1, std::to_string(seed), ""});
        cells.back().name = sweep::name_of(cells.back());
    }
    sweep::Local local;
    local.program = {"sh", "-c",
                     "echo \"$CUDA_VISIBLE_DEVICES\"; i=0; while [ $i -lt 100 ] && [ $(cat \"${0%/*}\"/*.log | wc -l) "
                     "-lt 4 ]; do sleep 0.1; i=$((i + 1)); done"};
    local.jobs = 4;
    local.devices = {"3", "GPU-5"};
    (void)sweep::launch(folder / "s", cells, local, {}, {});
    std::vector<std::string> seen;
    for (const std::string& log : run_files(folder / "s", ".log")) seen.push_back(slurp(log));
    std::ranges::sort(seen);
    EXPECT_EQ(seen, (std::vector<std::string>{"3\n", "3\n", "GPU-5\n", "GPU-5\n"}));
}

/// A stand-in for NVIDIA's control program: says what it is asked for, and for which card.
class StandInService {
  public:
    explicit StandInService(const Folder& folder, const std::string& status) : before_(std::getenv("PATH")) {
        folder.write(
            "nvidia-cuda-mps-control",
            "#!/bin/sh\nword=$1\n[ -n \"$word\" ] || read word\n[ -d \"$CUDA_MPS_PIPE_DIRECTORY\" ] || exit 9\n"
            "echo \"$word $CUDA_VISIBLE_DEVICES\" >> '" +
                folder / "asked" +
                "'\n"
                "[ \"$word\" = quit ] || echo no service today >&2\nexit " +
                status + "\n");
        const std::string program = folder / "nvidia-cuda-mps-control";
        fs::permissions(program, fs::perms::owner_all);
        ::setenv("PATH", (fs::path(program).parent_path().string() + ":" + before_).c_str(), 1);
    }
    ~StandInService() { ::setenv("PATH", before_.c_str(), 1); }

  private:
    std::string before_;
};

TEST(Sweep, RunsOfACardHaveAServiceOfTheirOwnThatEndsWithThem) {
    const Folder folder;
    fs::create_directories(folder / "s/runs");
    std::vector<sweep::Cell> cells;
    for (std::uint64_t seed = 0; seed < 2; ++seed) {
        cells.push_back({"", "none", "none", seed, 1, std::to_string(seed), ""});
        cells.back().name = sweep::name_of(cells.back());
    }
    sweep::Local local;
    local.program = {
        "sh", "-c",
        "echo \"$CUDA_VISIBLE_DEVICES $(basename $CUDA_MPS_PIPE_DIRECTORY)\"; echo \"$CUDA_MPS_PIPE_DIRECTORY\" "
        "> '" +
            folder / "pipe" + "'"};
    local.jobs = 2;
    local.devices = {"3", "GPU-5"};
    local.mps = true;
    {
        const StandInService service(folder, "0");
        (void)sweep::launch(folder / "s", cells, local, {}, {});
    }
    std::vector<std::string> seen;
    for (const std::string& log : run_files(folder / "s", ".log")) seen.push_back(slurp(log));
    std::ranges::sort(seen);
    EXPECT_EQ(seen, (std::vector<std::string>{"0 0\n", "0 1\n"}));
    EXPECT_EQ(slurp(folder / "asked"), "-d 3\n-d GPU-5\nquit 0\nquit 0\n");
    std::string pipe = slurp(folder / "pipe");
    pipe.pop_back();
    EXPECT_FALSE(fs::exists(fs::path(pipe).parent_path()));
    const StandInService none(folder, "4");
    try {
        (void)sweep::launch(folder / "s", cells, local, {}, {});
        ADD_FAILURE();
    } catch (const WorkError& error) {
        EXPECT_THAT(error.what(), HasSubstr("mps: nvidia-cuda-mps-control -d: status 4: no service today: expected"));
    }
}

/// A service whose launcher was killed outright is ended by the next one, and that of a launcher which lives is left alone.
TEST(Sweep, AServiceThatAKilledLauncherLeftIsEndedByTheNextOne) {
    const Folder folder;
    fs::create_directories(folder / "s/runs");
    for (const char* name : {"left", "alive"}) fs::create_directories(folder / "faultline-mps-" + name + "/0");
    folder.write("faultline-mps-left/launcher.lock", "");
    const std::string held = folder / "faultline-mps-alive/launcher.lock";
    std::array<int, 2> taken{};
    ASSERT_EQ(::pipe(taken.data()), 0);
    const pid_t other = ::fork();
    if (other == 0) {
        const auto lock = sweep::FileLock::take(held);
        (void)!::write(taken[1], "x", 1);
        for (;;) ::pause();
    }
    char word = 0;
    ASSERT_EQ(::read(taken[0], &word, 1), 1);
    const char* before = std::getenv("TMPDIR");
    const std::string was = before == nullptr ? "" : before;
    ::setenv("TMPDIR", (folder / "").c_str(), 1);
    std::vector<sweep::Cell> cells{{"", "none", "none", 0, 1, "0", ""}};
    cells.back().name = sweep::name_of(cells.back());
    sweep::Local local;
    local.program = {"sh", "-c", "true"};
    local.devices = {"3"};
    local.mps = true;
    {
        const StandInService service(folder, "0");
        (void)sweep::launch(folder / "s", cells, local, {}, {});
    }
    before == nullptr ? ::unsetenv("TMPDIR") : ::setenv("TMPDIR", was.c_str(), 1);
    ::kill(other, SIGKILL);
    ::waitpid(other, nullptr, 0);
    for (const int end : taken) ::close(end);
    EXPECT_EQ(slurp(folder / "asked"), "quit 0\n-d 3\nquit 0\n");
    EXPECT_FALSE(fs::exists(folder / "faultline-mps-left"));
    EXPECT_TRUE(fs::exists(folder / "faultline-mps-alive/0"));
}

}  // namespace
}  // namespace faultline::test
