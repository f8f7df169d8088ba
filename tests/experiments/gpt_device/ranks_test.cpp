// SPDX-License-Identifier: Apache-2.0
// A device run of one rank that adds up as several do, on one card: everything of several ranks but the second card, for which
// tests/experiments/cli/cards_test.cpp is.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include <dlfcn.h>

#include <faultline/base/error.hpp>
#include <faultline/dissociation/fault_hooks.hpp>
#include <faultline/gpt/fast_attention.hpp>
#include <faultline/gpt_device/device_trainer.hpp>

#include "../../kernels/tensor_kernel/on_hopper.hpp"
#include "../../lib/ranks/on_ranks.hpp"
#include "small_runs.hpp"

namespace faultline::gpt {
namespace {

using test::on_good_ranks;
using testing::HasSubstr;

TrainConfig small(bool bf16, int accumulate) {
    TrainConfig c;
    c.model = {.layers = 3, .width = 64, .heads = 2, .context = 128, .vocabulary = 256, .bias = true, .bf16 = bf16};
    c.batch = 4;
    c.accumulate = accumulate;
    c.steps = 8;
    c.schedule = {.learning_rate = 3e-3, .warmup = 4};
    c.monitor_every = 0;
    c.validate_every = 4;
    c.validation_batches = 3;
    return c;
}

struct Left {
    std::vector<float> weights;
    std::vector<double> losses;
    double validation = 0;
};

Left left_by(const TrainConfig& c, const DeviceOptions& options) {
    const WindowOrder order(c.seed);
    DeviceTrainer trainer(c, text(), order, options);
    Left left;
    while (!trainer.finished()) left.losses.push_back(trainer.step().loss);
    left.weights = trainer.weights();
    left.validation = trainer.report().validation_loss;
    return left;
}

bool there_is_nccl() {
    const char* named = std::getenv("FAULTLINE_NCCL");
    return ::dlopen(named != nullptr ? named : "libnccl.so.2", RTLD_NOW | RTLD_LOCAL) != nullptr;
}

void expect_one_rank_to_be_the_run_without(Reduce reduce) {
    for (const bool bf16 : {false, true})
        for (const int accumulate : {1, 3})
            for (const bool overlapped : {false, true}) {
                SCOPED_TRACE(testing::Message()
                             << "bf16 " << bf16 << ", accumulate " << accumulate << ", overlapped " << overlapped);
                const TrainConfig c = small(bf16, accumulate);
                const Left alone = left_by(c, {});
                on_good_ranks(1, [&](Ranks& self) {
                    const Left here =
                        left_by(c, {.ranks = &self, .exchange = {.overlapped = overlapped, .reduce = reduce}});
                    EXPECT_EQ(here.weights, alone.weights);
                    EXPECT_EQ(here.losses, alone.losses);
                    EXPECT_EQ(here.validation, alone.validation);
                });
            }
}

TEST(DeviceRanks, OneThroughNcclIsTheRunWithout) {
    NEEDS_HOPPER();
    if (!there_is_nccl()) GTEST_SKIP() << "there is no libnccl.so.2 here, and FAULTLINE_NCCL names none";
    expect_one_rank_to_be_the_run_without(Reduce::nccl);
}

TEST(DeviceRanks, OneThatGathersIsTheRunWithout) {
    NEEDS_HOPPER();
    expect_one_rank_to_be_the_run_without(Reduce::gather);
}

/// Sites in memory, inside the kernels, of the model and of the update; what they did is added up over the ranks.
TEST(DeviceRanks, FaultsOfOneAreThoseOfTheRunWithout) {
    NEEDS_HOPPER();
    const TrainConfig c = small(true, 3);
    const RoundingPlan plan = fast_plan(true);
    const auto run = [&](Ranks* ranks, std::vector<FaultHooks::Step>& did) {
        std::vector<Fault> faults;
        for (const char* word : {"lse:random:1%", "ds:fixed:1%", "ffn_output:random:2%", "optimizer_update:fixed:1%"})
            faults.push_back(parse_fault(word));
        FaultHooks hooks(faults, c.model.layers, c.model.heads, [&](int, int) { return &plan; });
        const WindowOrder order(c.seed);
        DeviceOptions options;
        options.faults = &hooks;
        options.ranks = ranks;
        if (ranks != nullptr) options.exchange.reduce = Reduce::gather;
        DeviceTrainer trainer(c, text(), order, options);
        while (!trainer.finished()) {
            trainer.step();
            did.push_back(hooks.take_step());
        }
        return trainer.weights();
    };
    std::vector<FaultHooks::Step> alone;
    const std::vector<float> weights = run(nullptr, alone);
    on_good_ranks(1, [&](Ranks& self) {
        std::vector<FaultHooks::Step> here;
        EXPECT_EQ(run(&self, here), weights);
        for (std::size_t step = 0; step < alone.size(); ++step) EXPECT_EQ(here[step].realised, alone[step].realised);
        EXPECT_GT(alone.back().realised.front().count, 0);
    });
}

TEST(DeviceRanks, AreRefusedWhereTheyDoNotDivideTheMicroBatches) {
    NEEDS_HOPPER();
    on_good_ranks(2, [](Ranks& self) {
        const WindowOrder order(0);
        try {
            const DeviceTrainer trainer(small(true, 3), text(), order, {.ranks = &self});
            ADD_FAILURE();
        } catch (const RequestError& error) {
            EXPECT_THAT(error.what(), HasSubstr("ranks: 2: expected a divisor of accumulate, 3"));
        }
    });
}

}  // namespace
}  // namespace faultline::gpt
