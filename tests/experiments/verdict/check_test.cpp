// SPDX-License-Identifier: Apache-2.0
// Verdicts on kernels whose fault is known: none, a bias, a mistake. docs/results/check.md measures the rates; here are the
// ends of the range.
#include <algorithm>
#include <cmath>
#include <numbers>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <faultline/base/error.hpp>
#include <faultline/generation/family.hpp>
#include <faultline/plan/presets.hpp>
#include <faultline/verdict/report.hpp>

#include "made_captures.hpp"

namespace faultline {
namespace {

using ::testing::HasSubstr;
using testing::made_capture;

const testing::MadeShape shape{.heads = 2, .kv_heads = 1, .n = 96, .d = 32};

CheckOptions quick() {
    CheckOptions options;
    options.runs = 16;
    return options;
}

HeadArray& output_of(Capture& capture, Output output) {
    return *capture.layers[0].observed[0].outputs[static_cast<std::size_t>(output)];
}

const OutputCheck& output_of(const Check& check, Output output) {
    for (const OutputCheck& o : check.layers.at(0).outputs)
        if (o.output == output) return o;
    throw std::logic_error("not checked");
}

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
    EXPECT_THAT(to_junit(found), HasSubstr("1 element is not finite"));
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

/// The lse that a plan returns for the layer, as fp32.
void add_lse(LayerCapture& layer, const RoundingPlan& plan) {
    HeadArray lse{1, layer.heads(), layer.q.rows, 1, {}, Dtype::f32};
    for (const attribution::Group& group : attribution::groups_of(layer, {}, 0))
        for (const Matrix& head :
             attribution::run_plan(group, for_head_dim(plan, static_cast<int>(layer.head_dim()), true)).lse)
            lse.values.insert(lse.values.end(), head.values.begin(), head.values.end());
    layer.observed[0].lse = std::move(lse);
}

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

TEST(Check, OnTheHealthyCapturesEveryKernelIsWithinItsRounding) {
    const std::filesystem::path file = testing::captures_folder() / "healthy64-3000.safetensors";
    if (!std::filesystem::exists(file)) GTEST_SKIP() << file << " is not here (FAULTLINE_CAPTURES names its folder)";
    const Capture capture = read_capture(file.string());
    const std::vector<std::pair<std::string, std::string>> kernels{
        {"flash", "fa2-unfused-splitkv"}, {"cudnn", "cudnn-like"}, {"efficient", "efficient"}, {"math", "math"}};
    for (const auto& [kernel, name] : kernels) {
        CheckOptions options = quick();
        options.kernel = kernel;
        options.heads = {0, 1};
        const Check found = check(capture, plan(name), options);
        EXPECT_EQ(found.verdict(), Verdict::within_rounding) << table(found, true);
    }
}

// Two layers that collapsed, most of whose rows are saturated: no kernel of PyTorch's is wrong by its own plan there.
TEST(Check, OnCollapsedLayersNoKernelIsWrongByItsPlan) {
    struct Row {
        const char *file, *layer, *kernel;
    };
    for (const Row& row : {Row{"biased64-1500", "layer3", "math"}, Row{"biased128-600", "layer1", "efficient"}}) {
        const std::filesystem::path file = testing::captures_folder() / fmt::format("{}.safetensors", row.file);
        if (!std::filesystem::exists(file))
            GTEST_SKIP() << file << " is not here (FAULTLINE_CAPTURES names its folder)";
        Capture capture = read_capture(file.string());
        std::erase_if(capture.layers, [&](const LayerCapture& l) { return l.name != row.layer; });
        CheckOptions options = quick();
        options.kernel = row.kernel;
        options.outputs = {Output::dq};
        options.heads = {1};
        const Check found = check(capture, plan(row.kernel), options);
        EXPECT_NE(found.verdict(), Verdict::wrong) << table(found, true);
    }
}

}  // namespace
}  // namespace faultline
