// SPDX-License-Identifier: Apache-2.0
// Every law on a matrix: the signs it promises, realised against asked, determinism, and that nothing means nothing.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include <faultline/format/format.hpp>
#include <faultline/injectors/apply.hpp>
#include <faultline/random/random_stream.hpp>

#include "../kernels/cpu/heads.hpp"

namespace faultline::testing {
namespace {

constexpr std::ptrdiff_t rows = 64, cols = 48;

Matrix values() { return random_matrix(rows, cols, 3.0, 5); }
double rms(const Matrix& m) {
    double squares = 0;
    for (const double x : m.values) squares += x * x;
    return std::sqrt(squares / static_cast<double>(m.values.size()));
}
Matrix changed(const Fault& fault, const FaultPlace& place, Format format, Realised* found = nullptr,
               Matrix start = values()) {
    const Realised r = apply_fault(fault, place, format, start.view());
    if (found != nullptr) *found = r;
    return start;
}
Matrix error(const Fault& fault, const FaultPlace& place, Format format = exact) {
    const Matrix before = values();
    Matrix after = changed(fault, place, format);
    for (std::size_t i = 0; i < after.values.size(); ++i) after.values[i] -= before.values[i];
    return after;
}
double sign(double x) { return (x > 0) - (x < 0); }

// x + a in binary64 is off by half an ulp of x + a, and so is the difference that is formed to see a.
constexpr double additive_tolerance(double x, double a) {
    return 2 * unit_roundoff(binary64) * ((x < 0 ? -x : x) + (a < 0 ? -a : a));
}

TEST(Laws, AmplitudeIsTheMagnitudeTimesTheRms) {
    const Matrix x = values();
    const double a = 0.25 * rms(x);
    for (const LawInfo& law : laws()) {
        if (law.law == Law::multiplicative) continue;
        const Matrix e = error({.law = law.law, .period = 3, .magnitude = 0.25}, {});
        for (std::size_t i = 0; i < e.values.size(); ++i)
            EXPECT_NEAR(std::abs(e.values[i]), a, additive_tolerance(x.values[i], a)) << law.name << " " << i;
    }
}

TEST(Laws, FixedKeepsItsSignInEveryStepAndPlace) {
    for (const std::int64_t step : {0, 1, 77})
        for (const double x :
             error({.law = Law::fixed, .magnitude = -0.1}, {.step = step, .layer = 2, .head = 1}).values)
            EXPECT_LT(x, 0);
}

TEST(Laws, PerHeadBalancesPairsAndPersists) {
    for (int layer = 0; layer < 4; ++layer)
        for (int head = 0; head < 6; head += 2) {
            const auto first = [&](int h, std::int64_t step) {
                return sign(error({.law = Law::per_head, .magnitude = 0.1, .seed = 3},
                                  {.step = step, .layer = layer, .head = h, .tile = static_cast<std::uint64_t>(step)})
                                .values[0]);
            };
            EXPECT_EQ(first(head, 0), -first(head + 1, 0));
            EXPECT_EQ(first(head, 0), first(head, 19));
        }
}

TEST(Laws, PerHeadOnColumnsIsBlocksOfColumns) {
    const Matrix e = error({.law = Law::per_head, .magnitude = 0.1}, {.heads = 4});
    for (std::ptrdiff_t i = 0; i < rows; ++i)
        for (std::ptrdiff_t j = 0; j < cols; ++j) EXPECT_EQ(sign(e.view()(i, j)), sign(e.view()(0, j / 12 * 12)));
    EXPECT_EQ(sign(e.view()(0, 0)), -sign(e.view()(0, 12)));
    EXPECT_EQ(sign(e.view()(0, 24)), -sign(e.view()(0, 36)));
}

TEST(Laws, PerColumnIsOnePersistentDirectionWithoutAMean) {
    const Fault fault{.law = Law::per_column, .magnitude = 0.1};
    const Matrix e = error(fault, {});
    const Matrix later = error(fault, {.step = 40, .batch = 3, .tile = 9});
    int positive = 0;
    for (std::ptrdiff_t j = 0; j < cols; ++j) {
        positive += e.view()(0, j) > 0;
        for (std::ptrdiff_t i = 0; i < rows; ++i) {
            EXPECT_EQ(sign(e.view()(i, j)), sign(e.view()(0, j)));
            EXPECT_EQ(sign(later.view()(i, j)), sign(e.view()(0, j)));
        }
    }
    EXPECT_NEAR(positive, cols / 2, 4 * std::sqrt(cols) / 2);  // 4 standard deviations of a fair coin
}

TEST(Laws, RandomIsAFairCoinForEachElementAndStep) {
    const Fault fault{.law = Law::random, .magnitude = 0.1};
    const Matrix e = error(fault, {}), next = error(fault, {.step = 1}), tile = error(fault, {.tile = 1});
    double sum = 0, with_next = 0, with_tile = 0, neighbours = 0;
    for (std::size_t i = 0; i < e.values.size(); ++i) {
        sum += sign(e.values[i]);
        with_next += sign(e.values[i]) * sign(next.values[i]);
        with_tile += sign(e.values[i]) * sign(tile.values[i]);
        if (i > 0) neighbours += sign(e.values[i]) * sign(e.values[i - 1]);
    }
    const double four_sigma = 4 * std::sqrt(static_cast<double>(e.values.size()));
    for (const double s : {sum, with_next, with_tile, neighbours}) EXPECT_LE(std::abs(s), four_sigma);
}

TEST(Laws, RandomStepIsCommonToAHeadAndFairOverSteps) {
    const Fault fault{.law = Law::random_step, .magnitude = 0.1};
    constexpr int steps = 400;
    StepCoherence coherence(2);
    double product = 0;
    for (int step = 0; step < steps; ++step) {
        std::vector<double> means;
        for (int head = 0; head < 2; ++head) {
            Realised found;
            (void)changed(fault, {.step = step, .head = head, .tile = 4}, exact, &found);
            EXPECT_NEAR(found.sign_coherence(), 1.0, 1e-15);
            means.push_back(found.mean());
        }
        product += sign(means[0]) * sign(means[1]);
        coherence.add(means);
    }
    // Mean of n fair signs: standard deviation 1/sqrt(n).
    EXPECT_LE(coherence.of_signs(0), 4 / std::sqrt(steps));
    EXPECT_LE(coherence.of_signs(1), 4 / std::sqrt(steps));
    EXPECT_LE(std::abs(product), 4 * std::sqrt(steps));
}

TEST(Laws, FlipReversesEveryPeriod) {
    const Fault fault{.law = Law::flip, .period = 3, .magnitude = 0.1};
    for (std::int64_t step = 0; step < 12; ++step)
        EXPECT_EQ(sign(error(fault, {.step = step}).values[0]), step / 3 % 2 == 0 ? 1 : -1);
}

TEST(Laws, OperandPointsAwayFromZero) {
    const Matrix x = values(), e = error({.law = Law::operand, .magnitude = 0.1}, {});
    for (std::size_t i = 0; i < x.values.size(); ++i) EXPECT_EQ(sign(e.values[i]), sign(x.values[i]));
    Matrix zero(1, 1);
    (void)apply_fault({.law = Law::operand, .magnitude = 0.1}, {}, exact, zero.view());
    EXPECT_EQ(zero.values[0], 0.0);
}

TEST(Laws, MultiplicativeIsOnePlusTheMagnitude) {
    const Matrix x = values(), after = changed({.law = Law::multiplicative, .magnitude = 0.1}, {}, exact);
    for (std::size_t i = 0; i < x.values.size(); ++i) EXPECT_EQ(after.values[i], x.values[i] + 0.1 * x.values[i]);
}

// The control of a multiplicative error in time: the same sizes, another sign in each step.
TEST(Laws, ShapeOfTheValueIsMultiplicativeUpToTheSignOfTheStep) {
    const Matrix same = error({.law = Law::multiplicative, .magnitude = 0.1}, {});
    EXPECT_EQ(error({.law = Law::fixed, .magnitude = 0.1, .by_value = true}, {}).values, same.values);
    int flipped = 0;
    for (std::int64_t step = 0; step < 40; ++step) {
        const Matrix e = error({.law = Law::random_step, .magnitude = 0.1, .by_value = true}, {.step = step});
        const double s = sign(e.values[0]) * sign(same.values[0]);
        flipped += s < 0;
        for (std::size_t i = 0; i < e.values.size(); ++i)
            EXPECT_NEAR(e.values[i], s * same.values[i], additive_tolerance(10, 1));
    }
    EXPECT_NEAR(flipped, 20, 4 * std::sqrt(40) / 2);
}

TEST(Laws, UlpsAreThoseOfTheFormatAtTheValue) {
    const Matrix x = values();
    const Matrix after =
        changed({.law = Law::operand, .magnitude = 1, .unit = Fault::Unit::ulps, .hold = Hold::nearest}, {}, bf16);
    for (std::size_t i = 0; i < x.values.size(); ++i)  // away from zero that is the next number of the format
        EXPECT_EQ(after.values[i], x.values[i] + sign(x.values[i]) * ulp(x.values[i], bf16));
}

// Stochastic holding: each change is a floor or a ceiling, off by less than an ulp of the result, and unbiased: the mean of
// n independent errors of at most one ulp u has a standard deviation of at most u / (2 sqrt n).
TEST(Laws, StochasticHoldKeepsTheMeanThatNearestLoses) {
    Matrix x(200, 200, 1.5);  // ulp 2^-7, asked 1.5 * 0.001 = 0.19 ulp
    const Fault asked{.law = Law::fixed, .magnitude = 0.001};
    Matrix held = x;
    const Realised r = apply_fault(asked, {}, bf16, held.view());
    const double u = ulp(1.5, bf16);
    for (const double y : held.values) EXPECT_TRUE(y == 1.5 || y == 1.5 + u) << y;
    EXPECT_NEAR(r.mean(), r.asked_mean(), 4 * u / (2 * std::sqrt(r.count)));
    EXPECT_EQ(r.sign_coherence(), 1.0);
    EXPECT_GT(r.rms(), r.asked_rms());  // what holding adds is on record

    Fault nearest = asked;
    nearest.hold = Hold::nearest;
    const Realised lost = apply_fault(nearest, {}, bf16, x.view());
    EXPECT_EQ(lost.rms(), 0.0);
    EXPECT_NEAR(lost.asked_rms(), 0.0015, 1e-15);
}

// Element by element: |realised - asked| is at most the rounding of the result.
TEST(Laws, RealisedIsAskedWithinTheRoundingOfTheFormat) {
    const Matrix x = values();
    const double size = rms(x);
    for (const LawInfo& law : laws())
        for (const Hold hold : {Hold::exact, Hold::nearest, Hold::stochastic})
            for (const Format format : {bf16, fp32, fp16}) {
                const Fault fault{.law = law.law, .magnitude = 0.3, .hold = hold};
                Realised found;
                const Matrix after = changed(fault, {}, format, &found);
                double squares = 0, sum = 0;
                for (std::size_t i = 0; i < x.values.size(); ++i) {
                    const double e = after.values[i] - x.values[i];
                    const double a = law.law == Law::multiplicative ? std::abs(0.3 * x.values[i]) : 0.3 * size;
                    const double rounding = hold == Hold::exact     ? 0
                                            : hold == Hold::nearest ? ulp(after.values[i], format) / 2
                                                                    : ulp(after.values[i], format);
                    // Rounding can reach the next binade, whose ulp is that of `after`.
                    EXPECT_LE(std::abs(std::abs(e) - a), rounding + additive_tolerance(x.values[i], a)) << law.name;
                    squares += e * e;
                    sum += e;
                }
                const auto n = static_cast<double>(x.values.size());
                EXPECT_EQ(found.count, n);
                // A sum of n terms is off by n u of the sum of their magnitudes, in whatever order; here are two.
                const double tolerance = 2 * n * unit_roundoff(binary64) * std::sqrt(squares / n);
                EXPECT_NEAR(found.rms(), std::sqrt(squares / n), tolerance);
                EXPECT_NEAR(found.mean(), sum / n, tolerance);
                EXPECT_NEAR(found.asked_rms(), 0.3 * size, n * unit_roundoff(binary64) * size);
            }
}

TEST(Laws, ZeroMagnitudeChangesNoBit) {
    Matrix start = values();
    start.values[0] = -0.0;
    start.values[1] = std::nan("");
    start.values[2] = 1.0 / 3.0;  // not a number of the format
    for (const LawInfo& law : laws()) {
        const Matrix after = changed({.law = law.law, .magnitude = 0}, {}, bf16, nullptr, start);
        EXPECT_EQ(std::memcmp(after.values.data(), start.values.data(), start.values.size() * sizeof(double)), 0);
    }
}

TEST(Laws, MaskedAndNonFiniteElementsStay) {
    Matrix start = values();
    const double infinity = std::numeric_limits<double>::infinity();
    start.values[0] = 0;
    start.values[1] = -infinity;
    for (const LawInfo& law : laws()) {
        Realised found;
        const Matrix after =
            changed({.law = law.law, .magnitude = 0.5}, {.visible0 = 2, .skip_zeros = true}, bf16, &found, start);
        EXPECT_EQ(after.values[0], 0.0);
        EXPECT_EQ(after.values[1], -infinity);
        double visible = 0;
        for (std::ptrdiff_t i = 0; i < rows; ++i)
            for (std::ptrdiff_t j = 2; j < cols; ++j) {
                const auto at = static_cast<std::size_t>(i * cols + j);
                EXPECT_EQ(after.values[at] != start.values[at], j < 2 + i) << law.name << i << " " << j;
                visible += j < 2 + i;
            }
        EXPECT_EQ(found.count, visible + 2 * (rows - 1));
    }
}

TEST(Laws, FloatsAreChangedAsDoublesThatHoldThem) {
    Matrix x = values();
    std::vector<float> floats(x.values.begin(), x.values.end());
    for (const LawInfo& law : laws()) {
        const Fault fault{.law = law.law, .magnitude = 0.01};
        std::vector<float> f = floats;
        const Realised in_float = apply_fault(fault, {.step = 3}, bf16, MatrixView<float>(f.data(), rows, cols));
        Realised in_double;
        const Matrix d = changed(fault, {.step = 3}, bf16, &in_double);
        for (std::size_t i = 0; i < f.size(); ++i) EXPECT_EQ(static_cast<double>(f[i]), d.values[i]);
        EXPECT_EQ(in_float, in_double);
    }
}

// A change of any coordinate of the place changes what random laws draw, and nothing else does.
TEST(Laws, PlaceNamesTheNumbers) {
    const FaultPlace base{.step = 5, .layer = 1, .head = 2, .batch = 3, .tile = 4};
    const Fault fault{.law = Law::random, .magnitude = 0.1, .seed = 9};
    const Matrix e = error(fault, base);
    EXPECT_EQ(e.values, error(fault, base).values);
    for (int which = 0; which < 5; ++which) {
        FaultPlace other = base;
        if (which == 0) ++other.step;
        if (which == 1) ++other.layer;
        if (which == 2) ++other.head;
        if (which == 3) ++other.batch;
        if (which == 4) ++other.tile;
        EXPECT_NE(e.values, error(fault, other).values) << which;
    }
    EXPECT_NE(e.values, error({.law = Law::random, .magnitude = 0.1, .seed = 10}, base).values);
    EXPECT_NE(e.values, error({.site = Site::lse, .law = Law::random, .magnitude = 0.1, .seed = 9}, base).values);
}

TEST(StepCoherence, CountsSignsAndSizes) {
    StepCoherence c(2);
    c.add({1, 3});
    c.add({1, -1});
    c.add({-1, -1});
    EXPECT_DOUBLE_EQ(c.of_signs(0), 1.0 / 3);
    EXPECT_DOUBLE_EQ(c.of_signs(1), 1.0 / 3);
    EXPECT_DOUBLE_EQ(c.of_sizes(0), 1.0 / 3);
    EXPECT_DOUBLE_EQ(c.of_sizes(1), 1.0 / 5);
    EXPECT_EQ(StepCoherence(1).of_signs(0), 0.0);
}

}  // namespace
}  // namespace faultline::testing
