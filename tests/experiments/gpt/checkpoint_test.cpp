// SPDX-License-Identifier: Apache-2.0
// A run stopped at any step, or given up within one, and taken up again is the run that never stopped; which checkpoints are read.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <string>
#include <vector>

#include <faultline/base/error.hpp>
#include <faultline/gpt/trainer.hpp>
#include <faultline/tensor/safetensors.hpp>

#include "../../lib/tensor/support.hpp"
#include "quick_run.hpp"

namespace faultline::gpt {
namespace {

using quick_run::quick;
using quick_run::text;
using test::Folder;
using testing::HasSubstr;

/// Turns on everything that a checkpoint has to keep.
class Switches final : public StepHook {
  public:
    std::string state;
    void before_step(std::int64_t step, const StepReport* last, StepControl& control) override {
        EXPECT_EQ(last == nullptr, step == 0);
        if (last != nullptr) {
            EXPECT_EQ(last->step, step - 1);
            state += std::to_string(last->max_logit.at(3)) + " ";
        }
        if (step == 2) {
            const double scale[] = {0.5, 0.25};
            control.enable_qk_norm(1, scale);
            control.set_learning_rate_factor(0.5);
            control.set_clip_factor(0.75);
            control.set_fp32_ffn(true);
            control.set_qk_clip(0.01);
        }
    }
    void after_step(StepReport& report) override { report.extras.push_back({"seen", {1.0}}); }
    [[nodiscard]] std::string save() const override { return state; }
    void load(std::string_view saved) override { state = saved; }
};

class Resume : public testing::TestWithParam<OptimizerKind> {};

TEST_P(Resume, AtEveryStepIsBitExact) {
    const Folder folder;
    TrainConfig c = quick();
    c.optimizer.kind = GetParam();
    c.model.sigma_reparam = true;
    const WindowOrder order(0);
    Switches switches;
    Trainer whole(c, text(), order, {.step = &switches});
    std::vector<StepReport> reports;
    while (!whole.finished()) {
        whole.save(folder / std::to_string(whole.next_step()));
        reports.push_back(whole.step());
    }
    for (std::int64_t at = 0; at < c.steps; ++at) {
        SCOPED_TRACE(at);
        Switches again;
        Trainer part(c, text(), order, {.step = &again});
        part.restore(folder / std::to_string(at));
        EXPECT_EQ(part.next_step(), at);
        while (!part.finished()) {
            const StepReport& r = part.step();
            const StepReport& wanted = reports[static_cast<std::size_t>(r.step)];
            EXPECT_EQ(r.loss, wanted.loss);
            EXPECT_EQ(r.zero_sum_total, wanted.zero_sum_total);
            EXPECT_EQ(r.qk_normed, wanted.qk_normed);
        }
        EXPECT_TRUE(std::ranges::equal(part.model().weights(), whole.model().weights()));
        EXPECT_EQ(again.state, switches.state);
    }
}

std::string optimizer_name(const testing::TestParamInfo<OptimizerKind>& of) {
    return of.param == OptimizerKind::adamw ? "adamw" : of.param == OptimizerKind::muon ? "muon" : "sgd";
}
INSTANTIATE_TEST_SUITE_P(Optimizers, Resume,
                         testing::Values(OptimizerKind::adamw, OptimizerKind::muon, OptimizerKind::sgd),
                         optimizer_name);

TEST(Checkpoint, OfAnotherConfigurationIsRefused) {
    const Folder folder;
    const WindowOrder order(0);
    Trainer one(quick(), text(), order);
    one.step();
    one.save(folder / "c");
    TrainConfig c = quick();
    c.schedule.learning_rate = 2e-2;
    Trainer other(c, text(), order);
    try {
        other.restore(folder / "c");
        FAIL();
    } catch (const RequestError& error) {
        EXPECT_THAT(error.what(), testing::AllOf(HasSubstr("lr:"), HasSubstr("0.01"), HasSubstr("0.02")));
    }
    test::write_file(folder / "cut", test::read_file(folder / "c").substr(0, 3000));
    EXPECT_THROW(one.restore(folder / "cut"), RequestError);
}

/// What a checkpoint would hold, as one text.
std::string bytes_of(const TensorSet& state) {
    std::string all;
    for (const auto& [key, value] : state.metadata) all += key + "=" + value + ";";
    for (const auto& [name, tensor] : state.tensors)
        all.append(name).append(reinterpret_cast<const char*>(tensor.bytes.data()), tensor.bytes.size());
    return all;
}

// Given up anywhere, in the passes or in the validation after the update, a step has changed nothing.
TEST(Trainer, AStepThatIsGivenUpIsTheStateBeforeIt) {
    TrainConfig c = quick();
    c.steps = 4;
    c.validate_every = 2;
    c.validation_batches = 3;
    c.model.sigma_reparam = true;
    const WindowOrder order(c.seed);
    const auto at_the_end = [](Trainer& trainer) {
        while (!trainer.finished()) trainer.step();
        return bytes_of(trainer.state());
    };
    Trainer straight(c, text(), order);
    std::atomic<int> asked{0};
    straight.cancel_when([&] { return ++asked < 0; }, true);  // only counts
    const std::string whole = at_the_end(straight);
    const int all = asked;
    ASSERT_GT(all, 100);
    std::vector<int> places{all};  // the last validation's
    for (int when = 1; when < all; when += all / 11) places.push_back(when);
    for (const int when : places) {
        Trainer first(c, text(), order);
        int left = when;
        std::string before;
        first.cancel_when([&] { return --left <= 0; }, true);
        while (!first.finished() && !first.abandoned()) {
            before = bytes_of(first.state());
            first.step();
        }
        ASSERT_TRUE(first.abandoned()) << when;
        EXPECT_TRUE(bytes_of(first.state()) == before) << when;
        Trainer second(c, text(), order);
        second.restore(first.state());
        EXPECT_TRUE(at_the_end(second) == whole) << when;
    }
}

TEST(Trainer, ACheckpointOfBeforeThereWasAChecksumIsRead) {
    const test::Folder folder;
    const TrainConfig c = quick();
    const WindowOrder order(c.seed);
    Trainer trainer(c, text(), order);
    trainer.step();
    const std::string path = folder / "x.safetensors";
    trainer.save(path);
    TensorSet set = read_safetensors(path);
    ASSERT_EQ(set.metadata.erase("checksum"), 1U);
    write_safetensors(path, set);
    Trainer again(c, text(), order);
    again.restore(path);
    EXPECT_TRUE(bytes_of(again.state()) == bytes_of(trainer.state()));
}

TEST(Trainer, RefusesACheckpointOfTheDevice) {
    const TrainConfig c = quick();
    const WindowOrder order(c.seed);
    Trainer trainer(c, text(), order);
    TensorSet state = trainer.state();
    state.metadata["schema"] = "faultline.device-checkpoint/1";
    try {
        trainer.restore(state);
        FAIL();
    } catch (const RequestError& e) {
        EXPECT_THAT(e.what(),
                    HasSubstr("is of a run on the device, whose sums have another order: expected --device cuda"));
    }
}

}  // namespace
}  // namespace faultline::gpt
