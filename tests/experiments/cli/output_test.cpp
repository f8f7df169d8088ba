// SPDX-License-Identifier: Apache-2.0
// What the program writes, where, and what it leaves when it cannot: inputs are never written over, a failing standard
// output is a sentence, and no signal leaves a partial file.
#include <chrono>
#include <csignal>
#include <cstdio>
#include <fstream>
#include <sstream>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <faultline/record/record_reader.hpp>
#include <faultline/tensor/safetensors.hpp>

#include "paths.hpp"
#include "support.hpp"

namespace faultline::test {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;

std::string bytes_of(const std::string& path) {
    std::ostringstream out;
    out << std::ifstream(path, std::ios::binary).rdbuf();
    return out.str();
}

std::string quoted(const std::vector<std::string>& arguments) {
    std::string line = "'" + program() + "'";
    for (const std::string& argument : arguments) line += " '" + argument + "'";
    return line;
}

TEST(Output, IsNotTheFileOfAnotherOutput) {
    const Folder folder;
    const std::string file = small_capture(folder), page = folder / "x.html";
    folder.write("x.html", "mine");
    const Outcome run = run_program({"attribute", file, "--report", page, "-o", page, "--force"});
    EXPECT_EQ(run.status, 2);
    EXPECT_THAT(run.err, HasSubstr("is what --report writes: expected another file"));
}

// Neither whole nor while it is written, however the names are spelled.
TEST(Output, IsNotTheFileOfAnotherOutputThatIsNotThereYet) {
    const Folder folder;
    const std::string file = small_capture(folder);
    fs::create_directory(folder / "sub");
    for (const auto& [junit, output] : {std::pair{"y.h5", "y.h5"},
                                        {"y.h5", "sub/../y.h5"},
                                        {"./y.h5", "y.h5"},
                                        {"y.h5.partial", "y.h5"},
                                        {"y.h5", "y.h5.partial"}}) {
        SCOPED_TRACE(junit);
        EXPECT_THAT(refused("check", {file, "--runs", "8", "--junit", folder / junit, "-o", folder / output}, &folder),
                    HasSubstr("is the file of -o too: expected another name"));
    }
    // Names alone, from the folder in which the program runs.
    const Outcome run = run_program({"check", file, "--runs", "8", "--junit", "./not-there.h5", "-o", "not-there.h5"});
    EXPECT_EQ(run.status, 2);
    EXPECT_THAT(run.err, HasSubstr("--junit: ./not-there.h5: is the file of -o too"));
}

TEST(Output, NeverReplacesABaseOfThePlan) {
    const Folder folder;
    const std::string file = small_capture(folder);
    fs::create_directory(folder / "sub");
    folder.write("first.toml", "base = \"fa2\"\nname = \"first\"\n");
    folder.write("sub/second.toml", "base = \"../first.toml\"\nname = \"second\"\n");
    folder.write("third.toml", "base = \"sub/second.toml\"\nname = \"third\"\n");
    for (const char* base : {"third.toml", "sub/second.toml", "first.toml"}) {
        SCOPED_TRACE(base);
        const std::string before = bytes_of(folder / base);
        EXPECT_THAT(refused("check", {file, "--plan", folder / "third.toml", "--junit", folder / base, "--force"}),
                    HasSubstr("is what --plan reads: expected another file"));
        EXPECT_THAT(refused("identify", {file, "--plans", folder / "third.toml", "-o", folder / base, "--force"}),
                    HasSubstr("is what --plans reads: expected another file"));
        EXPECT_EQ(bytes_of(folder / base), before);
    }
    // A base that comes back, or is no TOML, ends the search: the plan's own refusal is what is said.
    folder.write("first.toml", "base = \"third.toml\"\n");
    EXPECT_THAT(refused("check", {file, "--plan", folder / "third.toml", "--junit", folder / "j.xml"}),
                HasSubstr("has this plan as its base in turn"));
    folder.write("first.toml", "base = \n");
    EXPECT_THAT(refused("check", {file, "--plan", folder / "third.toml", "-o", folder / "j.h5"}),
                HasSubstr("first.toml"));
}

TEST(Output, NeverReplacesWhatIsRead) {
    const Folder folder;
    const std::string file = small_capture(folder);
    folder.write("mine.toml", "base = \"fa2\"\n");
    folder.write("run.toml", "[attribute]\nquiet = true\n");
    const std::string before = bytes_of(file);
    fs::create_symlink(file, folder / "link.safetensors");
    fs::create_hard_link(file, folder / "hard.safetensors");
    fs::create_hard_link(file, folder / "x.h5.partial");
    const std::string folder_name = fs::path(folder / "x").parent_path().string();
    const std::vector<std::string> fast{"--correction", "none", "--force"};
    const auto refused = [&](std::vector<std::string> arguments, const std::string& output, const std::string& what) {
        SCOPED_TRACE(output);
        arguments.insert(arguments.end(), {"-o", output});
        const Outcome run = run_program(arguments);
        EXPECT_EQ(run.status, 2);
        EXPECT_THAT(run.err,
                    AllOf(HasSubstr("--output: "), HasSubstr("is what " + what + " reads: expected another file")));
    };
    const auto attribute = [&](const std::vector<std::string>& more = {}) {
        std::vector<std::string> arguments{"attribute", file, "--correction", "none", "--force"};
        arguments.insert(arguments.end(), more.begin(), more.end());
        return arguments;
    };
    for (const char* name :
         {"capture.safetensors", "./capture.safetensors", "link.safetensors", "hard.safetensors", "x.h5"})
        refused(attribute(), folder / name, "capture");
    refused(attribute({"--plan", folder / "mine.toml"}), folder / "mine.toml", "--plan");
    refused(attribute({"--config", folder / "run.toml"}), folder / "run.toml", "--config");
    refused({"inspect", file, "--force"}, file, "file");
    refused({"bisect", file, "--until", "layer0.dq.rel_error < 1", "--force"}, file, "capture");
    refused({"identify", file, "--plans", folder / "mine.toml", "--force"}, folder / "mine.toml", "--plans");
    refused({"plans", folder / "mine.toml", "--force"}, folder / "mine.toml", "name");
    refused({"attribute", folder_name, "--force"}, file, "capture");  // a folder of .npy files
    EXPECT_TRUE(bytes_of(file) == before);
}

TEST(Output, AFullDeviceIsASentence) {
    if (!fs::exists("/dev/full")) GTEST_SKIP() << "there is no /dev/full";
    const Folder folder;
    const std::string file = small_capture(folder);
    const std::string out = folder / "out.h5";
    const std::vector<std::vector<std::string>> calls{
        {"--help"},
        {"--version"},
        {"attribute", "--help"},
        {"attribute", file, "--print-config"},
        {"inspect", file},
        {"inspect", file, "--json"},
        {"plans"},
        {"plans", "fa2"},
        {"plans", "--diff", "fa2,fa3"},
        {"sites", "--json"},
        {"formats"},
        {"corrections"},
        {"selftest", "--plans", "fa2", "--queries", "16"},
        {"attribute", file, "--correction", "none", "--sites", "p_cast", "--quiet", "-o", out},
        {"attribute", file, "--correction", "none", "--sites", "p_cast", "--quiet", "--json"}};
    for (const std::vector<std::string>& call : calls) {
        SCOPED_TRACE(quoted(call));
        EXPECT_EQ(WEXITSTATUS(std::system((quoted(call) + " > /dev/full 2> '" + (folder / "err") + "'").c_str())), 1);
        const std::string said = bytes_of(folder / "err");
        EXPECT_THAT(lines(said), ::testing::SizeIs(1));
        EXPECT_THAT(said, HasSubstr("standard output: cannot be written"));
        // A pipe whose reader has gone is what `| head` makes: no failure.
        EXPECT_EQ(WEXITSTATUS(std::system(("bash -c \"" + quoted(call) + (call.back() == out ? " --force" : "") +
                                           " 2>&1 | true; exit \\${PIPESTATUS[0]}\"")
                                              .c_str())),
                  0);
    }
    EXPECT_TRUE(RecordReader(out).contains("layer1/counterfactual/alone"));  // the results were not lost with the table
}

/// Runs a long attribution that writes `out`; `prepare` in the child before it begins.
template <class Prepare>
pid_t start_long(const Folder& folder, const std::string& out, Prepare&& prepare) {
    TensorSet set;
    for (int layer = 0; layer < 40; ++layer) add_layer(set, "layer" + std::to_string(layer), {.n_q = 96, .n_k = 96});
    const std::string file = folder / "long.safetensors";
    write_safetensors(file, set);
    const pid_t child = ::fork();
    if (child != 0) return child;
    (void)std::freopen((folder / "err").c_str(), "w", stderr);
    (void)std::freopen("/dev/null", "w", stdout);
    prepare();
    ::execl(program().c_str(), "faultline", "attribute", file.c_str(), "--quiet", "-o", out.c_str(),
            static_cast<char*>(nullptr));
    ::_exit(127);
}

TEST(Output, NoSignalLeavesAPartialFile) {
    for (const int signal : {SIGTERM, SIGHUP}) {
        SCOPED_TRACE(signal);
        const Folder folder;
        const std::string out = folder / "out.h5";
        const pid_t child = start_long(folder, out, [] {});
        while (!fs::exists(out + ".partial")) std::this_thread::sleep_for(std::chrono::milliseconds(5));
        ::kill(child, signal);
        int status = 0;
        ::waitpid(child, &status, 0);
        ASSERT_TRUE(WIFEXITED(status));
        EXPECT_EQ(WEXITSTATUS(status), 1);
        EXPECT_FALSE(fs::exists(out + ".partial"));
        EXPECT_EQ(RecordReader(out).attribute("", "complete"), "0");
    }
}

TEST(Output, WhatWhoeverStartedUsHadIgnoredStaysIgnored) {
    const Folder folder;
    const pid_t child = start_long(folder, folder / "out.h5", [] { std::signal(SIGHUP, SIG_IGN); });  // nohup
    while (!fs::exists(folder / "out.h5.partial")) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    ::kill(child, SIGHUP);
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    ::kill(child, SIGTERM);
    int status = 0;
    ::waitpid(child, &status, 0);
    EXPECT_TRUE(WIFEXITED(status));
}

TEST(Output, TheLimitOnAFilesSizeIsASentence) {
    const Folder folder;
    const std::string out = folder / "out.h5";
    const std::string command = "ulimit -f 10; " +
                                quoted({"attribute", small_capture(folder), "--correction", "none", "--sites", "p_cast",
                                        "--quiet", "-o", out}) +
                                " > /dev/null 2> '" + (folder / "err") + "'";
    EXPECT_EQ(WEXITSTATUS(std::system(command.c_str())), 1);
    EXPECT_THAT(bytes_of(folder / "err"), HasSubstr("(File too large): expected a writable folder with room for it"));
    EXPECT_FALSE(fs::exists(out));
    EXPECT_FALSE(fs::exists(out + ".partial"));
}

TEST(Output, NamesTheTensorsThatAreNotUsed) {
    const Folder folder;
    TensorSet set = read_safetensors(small_capture(folder));
    for (const char* name : {"layer0.a.b.dq", "layer0.flash.foo", "layer9.flash.o", "other", "layer0.x"}) {
        Tensor tensor = set.tensors.at("layer0.q");
        tensor.name = name;
        set.add(std::move(tensor));
    }
    const std::string file = folder / "more.safetensors";
    write_safetensors(file, set);
    std::vector<std::string> call{"attribute", file, "--correction", "none", "--sites", "p_cast", "--outputs", "o"};
    const Outcome run = run_program(call);
    EXPECT_EQ(run.status, 0);
    EXPECT_EQ(
        lines(run.err).front(),
        file +
            ": not used: 4 tensors (\"layer0.a.b.dq\", \"layer0.flash.foo\", \"layer9.flash.o\", ...): no name of "
            "theirs is LAYER.{q,k,v,do,mask,softcap,sink,dropout,keep} or LAYER.KERNEL.{o,dq,dk,dv,lse}");
    call.push_back("--quiet");
    EXPECT_EQ(run_program(call).err, "");
}

}  // namespace
}  // namespace faultline::test
