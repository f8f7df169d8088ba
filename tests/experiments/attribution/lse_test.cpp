// SPDX-License-Identifier: Apache-2.0
// The log-sum-exp that kernels left: against a sum in extended precision, in another unit, in rows without a key; and which
// sites make it wrong.
#include <cmath>
#include <limits>
#include <numbers>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <faultline/attribution/attribution.hpp>
#include <faultline/attribution/json.hpp>
#include <faultline/attribution/level.hpp>
#include <faultline/attribution/report.hpp>
#include <faultline/attribution/table.hpp>
#include <faultline/base/error.hpp>
#include <faultline/plan/presets.hpp>
#include <faultline/random/random_stream.hpp>

namespace faultline {
namespace {

using ::testing::HasSubstr;

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr std::ptrdiff_t heads = 4, kv_heads = 2, rows = 40, width = 16, hidden = 7;

HeadArray normals(std::ptrdiff_t count, std::uint64_t seed) {
    HeadArray a{1,          count, rows, width, std::vector<double>(static_cast<std::size_t>(count * rows * width)),
                Dtype::bf16};
    const RandomStream stream(seed, 31);
    for (std::size_t i = 0; i < a.values.size(); ++i)
        a.values[i] = round(4 * stream.normal(i), bf16, Rounding::nearest_even);
    return a;
}

/// [heads, rows, 1] by definition, in extended precision (an error of some 2^-60, far below fp32): -inf for a row without a key.
HeadArray independent_lse(const LayerCapture& layer) {
    HeadArray lse{1, heads, rows, 1, {}, Dtype::f32};
    for (std::ptrdiff_t h = 0; h < heads; ++h)
        for (std::ptrdiff_t i = 0; i < rows; ++i) {
            long double sum = 0;
            for (std::ptrdiff_t j = 0; j <= i; ++j) {
                long double s = 0;
                for (std::ptrdiff_t c = 0; c < width; ++c)
                    s += static_cast<long double>(layer.q(0, h)(i, c)) * layer.k(0, h * kv_heads / heads)(j, c);
                if (i != hidden) sum += std::exp(s / 4);  // 1/sqrt(16)
            }
            lse.values.push_back(static_cast<double>(std::log(sum)));
        }
    return lse;
}

/// Kernels: `own` stores the lse itself in fp32, with +inf where there is no key; `binary` in log2 units; `low` in bf16; `open`
/// has a number in the row without a key.
LayerCapture layer_with_lse() {
    LayerCapture layer;
    layer.name = "layer3";
    layer.q = normals(heads, 1);
    layer.k = normals(kv_heads, 2);
    layer.v = normals(kv_heads, 3);
    layer.dout = normals(heads, 4);
    layer.bias = HeadArray{1, 1, rows, rows, std::vector<double>(rows * rows, 0.0), Dtype::f32};
    for (std::ptrdiff_t j = 0; j < rows; ++j)
        layer.bias->values[static_cast<std::size_t>(hidden * rows + j)] = -infinity;
    const HeadArray exact = independent_lse(layer);
    const auto add = [&](const char* name, double factor, const Format& format, double where_no_key) {
        ObservedKernel kernel;
        kernel.name = name;
        kernel.lse = exact;
        for (double& x : kernel.lse->values)
            x = std::isinf(x) ? where_no_key : round(factor * x, format, Rounding::nearest_even);
        layer.observed.push_back(std::move(kernel));
    };
    add("binary", std::numbers::log2e, fp32, -infinity);
    add("low", 1, bf16, -infinity);
    add("open", 1, fp32, 3);
    add("own", 1, fp32, infinity);
    return layer;
}

AttributionOptions options(std::vector<Output> outputs, std::vector<Site> sites, bool lse = true) {
    AttributionOptions o;
    o.outputs = std::move(outputs);
    o.sites = std::move(sites);
    o.lse = lse;
    return o;
}

const OutputAttribution& lse_of(const LayerAttribution& a) {
    EXPECT_TRUE(!a.outputs.empty() && a.outputs.back().lse);
    return a.outputs.back();
}

TEST(Lse, IsJudgedWhereAKernelLeftOne) {
    const LayerCapture layer = layer_with_lse();
    const LayerAttribution a =
        attribute(layer, plan("fa2"), options({all_outputs.begin(), all_outputs.end()}, {Site::o_cast}));
    ASSERT_EQ(a.outputs.size(), 5u);
    const OutputAttribution& lse = lse_of(a);
    EXPECT_EQ(name(lse), "lse");
    EXPECT_EQ(lse.elements, static_cast<std::size_t>(heads * (rows - 1)));
    long double squares = 0;
    for (const double x : independent_lse(layer).values)
        if (std::isfinite(x)) squares += static_cast<long double>(x) * x;
    EXPECT_NEAR(lse.truth_norm.to_double() / static_cast<double>(std::sqrt(squares)), 1, 1e-15);

    ASSERT_EQ(lse.observed.size(), 4u);
    const ObservedOutput &binary = lse.observed[0], &low = lse.observed[1], &open = lse.observed[2],
                         &own = lse.observed[3];
    // Storing the truth in fp32 is all that this kernel does, and that is the level.
    EXPECT_EQ(own.error.rel_error, *lse.level);
    EXPECT_FALSE(own.in_log2);
    EXPECT_EQ(own.finite_without_key, 0u);
    EXPECT_GT(own.within_one_ulp_of_plan, 0.5);
    EXPECT_FALSE(lse_shows(own.error, lse.elements, plan("fa2")));
    EXPECT_TRUE(binary.in_log2);
    EXPECT_NEAR(binary.error.gain, std::numbers::log2e - 1, 1e-7) << "fp32 rounds it";
    EXPECT_TRUE(lse_shows(binary.error, lse.elements, plan("fa2")));
    ASSERT_TRUE(plan("math").schedule.p_saved);
    EXPECT_FALSE(lse_shows(binary.error, lse.elements, plan("math"))) << "that backward does not use it";
    // 8 significant bits of numbers of some ten: off by hundredths of a nat, and P with them.
    EXPECT_TRUE(lse_shows(low.error, lse.elements, plan("fa2")));
    EXPECT_NEAR(low.error.rel_error.to_double() / typical_level(bf16), 1, 0.5) << "by the significands, level.hpp";
    EXPECT_EQ(open.finite_without_key, static_cast<std::size_t>(heads));
    EXPECT_EQ(open.error.rel_error, own.error.rel_error) << "that row is in no sum";
}

// In the plan's own run: its lse in bf16, and the site is what makes it wrong, alone and by its repair.
TEST(Lse, IsAttributedToSites) {
    const LayerCapture layer = layer_with_lse();
    Rule rule = plan("fa2")[Site::lse];
    rule.format = bf16;
    Attribution all;
    all.input = "made";
    all.plan = plan("fa2").with(Site::lse, rule);
    all.layers.push_back(attribute(layer, all.plan, options({}, {})));
    const LayerAttribution& a = all.layers.front();
    ASSERT_EQ(a.outputs.size(), 1u) << "nothing else was asked for";
    const OutputAttribution& lse = lse_of(a);
    for (std::size_t s = 0; s < a.sites.size(); ++s) {
        if (a.sites[s] == Site::lse) {
            EXPECT_GT(lse.sites[s].share, 0.999);
        } else {
            EXPECT_LT(std::abs(lse.sites[s].share), 0.01) << name(a.sites[s]);
        }
        if (info(a.sites[s]).pass == Pass::backward) {
            EXPECT_EQ(lse.sites[s].moved_squared, 0) << name(a.sites[s]) << " comes after it";
        }
    }
    const auto object = nlohmann::json::parse(to_json(all))["layers"][0]["outputs"];
    EXPECT_EQ(object.size(), 1u);
    EXPECT_EQ(object["lse"]["rows"], lse.elements);
    EXPECT_EQ(object["lse"]["observed"]["binary"]["in_log2"], true);
    EXPECT_EQ(object["lse"]["observed"]["open"]["finite_without_key"], heads);
    EXPECT_GT(object["lse"]["sites"]["lse"]["share"], 0.999);
    const std::string text = table(all, {});
    EXPECT_THAT(text, HasSubstr("lse: binary's is the truth's in log2 units"));
    EXPECT_THAT(text, HasSubstr("lse: 4 rows of open see no key and have no infinite lse"));
    EXPECT_THAT(text, HasSubstr(", by lse (>99.9%)"));
    EXPECT_THAT(html_report(all, {}), HasSubstr("(in log2 units)"));
}

TEST(Lse, IsLeftOutWhereNobodyAskedOrNoKernelHasOne) {
    LayerCapture layer = layer_with_lse();
    EXPECT_EQ(attribute(layer, plan("fa2"), options({Output::o}, {Site::o_cast}, false)).outputs.size(), 1u);
    layer.observed.clear();
    EXPECT_EQ(attribute(layer, plan("fa2"), options({Output::o}, {Site::o_cast})).outputs.size(), 1u);
    try {
        (void)attribute(layer, plan("fa2"), options({}, {}));
        ADD_FAILURE() << "nothing to attribute";
    } catch (const RequestError& error) {
        EXPECT_THAT(error.what(), HasSubstr("no kernel has an lse there: expected LAYER.KERNEL.lse"));
    }
}

}  // namespace
}  // namespace faultline
