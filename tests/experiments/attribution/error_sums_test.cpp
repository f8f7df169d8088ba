// SPDX-License-Identifier: Apache-2.0
// The statistics of an error: rows of known means, and what is undefined.
#include <cmath>

#include <gtest/gtest.h>

#include <faultline/attribution/error_sums.hpp>
#include <faultline/tensor/matrix.hpp>

namespace faultline {
namespace {

/// Errors against a truth of zeros, so that they are what they are.
ErrorSums of_errors(std::ptrdiff_t rows, std::ptrdiff_t cols, const std::vector<double>& errors) {
    Matrix value(rows, cols);
    value.values = errors;
    return {value.view(), CertifiedMatrix(rows, cols), nullptr};
}

TEST(TStatistic, IsTheMeanOverItsStandardError) {
    // Row means 1, 2, 6: mean 3, variance (4 + 1 + 9) / 2 = 7.
    EXPECT_DOUBLE_EQ(of_errors(3, 2, {0, 2, 1, 3, 6, 6}).measure().t_statistic, 3 / std::sqrt(7.0 / 3));
}

TEST(TStatistic, IsUndefinedWithoutScatter) {
    EXPECT_TRUE(std::isnan(of_errors(1, 2, {1, 2}).measure().t_statistic)) << "a single row";
    EXPECT_TRUE(std::isnan(of_errors(3, 1, {0.1, 0.1, 0.1}).measure().t_statistic)) << "a constant shift";
    EXPECT_TRUE(std::isnan(of_errors(2, 1, {0, 0}).measure().t_statistic)) << "no error";
    ErrorSums two = of_errors(3, 1, {0.1, 0.1, 0.1});
    two.join(of_errors(2, 1, {0.1, 0.1}));
    EXPECT_TRUE(std::isnan(two.measure().t_statistic)) << "a constant shift over two heads";
    EXPECT_TRUE(std::isnan(ErrorMeasure{}.t_statistic));
}

// Means of 1 + k 2^-40: their squares differ from 1 by less than an x87 sum of squares keeps beyond 64 bits of the variance.
TEST(TStatistic, KeepsAScatterFarBelowTheMean) {
    const double step = 0x1p-40;
    const ErrorSums sums = of_errors(3, 1, {1 - step, 1, 1 + step});
    const double expected = 1 / std::sqrt(step * step / 3);  // variance step^2
    constexpr double arithmetic = 8 * 0x1p-53;               // a handful of roundings to 53 bits
    EXPECT_NEAR(sums.measure().t_statistic / expected, 1, arithmetic);
    ErrorSums joined = of_errors(1, 1, {1 - step});
    joined.join(of_errors(2, 1, {1, 1 + step}));
    EXPECT_NEAR(joined.measure().t_statistic / expected, 1, arithmetic);
}

// Heads in any order are the same samples; a head whose rows are all without a finite element adds none.
TEST(TStatistic, OfHeadsJoinedIsThatOfTheirRows) {
    ErrorSums joined = of_errors(1, 1, {1});
    joined.join(of_errors(2, 1, {2, 6}));
    joined.join(of_errors(1, 1, {std::nan("")}));
    EXPECT_DOUBLE_EQ(joined.measure().t_statistic, 3 / std::sqrt(7.0 / 3));
    EXPECT_EQ(joined.measure().nonfinite, 1u);
}

TEST(Coherence, OfRowsIsUndefinedWhereTheyAreKeys) {
    ErrorSums sums = of_errors(3, 2, {0, 2, 1, 3, 6, 6});
    EXPECT_DOUBLE_EQ(sums.measure().row_coherence, 1);
    sums.rows_are_keys();
    ErrorSums joined = of_errors(1, 1, {1});
    joined.join(sums);
    for (const ErrorMeasure& m : {sums.measure(), joined.measure()}) {
        EXPECT_TRUE(std::isnan(m.t_statistic));
        EXPECT_TRUE(std::isnan(m.row_coherence));
        EXPECT_GT(m.signed_bias, 0);
    }
}

TEST(Coherence, OfHeadsNeedsTwo) {
    ErrorSums sums = of_errors(1, 2, {1, 2});
    EXPECT_TRUE(std::isnan(sums.measure().head_coherence));
    sums.join(of_errors(1, 1, {std::nan("")}));
    EXPECT_TRUE(std::isnan(sums.measure().head_coherence)) << "a head without a finite element";
    sums.join(of_errors(1, 1, {-0.5}));
    EXPECT_DOUBLE_EQ(sums.measure().head_coherence, 0.5);  // |1.5 - 0.5| / (1.5 + 0.5)
}

}  // namespace
}  // namespace faultline
