// SPDX-License-Identifier: Apache-2.0
// Verdicts on kernels whose fault is known: none, a bias, a mistake. docs/results/check.md measures the rates; here are the
// ends of the range.
#include <algorithm>
#include <cmath>
#include <numbers>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <faultline/base/error.hpp>
#include <faultline/generation/family.hpp>
#include <faultline/plan/presets.hpp>
#include <faultline/verdict/report.hpp>

#include "made_checks.hpp"

namespace faultline {
namespace {

using ::testing::HasSubstr;
using testing::made_capture;
using namespace test;

TEST(Check, AKernelThatIsItsPlanIsWithinItsRounding) {
    const Check found = check(made_capture({{"mine", plan("fa2")}}, shape), plan("fa2"), quick());
    EXPECT_EQ(found.verdict(), Verdict::within_rounding) << table(found, true);
    for (const OutputCheck& o : found.layers[0].outputs) {
        EXPECT_EQ(o.bit_equal_to_plan, 1);
        EXPECT_NEAR(o.size_ratio, 1, 0.2);
    }
    EXPECT_GT(found.tests, 300u);
    EXPECT_DOUBLE_EQ(found.log10_threshold, std::log10(1e-3 / static_cast<double>(found.tests)));
}

// A plan that leaves fp32 in a file of bf16 is compared as the file holds it, and its null model rounds there too. The exact
// plan stands for a kernel whose only error is that rounding.
TEST(Check, AnOutputStoredNarrowerThanThePlanLeavesItIsComparedInItsType) {
    for (const char* name : {"thunderkittens", "exact"}) {
        Capture capture = made_capture({{"mine", plan(name)}}, shape);
        for (const Output output : all_outputs) {
            HeadArray& array = output_of(capture, output);
            array.dtype = Dtype::bf16;
            for (double& x : array.values) x = round(x, bf16, Rounding::nearest_even);
        }
        const Check found = check(capture, plan(name), quick());
        EXPECT_EQ(found.verdict(), Verdict::within_rounding) << table(found, true);
        for (const OutputCheck& o : found.layers[0].outputs) {
            EXPECT_EQ(o.bit_equal_to_plan, 1) << name << ' ' << faultline::name(o);
            EXPECT_NEAR(o.size_ratio, 1, 0.2) << name << ' ' << faultline::name(o);
        }
    }
}

// q = k = v = 133120 (pytorch/pytorch#121558): fa2 leaves NaN, and so does a kernel that is fa2.
TEST(Check, WhatIsNotFiniteInThePlanTooIsSaidToBeThePlans) {
    const auto overflowing = [](LayerCapture& layer) {
        for (HeadArray* a : {&layer.q, &layer.k, &layer.v}) std::fill(a->values.begin(), a->values.end(), 133120.0);
    };
    const Capture capture =
        made_capture({{"mine", plan("fa2")}}, {.n = 4, .d = 64, .gradient = false, .extras = overflowing});
    const Check found = check(capture, plan("fa2"), quick());
    EXPECT_EQ(found.verdict(), Verdict::wrong);
    const OutputCheck& o = output_of(found, Output::o);
    EXPECT_EQ(o.bit_equal_to_plan, 1);
    ASSERT_FALSE(o.findings.empty());
    EXPECT_TRUE(o.findings.front().nonfinite && o.findings.front().of_plan);
    EXPECT_THAT(table(found, true), HasSubstr("not finite where the truth is, as the plan's own run is"));
    EXPECT_THAT(table(found, true), HasSubstr("256 elements in 4 rows"));
    EXPECT_EQ(o.unpredicted, 0u);
}

// A kernel that is right where the plan overflows is neither passed nor called wrong: the plan has no size of error there.
TEST(Check, WhatIsFiniteWhereThePlanIsNotIsNotResolved) {
    const auto overflowing = [](LayerCapture& layer) {
        for (HeadArray* a : {&layer.q, &layer.k, &layer.v}) std::fill(a->values.begin(), a->values.end(), 133120.0);
    };
    Capture capture =
        made_capture({{"mine", plan("fa2")}}, {.n = 4, .d = 64, .gradient = false, .extras = overflowing});
    HeadArray& right = output_of(capture, Output::o);
    std::fill(right.values.begin(), right.values.end(),
              133120.0 * (1 + 0x1p-8));  // as far off as bf16 may be, and farther
    Check found = check(capture, plan("fa2"), quick());
    EXPECT_EQ(found.verdict(), Verdict::unresolved) << table(found, true);
    EXPECT_EQ(output_of(found, Output::o).unpredicted, right.values.size());
    EXPECT_EQ(output_of(found, Output::o).nonfinite_runs, 16u);
    EXPECT_THAT(to_junit(found), HasSubstr("errors=\"1\""));
    const auto of_o = [&] { return nlohmann::json::parse(to_json(found))["layers"][0]["outputs"]["o"]; };
    EXPECT_EQ(of_o()["plan_first_nonfinite"]["row"], 0);
    EXPECT_EQ(of_o()["expected_rel_error"], "inf");
    EXPECT_THAT(table(found), HasSubstr("the plan does not say how large an error may be in 256"));

    right.values[65] = INFINITY;  // the plan's is a NaN: not the plan's error
    found = check(capture, plan("fa2"), quick());
    EXPECT_EQ(found.verdict(), Verdict::wrong);
    EXPECT_EQ(of_o()["findings"][0]["first"],
              nlohmann::json({{"head", 0}, {"row", 1}, {"feature", 1}, {"value", "inf"}, {"plan", "nan"}}));
    EXPECT_EQ(of_o()["findings"][0]["elements_of_plan"], 0);
}

TEST(Check, TruncatingTheOutputIsABiasTowardsZeroAndNoMistake) {
    Rule truncating{bf16};
    truncating.rounding = Rounding::toward_zero;
    const Check found =
        check(made_capture({{"mine", plan("fa2").with(Site::o_cast, truncating)}}, shape), plan("fa2"), quick());
    const OutputCheck& o = output_of(found, Output::o);
    ASSERT_FALSE(o.findings.empty());
    EXPECT_NE(o.verdict, Verdict::within_rounding);
    bool growth = false;
    for (const Finding& f : o.findings)
        growth = growth || (f.cell.direction == verdict::Direction::growth && f.cell.extent == verdict::Extent::head &&
                            f.effect < 0);
    EXPECT_TRUE(growth) << table(found, true);
    EXPECT_EQ(output_of(found, Output::dv).verdict, Verdict::within_rounding);
}

TEST(Check, AShiftedFeatureIsFoundInItsPlace) {
    Capture capture = made_capture({{"mine", plan("fa2")}}, shape);
    HeadArray& dq = output_of(capture, Output::dq);
    double squares = 0;
    for (const double x : dq.values) squares += x * x;
    const double rms = std::sqrt(squares / static_cast<double>(dq.values.size()));
    for (std::ptrdiff_t i = 0; i < dq.rows; ++i)  // head 1, feature 5, by about four of its rounding errors
        dq.values[static_cast<std::size_t>((dq.rows + i) * dq.cols + 5)] += 0.02 * rms;
    const Check found = check(capture, plan("fa2"), quick());
    const OutputCheck& o = output_of(found, Output::dq);
    ASSERT_FALSE(o.findings.empty()) << table(found, true);
    EXPECT_NE(o.verdict, Verdict::within_rounding);
    bool there = false;
    for (const Finding& f : o.findings) {
        EXPECT_EQ(f.head, 1);
        EXPECT_FALSE(f.of_plan);
        there = there || (f.cell.extent == verdict::Extent::feature && f.cell.index == 5 && f.effect > 0);
    }
    EXPECT_TRUE(there) << table(found, true);
}

TEST(Check, AMistakeAndANaNAreWrong) {
    Capture capture = made_capture({{"mine", plan("fa2")}}, shape);
    HeadArray& o = output_of(capture, Output::o);
    for (std::ptrdiff_t j = 0; j < o.cols; ++j) o.values[static_cast<std::size_t>(40 * o.cols + j)] *= 1.5;
    Check found = check(capture, plan("fa2"), quick());
    EXPECT_EQ(output_of(found, Output::o).verdict, Verdict::wrong) << table(found, true);
    EXPECT_EQ(output_of(found, Output::dq).verdict, Verdict::within_rounding);

    output_of(capture, Output::dk).values[7] = NAN;
    found = check(capture, plan("fa2"), quick());
    ASSERT_FALSE(output_of(found, Output::dk).findings.empty());
    EXPECT_TRUE(output_of(found, Output::dk).findings[0].nonfinite);
    EXPECT_THAT(to_junit(found),
                HasSubstr("1 element in 1 row is not finite where the truth is; the first, row 0, feature 7, is nan"));
    EXPECT_THAT(table(found), ::testing::Not(HasSubstr("next to nothing")));
}

TEST(Check, AnErrorWhereThereIsNoneByRightIsWrongHoweverSmallOrLarge) {
    const auto checked = [](Capture capture, Output output, std::size_t head, double error) {
        observe(capture.layers[0], plan("fa2"), "mine", 0, 1);
        HeadArray& a = output_of(capture, output);
        const auto of_head = static_cast<std::size_t>(a.rows * a.cols);
        EXPECT_TRUE(std::all_of(a.values.begin() + static_cast<std::ptrdiff_t>(head * of_head),
                                a.values.begin() + static_cast<std::ptrdiff_t>((head + 1) * of_head),
                                [](double x) { return x == 0; }));
        a.values[head * of_head + 7] = error;
        const Check found = check(capture, plan("fa2"), quick());
        EXPECT_EQ(output_of(found, output).verdict, error == 0 ? Verdict::within_rounding : Verdict::wrong)
            << table(found, true);
        EXPECT_LT(table(found, true).size(), 10000u);
    };
    for (const double error : {0.0, 5e-324, 1e-200, 1000.0, -1e308}) {
        Capture dead = made_capture({}, shape);  // the second head's output goes nowhere
        for (std::size_t i = dead.layers[0].dout.values.size() / 2; i < dead.layers[0].dout.values.size(); ++i)
            dead.layers[0].dout.values[i] = 0;
        checked(dead, Output::dq, 1, error);
        Capture no_values = made_capture({}, shape);
        std::fill(no_values.layers[0].v.values.begin(), no_values.layers[0].v.values.end(), 0);
        checked(no_values, Output::o, 0, error);
        Capture no_keys = made_capture({}, shape);
        std::fill(no_keys.layers[0].k.values.begin(), no_keys.layers[0].k.values.end(), 0);
        checked(no_keys, Output::dq, 0, error);
    }
}

TEST(Check, AFiniteValueFarOffIsWrongWhateverItsSize) {
    for (const double value : {1e30, 1e160, -1e300, 1.7e308}) {
        Capture capture = made_capture({{"mine", plan("fa2")}}, shape);
        output_of(capture, Output::dk).values[7] = value;
        const Check found = check(capture, plan("fa2"), quick());
        EXPECT_EQ(output_of(found, Output::dk).verdict, Verdict::wrong) << table(found, true);
        EXPECT_EQ(output_of(found, Output::o).verdict, Verdict::within_rounding);
    }
}

// Where one key has nearly all the probability, dp - delta is what the tails leave of a delta that was added in some order; in
// another they are lost, or an ulp is. That is no mistake, though it is hundreds of times what the plan's low precision
// makes of the row.
TEST(Check, DeltaAddedInAnotherOrderOnSaturatedRowsIsNotWrong) {
    const testing::MadeShape saturated{.heads = 2, .kv_heads = 1, .n = 96, .d = 32, .query_size = 12};
    RoundingPlan other = plan("math");
    other.schedule.bwd_block_k = 16;
    other.schedule.bwd_key_order = Order::descending;
    const Check found = check(made_capture({{"mine", other}}, saturated), plan("math"), quick());
    EXPECT_EQ(output_of(found, Output::dq).verdict, Verdict::within_rounding) << table(found, true);
    EXPECT_LT(output_of(found, Output::dq).bit_equal_to_plan, 1);  // it is another order

    // A delta of 14 bits in place of 24 is a mistake there as elsewhere.
    Rule coarse = plan("math")[Site::delta];
    coarse.format = Format{.precision = 14, .emin = -126, .emax = 127};
    const Check faulty =
        check(made_capture({{"mine", plan("math").with(Site::delta, coarse)}}, saturated), plan("math"), quick());
    EXPECT_EQ(output_of(faulty, Output::dq).verdict, Verdict::wrong) << table(faulty, true);
}

TEST(Check, ThePlansOwnBiasIsSaidToBeThePlans) {
    Rule truncating{bf16};
    truncating.rounding = Rounding::toward_zero;
    const RoundingPlan biased = plan("fa2").with(Site::o_cast, truncating);
    const Check found = check(made_capture({{"mine", biased}}, shape), biased, quick());
    const OutputCheck& o = output_of(found, Output::o);
    EXPECT_EQ(o.verdict, Verdict::biased) << table(found, true);
    for (const Finding& f : o.findings) {
        EXPECT_TRUE(f.of_plan);
        EXPECT_EQ(f.t, f.plan_t);
    }
}

// A ratio beyond --slack that is no finding says which test it passed.
TEST(Check, ARatioBeyondSlackThatIsNoFindingSaysWhy) {
    Capture capture = made_capture({{"mine", plan("fa2")}}, shape);
    CheckOptions options = quick();
    options.slack = 1;
    Check found = check(capture, plan("fa2"), options);
    OutputCheck& dq = found.layers[0].outputs[1];
    ASSERT_EQ(dq.verdict, Verdict::within_rounding);
    EXPECT_GT(dq.size_log10_p, found.log10_threshold) << "its size is no finding";
    EXPECT_LE(dq.size_log10_p, 0);
    dq.size_ratio = 2.067;
    dq.size_t = 4.1;
    dq.size_log10_p = -3.7;
    found.log10_threshold = -6.2;
    EXPECT_THAT(table(found),
                HasSubstr("no finding: beyond --slack 1 it has t +4.1 (p 2e-4) in its worst head, and p < "
                          "6e-7 is asked for"));
}

// The useful line of a coherent fault, and the row and feature of a single one, within the lines that are shown.
TEST(Check, FindingsSayWhereAndOfEveryKindFirst) {
    Capture capture = made_capture({{"mine", plan("fa2")}}, shape);
    HeadArray& o = output_of(capture, Output::o);
    for (double& x : o.values) x *= 1.01;
    const OutputCheck grown = output_of(check(capture, plan("fa2"), quick()), Output::o);
    const auto lines = std::min<std::size_t>(grown.findings.size(), 5);
    EXPECT_TRUE(std::any_of(grown.findings.begin(), grown.findings.begin() + static_cast<std::ptrdiff_t>(lines),
                            [](const Finding& f) { return f.cell.direction == verdict::Direction::growth; }));
    HeadArray& dk = output_of(capture, Output::dk);
    dk.values[static_cast<std::size_t>(50 * dk.cols + 9)] += 100;
    const Check found = check(capture, plan("fa2"), quick());
    EXPECT_THAT(table(found), HasSubstr("row 50, feature 9"));
    EXPECT_THAT(to_json(found), HasSubstr("\"worst_row\": 50"));
}

TEST(Check, WhatIsExpectedWhereTheTruthIsZero) {
    Capture capture;
    capture.path = "made";
    capture.layers.push_back(make_inputs(*find_family("two-level"), {}, 0));
    observe(capture.layers[0], plan("fa2"), "mine", 0, 1);
    const Check found = check(capture, plan("fa2"), quick());
    std::size_t infinite = 0;
    for (const OutputCheck& o : found.layers[0].outputs) {
        if (!std::isinf(o.plan.rel_error.to_double())) continue;
        ++infinite;
        EXPECT_TRUE(std::isinf(o.expected.to_double())) << name(o) << table(found);
    }
    EXPECT_GT(infinite, 0u);
    const std::string text = table(found);
    EXPECT_THAT(text, HasSubstr("its truth is 0, which no error is relative to"));
    EXPECT_THAT(text, ::testing::Not(HasSubstr(" inf"))) << "a size that is none";
}

// A size that a person cannot read is a bound in the table, and itself in JSON.
TEST(Check, ErrorsBeyondAnyScaleAreBounds) {
    Check made;
    LayerCheck& layer = made.layers.emplace_back();
    layer.name = "layer0";
    OutputCheck& dq = layer.outputs.emplace_back();
    dq.output = Output::dq;
    dq.truth_norm = WideReal(1.0);
    dq.observed.rel_error = WideReal(0.5);
    dq.plan.rel_error = WideReal(0.25);
    dq.expected = WideReal{1.0, 6600};  // 2^6600
    const std::string text = table(made);
    EXPECT_THAT(text, HasSubstr("50.0%     25.0%      >1e9%"));
    EXPECT_THAT(text, HasSubstr("exact figures: --json"));
    EXPECT_THAT(to_json(made), HasSubstr("1986\""));
    dq.expected = WideReal(0.3);
    EXPECT_THAT(table(made), ::testing::Not(HasSubstr("exact figures")));
}

TEST(Check, DoesNotDependOnThreads) {
    const Capture capture = made_capture({{"mine", plan("fa3")}}, shape);
    CheckOptions options = quick();
    options.threads = 1;
    const std::string one = to_json(check(capture, plan("fa2"), options));
    options.threads = 5;
    EXPECT_EQ(one, to_json(check(capture, plan("fa2"), options)));
}

// Runs that memory does not hold are run a second time, to the same bits.
TEST(Check, DoesNotDependOnWhatIsHeldInMemory) {
    Capture capture = made_capture({{"mine", plan("fa3")}}, shape);
    add_lse(capture.layers[0], plan("fa3"));
    CheckOptions options = quick();
    const std::string whole = to_json(check(capture, plan("fa2"), options));
    const std::size_t of_run = 8 * 96 * (2 * (32 + 32 + 1) + 2 * 32);  // two query heads' o, dq, lse; dk, dv
    for (const std::size_t runs : {0, 5}) {
        std::size_t done = 0, total = 0;
        options.held_bytes = runs * of_run + 1;
        options.progress = [&](std::size_t d, std::size_t t, const std::string&) { done = d, total = t; };
        EXPECT_EQ(whole, to_json(check(capture, plan("fa2"), options))) << runs;
        EXPECT_EQ(done, total);
        EXPECT_EQ(total, 2 + 2 * 16 - runs);
    }
}

// A cap of 1e-6 beside a sink: dQ is far below the bound of its truth (docs/numerics-truth.md). Neither zeros nor numbers of
// the bound's size are right or wrong; a kernel that is far beyond it is wrong, whatever the truth is.
TEST(Check, WhatTheTruthDoesNotResolveIsNeitherRightNorWrong) {
    const testing::MadeShape capped{.n = 24, .d = 8, .extras = [](LayerCapture& layer) {
                                        layer.softcap = 1e-6;
                                        layer.sink = {0.5};
                                    }};
    Capture capture = made_capture({{"mine", plan("fa2")}}, capped);
    const auto checked = [&] { return check(capture, plan("fa2"), quick()); };
    Check found = checked();
    const OutputCheck& dq = output_of(found, Output::dq);
    ASSERT_FALSE(truth_is_resolved(dq)) << dq.truth_bound.to_string() << " of " << dq.truth_norm.to_string();
    EXPECT_EQ(dq.verdict, Verdict::unresolved) << table(found, true);
    EXPECT_GT(dq.undecided, 0u);
    EXPECT_EQ(output_of(found, Output::dv).verdict, Verdict::within_rounding) << table(found, true);
    EXPECT_TRUE(truth_is_resolved(output_of(found, Output::dv)));
    EXPECT_EQ(found.verdict(), Verdict::unresolved);
    EXPECT_THAT(table(found),
                ::testing::AllOf(HasSubstr("verdict: not resolved"), HasSubstr("only known to be within")));
    EXPECT_THAT(to_json(found),
                ::testing::AllOf(HasSubstr("\"verdict\": \"unresolved\""), HasSubstr("\"truth_resolved\": false")));
    EXPECT_THAT(to_junit(found),
                ::testing::AllOf(HasSubstr("failures=\"0\" errors=\"1\""), HasSubstr("<error type=\"unresolved\"")));
    std::fill(output_of(capture, Output::dq).values.begin(), output_of(capture, Output::dq).values.end(), 1.0);
    found = checked();
    EXPECT_EQ(output_of(found, Output::dq).verdict, Verdict::wrong) << table(found, true);
}

TEST(Check, NamesTheKernelsThatThereAre) {
    const Capture two = made_capture({{"mine", plan("fa2")}, {"yours", plan("fa2")}}, {.n = 8, .d = 8});
    for (const char* kernel : {"", "mein"}) {
        CheckOptions options = quick();
        options.kernel = kernel;
        try {
            (void)check(two, plan("fa2"), options);
            FAIL() << kernel;
        } catch (const RequestError& error) {
            EXPECT_THAT(error.what(), ::testing::AllOf(HasSubstr("mine"), HasSubstr("yours")));
        }
    }
}

}  // namespace
}  // namespace faultline
