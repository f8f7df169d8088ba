// SPDX-License-Identifier: Apache-2.0
// What is there stays: an interrupted run does not replace a whole file, and a file that appears meanwhile is not written
// over. And limits of settings whose excess would tell nothing.
#include <chrono>
#include <csignal>
#include <cstdio>
#include <fstream>
#include <sstream>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <faultline/base/error.hpp>
#include <faultline/record/record_reader.hpp>
#include <faultline/tensor/partial_file.hpp>
#include <faultline/tensor/safetensors.hpp>

#include "paths.hpp"
#include "support.hpp"

namespace faultline::test {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

std::string text_of(const std::string& path) {
    std::ostringstream out;
    out << std::ifstream(path, std::ios::binary).rdbuf();
    return out.str();
}

std::span<const std::byte> bytes(std::string_view text) { return std::as_bytes(std::span(text)); }

TEST(KeptFile, AnInterruptedRunDoesNotReplaceAWholeOne) {
    const Folder folder;
    TensorSet set;  // recomputing every element of such a layer takes minutes
    add_layer(set, "layer0", {.heads = 4, .n_q = 256, .n_k = 256, .d = 64, .d_v = 64});
    const std::string file = folder / "long.safetensors", out = folder / "out.h5", page = folder / "page.html",
                      err = folder / "err";
    write_safetensors(file, set);
    folder.write("out.h5", "whole");
    folder.write("page.html", "whole page");
    const pid_t child = ::fork();
    if (child == 0) {
        (void)std::freopen(err.c_str(), "w", stderr);
        (void)std::freopen("/dev/null", "w", stdout);
        ::execl(program().c_str(), "faultline", "attribute", file.c_str(), "-o", out.c_str(), "--report", page.c_str(),
                "--force", "--verify-truth", "9223372036854775807", "--correction", "none", "--sites", "p_cast",
                static_cast<char*>(nullptr));
        ::_exit(127);
    }
    while (!fs::exists(page + ".partial")) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    ::kill(child, SIGINT);
    int status = 0;
    ::waitpid(child, &status, 0);
    ASSERT_TRUE(WIFEXITED(status));
    EXPECT_EQ(WEXITSTATUS(status), 1);
    EXPECT_EQ(text_of(out), "whole");
    EXPECT_EQ(text_of(page), "whole page");
    EXPECT_EQ(RecordReader(out + ".partial").attribute("", "complete").value_or(""), "0");
    EXPECT_THAT(text_of(page + ".partial"), HasSubstr("</html>"));
    EXPECT_THAT(text_of(err), AllOf(HasSubstr("out.h5.partial ("), HasSubstr("out.h5 is as it was"),
                                    HasSubstr("page.html.partial (")));
}

TEST(KeptFile, AnInterruptedRunNamesItsReport) {
    const Folder folder;
    TensorSet set;
    add_layer(set, "layer0", {.n_q = 128, .n_k = 128, .d = 64, .d_v = 64});
    const std::string file = folder / "long.safetensors", page = folder / "page.html";
    write_safetensors(file, set);
    Child child({"attribute", file, "--plan", "fa2", "--report", page, "--verify-truth", "9223372036854775807",
                 "--correction", "none", "--sites", "p_cast"},
                folder / "err");
    child.wait_until_it_catches(SIGINT);
    while (!fs::exists(page + ".partial")) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    child.signal(SIGINT);
    EXPECT_EQ(child.wait(), 1);
    EXPECT_TRUE(fs::exists(page));
    EXPECT_THAT(child.error(),
                HasSubstr("interrupted after 0 of 1 layers, the report written to " + page + "; the rest"));
}

TEST(KeptFile, OneThatAppearsMeanwhileStays) {
    const Folder folder;
    const std::string path = folder / "a.txt";
    {
        PartialFile ours(path);
        ours.write(bytes("ours"));
        folder.write("a.txt", "theirs");
        try {
            ours.commit();
            ADD_FAILURE();
        } catch (const WorkError& error) {
            EXPECT_THAT(error.what(), AllOf(HasSubstr("has appeared since"), HasSubstr("a.txt.partial")));
        }
    }
    EXPECT_EQ(text_of(path), "theirs");
    EXPECT_EQ(text_of(path + ".partial"), "ours");
    {
        PartialFile again(path);  // one that was there is replaced
        again.write(bytes("new"));
        again.commit();
    }
    EXPECT_EQ(text_of(path), "new");
    EXPECT_FALSE(fs::exists(path + ".partial"));
}

TEST(KeptFile, ALinkToNothingIsRefusedAndStays) {
    const Folder folder;
    const std::string file = small_capture(folder), link = folder / "link.h5";
    fs::create_symlink(folder / "nowhere.h5", link);
    for (const char* force : {"--quiet", "--force"}) {
        const Outcome run = run_program({"attribute", file, "--correction", "none", "-o", link, force});
        EXPECT_EQ(run.status, 2);
        EXPECT_THAT(run.err, HasSubstr("link.h5: is a link to nothing: expected"));
    }
    EXPECT_TRUE(fs::is_symlink(link));
    EXPECT_THAT(folder.files(), Not(::testing::Contains("nowhere.h5")));
}

TEST(KeptFile, HDF5HasNoNameOfAnotherType) {
    const Folder folder;
    const std::string file = small_capture(folder);
    for (const char* name : {"a.toml", "a.safetensors", "a.json", "a.txt", "a.html"}) {
        const Outcome run = run_program({"attribute", file, "--correction", "none", "-o", folder / name});
        EXPECT_EQ(run.status, 2) << name;
        EXPECT_THAT(run.err, HasSubstr("expected a name for an HDF5 file")) << name;
        EXPECT_FALSE(fs::exists(folder / name));
    }
}

TEST(Limits, OfCheckAndGenerate) {
    const Folder folder;
    const std::string file = small_capture(folder), out = folder / "out.safetensors";
    const std::vector<std::vector<std::string>> wrong{{"check", file, "--runs", "10001"},
                                                      {"check", file, "--alpha", "1e-13"},
                                                      {"check", file, "--alpha", "0"},
                                                      {"generate", "saturated", "-o", out, "--seq", "0"},
                                                      {"generate", "saturated", "-o", out, "--head-dim", "0"},
                                                      {"generate", "saturated", "-o", out, "--heads", "0"}};
    for (const std::vector<std::string>& arguments : wrong) {
        const Outcome run = run_program(arguments);
        EXPECT_EQ(run.status, 2) << arguments.back() << run.err;
        EXPECT_THAT(run.err, HasSubstr("expected")) << arguments.back();
    }
    const Outcome printed = run_program({"generate", "--print-config"});
    EXPECT_EQ(printed.status, 0);
    EXPECT_THAT(printed.out, Not(HasSubstr("head-dim")));  // not set, and 0 would be refused
}

TEST(Generate, WhatAPlanWithADotReturnsIsReadBack) {
    const Folder folder;
    const std::string out = folder / "out.safetensors", plan = "repo-2510.04212";
    const Outcome made = run_program(
        {"generate", "saturated", "--plan", plan, "-o", out, "--seq", "32", "--head-dim", "16", "--heads", "1"});
    ASSERT_EQ(made.status, 0) << made.err;
    const Outcome checked = run_program({"check", out, "--plan", plan, "--runs", "8"});
    EXPECT_THAT(checked.out, HasSubstr("kernel repo-2510-04212")) << checked.err;
    EXPECT_THAT(checked.err, Not(HasSubstr("not used")));
}

}  // namespace
}  // namespace faultline::test
