// SPDX-License-Identifier: Apache-2.0
// attention_truth against the judge, every element: shapes, masks, formats, saturation, cancellation.
#include <cmath>
#include <limits>
#include <string>

#include <gtest/gtest.h>

#include <faultline/base/error.hpp>

#include "compare.hpp"
#include "problems.hpp"

namespace faultline {
namespace {

using test::Generator;
using test::OwnedProblem;
using test::Shape;

GroupTruth expect_truth(const TruthProblem& problem, const std::string& name, int bits = 320) {
    SCOPED_TRACE(name);
    TruthOptions options;
    options.keep_matrices = true;
    GroupTruth truth = attention_truth(problem, options);
    const GroupTruth judge = attention_truth_mpfr(problem, bits);
    test::expect_same(truth, judge);
    test::expect_matrices(truth, judge);
    test::expect_within_bounds(problem, truth, name, bits);
    EXPECT_EQ(truth.undecided_elements, 0U);
    return truth;
}

TEST(Truth, RandomHeadsOfEveryShape) {
    std::uint64_t seed = 1;
    for (const std::ptrdiff_t d : {1, 8, 64, 96, 128})
        for (const bool causal : {false, true})
            for (const auto& [n_q, n_k] : {std::pair{1, 1}, std::pair{17, 17}, std::pair{5, 30}, std::pair{30, 5}}) {
                Shape shape{.n_q = n_q, .n_k = n_k, .d = d, .d_v = d, .causal = causal};
                shape.heads = 1 + seed % 3;
                const auto owned = test::random_problem(shape, ++seed);
                expect_truth(owned.problem, "d " + std::to_string(d) + " n_q " + std::to_string(n_q) + " n_k " +
                                                std::to_string(n_k) + (causal ? " causal" : ""));
            }
}

TEST(Truth, EveryInputFormat) {
    for (const int significand : {4, test::fp16_bits, test::fp32_bits, test::double_bits}) {
        const Shape shape{.n_q = 24, .n_k = 24, .d = 16, .d_v = 12, .heads = 2, .significand = significand};
        const auto owned = test::random_problem(shape, 5);
        const GroupTruth truth = expect_truth(owned.problem, std::to_string(significand) + " bits");
        EXPECT_EQ(truth.slow_elements, 0U) << "the fast path is for these";
    }
}

TEST(Truth, SaturatedRowsKeepTheirGradients) {
    // logits of standard deviation `gap` nats: most rows have all mass on one key and a gradient of e^-gap
    for (const double gap : {1e2, 1e3, 1e4, 1e5, 1e6}) {
        for (const bool causal : {true, false}) {
            Shape shape{.n_q = 20, .n_k = 20, .d = 8, .d_v = 8, .causal = causal};
            shape.q_size = shape.k_size = std::sqrt(gap);
            const auto owned = test::random_problem(shape, 21);
            const GroupTruth truth = expect_truth(owned.problem, "gap " + std::to_string(gap));
            EXPECT_EQ(truth.slow_elements, 0U);
            EXPECT_TRUE(gap < 1e4 || truth.heads[0].dq.wide()) << "the problem is not what it was meant to be";
        }
    }
}

TEST(Truth, Fp32InputsWithWideExponents) {
    for (const auto& [low, high] : {std::pair{-6, 3}, std::pair{-30, 3}, std::pair{-149, -10}, std::pair{-60, 30}}) {
        Generator g(31);
        OwnedProblem owned;
        owned.problem.q = {owned.keep(g.wide_matrix(12, 8, low, high, test::fp32_bits))};
        owned.problem.k = owned.keep(g.wide_matrix(12, 8, low, std::min(high, 3), test::fp32_bits));
        owned.problem.v = owned.keep(g.wide_matrix(12, 8, low, high, test::fp32_bits));
        owned.problem.dout = {owned.keep(g.wide_matrix(12, 8, low, high, test::fp32_bits))};
        owned.problem.causal = true;
        expect_truth(owned.problem, std::to_string(low) + " to " + std::to_string(high), 700);
    }
}

TEST(Truth, InputsBeyondTheFastPathsRange) {
    Generator g(32);
    OwnedProblem owned;
    owned.problem.q = {owned.keep(g.wide_matrix(4, 3, -700, 10, test::double_bits))};
    owned.problem.k = owned.keep(g.wide_matrix(5, 3, -300, 5, test::double_bits));
    owned.problem.v = owned.keep(g.wide_matrix(5, 2, -400, 400, test::double_bits));
    owned.problem.dout = {owned.keep(g.wide_matrix(4, 2, -1020, -900, test::double_bits))};
    const GroupTruth truth = expect_truth(owned.problem, "double's whole range", 3000);
    EXPECT_EQ(truth.slow_elements, truth.elements);
}

/// Additive masks: some keys hidden from some queries.
Matrix mask(std::ptrdiff_t n_q, std::ptrdiff_t n_k, double hidden, double ordinary_size, Generator& g) {
    Matrix m(n_q, n_k);
    for (double& x : m.values) x = g.uniform() < 0.3 ? hidden : test::keep_bits(ordinary_size * g.normal(), 11);
    return m;
}

TEST(Truth, AdditiveMasks) {
    constexpr double fp32_lowest = -3.4028234663852886e38;
    constexpr double bf16_lowest = -3.3895313892515355e38;
    for (const double hidden :
         {-std::numeric_limits<double>::infinity(), fp32_lowest, bf16_lowest, -1e9, -1e4, -1e12, -5.0})
        for (const bool causal : {false, true}) {
            const Shape shape{.n_q = 14, .n_k = 18, .heads = 2, .causal = causal};
            auto owned = test::random_problem(shape, 41);
            Generator g(42);
            owned.problem.bias = {owned.keep(mask(14, 18, hidden, 0, g)), owned.keep(mask(14, 18, hidden, 2, g))};
            expect_truth(owned.problem, "mask " + std::to_string(hidden), 400);
            owned.problem.bias.pop_back();
            expect_truth(owned.problem, "one mask for both heads " + std::to_string(hidden), 400);
        }
}

TEST(Truth, CausalMaskOfLowestIsTheCausalMask) {
    constexpr double lowest = -3.4028234663852886e38;
    auto owned = test::random_problem(Shape{.n_q = 12, .n_k = 12}, 43);
    const GroupTruth causal = attention_truth(owned.problem);
    Matrix bias(12, 12);
    for (std::ptrdiff_t i = 0; i < 12; ++i)
        for (std::ptrdiff_t j = i + 1; j < 12; ++j) bias(i, j) = lowest;
    owned.problem.causal = false;
    owned.problem.bias = {owned.keep(bias)};
    const GroupTruth masked = attention_truth(owned.problem);
    EXPECT_EQ(masked.slow_elements, 0U);
    EXPECT_EQ(masked.heads[0].o.value, causal.heads[0].o.value);
    EXPECT_EQ(masked.heads[0].dq.value, causal.heads[0].dq.value);
    EXPECT_EQ(masked.dk.value, causal.dk.value);
    EXPECT_EQ(masked.dv.value, causal.dv.value);
    EXPECT_EQ(masked.heads[0].dq.bound[0], std::numeric_limits<double>::denorm_min());
}

TEST(Truth, RowsWithoutKeys) {
    auto owned = test::random_problem(Shape{.n_q = 9, .n_k = 9, .causal = false}, 44);
    Matrix bias(9, 9);
    for (std::ptrdiff_t j = 0; j < 9; ++j) bias(3, j) = -INFINITY;
    for (std::ptrdiff_t i = 0; i < 9; ++i) bias(i, 5) = -INFINITY;
    owned.problem.bias = {owned.keep(bias)};
    const GroupTruth truth = expect_truth(owned.problem, "row 3 and key 5 masked");
    EXPECT_EQ(truth.heads[0].lse(3, 0), -INFINITY);
    for (std::ptrdiff_t c = 0; c < 8; ++c) {
        EXPECT_EQ(truth.heads[0].o(3, c), 0);
        EXPECT_EQ(truth.heads[0].dq(3, c), 0);
        EXPECT_EQ(truth.dk(5, c), 0);
        EXPECT_EQ(truth.dv(5, c), 0);
        EXPECT_EQ(truth.dv.bound[truth.dv.index(5, c)], 0);
    }
    const auto more_queries = test::random_problem(Shape{.n_q = 9, .n_k = 4, .causal = true}, 45);
    EXPECT_EQ(expect_truth(more_queries.problem, "queries before all keys").heads[0].lse(4, 0), -INFINITY);
}

TEST(Truth, ProblemsWithAnExactAnswer) {
    // one key: o = v, dq = dk = 0, dv = dout, lse = s
    auto one = test::random_problem(Shape{.n_q = 1, .n_k = 1, .d = 4, .d_v = 4}, 46);
    one.problem.scale = Scale::exactly(0.5);
    const GroupTruth truth = expect_truth(one.problem, "one key");
    for (std::ptrdiff_t c = 0; c < 4; ++c) {
        EXPECT_EQ(truth.heads[0].o(0, c), one.problem.v(0, c));
        EXPECT_EQ(truth.dv(0, c), one.problem.dout[0](0, c));
        EXPECT_EQ(truth.heads[0].dq(0, c), 0);
        EXPECT_EQ(truth.heads[0].dq.bound[truth.heads[0].dq.index(0, c)], 0);
        EXPECT_EQ(truth.dk(0, c), 0);
    }
    // two equal keys: o = (v_0 + v_1)/2, which is a tie between doubles when they lie 53 binades apart
    OwnedProblem two;
    two.problem.q = {two.keep(test::Generator(1).matrix(1, 2, 1, 8))};
    two.problem.k = two.keep(Matrix(2, 2, 1.0));
    Matrix v(2, 3);
    v(0, 0) = 1;
    v(1, 0) = 3;
    v(0, 1) = 1;
    v(1, 1) = 0x1p-53;
    v(0, 2) = 1 + 0x1p-52;
    v(1, 2) = 0x1p-53;
    two.problem.v = two.keep(v);
    two.problem.dout = {two.keep(Matrix(1, 3, 1.0))};
    const GroupTruth halves = attention_truth(two.problem);
    EXPECT_EQ(halves.heads[0].o(0, 0), 2.0);
    EXPECT_EQ(halves.heads[0].o(0, 1), 0.5);            // tie, to even
    EXPECT_EQ(halves.heads[0].o(0, 2), 0.5 + 0x1p-52);  // tie, to even
    EXPECT_EQ(halves.undecided_elements, 0U) << "interval arithmetic is exact here and must see it";
    EXPECT_GT(halves.slow_elements, 0U);
}

TEST(Truth, AllLogitsEqual) {
    for (const bool causal : {false, true}) {
        auto owned = test::random_problem(Shape{.n_q = 13, .n_k = 13, .causal = causal}, 47);
        owned.problem.k = owned.keep(Matrix(13, 8, 0.75));
        const GroupTruth truth = expect_truth(owned.problem, "equal keys");
        for (const double x : truth.heads[0].dq.value) EXPECT_EQ(x, 0);  // sum_j ds_j = 0
        for (const double x : truth.heads[0].dq.bound) EXPECT_EQ(x, 0);
        EXPECT_EQ(truth.slow_elements, 0U);
    }
}

TEST(Truth, HiddenZerosEndUndecidedWithATinyBound) {
    // the second half of the queries repeats the first with dout negated: dk and dv are sums that cancel exactly
    Generator g(48);
    Matrix q = g.matrix(8, 4, 1, 8);
    Matrix dout = g.matrix(8, 4, 1, 8);
    for (std::ptrdiff_t i = 0; i < 4; ++i)
        for (std::ptrdiff_t c = 0; c < 4; ++c) {
            q(i + 4, c) = q(i, c);
            dout(i + 4, c) = -dout(i, c);
        }
    OwnedProblem owned = test::random_problem(Shape{.n_q = 8, .n_k = 6, .d = 4, .d_v = 4, .causal = false}, 49);
    owned.problem.q = {owned.keep(q)};
    owned.problem.dout = {owned.keep(dout)};
    TruthOptions options;
    options.max_bits = 400;
    const GroupTruth truth = attention_truth(owned.problem, options);
    EXPECT_EQ(truth.undecided_elements, truth.dk.size() + truth.dv.size());
    for (const CertifiedMatrix* m : {&truth.dk, &truth.dv})
        for (std::ptrdiff_t j = 0; j < 6; ++j)
            for (std::ptrdiff_t c = 0; c < 4; ++c) {
                EXPECT_EQ((*m)(j, c), 0);
                EXPECT_LE(m->bound_at(j, c), WideReal(1.0, -350));
            }
    test::expect_within_bounds(owned.problem, truth);
}

/// The three generators of FLINT's dot tests: independent terms; the second half of each sum the first half negated; the
/// same, rounded to a random number of bits.
enum class Cancellation { none, exact, near };

OwnedProblem cancelling_problem(Cancellation kind, int significand, std::uint64_t seed) {
    Generator g(seed);
    const auto partner = [&](double x) {
        if (kind == Cancellation::none) return test::keep_bits(g.normal(), significand);
        if (kind == Cancellation::exact) return -x;
        return -test::keep_bits(x, 1 + static_cast<int>(g.bits() % static_cast<unsigned>(significand)));
    };
    constexpr std::ptrdiff_t n = 10, half = 6;
    OwnedProblem owned;
    Matrix left[2], right[2];
    for (int side = 0; side < 2; ++side) {
        left[side] = g.matrix(n, 2 * half, 1, significand);
        right[side] = g.matrix(n, 2 * half, 1, significand);
        for (std::ptrdiff_t i = 0; i < n; ++i)
            for (std::ptrdiff_t c = 0; c < half; ++c) {
                left[side](i, half + c) = left[side](i, c);
                right[side](i, half + c) = partner(right[side](i, c));
            }
    }
    owned.problem.q = {owned.keep(left[0])};
    owned.problem.k = owned.keep(right[0]);
    owned.problem.dout = {owned.keep(left[1])};
    owned.problem.v = owned.keep(right[1]);
    return owned;
}

TEST(Truth, CancellationInTheDotProducts) {
    for (const int significand : {test::bf16_bits, test::fp32_bits, test::double_bits})
        for (const Cancellation kind : {Cancellation::none, Cancellation::exact, Cancellation::near}) {
            const auto owned = cancelling_problem(kind, significand, 51);
            const GroupTruth truth = expect_truth(owned.problem, "kind " + std::to_string(static_cast<int>(kind)) +
                                                                     ", " + std::to_string(significand) + " bits");
            if (kind != Cancellation::exact) continue;
            for (const double x : truth.heads[0].delta.value) EXPECT_EQ(x, 0);
        }
}

TEST(Truth, NearCancellationAcrossQueries) {
    // dk and dv lose as many leading bits as the rounding of dout leaves equal
    Generator g(52);
    Matrix q = g.matrix(8, 4, 1, 8);
    Matrix dout = g.matrix(8, 4, 1, test::double_bits);
    for (std::ptrdiff_t i = 0; i < 4; ++i)
        for (std::ptrdiff_t c = 0; c < 4; ++c) {
            q(i + 4, c) = q(i, c);
            dout(i + 4, c) = -test::keep_bits(dout(i, c), 10 * static_cast<int>(i) + 20);
        }
    OwnedProblem owned = test::random_problem(Shape{.n_q = 8, .n_k = 6, .d = 4, .d_v = 4, .causal = false}, 53);
    owned.problem.q = {owned.keep(q)};
    owned.problem.dout = {owned.keep(dout)};
    expect_truth(owned.problem, "near cancellation across queries");
}

TEST(Truth, ScalesOfTheUser) {
    for (const double scale : {0.0, -0.3, 1.0, 1e-3, 0.08838834764831845}) {
        auto owned = test::random_problem(Shape{.n_q = 11, .n_k = 11}, 54);
        owned.problem.scale = Scale::exactly(scale);
        expect_truth(owned.problem, "scale " + std::to_string(scale));
    }
}

TEST(Truth, RowsOfDsSumToZeroWithinTheirBounds) {
    TruthOptions options;
    options.keep_matrices = true;
    for (const double size : {1.0, 30.0, 1000.0}) {
        const auto owned = test::random_problem(Shape{.n_q = 40, .n_k = 40, .d = 16, .d_v = 16, .q_size = size}, 55);
        const GroupTruth truth = attention_truth(owned.problem, options);
        for (std::ptrdiff_t i = 0; i < 40; ++i) {
            WideReal sum, bound;
            for (std::ptrdiff_t j = 0; j < 40; ++j) {
                const WideReal ds = truth.heads[0].ds.at(i, j);
                sum = sum + ds;
                // and the rounding of the addition itself
                bound = bound + truth.heads[0].ds.bound_at(i, j) + abs(sum) * WideReal(1.0, -53);
            }
            EXPECT_LE(abs(sum), bound * WideReal(1 + 0x1p-40)) << "row " << i << " size " << size;
        }
    }
}

TEST(Truth, WithoutCorrectRoundingBoundsStillHold) {
    TruthOptions options;
    options.correctly_rounded = false;
    for (const auto kind : {Cancellation::none, Cancellation::exact, Cancellation::near}) {
        const auto owned = cancelling_problem(kind, test::double_bits, 56);
        const GroupTruth truth = attention_truth(owned.problem, options);
        EXPECT_EQ(truth.slow_elements, 0U);
        test::expect_within_bounds(owned.problem, truth);
    }
}

TEST(Truth, BadRequests) {
    const auto message = [](const TruthProblem& problem) -> std::string {
        try {
            (void)attention_truth(problem);
        } catch (const RequestError& e) {
            return e.what();
        }
        return "accepted";
    };
    auto owned = test::random_problem(Shape{.n_q = 3, .n_k = 3, .d = 2, .d_v = 2}, 58);
    TruthProblem p = owned.problem;
    p.v = MatrixView<const double>(p.v.data, 2, 2);
    EXPECT_EQ(message(p), "attention truth: v: shape [2, 2] where [3, 2] was expected");
    p = owned.problem;
    p.q.clear();
    EXPECT_NE(message(p).find("no query head"), std::string::npos);
    p = owned.problem;
    Matrix bad(3, 2, 1.0);
    bad(2, 1) = NAN;
    p.k = owned.keep(bad);
    EXPECT_EQ(message(p), "attention truth: k[2, 1] is NaN: finite values expected");
    p = owned.problem;
    p.bias = {owned.keep(Matrix(3, 3, INFINITY))};
    EXPECT_EQ(message(p), "attention truth: bias 0[0, 0] is +inf: finite values or -inf expected");
    p = owned.problem;
    p.scale = Scale::exactly(NAN);
    EXPECT_NE(message(p).find("scale"), std::string::npos);
    // nothing to attend to is not an error
    p = owned.problem;
    p.k = MatrixView<const double>(p.k.data, 0, 2);
    p.v = MatrixView<const double>(p.v.data, 0, 2);
    EXPECT_EQ(attention_truth(p).heads[0].lse(0, 0), -INFINITY);
}

}  // namespace
}  // namespace faultline
