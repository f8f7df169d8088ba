// SPDX-License-Identifier: Apache-2.0
// faultline train ended at any moment, by a signal, a reader or another run, and gone on with; what a checkpoint and a record must be
// for that.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <thread>

#include <faultline/record/record_reader.hpp>

#include "train_fixture.hpp"

namespace faultline::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

std::string file_bytes(const std::string& path) {
    std::ifstream in(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
}

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

TEST_F(Train, AnInterruptSavesAndSaysHowToGoOn) {
    for (const int signal : {SIGINT, SIGTERM}) {
        const std::string file = folder / (std::to_string(signal) + ".h5");
        const std::string checkpoint = folder / (std::to_string(signal) + ".checkpoint.safetensors");
        EXPECT_EQ(train_and_signal("100000", {"-o", file}, checkpoint, signal, 30), 1);
        const RecordReader reader(file);
        EXPECT_GE(reader.read("steps/loss").size(), 7);
    }
    const Outcome rest = train("7", {"--resume", folder / "2.h5"});
    EXPECT_EQ(rest.status, 0) << rest.err;
    EXPECT_THAT(rest.out, HasSubstr("steps were done before: nothing is left to do of 7"));
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

// The first interrupt waits for a layer to end, here some tenths of a second, and what there is to be written; a second one does
// not, and leaves no NAME.partial. Of two unlike signals neither is lost where both come before the first is heeded.
TEST_F(Train, ASecondInterruptEndsAtOnceAndLeavesNothingHalfWritten) {
    const std::string partial = folder / "m.h5.partial", record = folder / "m.runs/none__none__seed0.h5.partial";
    Child child({"dissociate", "--data", folder / "text", "-o", folder / "m.h5", "--threads", "1", "--width", "256",
                 "--layers", "8", "--context", "512", "--batch", "64", "--steps", "2", "--validation-batches", "1"},
                folder / "err");
    for (int i = 0; i < 4000 && !std::filesystem::exists(record); ++i)  // made right before the first step
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
    ASSERT_TRUE(std::filesystem::exists(partial) && std::filesystem::exists(record)) << child.error();
    child.signal(SIGINT);
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    child.signal(SIGTERM);
    EXPECT_THAT(child.wait(), testing::AnyOf(-SIGINT, -SIGTERM));  // of the one that was heeded second
    EXPECT_FALSE(std::filesystem::exists(partial));
    EXPECT_FALSE(std::filesystem::exists(record));
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

// The recorded configuration names the output that it was; that is the file of --resume.
TEST_F(Train, ARunGoesOnWithTheSettingsThatItRecorded) {
    const std::string run = folder / "own.h5";
    ASSERT_EQ(train("4", {"--inject", "delta:multiplicative:0.3", "-o", run}).status, 0);
    folder.write("own.toml", RecordReader(run).manifest().config_toml);
    const Outcome on = run_program({"train", "--config", folder / "own.toml", "--steps", "8", "--resume", run});
    EXPECT_EQ(on.status, 0) << on.err;
    EXPECT_EQ(RecordReader(run).read("steps/loss").size(), 8);
    const Outcome other = train("12", {"-o", folder / "other.h5", "--resume", run});
    EXPECT_EQ(other.status, 2);
    EXPECT_THAT(other.err, HasSubstr("expected one of them; a resumed run goes on in its own file"));
}

TEST_F(Train, ARunOnOtherDataIsNamedWithBoth) {
    const std::string run = folder / "own.h5";
    ASSERT_EQ(train("4", {"-o", run}).status, 0);
    folder.write("more", text_of_squares(3001));
    const Outcome other = train("8", {"--data", folder / "more", "--resume", run});
    EXPECT_EQ(other.status, 2);
    EXPECT_THAT(other.err,
                testing::ContainsRegex("--data: this command reads .*/more \\(xxh3-128:.*\\), and .*/own.h5 was "
                                       "begun with .*/text \\(xxh3-128:.*\\): expected the data of then"));
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
    const Outcome probed = run_program({"probe", checkpoint, "--probe", "directions"});
    EXPECT_EQ(probed.status, 2);
    EXPECT_THAT(probed.err, HasSubstr("checksum: is not that of what the file holds"));
    folder.write("run.checkpoint.safetensors", whole);
    EXPECT_EQ(train("12", {"--resume", run}).status, 0);
}

TEST_F(Train, ADamagedRecordIsRefused) {
    const std::string run = folder / "run.h5";
    ASSERT_EQ(train("8", {"-o", run}).status, 0);
    const std::string whole = file_bytes(run);
    const Tensor norms = RecordReader(run).read("steps/grad_norm");
    const std::size_t at =
        whole.find(std::string(reinterpret_cast<const char*>(norms.bytes.data()), norms.bytes.size()));
    ASSERT_NE(at, std::string::npos);
    std::string bytes = whole;
    bytes[at + 3 * sizeof(double)] ^= 1;  // the last bit of a number
    folder.write("run.h5", bytes);
    const Outcome resumed = train("12", {"--resume", run});
    EXPECT_EQ(resumed.status, 2);
    EXPECT_THAT(resumed.err, HasSubstr("run.h5: dataset \"steps/grad_norm\": index 3 of the steps is damaged"));
    EXPECT_EQ(file_bytes(run), bytes);
    folder.write("run.h5", whole);
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
    refused("fast.h5", {"--schedule", "cosine", "--steps", "9"},
            "schedule: the checkpoint is of a run with constant: expected cosine");
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
    // The second step has a validation without end; the file is there when the first step is whole. The checkpoint that the
    // interrupt left stays without --force.
    EXPECT_THAT(ends({"--validate-every", "2", "--validation-batches", "1048576", "-o", run, "--force"}, run),
                HasSubstr("interrupted after step 0; "));
    EXPECT_EQ(RecordReader(run).read("steps/loss").size(), 1);
}

}  // namespace
}  // namespace faultline::test
