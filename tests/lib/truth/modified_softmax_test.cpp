// SPDX-License-Identifier: Apache-2.0
// Softcap, sinks and dropout, each and together, against the judge, over shapes, formats and exponent ranges.
#include <cmath>
#include <string>

#include <gtest/gtest.h>

#include <faultline/base/error.hpp>
#include <faultline/truth/truth.hpp>

#include "compare.hpp"
#include "problems.hpp"

namespace faultline {
namespace {

using test::OwnedProblem;
using test::Shape;

struct Extras {
    double softcap = 0;
    bool sink = false;
    double keep = 1;
};

OwnedProblem problem_with(const Shape& shape, const Extras& extras, std::uint64_t seed) {
    OwnedProblem owned = test::random_problem(shape, seed);
    test::Generator g(seed + 1000);
    TruthProblem& p = owned.problem;
    p.softcap = extras.softcap;
    for (std::size_t h = 0; h < shape.heads && extras.sink; ++h) p.sink.push_back(test::keep_bits(3 * g.normal(), 8));
    p.keep = extras.keep;
    for (std::size_t h = 0; h < shape.heads && extras.keep < 1; ++h) {
        Matrix kept(shape.n_q, shape.n_k);
        for (double& x : kept.values) x = g.uniform() < extras.keep ? 1 : 0;
        p.dropout.push_back(owned.keep(kept));
    }
    return owned;
}

/// Both paths against the judge; returns the truth of the fast one.
GroupTruth judged(const TruthProblem& problem, const std::string& name, int bits = 320) {
    const GroupTruth judge = attention_truth_mpfr(problem, bits);
    const GroupTruth truth = attention_truth(problem, {.keep_matrices = true});
    test::expect_same(truth, judge, name);
    test::expect_matrices(truth, judge);
    test::expect_within_bounds(problem, truth, name, bits);
    test::expect_same(attention_truth(problem, {.fast_path = false}), judge, name + " slow");
    const GroupTruth bounded = attention_truth(problem, {.correctly_rounded = false});
    test::expect_within_bounds(problem, bounded, name + " not rounded", bits);
    return truth;
}

TEST(ModifiedSoftmax, EachAndTogetherOnRandomHeads) {
    int seed = 1;
    for (const double softcap : {0.0, 30.0, 0.7})
        for (const bool sink : {false, true})
            for (const double keep : {1.0, 0.8})
                for (const bool causal : {false, true}) {
                    const Shape shape{.n_q = 9, .n_k = 13, .d = 6, .d_v = 5, .heads = 2, .causal = causal};
                    const std::string name = "cap " + std::to_string(softcap) + (sink ? " sink" : "") + " keep " +
                                             std::to_string(keep) + (causal ? " causal" : "");
                    const OwnedProblem owned = problem_with(shape, {softcap, sink, keep}, seed++);
                    const GroupTruth truth = judged(owned.problem, name);
                    // Nothing but ties and zeros is left for the slow way. One in twenty is what that may cost, and no
                    // bound on an error: the values are judged above.
                    EXPECT_LT(truth.slow_elements, truth.elements / 20) << name;
                }
}

TEST(ModifiedSoftmax, EveryInputFormat) {
    for (const int significand : {test::bf16_bits, test::fp16_bits, test::fp32_bits, test::double_bits})
        judged(
            problem_with({.n_q = 12, .n_k = 12, .heads = 1, .significand = significand}, {20, true, 0.9}, 31).problem,
            std::to_string(significand) + " bits");
}

// Raw logits of 10^2 to 10^6 against a cap of 50: slopes of the cap down to e^-40000, which doubles do not hold.
TEST(ModifiedSoftmax, SlopesOfASaturatedCapKeepTheirDigits) {
    for (const double size : {8.0, 60.0, 600.0}) {
        const Shape shape{.n_q = 8, .n_k = 10, .causal = false, .q_size = size, .k_size = size};
        const OwnedProblem owned = problem_with(shape, {50, true, 1}, 41);
        const GroupTruth truth = judged(owned.problem, "size " + std::to_string(size), 400);
        EXPECT_FALSE(truth.heads[0].o.wide());
        if (size > 100) {
            EXPECT_TRUE(truth.dk.wide()) << "some key has saturated scores alone";
        }
    }
}

// A cap far above the logits leaves saturated rows as they are: p of e^-10000 under a cap, beside a sink.
TEST(ModifiedSoftmax, SaturatedRowsUnderAHighCap) {
    const Shape shape{.n_q = 10, .n_k = 10, .causal = true, .q_size = 80, .k_size = 80};
    for (const Extras& extras :
         {Extras{1e5, false, 1}, Extras{1e5, true, 0.75}, Extras{0, true, 1}, Extras{0, false, 0.5}})
        judged(problem_with(shape, extras, 51).problem, "cap " + std::to_string(extras.softcap), 700);
}

TEST(ModifiedSoftmax, SinksFarAboveAndFarBelowTheScores) {
    for (const double logit : {-2e4, -300.0, 300.0, 2e4}) {
        OwnedProblem owned = problem_with({.n_q = 7, .n_k = 9}, {}, 61);
        owned.problem.sink = {logit};
        const GroupTruth truth = judged(owned.problem, "sink " + std::to_string(logit), 400);
        if (logit == 2e4) {
            EXPECT_TRUE(truth.heads[0].o.wide()) << "o is e^-20000 of the values";
        }
    }
}

// Rows without a key: of the mask, and of causality where there are more queries than keys. With a sink lse is its logit.
TEST(ModifiedSoftmax, RowsWithoutKeysSeeTheSink) {
    for (const double softcap : {0.0, 10.0}) {
        OwnedProblem owned = problem_with({.n_q = 9, .n_k = 5, .causal = true}, {softcap, true, 0.9}, 71);
        const GroupTruth causal = judged(owned.problem, "more queries than keys");
        for (std::ptrdiff_t i = 0; i < 4; ++i) EXPECT_EQ(causal.heads[0].lse(i, 0), owned.problem.sink[0]);
        Matrix bias(9, 5);
        for (std::ptrdiff_t j = 0; j < 5; ++j) bias(7, j) = -INFINITY;
        owned.problem.bias = {owned.keep(bias)};
        owned.problem.causal = false;
        const GroupTruth masked = judged(owned.problem, "a masked row");
        EXPECT_EQ(masked.heads[0].lse(7, 0), owned.problem.sink[0]);
        EXPECT_EQ(masked.heads[0].o(7, 0), 0);
    }
}

// All of a row dropped: o = 0 and dp = 0, so that nothing of it enters dq.
TEST(ModifiedSoftmax, ARowThatIsDroppedAltogether) {
    OwnedProblem owned = problem_with({.n_q = 6, .n_k = 6, .causal = false}, {}, 81);
    Matrix kept(6, 6, 1.0);
    for (std::ptrdiff_t j = 0; j < 6; ++j) kept(2, j) = 0;
    owned.problem.dropout = {owned.keep(kept)};
    owned.problem.keep = 0.5;
    const GroupTruth truth = judged(owned.problem, "dropped row");
    for (std::ptrdiff_t c = 0; c < 8; ++c) {
        EXPECT_EQ(truth.heads[0].o(2, c), 0);
        EXPECT_EQ(truth.heads[0].dq(2, c), 0);
    }
}

TEST(ModifiedSoftmax, BiasIsAddedToTheCappedScore) {
    OwnedProblem owned = problem_with({.n_q = 8, .n_k = 8, .causal = false, .q_size = 40}, {5, true, 0.8}, 91);
    test::Generator g(92);
    owned.problem.bias = {owned.keep(g.matrix(8, 8, 30, 8))};
    const GroupTruth truth = judged(owned.problem, "bias");
    double largest = 0;
    for (std::ptrdiff_t i = 0; i < 8; ++i)
        for (std::ptrdiff_t j = 0; j < 8; ++j)
            largest = std::max(largest, std::abs(truth.heads[0].s(i, j) - owned.problem.bias[0](i, j)));
    EXPECT_LE(largest, 5);
    EXPECT_GT(largest, 4.9);
}

// sum_j ds_j = 0 of the capped scores, of which a sink takes its share.
TEST(ModifiedSoftmax, RowsOfDsSumToMinusTheSinksShare) {
    const OwnedProblem owned = problem_with({.n_q = 16, .n_k = 16}, {4, true, 0.8}, 93);
    const GroupTruth truth = attention_truth(owned.problem, {.keep_matrices = true});
    const HeadTruth& head = truth.heads[0];
    WideReal all, bound;
    for (std::ptrdiff_t i = 0; i < 16; ++i)
        for (std::ptrdiff_t j = 0; j <= i; ++j) {
            all = all + head.ds.at(i, j);
            bound = bound + head.ds.bound_at(i, j) + abs(head.ds.at(i, j)) * WideReal(0x1p-44);
            // The last: the sum's own roundings, up to n (n + 1)/2 = 136 < 2^8 of 2^-53 of the terms.
        }
    EXPECT_LE(abs(all + head.dsink.at(0, 0)), bound + head.dsink.bound_at(0, 0));
    EXPECT_GT(abs(head.dsink.at(0, 0)), bound);
}

TEST(ModifiedSoftmax, BadRequests) {
    const auto refused = [](auto&& change) {
        OwnedProblem owned = problem_with({}, {}, 1);
        change(owned);
        EXPECT_THROW((void)attention_truth(owned.problem), RequestError);
    };
    refused([](OwnedProblem& o) { o.problem.softcap = -1; });
    refused([](OwnedProblem& o) { o.problem.softcap = NAN; });
    refused([](OwnedProblem& o) { o.problem.sink = {1, 2}; });
    refused([](OwnedProblem& o) { o.problem.sink = {INFINITY}; });
    refused([](OwnedProblem& o) { o.problem.keep = 0; });
    refused([](OwnedProblem& o) { o.problem.keep = 1.5; });
    refused([](OwnedProblem& o) { o.problem.dropout = {o.keep(Matrix(16, 16, 0.5))}; });
    refused([](OwnedProblem& o) { o.problem.dropout = {o.keep(Matrix(16, 15, 1))}; });
}

}  // namespace
}  // namespace faultline
