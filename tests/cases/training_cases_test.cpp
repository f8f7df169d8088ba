// SPDX-License-Identifier: Apache-2.0
// Public reports of training that goes wrong although every kernel's unit test passes.
#include <cmath>

#include <gtest/gtest.h>

#include "../experiments/gpt/small_model.hpp"

namespace faultline::gpt {
namespace {

struct Pass {
    double loss = 0;
    std::vector<double> gradient;
};

/// Loss and gradient in binary64 of a model with layer norms of these statistics.
Pass pass(NormStatistics statistics, int width) {
    ModelConfig config = small_config();
    config.width = width;
    config.norm_statistics = statistics;
    Gpt<double> model(config, 5);
    spread_weights(model);
    const auto ids = formula_tokens(19, config.vocabulary, 2);
    const std::span all(ids);
    const Batch batch{all.first(18), all.subspan(1, 18), 2, 9};
    StepContext context;
    context.loss_weight = 1.0 / 18;
    BatchStatistics seen(static_cast<std::size_t>(config.layers * config.heads));
    Pass result;
    result.loss = model.accumulate(context, batch, seen);
    model.finish_gradient();
    result.gradient.assign(model.gradient().begin(), model.gradient().end());
    return result;
}

double distance(const std::vector<double>& a, const std::vector<double>& b) {
    double difference = 0, size = 0;
    for (std::size_t i = 0; i < a.size(); ++i) {
        difference += (a[i] - b[i]) * (a[i] - b[i]);
        size += b[i] * b[i];
    }
    return std::sqrt(difference / size);
}

// tenstorrent/tt-metal#54371, #34511: layer norm statistics in fp32 in the forward and bf16 in the backward, against both
// bf16. Losses, which is what unit tests compare, do not see the former; its gradient is that of no function. What each of
// the four does to a training run stands in docs/results/norm-statistics.md.
TEST(Row24, LayerNormStatisticsOfTwoPrecisions) {
    for (const int width : {12, 48}) {
        const Pass exact = pass(NormStatistics::fp32, width), both = pass(NormStatistics::bf16, width);
        const Pass forward = pass(NormStatistics::bf16_forward, width),
                   backward = pass(NormStatistics::bf16_backward, width);
        EXPECT_EQ(backward.loss, exact.loss);
        EXPECT_EQ(forward.loss, both.loss);
        EXPECT_NE(exact.loss, both.loss);
        // 1/sigma is off by up to 2^-9 and the mean by 2^-9 of itself, in each of the five norms on the way back, and in
        // the backward of a norm 1/sigma stands twice: at most some 2^-9 (2 5) of the gradient. The roundings are those of 18
        // tokens, uniform to 2^-9, so that all of them together being below 2^-14, a thirty-second, is no chance.
        const double off = distance(backward.gradient, exact.gradient);
        EXPECT_LT(off, 0x1p-9 * 10);
        EXPECT_GT(off, 0x1p-14);
        // From the backward of the function that the forward was, whose statistics are not rounded again, it is as far.
        const double inconsistent = distance(both.gradient, forward.gradient);
        EXPECT_LT(inconsistent, 0x1p-9 * 10);
        EXPECT_GT(inconsistent, 0x1p-14);
    }
}

}  // namespace
}  // namespace faultline::gpt
