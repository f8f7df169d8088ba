// SPDX-License-Identifier: Apache-2.0
// --device cuda where it cannot be had: one sentence, exit 1, nothing written.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <faultline/tensor/safetensors.hpp>

#include "support.hpp"

namespace faultline::test {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

using Environment = std::map<std::string, std::string>;

/// Commands that run plans, each with a file to write where it can.
const std::vector<std::vector<std::string>> commands = {
    {"attribute", "--plan", "fa2", "-o", "out.h5"},
    {"identify", "--rank-only"},
    {"bisect", "--plan", "fa2", "--until", "layer0.o.rel_error < 1e-9"},
    {"check", "--plan", "fa2"},
    {"probe", "-o", "out.h5"}};

class DeviceRefusal : public testing::Test {
  protected:
    void SetUp() override {
        LayerShape shape{.batch = 1, .heads = 2, .kv_heads = 1, .n_q = 512, .n_k = 512, .d = 64, .d_v = 64};
        TensorSet set;
        add_layer(set, "layer0", shape);
        write_safetensors(folder / "capture.safetensors", set);
    }
    /// What the command says on the card, whose files would stand in the folder.
    [[nodiscard]] Outcome outcome_of(std::vector<std::string> command, const Environment& environment) const {
        for (std::string& argument : command)
            if (argument == "out.h5") argument = folder / argument;
        command.insert(command.begin() + 1, folder / "capture.safetensors");
        command.insert(command.end(), {"--device", "cuda"});
        return run_program(command, environment);
    }
    /// Exit 1, a last line that says why, and before it no line of work done; no file.
    void expect_refused(const std::vector<std::string>& command, const Environment& environment, const std::string& why,
                        const std::string& and_why = "") const {
        const Outcome outcome = outcome_of(command, environment);
        EXPECT_EQ(outcome.status, 1) << command.front() << ": " << outcome.err;
        EXPECT_THAT(outcome.out, IsEmpty()) << command.front();
        const std::vector<std::string> said = lines(outcome.err);
        ASSERT_FALSE(said.empty());
        EXPECT_THAT(said.back(), AllOf(HasSubstr("faultline " + command.front()), HasSubstr("device cuda: "),
                                       HasSubstr(why), HasSubstr(and_why), HasSubstr("expected")));
        EXPECT_THAT(outcome.err, Not(HasSubstr("truth,"))) << command.front();
        EXPECT_THAT(folder.files(), ElementsAre("capture.safetensors")) << command.front();
    }
    Folder folder;
};

TEST_F(DeviceRefusal, NoDevice) {
    for (const std::vector<std::string>& command : commands) {
        const Outcome outcome = outcome_of(command, {{"CUDA_VISIBLE_DEVICES", ""}});
        EXPECT_EQ(outcome.status, 1) << command.front();
        const std::vector<std::string> said = lines(outcome.err);
        ASSERT_EQ(said.size(), 1u) << outcome.err;
        EXPECT_THAT(said.front(),
                    AllOf(HasSubstr("faultline " + command.front() + ": device cuda: "), HasSubstr("expected")));
        EXPECT_THAT(folder.files(), ElementsAre("capture.safetensors")) << command.front();
    }
}

/// Before a device is looked for, so on every machine.
TEST_F(DeviceRefusal, ALimitThatIsNoNumber) {
    const auto expect_said = [&](const std::vector<std::string>& command, const std::string& text) {
        const Outcome outcome = outcome_of(command, {{"FAULTLINE_DEVICE_MIB", text}});
        EXPECT_EQ(outcome.status, 2) << text;
        EXPECT_EQ(outcome.err, "faultline " + command.front() + ": FAULTLINE_DEVICE_MIB: \"" + text +
                                   "\": expected the MiB of the card's memory that may be used, 1 to 1099511627776\n");
        EXPECT_THAT(folder.files(), ElementsAre("capture.safetensors"));
    };
    for (const std::string text : {"0", "12GiB", " 7", "99999999999999999999"}) expect_said(commands.front(), text);
    for (const std::vector<std::string>& command : commands) expect_said(command, "lots");
}

/// What is wrong with a request is exit 2 with a card and without one.
TEST_F(DeviceRefusal, AWrongRequestIsSaidBeforeAMissingCard) {
    const std::string capture = folder / "capture.safetensors";
    const std::vector<std::pair<std::vector<std::string>, std::string>> wrong = {
        {{"attribute", capture, "--force"}, "without a file to write"},
        {{"attribute", capture, "--plan", "fa22"}, "--plan: "},
        {{"attribute", capture, "--softcap", "-1"}, "--softcap: -1: expected"},
        {{"attribute", capture, "--correction", "nothing"}, "--correction: correction \"nothing\""},
        {{"attribute"}, "CAPTURE: is missing"},
        {{"attribute", capture, "-o", "nowhere/a.h5"}, "nowhere/a.h5: folder \"nowhere\" does not exist"},
        {{"train", "-o", "nowhere/a.h5"}, "nowhere/a.h5: folder \"nowhere\" does not exist"},
        {{"dissociate", "-o", "nowhere/a.h5"}, "nowhere/a.h5: folder \"nowhere\" does not exist"},
        {{"identify", capture, "-o", "plan.txt"}, "plan.txt\": expected a name"},
        {{"identify", capture, "--allow", "all"}, "--allow: \"all\""},
        {{"bisect", capture}, "--until: is missing"},
        {{"bisect", capture, "--plan", "fa22", "--until", "layer0.o.rel_error < 1e-9"}, "--plan: "},
        {{"check", capture, "--alpha", "2"}, "--alpha: 2: expected"},
        {{"check", capture, "--plan", "fa22"}, "--plan: "},
        {{"probe", capture, "--probe", "trajectory"}, "trajectory is no probe of a capture"},
        {{"probe", capture, "--rise", "1"}, "--rise: means nothing for a capture"},
        {{"probe", capture, "--plan", "fa22"}, "--plan: "},
        {{"selftest", "--parts", "rules", "--queries", "64"}, "--queries: "},
        {{"selftest", "--parts", "truth", "--plans", "fa2"}, "--plans: expected the part plans"},
        {{"train", "--capture-sequences", "2"}, "--capture-sequences: "},
        {{"train", "--inject", "here"}, "--inject: "},
        {{"train", "--steps", "4", "--capture", "9"}, "--capture: step 9: expected steps of the run"},
        {{"dissociate", "--monitor-every", "0"}, "--monitor-every: 0: "},
        {{"dissociate", "--intervention", "hope"}, "--intervention: "}};
    for (auto [command, why] : wrong) {
        command.insert(command.end(), {"--device", "cuda"});
        const Outcome outcome = run_program(command, {{"CUDA_VISIBLE_DEVICES", ""}});
        EXPECT_EQ(outcome.status, 2) << command.front() << ": " << outcome.err;
        EXPECT_THAT(outcome.err, HasSubstr(why)) << command.front();
        EXPECT_EQ(lines(outcome.err).size(), 1u) << outcome.err;
    }
}

#ifdef FAULTLINE_DRIVER_STAND_IN
// CUresult 100: no device; 803: a driver of the system that is not the module's; 999: unknown.
TEST_F(DeviceRefusal, WhatADriverSays) {
    const std::vector<std::pair<Environment, std::string>> cases = {
        {{{"STAND_IN_VERSION", "12080"}}, "the driver is for CUDA 12.8: expected one for CUDA 13"},
        {{{"STAND_IN_INIT", "100"}}, "there is no device: expected one that CUDA_VISIBLE_DEVICES leaves"},
        {{{"STAND_IN_INIT", "803"}},
         "looking for a device failed (system has unsupported display driver / cuda driver "
         "combination): expected a device that works"},
        {{{"STAND_IN_INIT", "999"}}, "looking for a device failed (unknown error): expected a device that works"}};
    for (const std::vector<std::string>& command : commands)
        for (auto [environment, why] : cases) {
            environment["LD_LIBRARY_PATH"] = FAULTLINE_DRIVER_STAND_IN;
            const Outcome outcome = outcome_of(command, environment);
            EXPECT_EQ(outcome.status, 1) << command.front();
            const std::vector<std::string> said = lines(outcome.err);
            ASSERT_EQ(said.size(), 1u) << outcome.err;
            EXPECT_THAT(said.front(), HasSubstr("faultline " + command.front() + ": device cuda: " + why));
            EXPECT_THAT(folder.files(), ElementsAre("capture.safetensors")) << command.front();
        }
}
#endif

class DeviceRefusalOnACard : public DeviceRefusal {
  protected:
    void SetUp() override {
        DeviceRefusal::SetUp();
        // Once: each call of the program takes a second there, most of it the driver's.
        static const Outcome trial = outcome_of({"attribute", "--plan", "fa2", "--sites", "o_cast"}, {});
        if (trial.status != 0) GTEST_SKIP() << "no plan runs on a card: " << trial.err;
    }
};

// Two query heads of 512 x 64 take some 3 MiB with their gradients. The sentence names file, layer and plan.
TEST_F(DeviceRefusalOnACard, ACaptureThatDoesNotFitIsRefusedBeforeAnyWork) {
    for (const std::vector<std::string>& command : commands)
        expect_refused(command, {{"FAULTLINE_DEVICE_MIB", "2"}}, "capture.safetensors: layer0: device cuda: plan \"",
                       "and 2 MiB are free");
}

// What is recorded takes 23 MiB beside the 4 of the run (kernels/emulated/needs.hpp).
TEST_F(DeviceRefusalOnACard, ARecorderThatDoesNotFitIsRefusedBeforeAnyWork) {
    expect_refused(commands.front(), {{"FAULTLINE_DEVICE_MIB", "20"}},
                   "of them for what is recorded, and 20 MiB are free");
}

// Those that save P take 7 MiB, the others 3.
TEST_F(DeviceRefusalOnACard, IdentifyLeavesOutThePlansWithoutRoom) {
    const std::vector<std::string> command{"identify", "--rank-only", "--json"};
    const Outcome some = outcome_of(command, {{"FAULTLINE_DEVICE_MIB", "5"}}), all = outcome_of(command, {});
    ASSERT_EQ(some.status, 0) << some.err;
    ASSERT_EQ(all.status, 0) << all.err;
    EXPECT_THAT(some.out, AllOf(HasSubstr("\"left_out\""), HasSubstr("\"plan\": \"math\""),
                                HasSubstr("layer0: device cuda: plan \\\"math\\\": a run needs ")));
    EXPECT_THAT(all.out, Not(HasSubstr("left_out")));
}

// Truth of a group of two query heads of 512 x 64 takes 6 MiB in strips of a row (truth_teams/sizes.hpp: 5.72), their plan 4: with
// what is between, the refusal is truth's. (attribute's first run has a recorder, which needs more than either.)
TEST_F(DeviceRefusalOnACard, TruthThatDoesNotFitIsRefusedBeforeAnyWork) {
    for (const std::vector<std::string>& command : {commands[2], commands[3]})
        expect_refused(command, {{"FAULTLINE_DEVICE_MIB", "5"}},
                       "capture.safetensors: layer0: device cuda: truth: rows of 512 keys need 6 MiB",
                       "and 5 MiB are free");
}

/// What fits is computed, and says the same, whatever room there is.
TEST_F(DeviceRefusalOnACard, LittleMemoryChangesNoNumber) {
    const std::vector<std::string> command{"attribute", "--plan", "fa2", "--sites", "o_cast,p_cast", "--json"};
    const Outcome ample = outcome_of(command, {}), little = outcome_of(command, {{"FAULTLINE_DEVICE_MIB", "64"}});
    ASSERT_EQ(ample.status, 0) << ample.err;
    ASSERT_EQ(little.status, 0) << little.err;
    EXPECT_EQ(little.out, ample.out);
}

}  // namespace
}  // namespace faultline::test
