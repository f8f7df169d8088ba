// SPDX-License-Identifier: Apache-2.0
// A run of several ranks is the run of one, bit for bit: weights, reports, what faults did, captures, the value that first
// stopped being a number.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <mutex>

#include <faultline/base/error.hpp>
#include <faultline/dissociation/fault_hooks.hpp>
#include <faultline/dissociation/fault_report.hpp>
#include <faultline/gpt/fast_attention.hpp>
#include <faultline/gpt/trainer.hpp>

#include "../../lib/ranks/on_ranks.hpp"
#include "texts.hpp"

namespace faultline::gpt {
namespace {

using test::on_good_ranks;
using testing::HasSubstr;

const TokenData& text() {
    static const TokenData data = tokens_of_text(test::text_of_squares(900));
    return data;
}

/// Eleven sequences of 100 tokens are six chunks of two, so six groups, which three and four ranks divide unevenly.
TrainConfig quick(int accumulate) {
    TrainConfig c;
    c.model.layers = 2;
    c.model.width = 16;
    c.model.heads = 2;
    c.model.context = 100;
    c.batch = 11;
    c.accumulate = accumulate;
    c.steps = 2;
    c.schedule = {.learning_rate = 1e-2, .warmup = 2};
    c.monitor_every = 2;
    c.validate_every = 2;
    c.validation_batches = 2;
    return c;
}

/// What a rank is left with.
struct Left {
    std::vector<float> weights;
    std::vector<StepReport> reports;
    std::map<int, std::string> captured;  ///< by micro-batch: the bytes of q and x of the layers, one behind the other
    std::optional<NonFinite> failure;
    std::string state;
};

Left left_by(const TrainConfig& c, const std::vector<std::string>& injected, Ranks* ranks) {
    std::vector<Fault> faults;
    for (const std::string& word : injected) faults.push_back(parse_fault(word));
    const RoundingPlan plan = fast_plan(true);
    FaultHooks hooks(faults, c.model.layers, c.model.heads, [&](int, int) { return &plan; });
    FaultReport reporter(hooks);
    Hooks all;
    if (!faults.empty()) all = {&hooks, &hooks, nullptr, &reporter};
    const WindowOrder order(c.seed);
    Trainer trainer(c, text(), order, all, ranks);
    Left left;
    trainer.capture([](std::int64_t step) { return step == 1; },
                    [&](std::int64_t, int micro_step, const Trainer::Captured& layers) {
                        std::string& to = left.captured[micro_step];
                        for (const auto& layer : layers)
                            for (const std::vector<float>* part : {&layer.q, &layer.x})
                                to.append(reinterpret_cast<const char*>(part->data()), part->size() * sizeof(float));
                    });
    while (!trainer.finished()) {
        const StepReport& report = trainer.step();
        if (!trainer.failure()) left.reports.push_back(report);
    }
    left.weights.assign(trainer.model().weights().begin(), trainer.model().weights().end());
    left.failure = trainer.failure();
    left.state = hooks.save();
    return left;
}

/// Bits, so that NaN where a monitor is not due is itself.
std::string bits(const std::vector<double>& values) {
    return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(double)};
}

void expect_same(const StepReport& a, const StepReport& b) {
    EXPECT_EQ(a.loss, b.loss);
    EXPECT_EQ(a.grad_norm, b.grad_norm);
    EXPECT_EQ(bits({a.validation_loss}), bits({b.validation_loss}));
    using Values = std::vector<double> StepReport::*;
    for (const Values values :
         {&StepReport::max_logit, &StepReport::qk_rms, &StepReport::zero_sum, &StepReport::zero_sum_abs,
          &StepReport::zero_sum_total, &StepReport::saturated, &StepReport::entropy, &StepReport::singular_qk})
        EXPECT_EQ(bits(a.*values), bits(b.*values));
    ASSERT_EQ(a.extras.size(), b.extras.size());
    for (std::size_t i = 0; i < a.extras.size(); ++i) EXPECT_EQ(bits(a.extras[i].values), bits(b.extras[i].values));
}

void expect_the_run_of_one(const TrainConfig& c, const std::vector<std::string>& faults, int size) {
    SCOPED_TRACE(size);
    const Left one = left_by(c, faults, nullptr);
    std::mutex mutex;
    on_good_ranks(size, [&](Ranks& self) {
        const Left here = left_by(c, faults, &self);
        const std::lock_guard lock(mutex);
        SCOPED_TRACE(self.rank());
        EXPECT_EQ(here.weights, one.weights);
        EXPECT_EQ(here.state, one.state);
        ASSERT_EQ(here.reports.size(), one.reports.size());
        for (std::size_t i = 0; i < one.reports.size(); ++i) expect_same(here.reports[i], one.reports[i]);
        ASSERT_EQ(here.failure.has_value(), one.failure.has_value());
        if (one.failure) {
            EXPECT_EQ(here.failure->site, one.failure->site);
            EXPECT_EQ(here.failure->row, one.failure->row);
            EXPECT_EQ(here.failure->column, one.failure->column);
        }
        if (self.first())
            EXPECT_TRUE(here.captured == one.captured);
        else
            EXPECT_TRUE(here.captured.empty());
    });
}

TEST(TrainerOfRanks, DividesGroupsOfAMicroBatch) { expect_the_run_of_one(quick(1), {}, 4); }

TEST(TrainerOfRanks, DividesMicroBatches) {
    expect_the_run_of_one(quick(4), {}, 2);  // two rounds
}

TEST(TrainerOfRanks, FaultsActAndAreCountedAsInOne) {
    const std::vector<std::string> faults{"delta:random:0.1", "layer_norm_statistics:random:0.001",
                                          "optimizer_update:random:0.01"};
    expect_the_run_of_one(quick(1), faults, 3);
    expect_the_run_of_one(quick(2), faults, 2);
}

TEST(TrainerOfRanks, NameTheValueThatAnotherRankCameUponFirst) {
    expect_the_run_of_one(quick(1), {"ffn_output:multiplicative:1e40:from=1"}, 3);
    expect_the_run_of_one(quick(2), {"ffn_output:multiplicative:1e40:from=1"}, 2);
}

TEST(TrainerOfRanks, MoreThanThereIsWorkForAreRefused) {
    on_good_ranks(7, [](Ranks& self) {
        const WindowOrder order(0);
        try {
            const Trainer trainer(quick(1), text(), order, {}, &self);
            ADD_FAILURE();
        } catch (const RequestError& error) {
            EXPECT_THAT(error.what(),
                        HasSubstr("ranks: 7: a batch of 11 is cut into 6 groups: expected at most so many"));
        }
    });
}

}  // namespace
}  // namespace faultline::gpt
