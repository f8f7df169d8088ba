// SPDX-License-Identifier: Apache-2.0
// faultline train as a user meets it: what it prints, writes and refuses, on a full disk too, and its captures through attribute.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <filesystem>

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>
#include <nlohmann/json.hpp>

#include <faultline/record/record_reader.hpp>

#include "train_fixture.hpp"

namespace faultline::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;

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
    const Outcome more = train("4", {"--capture", "1", "--capture-sequences", "99", "-o", folder / "more.h5"});
    EXPECT_EQ(more.status, 2);
    EXPECT_THAT(more.err, HasSubstr("--capture-sequences: 99: expected at most the batch, "));
    EXPECT_FALSE(std::filesystem::exists(folder / "more.h5"));
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
    refused({"--layer-attention", "4=fa2"}, "--layer-attention: layer 4");
    // What would do nothing, or is there twice.
    refused({"--layer-attention", "0=fast"}, "--layer-attention: \"0=fast\": does nothing");
    refused({"--layer-attention", "0/0=fa2", "--layer-attention", "0=math"}, "\"0/0=fa2\": does nothing");
    refused({"--layer-attention", "0/0,0=fa2"}, "\"0/0,0=fa2\": head 0: is there twice: expected it once");
    refused({"--layer-attention", "0=fa2", "--attention", "fa2"}, "--attention: \"fa2\": does nothing");
    refused({"--layer-attention", "0=fa2", "--attention", "math"}, "--attention: \"math\": does nothing");
    refused({"--schedule", "cosine", "--warmup", "2"},
            "--schedule: cosine: does nothing: the warm-up leaves 1 of 3 steps");
    refused({"--schedule", "cosine", "--warmup", "0", "--lr", "0.1", "--final-lr", "0.1"},
            "--final-lr: 0.1: does nothing");
    folder.write("cosine.toml", "[train]\nschedule = \"cosine\"\nwarmup = 500\n");  // for longer runs
    EXPECT_EQ(train("3", {"--config", folder / "cosine.toml"}).status, 0);
    refused({"--lr", "1e-300"}, "--lr: 1e-300: expected a number that fp32 has");
    refused({"--optimizer", "adam"}, "did you mean \"adamw\"");
    refused({"--inject", "delta:huge:1"}, "--inject");
    refused({"--inject", "delta:fixed:1:layers=3"}, "layer 3");
    refused({"--inject", "delta:multiplicative:0"}, "--inject: fault \"delta:multiplicative:0\": magnitude 0: changes");
    refused({"--inject", "delta:fixed:1:heads=7"}, "--inject: fault \"delta:fixed:1:heads=7\": head 7: expected ");
    refused({"--inject", "o_cast:fixed:0.3:column=3"}, "column=3: o_cast is in the attention kernel");
    refused({"--inject", "ffn_output:fixed:1:column=99", "-o", folder / "never.h5"}, "column 99: expected less than");
    refused({"--inject", "delta:fixed:1:from=3"}, "from: 3: expected a step of the run, 0 to 2");
    refused({"--resume", folder / "none.h5"}, "checkpoint");
    refused({"-o", folder / "no/such/folder.h5"}, "no/such/folder.h5");
    refused({"--replay", folder / "text"}, "line 1");
    refused({"--heads", "3"}, "divisor of the width");
    refused({"--beta1", "1.5"}, "--beta1: 1.5: expected 0 or more and below 1");
    refused({"--checkpoint-every", "2"}, "--checkpoint-every: means nothing without --output or --resume");
    refused({"--clip", "-1"}, "--clip: -1: expected 0, or a number that fp32 has");
}

TEST_F(Train, AFullDiskIsStatus1AndLeavesTheStepsThatWereWritten) {
    const auto run_with_room = [&](rlim_t bytes) {
        const pid_t child = ::fork();
        if (child == 0) {
            std::signal(SIGXFSZ, SIG_IGN);  // writes then fail with EFBIG, as with ENOSPC
            const rlimit size{bytes, bytes};
            ::setrlimit(RLIMIT_FSIZE, &size);
            const Outcome outcome = train("2000", {"--checkpoint-every", "0", "-o", folder / "full.h5"});
            ::_exit(outcome.status == 1 && outcome.err.find("full.h5") != std::string::npos ? 0 : 1);
        }
        int status = 0;
        ::waitpid(child, &status, 0);
        return status;
    };
    // Not even the first step: nothing is left that would be in the way of another try.
    EXPECT_EQ(run_with_room(64 << 10), 0);
    EXPECT_THAT(folder.files(), testing::ElementsAre("text"));
    EXPECT_EQ(run_with_room(240 << 10), 0);
    EXPECT_GE(RecordReader(folder / "full.h5").read("steps/loss").size(), 100);
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

TEST_F(Train, RunsThePlanOfTheTensorCoresKernelOnTheCpu) {
    const Outcome refused = run_program(arguments("1", {"--attention", "tensor"}));
    EXPECT_EQ(refused.status, 2);
    EXPECT_THAT(refused.err, HasSubstr("--attention: tensor: heads have 8 columns: expected 64 or 128, or fast"));
    const Outcome done = run_program(arguments("1", {"--attention", "tensor", "--width", "64", "--heads", "1"}));
    EXPECT_EQ(done.status, 0) << done.err;
}

}  // namespace
}  // namespace faultline::test
