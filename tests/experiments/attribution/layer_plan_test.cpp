// SPDX-License-Identifier: Apache-2.0
// Which masks of a capture are a sliding window, and that the plan of a window is what CPU and emulated device run.
#include <cmath>
#include <functional>

#include <gtest/gtest.h>

#include <faultline/attribution/group_run.hpp>
#include <faultline/attribution/layer_plan.hpp>
#include <faultline/emulated/host.hpp>
#include <faultline/plan/presets.hpp>
#include <faultline/random/random_stream.hpp>

namespace faultline {
namespace {

using attribution::groups_of;

LayerCapture layer_of(std::ptrdiff_t queries, std::ptrdiff_t keys, std::ptrdiff_t d) {
    LayerCapture layer;
    layer.name = "l";
    layer.causal = false;
    const auto normals = [&](std::ptrdiff_t rows, std::uint64_t seed) {
        HeadArray x{1, 1, rows, d, {}, Dtype::bf16};
        for (std::ptrdiff_t i = 0; i < rows * d; ++i)
            x.values.push_back(
                round(RandomStream(seed).normal(static_cast<std::uint64_t>(i)), bf16, Rounding::nearest_even));
        return x;
    };
    layer.q = normals(queries, 1);
    layer.k = normals(keys, 2);
    layer.v = normals(keys, 3);
    layer.dout = normals(queries, 4);
    return layer;
}

/// `visible` of (head, query, key), and what is added where it is.
void mask(LayerCapture& layer, std::ptrdiff_t heads, const std::function<bool(int, int, int)>& visible,
          double added = 0) {
    HeadArray bias{1, heads, layer.q.rows, layer.k.rows, {}, Dtype::f32};
    for (int h = 0; h < heads; ++h)
        for (int i = 0; i < layer.q.rows; ++i)
            for (int j = 0; j < layer.k.rows; ++j) bias.values.push_back(visible(h, i, j) ? added : -INFINITY);
    layer.bias = bias;
}

TEST(Window, IsABandThatIsBoundedOffTheDiagonal) {
    LayerCapture layer = layer_of(12, 20, 8);  // the diagonal ends in the lower right corner: j = i + 8
    EXPECT_FALSE(is_window(layer)) << "without a mask";
    const auto is = [&](int left, int right, bool causal = false) {
        layer.causal = causal;
        mask(layer, 2, [&](int, int i, int j) { return j >= i + 8 - left && j <= i + 8 + right; });
        return is_window(layer);
    };
    EXPECT_TRUE(is(3, 0));
    EXPECT_TRUE(is(3, 0, true));
    EXPECT_TRUE(is(0, 0));
    EXPECT_TRUE(is(18, 0)) << "hides one key of the last query";
    EXPECT_FALSE(is(19, 0)) << "hides none: a causal mask";
    EXPECT_TRUE(is(3, 2)) << "on both sides";
    EXPECT_TRUE(is(100, 2)) << "on the right alone";
    EXPECT_FALSE(is(100, 100)) << "hides nothing";
    EXPECT_TRUE(is(3, 100, true)) << "the causal flag bounds it on the right";
    EXPECT_FALSE(is(100, 100, true));
}

TEST(Window, OtherMasksAreNone) {
    LayerCapture layer = layer_of(12, 12, 8);
    const auto band = [](int, int i, int j) { return j <= i && j > i - 4; };
    mask(layer, 1, band);
    ASSERT_TRUE(is_window(layer));
    mask(layer, 1, band, 0.5);
    EXPECT_FALSE(is_window(layer)) << "adds to the scores";
    mask(layer, 2, [&](int h, int i, int j) { return j <= i && j > i - 4 - h; });
    EXPECT_FALSE(is_window(layer)) << "another width in the second head";
    mask(layer, 1, [&](int h, int i, int j) { return band(h, i, j) && j != 5; });
    EXPECT_FALSE(is_window(layer)) << "a hole";
    mask(layer, 1, [](int, int i, int j) { return j <= i && j / 4 == i / 4; });
    EXPECT_FALSE(is_window(layer)) << "blocks: documents in one sequence";
    mask(layer, 1, [](int, int, int j) { return j < 9; });
    EXPECT_FALSE(is_window(layer)) << "padding";
    mask(layer, 1, [](int, int, int) { return false; });
    EXPECT_FALSE(is_window(layer)) << "sees nothing";
}

// FlashAttention-4 at head size 128: a window takes 16/4/1 of the columns, another mask 10/4/1; at 192 a window takes none.
TEST(LayerPlan, OfAWindowIsWhatBothBackEndsRun) {
    const emulated::HostForm device;
    for (const int d : {128, 192}) {
        LayerCapture layer = layer_of(9, 140, d);
        const auto window = [](int, int i, int j) { return j <= i + 131 && j > i + 131 - 90; };
        mask(layer, 1, window);
        const RoundingPlan plan = for_layer(faultline::plan("fa4"), layer);
        RoundingPlan expected = for_head_dim(faultline::plan("fa4"), d, true);
        expected.schedule.exp_poly_every = d == 128 ? 16 : 0;
        EXPECT_TRUE(plan.same_numerics(expected)) << d;
        const RoundingPlan other = for_head_dim(faultline::plan("fa4"), d, false);
        const HeadGroup group = groups_of(layer, {}, 0)[0].inputs;
        const GroupForward cpu = cpu_backend().forward(group, plan, nullptr),
                           own = device.forward(group, plan, nullptr);
        EXPECT_EQ(cpu.heads[0].o_unrounded, own.heads[0].o_unrounded) << d;
        EXPECT_NE(cpu.heads[0].o_unrounded, cpu_backend().forward(group, other, nullptr).heads[0].o_unrounded) << d;
        EXPECT_NE(own.heads[0].o_unrounded, device.forward(group, other, nullptr).heads[0].o_unrounded) << d;
        layer.causal = true;  // as the file may say beside a mask
        EXPECT_TRUE(for_layer(faultline::plan("fa4"), layer).same_numerics(plan)) << d;
    }
}

}  // namespace
}  // namespace faultline
