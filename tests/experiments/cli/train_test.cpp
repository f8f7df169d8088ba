// SPDX-License-Identifier: Apache-2.0
// faultline train as a user meets it: killed at any moment and resumed, interrupted, on a full disk, with bad input, and
// its captures through attribute.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <thread>

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>
#include <nlohmann/json.hpp>

#include <faultline/base/error.hpp>
#include <faultline/record/record_reader.hpp>

#include "paths.hpp"
#include "support.hpp"
#include "texts.hpp"

namespace faultline::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

std::string file_bytes(const std::string& path) {
    std::ifstream in(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
}

class Train : public testing::Test {
  protected:
    Train() { folder.write("text", text_of_squares(3000)); }
    std::vector<std::string> arguments(const std::string& steps, std::vector<std::string> more) const {
        std::vector<std::string> all{"train",
                                     "--data",
                                     folder / "text",
                                     "--steps",
                                     steps,
                                     "--layers",
                                     "1",
                                     "--width",
                                     "16",
                                     "--context",
                                     "32",
                                     "--batch",
                                     "8",
                                     "--warmup",
                                     "5",
                                     "--threads",
                                     "1",
                                     "--checkpoint-every",
                                     "7",
                                     "--monitor-every",
                                     "3",
                                     "--validate-every",
                                     "10",
                                     "--validation-batches",
                                     "1"};
        all.insert(all.end(), more.begin(), more.end());
        return all;
    }
    Outcome train(const std::string& steps, const std::vector<std::string>& more) const {
        return run_program(arguments(steps, more));
    }
    /// Starts it, lets it write its first checkpoint, and sends a signal; the exit status as run_program has it.
    int train_and_signal(const std::string& steps, const std::vector<std::string>& more, const std::string& checkpoint,
                         int signal, int delay_ms) const {
        Child child(arguments(steps, more));
        for (int i = 0; i < 2000 && !std::filesystem::exists(checkpoint); ++i)
            std::this_thread::sleep_for(std::chrono::milliseconds(5));
        std::this_thread::sleep_for(std::chrono::milliseconds(delay_ms));
        child.signal(signal);
        return child.wait();
    }
    static void expect_same_content(const std::string& a, const std::string& b) {
        const RecordReader one(a), two(b);
        EXPECT_EQ(one.datasets(), two.datasets());
        for (const std::string& path : one.datasets()) {
            const Tensor x = one.read(path), y = two.read(path);
            EXPECT_EQ(x.shape, y.shape) << path;
            EXPECT_TRUE(x.bytes == y.bytes) << path;
        }
    }

    Folder folder;
};

TEST_F(Train, KilledAndResumedIsTheRunThatNeverStopped) {
    const std::string steps = "400";
    const std::vector<std::string> fault{"--inject", "delta:multiplicative:0.3"};
    const auto with = [&](std::vector<std::string> more) {
        more.insert(more.end(), fault.begin(), fault.end());
        return more;
    };
    ASSERT_EQ(train(steps, with({"-o", folder / "whole.h5"})).status, 0);
    int status =
        train_and_signal(steps, with({"-o", folder / "cut.h5"}), folder / "cut.checkpoint.safetensors", SIGKILL, 40);
    EXPECT_EQ(status, -SIGKILL);
    {
        const RecordReader cut(folder / "cut.h5");  // readable as it was left
        EXPECT_GE(cut.read("steps/loss").size(), 7);
        EXPECT_LT(cut.read("steps/loss").size(), 400);
    }
    status = train_and_signal(steps, with({"--resume", folder / "cut.h5"}), folder / "cut.checkpoint.safetensors",
                              SIGKILL, 250);
    EXPECT_EQ(status, -SIGKILL);
    const Outcome rest = train(steps, with({"--resume", folder / "cut.h5"}));
    EXPECT_EQ(rest.status, 0) << rest.err;
    expect_same_content(folder / "whole.h5", folder / "cut.h5");
    const RecordReader whole(folder / "whole.h5");
    EXPECT_EQ(whole.read("steps/loss").size(), 400);
    EXPECT_TRUE(whole.contains("steps/injected_rms"));
}

// What a run goes on from can be looked at.
TEST_F(Train, ACheckpointIsShownByInspect) {
    ASSERT_EQ(run_program(arguments("2", {"-o", folder / "run.h5"})).status, 0);
    const std::string file = folder / "run.checkpoint.safetensors";
    const Outcome text = run_program({"inspect", file}), object = run_program({"inspect", file, "--json"});
    ASSERT_EQ(text.status, 0) << text.err;
    ASSERT_EQ(object.status, 0) << object.err;
    EXPECT_THAT(text.out, AllOf(HasSubstr("checkpoint of faultline train, next step 2, 2 optimizer steps"),
                                HasSubstr("context=32"), HasSubstr("weights")));
    const nlohmann::json json = nlohmann::json::parse(object.out);
    EXPECT_EQ(json["metadata"]["next_step"], "2");
    EXPECT_EQ(json["config"]["width"], "16");
    EXPECT_THAT(refused("inspect", {file, "-o", folder / "x.h5"}, &folder), HasSubstr("is a checkpoint"));
}

TEST_F(Train, AnInterruptSavesAndSaysHowToGoOn) {
    for (const int signal : {SIGINT, SIGTERM}) {
        const std::string file = folder / (std::to_string(signal) + ".h5");
        const std::string checkpoint = folder / (std::to_string(signal) + ".checkpoint.safetensors");
        EXPECT_EQ(train_and_signal("100000", {"-o", file}, checkpoint, signal, 30), 1);
        const RecordReader reader(file);
        EXPECT_GE(reader.read("steps/loss").size(), 7);
    }
    const Outcome rest = train("8", {"--resume", folder / "2.h5"});
    EXPECT_EQ(rest.status, 0) << rest.err;
    EXPECT_THAT(rest.out, HasSubstr("steps were done before: nothing is left to do of 8"));
}

// HDF5 readers, ours and h5py, lock a file as long as they have it open.
TEST_F(Train, AReaderHoldsTheFile) {
    const std::string file = folder / "run.h5";
    ASSERT_EQ(train("14", {"-o", file}).status, 0);
    std::optional<RecordReader> reader(std::in_place, file);
    const Tensor before = reader->read("steps/loss");
    // Going on replaces the file's steps: that waits until nobody reads it, and nothing is lost.
    const Outcome refused = train("21", {"--resume", file});
    EXPECT_EQ(refused.status, 1);
    EXPECT_THAT(refused.err, HasSubstr("run.h5: is being written or read: expected nobody to have it open"));
    EXPECT_EQ(lines(refused.err).size(), 1U) << refused.err;
    EXPECT_TRUE(reader->read("steps/loss").bytes == before.bytes);
    // A new run takes the name; the reader keeps the file that it opened.
    EXPECT_EQ(train("7", {"-o", file, "--force", "--lr", "0.01"}).status, 0);
    EXPECT_TRUE(reader->read("steps/loss").bytes == before.bytes);
    EXPECT_EQ(RecordReader(file).read("steps/loss").size(), 7);
    // Nor does a reader of the new one keep it from being resumed once it is gone.
    reader.reset();
    EXPECT_EQ(train("21", {"--resume", file, "--lr", "0.01"}).status, 0);
    EXPECT_EQ(RecordReader(file).read("steps/loss").size(), 21);
    // The file says how long the run is now, and else what it began with.
    const std::string config = RecordReader(file).manifest().config_toml;
    EXPECT_THAT(config, HasSubstr("\nsteps = 21\n"));
    EXPECT_THAT(config, HasSubstr("\nlr = 0.01\n"));
    EXPECT_THAT(folder.files(), Not(testing::Contains("run.h5.partial")));
}

TEST_F(Train, ARunAtWorkIsNotTakenOver) {
    const std::string file = folder / "run.h5", checkpoint = folder / "run.checkpoint.safetensors";
    Child child(arguments("100000", {"-o", file}));
    for (int i = 0; i < 2000 && !std::filesystem::exists(checkpoint); ++i)
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
    const Outcome refused = train("7", {"-o", file, "--force"});
    EXPECT_EQ(refused.status, 1);
    EXPECT_THAT(refused.err, HasSubstr("run.h5: is being written or read: expected nobody to have it open"));
    EXPECT_TRUE(std::filesystem::exists(checkpoint));
    child.signal(SIGKILL);
    EXPECT_EQ(child.wait(), -SIGKILL);
    EXPECT_EQ(train("7", {"-o", file, "--force"}).status, 0);  // of the dead, its mark remains and nobody's lock
    EXPECT_EQ(RecordReader(file).read("steps/loss").size(), 7);
}

TEST_F(Train, AnInterruptWhileItReadsIsAnEndLikeAnyOther) {
    const std::string text = folder / "long";
    folder.write("long", "");
    std::filesystem::resize_file(text, 64 << 20);  // zeros are bytes too; read in some tenths of a second
    for (const char* command : {"train", "dissociate"}) {
        const std::string err = folder / "err";
        Child child({command, "--data", text, "-o", folder / "run.h5", "--threads", "1"}, err);
        child.wait_until_it_catches(SIGINT);
        child.signal(SIGINT);
        EXPECT_EQ(child.wait(), 1) << command;
        EXPECT_THAT(child.error(), HasSubstr("interrupted, nothing written")) << command;
        EXPECT_THAT(folder.files(), testing::UnorderedElementsAre("err", "long", "text")) << command;
    }
}

// The first interrupt waits for the end of a step, here of seconds; a second one does not, and leaves no NAME.partial.
TEST_F(Train, ASecondInterruptEndsAtOnceAndLeavesNothingHalfWritten) {
    const std::string partial = folder / "m.h5.partial", record = folder / "m.runs/none__none__seed0.h5.partial";
    Child child({"dissociate", "--data", folder / "text", "-o", folder / "m.h5", "--threads", "1", "--width", "256",
                 "--layers", "8", "--context", "512", "--batch", "64", "--steps", "2", "--validation-batches", "1"},
                folder / "err");
    for (int i = 0; i < 4000 && !std::filesystem::exists(record); ++i)  // made right before the first step
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
    ASSERT_TRUE(std::filesystem::exists(partial) && std::filesystem::exists(record)) << child.error();
    child.signal(SIGINT);
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    child.signal(SIGINT);
    EXPECT_EQ(child.wait(), -SIGINT);
    EXPECT_FALSE(std::filesystem::exists(partial));
    EXPECT_FALSE(std::filesystem::exists(record));
}

TEST_F(Train, SummaryAsTextAndJson) {
    const Outcome text = train("12", {});
    EXPECT_EQ(text.status, 0) << text.err;
    EXPECT_THAT(text.out, AllOf(HasSubstr("12 of 12 steps"), HasSubstr("tokens/s"), HasSubstr("validation loss")));
    const Outcome json = train("12", {"--json"});
    const auto object = nlohmann::json::parse(json.out);
    EXPECT_EQ(object["schema"], "faultline.training/1");
    EXPECT_EQ(object["end"], "finished");
    EXPECT_EQ(object["steps"], 12);
    EXPECT_GT(object["sigma_q"].get<double>(), 0);
}

TEST_F(Train, PrintedConfigurationMakesTheSameRun) {
    const Outcome printed = train("9", {"--lr", "0.01", "--qk-norm", "learned", "--print-config"});
    ASSERT_EQ(printed.status, 0) << printed.err;
    folder.write("run.toml", printed.out);
    ASSERT_EQ(train("9", {"--lr", "0.01", "--qk-norm", "learned", "-o", folder / "a.h5"}).status, 0);
    const Outcome again =
        run_program({"train", "--config", folder / "run.toml", "-o", folder / "b.h5", "--threads", "2"});
    ASSERT_EQ(again.status, 0) << again.err;
    expect_same_content(folder / "a.h5", folder / "b.h5");
}

TEST_F(Train, CapturesAreReadByAttribute) {
    ASSERT_EQ(train("4", {"--capture", "0,3", "-o", folder / "run.h5"}).status, 0);
    for (const char* step : {"000000", "000003"}) {
        const Outcome read = run_program({"attribute", folder / (std::string("run.step") + step + ".safetensors"),
                                          "--plan", "fa2", "--correction", "none"});
        EXPECT_EQ(read.status, 0) << read.err;
        EXPECT_THAT(read.out, HasSubstr("layer0   batch 4, 2 heads, 32 x 32, head_dim 8, causal"));
    }
    // The layer's input is there too: the terms of W_Q's gradient error are made of it, not of q.
    const Outcome probed =
        run_program({"probe", folder / "run.step000003.safetensors", "--probe", "similarity", "--terms", "8"});
    EXPECT_EQ(probed.status, 0) << probed.err;
    EXPECT_THAT(probed.out, HasSubstr("8 terms (PK)[t]^T X[t] a head"));
    // Its cap belongs to the problem, whatever runs it.
    ASSERT_EQ(
        train("2", {"--capture", "1", "-o", folder / "capped.h5", "--softcap", "30", "--attention", "fa3"}).status, 0);
    const Outcome capped =
        run_program({"attribute", folder / "capped.step000001.safetensors", "--plan", "fa3", "--correction", "none"});
    EXPECT_EQ(capped.status, 0) << capped.err;
    EXPECT_THAT(capped.out, HasSubstr("softcap 30"));
    EXPECT_THAT(train("4", {"--capture", "1"}).err, HasSubstr("expected -o"));
    const Outcome beyond = train("4", {"--capture", "4", "-o", folder / "beyond.h5"});
    EXPECT_EQ(beyond.status, 2);
    EXPECT_THAT(beyond.err, HasSubstr("--capture: step 4: expected steps of the run, 0 to 3"));
}

TEST_F(Train, RequestsThatAreWrongAreOneSentenceAndStatus2) {
    const auto refused = [&](const std::vector<std::string>& more, const std::string& part) {
        const Outcome outcome = train("3", more);
        EXPECT_EQ(outcome.status, 2) << outcome.err;
        EXPECT_THAT(outcome.err, HasSubstr(part));
        EXPECT_EQ(lines(outcome.err).size(), 1U) << outcome.err;
        EXPECT_EQ(outcome.out, "");
    };
    folder.write("tiny", "too short");
    folder.write("x.bin", "no magic here");
    folder.write("train.bin", std::string("\x30\xc6", 2) + std::string(1000, '\0'));
    refused({"--data", folder / "tiny"}, "expected more than the context of 32");
    refused({"--data", folder / "x.bin"}, "magic");
    refused({"--data", folder / "absent"}, "absent");
    refused({"--data", folder / "train.bin", "--vocab", "50000"}, "token 50736 at position 0: expected ids below");
    refused({"--attention", "fa9"}, "fa9");
    refused({"--layer-attention", "one=fa2"}, "LAYER=PLAN");
    refused({"--layer-attention", "4=fa2"}, "layer 4");
    refused({"--optimizer", "adam"}, "did you mean \"adamw\"");
    refused({"--inject", "delta:huge:1"}, "--inject");
    refused({"--inject", "delta:fixed:1:layers=3"}, "layer 3");
    refused({"--inject", "delta:fixed:1:heads=7"}, "--inject: fault \"delta:fixed:1:heads=7\": head 7: expected ");
    refused({"--inject", "o_cast:fixed:0.3:column=3"}, "column=3: o_cast is in the attention kernel");
    refused({"--inject", "ffn_output:fixed:1:column=99", "-o", folder / "never.h5"}, "column 99: expected less than");
    refused({"--inject", "delta:fixed:1:from=3"}, "from: 3: expected a step of the run, 0 to 2");
    refused({"--resume", folder / "none.h5"}, "checkpoint");
    refused({"-o", folder / "no/such/folder.h5"}, "no/such/folder.h5");
    refused({"--replay", folder / "text"}, "line 1");
    refused({"--heads", "3"}, "divisor of the width");
    refused({"--beta1", "1.5"}, "beta1: 1.5: expected 0 or more and below 1");
    refused({"--clip", "-1"}, "clip: -1: expected 0 or more");
}

TEST_F(Train, AFullDiskIsStatus1AndLeavesTheStepsThatWereWritten) {
    const pid_t child = ::fork();
    if (child == 0) {
        std::signal(SIGXFSZ, SIG_IGN);  // writes then fail with EFBIG, as with ENOSPC
        const rlimit size{64 << 10, 64 << 10};
        ::setrlimit(RLIMIT_FSIZE, &size);
        const Outcome outcome = train("400", {"--checkpoint-every", "0", "-o", folder / "full.h5"});
        ::_exit(outcome.status == 1 && outcome.err.find("full.h5") != std::string::npos ? 0 : 1);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    EXPECT_EQ(status, 0);
}

TEST_F(Train, ARunThatExplodesSaysWhere) {
    const Outcome outcome = train("50", {"--inject", "ffn_output:multiplicative:1e40:from=5", "-o", folder / "nan.h5"});
    EXPECT_EQ(outcome.status, 1);
    EXPECT_THAT(outcome.err,
                AllOf(HasSubstr("is not finite"), HasSubstr("layer0."), HasSubstr("nan.checkpoint.safetensors")));
    EXPECT_TRUE(std::filesystem::exists(folder / "nan.checkpoint.safetensors"));
    const RecordReader reader(folder / "nan.h5");
    EXPECT_GE(reader.read("steps/loss").size(), 5);
    const Outcome at_once = train("50", {"--inject", "delta:multiplicative:1e300", "-o", folder / "once.h5"});
    EXPECT_EQ(at_once.status, 1);
    EXPECT_THAT(at_once.err, AllOf(HasSubstr("step 0: layer0."), HasSubstr("is not finite")));
    EXPECT_TRUE(std::filesystem::exists(folder / "once.checkpoint.safetensors"));
    EXPECT_FALSE(std::filesystem::exists(folder / "once.h5"));
    EXPECT_FALSE(std::filesystem::exists(folder / "once.h5.partial"));
    EXPECT_EQ(at_once.out, "0 of 50 steps\n");  // no number that there is not
    // Taken up again it comes to the same step, with the same sentence.
    const Outcome again = train("50", {"--inject", "delta:multiplicative:1e300", "--resume", folder / "once.h5"});
    EXPECT_EQ(again.status, 1);
    EXPECT_EQ(again.err, at_once.err);
}

TEST_F(Train, AResumedRunHasItsOwnFaultsAndData) {
    const std::string run = folder / "own.h5";
    ASSERT_EQ(train("4", {"--inject", "delta:multiplicative:0.3", "-o", run}).status, 0);
    const Outcome other = train("8", {"--inject", "delta:multiplicative:0.5", "--resume", run});
    EXPECT_EQ(other.status, 2);
    EXPECT_THAT(other.err,
                AllOf(HasSubstr("inject: the checkpoint is of a run with"), HasSubstr("0.3"), HasSubstr("0.5")));
    EXPECT_EQ(train("8", {"--inject", "delta:multiplicative:0.3", "--resume", run}).status, 0);
}

TEST_F(Train, ARecordGoesOnBesideItsOwnCheckpointAlone) {
    const std::string mixed = folder / "mixed.h5";
    const auto beside = [&](const std::vector<std::string>& of_record, const std::string& steps) {
        std::vector<std::string> more = of_record;
        more.insert(more.end(), {"-o", mixed, "--force"});
        ASSERT_EQ(train(steps, more).status, 0);
        std::filesystem::copy_file(folder / "run.checkpoint.safetensors", folder / "mixed.checkpoint.safetensors",
                                   std::filesystem::copy_options::overwrite_existing);
    };
    // Refused whether or not there is something left to do, and nothing is touched.
    const auto refused = [&](const std::string& part) {
        const std::string before = file_bytes(mixed), checkpoint = file_bytes(folder / "mixed.checkpoint.safetensors");
        for (const char* steps : {"12", "8"}) {
            const Outcome outcome = train(steps, {"--resume", mixed});
            EXPECT_EQ(outcome.status, 2) << outcome.out;
            EXPECT_THAT(outcome.err, HasSubstr(part));
            EXPECT_EQ(lines(outcome.err).size(), 1U) << outcome.err;
        }
        EXPECT_TRUE(file_bytes(mixed) == before);
        EXPECT_TRUE(file_bytes(folder / "mixed.checkpoint.safetensors") == checkpoint);
        EXPECT_THAT(folder.files(), Not(testing::Contains("mixed.h5.partial")));
    };
    ASSERT_EQ(train("8", {"-o", folder / "run.h5"}).status, 0);
    beside({"--seed", "7"}, "8");
    refused("mixed.h5: seed: is the record of a run with 7: expected 0, as its checkpoint has it");
    beside({"--lr", "0.001"}, "8");
    refused("mixed.h5: lr: is the record of a run with 0.001: expected 0.003");
    beside({"--inject", "delta:multiplicative:0.3"}, "8");
    refused("mixed.h5: step 7: has the loss ");
    beside({}, "4");
    refused("mixed.h5: ends before step 7 of its checkpoint: expected the file that was written with it");
    folder.write("mixed.h5", "");
    refused("mixed.h5");
    folder.write("mixed.h5", std::string(5000, 'x'));
    refused("mixed.h5");
    std::filesystem::remove(mixed);
    EXPECT_EQ(train("8", {"--resume", mixed}).status, 2);
    EXPECT_FALSE(std::filesystem::exists(mixed));
    beside({}, "8");
    EXPECT_EQ(train("12", {"--resume", mixed}).status, 0);
}

TEST_F(Train, AResumedRunHasNoCaptureOfTheStepsBefore) {
    const std::string run = folder / "run.h5";
    ASSERT_EQ(train("8", {"--capture", "3", "-o", run}).status, 0);
    const Outcome missed = train("12", {"--capture", "2,10", "--resume", run});
    EXPECT_EQ(missed.status, 2);
    EXPECT_THAT(missed.err, AllOf(HasSubstr("capture: step 2: was done before, and "),
                                  HasSubstr("run.step000002.safetensors is not there: expected steps from 8 on")));
    EXPECT_EQ(train("12", {"--capture", "3,10", "--resume", run}).status, 0);  // the command that it began with
    EXPECT_TRUE(std::filesystem::exists(folder / "run.step000010.safetensors"));
}

TEST_F(Train, ADamagedCheckpointIsRefused) {
    const std::string run = folder / "run.h5", checkpoint = folder / "run.checkpoint.safetensors";
    ASSERT_EQ(train("8", {"-o", run}).status, 0);
    const std::string whole = file_bytes(checkpoint);
    for (const std::size_t at : {whole.find("checksum"), whole.size() / 2, whole.size() - 5}) {
        std::string bytes = whole;
        bytes[at] = static_cast<char>(bytes[at] ^ 1);
        folder.write("run.checkpoint.safetensors", bytes);
        const Outcome damaged = train("12", {"--resume", run});
        EXPECT_EQ(damaged.status, 2) << at;
        EXPECT_THAT(damaged.err, HasSubstr("run.checkpoint.safetensors: checksum: is not that of what the file holds"));
    }
    EXPECT_EQ(run_program({"probe", checkpoint, "--probe", "spectra"}).status, 2);
    folder.write("run.checkpoint.safetensors", whole);
    EXPECT_EQ(train("12", {"--resume", run}).status, 0);
}

TEST_F(Train, ARefusedResumeSpeaksOfSettingsAsTheCommandHasThem) {
    const auto refused = [&](const std::string& run, const std::vector<std::string>& other, const std::string& part) {
        std::vector<std::string> more = other;
        more.insert(more.end(), {"--resume", folder / run});
        const Outcome outcome = train("4", more);
        EXPECT_EQ(outcome.status, 2) << part;
        EXPECT_THAT(outcome.err, HasSubstr(part));
    };
    ASSERT_EQ(train("2", {"-o", folder / "fast.h5"}).status, 0);
    ASSERT_EQ(train("2", {"--attention", "fa2", "--norm-statistics", "bf16", "-o", folder / "fa2.h5"}).status, 0);
    refused("fast.h5", {"--optimizer", "muon"},
            "optimizer: the checkpoint is of a run with adamw: expected muon, as this command asks for");
    refused("fast.h5", {"--precision", "fp32"}, "precision: the checkpoint is of a run with bf16: expected fp32");
    refused("fast.h5", {"--qk-norm", "learned"}, "qk-norm: the checkpoint is of a run with none: expected learned");
    refused("fast.h5", {"--schedule", "cosine"}, "schedule: the checkpoint is of a run with constant: expected cosine");
    refused("fast.h5", {"--attention", "fa2"},
            "attention: the checkpoint is of a run with fast in every layer: expected fa2 in every layer");
    refused("fast.h5", {"--layer-attention", "0/1=fa2"}, "expected fa2 in heads [1] of layer 0");
    refused("fast.h5", {"--inject", "delta:multiplicative:0.3"}, "inject: the checkpoint is of a run with no fault");
    // What the run began with and the command has not is missed too.
    refused("fa2.h5", {"--norm-statistics", "bf16"},
            "attention: the checkpoint is of a run with fa2 in every layer: expected fast in every layer");
    refused("fa2.h5", {"--attention", "fa2"}, "norm-statistics: the checkpoint is of a run with bf16: expected fp32");
}

// A step of hours, or a validation, is not waited for; the run goes on from before it.
TEST_F(Train, OneSignalEndsALongStep) {
    const auto ends = [&](const std::vector<std::string>& more, const std::string& wait_for) {
        Child child(arguments("100", more), folder / "err");
        for (int i = 0; i < 4000 && !std::filesystem::exists(wait_for); ++i)
            std::this_thread::sleep_for(std::chrono::milliseconds(5));
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
        child.signal(SIGTERM);
        EXPECT_EQ(child.wait(), 1);
        return child.error();
    };
    const std::string run = folder / "run.h5", partial = folder / "run.h5.partial";
    const std::vector<std::string> micro_batches{"--accumulate", "1048576", "-o", run};
    EXPECT_THAT(ends(micro_batches, partial), HasSubstr("interrupted in the first step; to go on: "));
    EXPECT_FALSE(std::filesystem::exists(run));
    EXPECT_THAT(ends({"--accumulate", "1048576", "--resume", run}, partial),
                HasSubstr("interrupted in the first step"));
    // The tenth step has the first validation.
    EXPECT_THAT(ends({"--validation-batches", "1048576", "-o", run}, run), HasSubstr("interrupted after step 8; "));
    EXPECT_EQ(RecordReader(run).read("steps/loss").size(), 9);
}

TEST_F(Train, RunsThePlanOfTheTensorCoresKernelOnTheCpu) {
    const Outcome refused = run_program(arguments("1", {"--attention", "tensor"}));
    EXPECT_EQ(refused.status, 2);
    EXPECT_THAT(refused.err, HasSubstr("--attention: tensor: heads have 8 columns: expected 64 or 128, or fast"));
    const Outcome done = run_program(arguments("1", {"--attention", "tensor", "--width", "64", "--heads", "1"}));
    EXPECT_EQ(done.status, 0) << done.err;
}

}  // namespace
}  // namespace faultline::test
