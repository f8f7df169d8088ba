// SPDX-License-Identifier: Apache-2.0
// Verdicts on a stored log-sum-exp: natural units, the type of its file, other orders of its sums, rows without a key.
#include <cmath>
#include <initializer_list>
#include <numbers>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <faultline/attribution/group_run.hpp>
#include <faultline/plan/presets.hpp>
#include <faultline/verdict/report.hpp>

#include "made_checks.hpp"

namespace faultline {
namespace {

using ::testing::HasSubstr;
using testing::made_capture;
using namespace test;

TEST(Check, TheLogSumExpIsJudgedInNaturalUnits) {
    Capture capture = made_capture({{"mine", plan("fa2")}}, shape);
    add_lse(capture.layers[0], plan("fa3"));
    const HeadArray right = *capture.layers[0].observed[0].lse;
    const auto judged = [&](const auto& change) {
        HeadArray& lse = *capture.layers[0].observed[0].lse;
        lse = right;
        for (std::size_t i = 0; i < lse.values.size(); ++i) lse.values[i] = change(i, lse.values[i]);
        const Check found = check(capture, plan("fa2"), quick());
        EXPECT_EQ(found.layers[0].outputs.size(), 5u);
        EXPECT_EQ(output_of(found, Output::dq).verdict, Verdict::within_rounding);
        return found.layers[0].outputs.back();
    };
    const OutputCheck own = judged([](std::size_t, double x) { return x; });
    EXPECT_EQ(own.verdict, Verdict::within_rounding);
    EXPECT_EQ(name(own), "lse");
    EXPECT_LT(own.observed.rel_error.to_double(), 1e-6);
    EXPECT_EQ(judged([](std::size_t, double x) { return x + 1; }).verdict, Verdict::wrong);
    EXPECT_EQ(judged([](std::size_t i, double x) { return i == 70 ? x + 1e-4 : x; }).findings.at(0).worst.row, 70);
    EXPECT_EQ(judged([](std::size_t i, double x) { return i == 3 ? -INFINITY : x; }).verdict, Verdict::wrong);
    const OutputCheck in_log2 = judged([](std::size_t, double x) { return x / std::numbers::ln2; });
    EXPECT_EQ(in_log2.verdict, Verdict::wrong);
    EXPECT_TRUE(in_log2.in_log2);

    CheckOptions without = quick();
    without.lse = false;
    EXPECT_EQ(check(capture, plan("fa2"), without).layers[0].outputs.size(), 4u);
}

// Stored in a type that the plan does not have, by a kernel that does nothing else: what is the plan's own rounded to the
// file's type is no error of the kernel, for a plan that rounds and for one that does not.
TEST(Check, ALogSumExpIsRoundedToTheTypeOfItsFile) {
    Capture capture = made_capture({{"mine", plan("fa2")}}, shape);
    for (const char* name : {"fa2", "exact"}) {
        add_lse(capture.layers[0], plan(name));
        const HeadArray own = *capture.layers[0].observed[0].lse;
        for (const Dtype type : {Dtype::bf16, Dtype::f16, Dtype::f32}) {
            const auto judged = [&](double factor) {
                HeadArray& lse = *capture.layers[0].observed[0].lse;
                lse.dtype = type;
                const Format format = attribution::format_of(type);
                for (std::size_t i = 0; i < own.values.size(); ++i)
                    lse.values[i] = round(factor * own.values[i], format, Rounding::nearest_even);
                CheckOptions options = quick();
                options.outputs = {};
                return check(capture, plan(name), options).layers[0].outputs.at(0);
            };
            const OutputCheck same = judged(1);
            EXPECT_EQ(same.bit_equal_to_plan, 1) << name;
            EXPECT_EQ(same.verdict, Verdict::within_rounding) << name;
            // Off by 16 roundings of a narrow type: what passes is the type's rounding and no more. In fp32 another order
            // of the sums makes some 5 (lse_floor, here an lse near 5 of 96 keys), of which 6 to 7 may pass.
            const double roundings = type == Dtype::f32 ? 64 : 16;
            EXPECT_EQ(judged(1 + std::ldexp(roundings, -attribution::format_of(type).precision)).verdict,
                      Verdict::wrong)
                << name;
        }
    }
}

// A last block of one row, whose lse an fp32 sum in another order moves by two units of its last place: the runs, which have
// no such order, all have the plan's own error there, and it may be a small one.
TEST(Check, TheLogSumExpOfFewRowsMayBeOfAnotherOrderOfSums) {
    const testing::MadeShape odd{.n = 129, .d = 16, .gradient = false};
    Capture capture = made_capture({{"mine", plan("fa2")}}, odd);
    add_lse(capture.layers[0], plan("fa2"));
    double& last = capture.layers[0].observed[0].lse->values[128];
    const double own = last, unit = std::nextafterf(static_cast<float>(own), INFINITY) - own;
    for (const double units : {-2.0, -1.0, 1.0, 2.0, -64.0, 64.0}) {
        last = own + units * unit;
        const Check found = check(capture, plan("fa2"), quick());
        EXPECT_EQ(found.verdict(), std::abs(units) < 3 ? Verdict::within_rounding : Verdict::wrong)
            << units << table(found, true);
    }
}

// A row without a key: -inf, or +inf as FlashAttention-2 writes, and nothing finite.
TEST(Check, TheLogSumExpOfARowWithoutAKeyIsInfinite) {
    const testing::MadeShape masked{.n = 32, .d = 16, .gradient = false, .extras = [](LayerCapture& layer) {
                                        layer.bias = HeadArray{1, 1, 32, 32, std::vector<double>(32 * 32), Dtype::f32};
                                        for (std::size_t j = 0; j < 32; ++j) layer.bias->values[5 * 32 + j] = -INFINITY;
                                    }};
    Capture capture = made_capture({{"mine", plan("fa2")}}, masked);
    add_lse(capture.layers[0], plan("fa2"));
    for (const double value : std::initializer_list<double>{INFINITY, -INFINITY, 0.0, std::nan("")}) {
        capture.layers[0].observed[0].lse->values[5] = value;
        const Check found = check(capture, plan("fa2"), quick());
        EXPECT_EQ(found.verdict(), std::isinf(value) ? Verdict::within_rounding : Verdict::wrong)
            << value << table(found, true);
        if (!std::isinf(value)) {
            EXPECT_THAT(table(found), HasSubstr("1 row sees no key and has no infinite lse"));
        }
    }
}

}  // namespace
}  // namespace faultline
