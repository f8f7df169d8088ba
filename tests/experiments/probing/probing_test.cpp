// SPDX-License-Identifier: Apache-2.0
// The probes on files in memory: planted weights, planted terms, and laws that a capture must keep.
#include <cmath>
#include <cstring>

#include <gtest/gtest.h>

#include <faultline/base/error.hpp>
#include <faultline/gpt/parameters.hpp>
#include <faultline/plan/presets.hpp>
#include <faultline/probing/probing.hpp>
#include <faultline/random/random_stream.hpp>

#include "support.hpp"

namespace faultline::probing {
namespace {

const Block& block(const Report& report, const std::string& place, const std::string& probe) {
    for (const Block& b : report.blocks)
        if (b.place == place && b.probe == probe) return b;
    throw std::out_of_range(place + " " + probe);
}
std::vector<double> line(const Block& b, const std::string& name) {
    for (const Line& l : b.lines)
        if (l.name == name) return l.values;
    throw std::out_of_range(name);
}
std::vector<double> quantity(const Block& b, const std::string& name) {
    for (const Quantity& q : b.quantities)
        if (q.name == name) return q.values;
    throw std::out_of_range(name);
}
/// Every array has as many numbers as its axes say.
void expect_whole(const Report& report) {
    for (const Block& b : report.blocks) {
        for (const Quantity& q : b.quantities) {
            std::size_t size = 1;
            for (const Axis& axis : q.axes) size *= static_cast<std::size_t>(axis.size);
            EXPECT_EQ(q.values.size(), size) << b.place << " " << b.probe << " " << q.name;
            for (const auto& [name, labels] : b.labels)
                for (const Axis& axis : q.axes) {
                    if (axis.name != name) continue;
                    EXPECT_EQ(labels.size(), static_cast<std::size_t>(axis.size)) << q.name << name;
                }
        }
        for (const Line& l : b.lines) EXPECT_LE(l.values.size(), b.columns.size()) << l.name;
    }
}

ProbeCapture capture_from(TensorSet set, const std::string& label) {
    ProbeCapture one{label, std::move(set), {}};
    one.tensors.source = label;
    one.capture = capture_of(one.tensors);
    return one;
}

ProbeOptions with_plan(const std::string& name) {
    ProbeOptions options;
    options.plan = plan(name);
    options.terms = 16;
    return options;
}

TEST(Captures, TheExactPlanKeepsEveryLaw) {
    TensorSet set;
    test::add_layer(set, "layer0", {.batch = 2, .heads = 4, .kv_heads = 2});
    const std::vector<ProbeCapture> captures{capture_from(std::move(set), "made")};
    const Report report = probe_captures(captures, with_plan("exact"));
    expect_whole(report);
    constexpr double binary64 = 1e-12;  // sums of 24 terms of some 10
    for (const char* source : {"exact", "exact (plan)"}) {
        const Block& b = block(report, "layer0", "conservation");
        for (const char* what : {": sum of p - 1, rms", ": r over sum of |ds|, rms", ": delta - exact, rms"})
            for (const double x : line(b, source + std::string(what))) EXPECT_LE(std::abs(x), binary64) << what;
    }
    const Block& moved = block(report, "layer0", "invariance");
    EXPECT_EQ(moved.columns.size(), 2u);  // key heads
    for (const Line& l : moved.lines)
        for (const double x : l.values) EXPECT_LE(std::abs(x), binary64) << l.name;
    // The toy kernel's o has nothing to do with attention: its delta is wrong by as much as delta itself.
    for (const double x : line(block(report, "layer0", "conservation"), "toy: delta - exact, rms")) EXPECT_GT(x, 0.1);
}

TEST(Captures, HeadsAndRowsAreChosen) {
    TensorSet set;
    test::add_layer(set, "layer0", {.heads = 4, .kv_heads = 2});
    const std::vector<ProbeCapture> captures{capture_from(std::move(set), "made")};
    ProbeOptions options = with_plan("fa2");
    const Report all = probe_captures(captures, options);
    options.threads = 3;
    EXPECT_EQ(to_json(probe_captures(captures, options)), to_json(all));  // whatever the number of threads
    options.heads = {3};
    options.row = 5;
    const Report one = probe_captures(captures, options);
    expect_whole(one);
    for (const char* probe : {"conservation", "saturation", "coherence", "similarity", "output-error"}) {
        const Block &a = block(all, "layer0", probe), &b = block(one, "layer0", probe);
        ASSERT_EQ(b.columns, std::vector<std::string>{"head 3"});
        for (const Line& l : b.lines) {
            const double all_heads = line(a, l.name)[3];
            const bool same = l.values[0] == all_heads || (std::isnan(l.values[0]) && std::isnan(all_heads));
            EXPECT_TRUE(same) << probe << " " << l.name << " " << l.values[0] << " " << all_heads;
        }
    }
    EXPECT_EQ(quantity(block(one, "layer0", "output-error"), "running_row"), std::vector<double>{5});
    options.row = 24;
    EXPECT_THROW((void)probe_captures(captures, options), RequestError);
}

// Keys alike and queries alike: every term is one direction.
TEST(Captures, PlantedTermsAreOneDirection) {
    TensorSet set;
    test::add_layer(set, "layer0", {.heads = 1, .kv_heads = 1, .n_q = 32, .n_k = 32});
    std::vector<float> rows(32 * 16);
    for (std::size_t i = 0; i < rows.size(); ++i)
        rows[i] = (i / 16 % 2 == 0 ? 1.0F : 2.0F) * static_cast<float>(i % 16 + 1) / 16;
    for (const char* name : {"layer0.q", "layer0.k"}) {
        set.tensors.erase(name);
        set.add(make_tensor<float>(name, {1, 1, 32, 16}, rows));
    }
    const TensorSet copy = set;
    const std::vector<ProbeCapture> captures{capture_from(std::move(set), "a"), capture_from(copy, "b")};
    const Report report = probe_captures(captures, with_plan("fa2"));
    expect_whole(report);
    const Block& b = block(report, "layer0", "similarity");
    EXPECT_NEAR(line(b, "mean cosine")[0], 1, 1e-12);
    EXPECT_NEAR(line(b, "effective rank")[0], 1, 1e-9);
    EXPECT_EQ(quantity(b, "term_capture").size(), 32u);          // 16 of each
    EXPECT_NEAR(quantity(b, "principal_angle")[3], 0, 1e-7);     // capture b's first angle to a, the same file
    EXPECT_TRUE(std::isnan(quantity(b, "principal_angle")[4]));  // PK has rank 1: there is no second direction
    EXPECT_EQ(block(report, "a/layer0", "saturation").columns.size(), 1u);
}

TEST(Captures, SinkAndSoftcapLeaveThePlanOut) {
    TensorSet set;
    test::add_layer(set, "layer0");
    const std::vector<float> sink{0.5F, 1};
    set.add(make_tensor<float>("layer0.sink", {2}, sink));
    const std::vector<ProbeCapture> captures{capture_from(set, "made")};
    ProbeOptions options = with_plan("fa2");
    const Report report = probe_captures(captures, options);
    expect_whole(report);
    for (const double x : line(block(report, "layer0", "conservation"), "exact: sum of p - 1, rms"))
        EXPECT_LE(x, 1e-14);
    EXPECT_THROW((void)line(block(report, "layer0", "conservation"), "fa2: sum of p - 1, rms"), std::out_of_range);
    options.probes = {"invariance"};
    EXPECT_THROW((void)probe_captures(captures, options), RequestError);
    TensorSet wrong = set;
    wrong.tensors.erase("layer0.sink");
    const std::vector<float> three{1, 2, 3};
    wrong.add(make_tensor<float>("layer0.sink", {3}, three));
    EXPECT_THROW((void)capture_from(wrong, "made"), RequestError);
    TensorSet dropped = set;
    dropped.add(make_tensor<float>("layer0.dropout", {1, 1}, std::vector<float>{1}));
    EXPECT_THROW((void)capture_from(dropped, "made"), RequestError);
}

/// A checkpoint of one layer whose W_Q and W_K are 4 e_0 e_1^T + 2 e_1 e_0^T + e_2 e_2^T, with an update of the first alone.
TensorSet checkpoint(float w_q_scale) {
    gpt::ModelConfig m;
    m.layers = 1, m.width = 8, m.heads = 2, m.context = 4, m.vocabulary = 5;
    const gpt::ParameterLayout layout(m);
    std::vector<float> weights(static_cast<std::size_t>(layout.size())), first = weights, second(weights.size(), 1.0F);
    for (const char* name : {"layer0.w_q", "layer0.w_k"}) {
        const MatrixView<float> w = layout.at(name).of(std::span<float>(weights));
        w(0, 1) = 4, w(1, 0) = 2, w(2, 2) = 1;
        layout.at(name).of(std::span<float>(first))(0, 1) = 3;
        layout.at(name).of(std::span<float>(first))(7, 7) = 4;
    }
    for (std::ptrdiff_t i = 0; i < 8; ++i)
        for (std::ptrdiff_t j = 0; j < 8; ++j) layout.at("layer0.w_q").of(std::span<float>(weights))(i, j) *= w_q_scale;
    TensorSet set;
    set.source = "made.safetensors";
    const auto size = static_cast<std::int64_t>(weights.size());
    set.add(make_tensor<float>("weights", {size}, weights));
    set.add(make_tensor<float>("optimizer.first", {size}, first));
    set.add(make_tensor<float>("optimizer.second", {size}, second));
    set.metadata = {{"schema", "faultline.checkpoint/1"},
                    {"config.layers", "1"},
                    {"config.width", "8"},
                    {"config.heads", "2"},
                    {"config.context", "4"},
                    {"config.vocab", "5"},
                    {"config.bias", "false"},
                    {"config.qk-norm", "0"},
                    {"config.sigma-reparam", "false"},
                    {"config.output-gate", "false"},
                    {"config.optimizer", "0"},
                    {"config.beta1", "0.9"},
                    {"config.beta2", "0.95"},
                    {"config.epsilon", "1e-8"},
                    {"config.weight-decay", "0"},
                    {"optimizer_steps", "10"}};
    return set;
}

TEST(Checkpoints, KnownDirections) {
    const std::vector<TensorSet> files{checkpoint(1), checkpoint(1.5F)};
    ProbeOptions options;
    options.directions = 2;
    const Report report = probe_checkpoints(files, options);
    expect_whole(report);
    const Block& b = block(report, "checkpoint0/layer0", "directions");
    EXPECT_EQ(b.columns, (std::vector<std::string>{"W_Q", "W_K", "QK head 0", "QK head 1"}));
    EXPECT_NEAR(line(b, "sigma_1")[0], 4, 1e-14);
    EXPECT_NEAR(line(b, "sigma_2")[1], 2, 1e-14);
    EXPECT_NEAR(line(b, "stable rank")[0], 21.0 / 16, 1e-14);
    // Head 0 has columns 0 to 3, all of W: W_Q W_K^T = 16 e_0 e_0^T + 4 e_1 e_1^T + e_2 e_2^T.
    EXPECT_NEAR(line(b, "sigma_1")[2], 16, 1e-13);
    EXPECT_NEAR(line(b, "sigma_2")[2], 4, 1e-13);
    EXPECT_EQ(line(b, "sigma_1")[3], 0);
    // The update has 3 along the first direction and 4 elsewhere: 9 of 25.
    EXPECT_NEAR(line(b, "update's energy along U and V: two-sided projection removes")[0], 9.0 / 25, 1e-6);
    // From the first to the second checkpoint W_Q moved by half of itself: 16 + 4 of 21 lie along its two directions.
    const Block& moved = block(report, "checkpoint1/layer0", "directions");
    EXPECT_NEAR(line(moved, "update's energy along U or V: one-sided projection removes")[0], 20.0 / 21, 1e-12);
    EXPECT_TRUE(std::isnan(line(moved, "update's energy along U or V: one-sided projection removes")[1]));
    const std::vector<double> distance = line(block(report, "checkpoint1/parameters", "trajectory"), "layer0.w_q");
    EXPECT_NEAR(distance[0], (2 + 1 + 0.5) / 64, 1e-15);
    EXPECT_EQ(distance[1], 2);
    EXPECT_NEAR(distance[3], 0.5, 1e-15);
}

TEST(Checkpoints, WhatIsNoneIsRefused) {
    const auto refused = [](auto&& change) {
        std::vector<TensorSet> files{checkpoint(1)};
        change(files.front());
        EXPECT_THROW((void)probe_checkpoints(files, {}), RequestError);
    };
    refused([](TensorSet& s) { s.metadata.erase("config.width"); });
    refused([](TensorSet& s) { s.metadata["config.heads"] = "3"; });
    refused([](TensorSet& s) { s.metadata["config.heads"] = "-1"; });
    refused([](TensorSet& s) { s.metadata["config.width"] = "16"; });  // not as many weights
    refused([](TensorSet& s) { s.metadata["config.bias"] = "maybe"; });
    refused([](TensorSet& s) { s.tensors.erase("weights"); });
    refused([](TensorSet& s) { s.metadata["schema"] = "faultline.checkpoint/9"; });
    refused([](TensorSet& s) { s.metadata["config.beta1"] = "x"; });
    refused([](TensorSet& s) { s.metadata["config.beta2"] = "1"; });
    refused([](TensorSet& s) { s.metadata["config.epsilon"] = "nan"; });
    refused([](TensorSet& s) { s.metadata["config.weight-decay"] = "-1"; });
    refused([](TensorSet& s) {
        const float negative = -1;
        std::memcpy(s.tensors.at("optimizer.second").bytes.data(), &negative, sizeof negative);
    });
    ProbeOptions options;
    options.layers = {"layer7"};
    const std::vector<TensorSet> one{checkpoint(1)};
    EXPECT_THROW((void)probe_checkpoints(one, options), RequestError);
}

// AdamW takes decay times the weight too: W_Q's own direction, 4, 2 and 1 along the first three, of which two are leading.
TEST(Checkpoints, TheUpdateHasItsWeightDecay) {
    std::vector<TensorSet> files{checkpoint(1)};
    files[0].metadata["config.weight-decay"] = "0.5";
    ProbeOptions options;
    options.directions = 2;
    const Block b = block(probe_checkpoints(files, options), "layer0", "directions");
    // What the moments give: first over 1 - 0.9^10, over the root of 1 / (1 - 0.95^10).
    const double scale = std::sqrt(1 - std::pow(0.95, 10)) / (1 - std::pow(0.9, 10));
    const double along = std::pow(3 * scale + 0.5 * 4, 2) + 1, all = along + std::pow(4 * scale, 2) + 0.25;
    EXPECT_NEAR(line(b, "update's energy along U and V: two-sided projection removes")[0], along / all, 1e-6);
}

// NaNs in W_Q: nothing is said of it, and everything of W_K. A weight of zeros has no directions either.
TEST(Checkpoints, NotANumberIsShownAsNone) {
    std::vector<TensorSet> files{checkpoint(std::numeric_limits<float>::quiet_NaN())};
    const Report report = probe_checkpoints(files, {});
    expect_whole(report);
    for (const char* what : {"sigma_1", "update's energy along U and V: two-sided projection removes",
                             "update's energy along U or V: one-sided projection removes"}) {
        EXPECT_TRUE(std::isnan(line(block(report, "layer0", "directions"), what)[0])) << what;
        EXPECT_TRUE(std::isfinite(line(block(report, "layer0", "directions"), what)[1])) << what;
    }
    for (const double x : quantity(block(report, "layer0", "directions"), "left_q")) EXPECT_TRUE(std::isnan(x));
    for (const double x : quantity(block(report, "layer0", "directions"), "right_q")) EXPECT_TRUE(std::isnan(x));
    const std::vector<TensorSet> zero{checkpoint(0)};
    const Block none = block(probe_checkpoints(zero, {}), "layer0", "directions");
    EXPECT_TRUE(std::isnan(line(none, "update's energy along U or V: one-sided projection removes")[0]));
    EXPECT_NE(table(report).find("-"), std::string::npos);
}

}  // namespace
}  // namespace faultline::probing
