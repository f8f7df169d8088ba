// SPDX-License-Identifier: Apache-2.0
// Tail probabilities against an integral in MPFR, and the cells' bookkeeping against plain sums.
#include <cmath>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <mpfr.h>

#include <faultline/random/random_stream.hpp>
#include <faultline/verdict/cells.hpp>
#include <faultline/verdict/statistics.hpp>
#include <faultline/verdict/student_t.hpp>

namespace faultline::verdict {
namespace {

// One block of rows is the whole head: each thing is tested, and said, once.
TEST(Cells, OneBlockIsTheHead) {
    for (const std::ptrdiff_t block : {12, 13}) {
        const std::vector<Cell> cells = cells_of(12, 3, block, true);
        for (const Cell& cell : cells) EXPECT_NE(cell.extent, Extent::rows) << cell.where();
        Matrix values(12, 3);
        const std::vector<double> sigma(12, 1.0);
        EXPECT_EQ(cell_sums(values.view(), values.view(), values.view(), sigma, block, {0.6, 0, 0.8}).size(),
                  cells.size());
    }
    EXPECT_EQ(cells_of(12, 3, 6, true).size(), cells_of(12, 3, 12, true).size() + 2 * 4);
}

/// P(|T| > t) for an even number of degrees of freedom, in 300 bits: 1 - A(t | n) with the finite sum of Abramowitz and
/// Stegun 26.7.3, A = sin a (1 + cos^2 a / 2 + 1*3/(2*4) cos^4 a + … ), tan a = t / sqrt(n). Nothing of the fraction that
/// is tested is in it.
double log10_p_mpfr(double t, int n) {
    mpfr_t cosine_squared, sine, sum, term, p;
    mpfr_inits2(300, cosine_squared, sine, sum, term, p, nullptr);
    mpfr_set_d(p, t, MPFR_RNDN);
    mpfr_sqr(p, p, MPFR_RNDN);
    mpfr_add_si(sum, p, n, MPFR_RNDN);  // n + t^2
    mpfr_si_div(cosine_squared, n, sum, MPFR_RNDN);
    mpfr_div(sine, p, sum, MPFR_RNDN);
    mpfr_sqrt(sine, sine, MPFR_RNDN);
    mpfr_set_si(term, 1, MPFR_RNDN);
    mpfr_set_si(sum, 1, MPFR_RNDN);
    for (int k = 2; k <= n - 2; k += 2) {
        mpfr_mul_si(term, term, k - 1, MPFR_RNDN);
        mpfr_div_si(term, term, k, MPFR_RNDN);
        mpfr_mul(term, term, cosine_squared, MPFR_RNDN);
        mpfr_add(sum, sum, term, MPFR_RNDN);
    }
    mpfr_mul(sum, sum, sine, MPFR_RNDN);
    mpfr_si_sub(p, 1, sum, MPFR_RNDN);
    mpfr_log10(p, p, MPFR_RNDN);
    const double result = mpfr_get_d(p, MPFR_RNDN);
    mpfr_clears(cosine_squared, sine, sum, term, p, nullptr);
    return result;
}

TEST(StudentT, AgreesWithTheFiniteSumInMpfr) {
    // The documented relative error of the probability, 1e-10, in its logarithm.
    constexpr double tolerance = 1e-10 / 2.302585;
    for (const int n : {2, 8, 32, 64, 1000})
        for (const double t : {1e-3, 0.1, 0.7, 1.0, 2.04, 5.0, 6.3, 12.0, 40.0, 1e3}) {
            const double judge = log10_p_mpfr(t, n);
            if (judge < -80) continue;  // the sum has 300 bits, 90 decimals, to cancel in
            EXPECT_NEAR(log10_two_sided_p(t, n), judge, tolerance * std::max(1.0, std::abs(judge)))
                << t << " with " << n;
        }
}

TEST(StudentT, Ends) {
    EXPECT_EQ(log10_two_sided_p(0, 32), 0);
    EXPECT_EQ(log10_two_sided_p(-3, 32), log10_two_sided_p(3, 32));
    EXPECT_TRUE(std::isinf(log10_two_sided_p(INFINITY, 32)));
    EXPECT_TRUE(std::isnan(log10_two_sided_p(NAN, 32)));
    EXPECT_LT(log10_two_sided_p(1e200, 8), -1500);  // t^2 overflows; p ~ t^-8
}

TEST(Cells, SumsAreThosePlainLoopsGive) {
    const std::ptrdiff_t rows = 10, cols = 3, block = 4;
    Matrix value(rows, cols), truth(rows, cols), bound(rows, cols);
    std::vector<double> sigma;
    const RandomStream stream(5);
    for (std::size_t a = 0; a < value.values.size(); ++a) {
        truth.values[a] = stream.normal(2 * a);
        value.values[a] = truth.values[a] + stream.normal(2 * a + 1);
    }
    for (std::ptrdiff_t i = 0; i < rows; ++i) sigma.push_back(1.0 + 0.25 * static_cast<double>(i));
    const std::vector<double> key{0.6, 0, 0.8};
    const std::vector<Cell> cells = cells_of(rows, cols, block, true);
    const std::vector<double> sums = cell_sums(value.view(), truth.view(), bound.view(), sigma, block, key);
    ASSERT_EQ(cells.size(), sums.size());
    for (std::size_t c = 0; c < cells.size(); ++c) {
        const Cell& cell = cells[c];
        double sum = 0, largest = 0, elements = 0;
        std::vector<double> down(static_cast<std::size_t>(cols), 0.0);
        for (std::ptrdiff_t i = 0; i < rows; ++i)
            for (std::ptrdiff_t j = 0; j < cols; ++j) {
                if (cell.extent == Extent::feature && j != cell.index) continue;
                if (cell.extent == Extent::rows && (i < cell.index || i >= cell.index + cell.rows)) continue;
                const double e = (value(i, j) - truth(i, j)) / sigma[static_cast<std::size_t>(i)];
                down[static_cast<std::size_t>(j)] += e;
                largest = std::max(largest, std::abs(e));
                elements += cell.direction == Direction::mean_key ? (j == 0 ? 1 : 0) : 1;
                if (cell.direction == Direction::shift) sum += e;
                if (cell.direction == Direction::growth) sum += truth(i, j) > 0 ? e : -e;
                if (cell.direction == Direction::mean_key) sum += e * key[static_cast<std::size_t>(j)];
                if (cell.direction == Direction::size) sum += e * e;
            }
        if (cell.direction == Direction::scatter)
            for (const double x : down) sum += x * x;
        if (cell.direction == Direction::element) sum = largest;
        EXPECT_NEAR(sums[c], sum, 1e-13 * (1 + std::abs(sum))) << name(cell.direction) << " " << cell.where();
        EXPECT_EQ(cell.elements, elements) << name(cell.direction) << " " << cell.where();
    }
}

CellNull null_of(Direction direction, const std::vector<double>& sums) {
    NullSums of_runs(direction);
    for (const double sum : sums) of_runs.add(sum);
    return of_runs.null(0, 1);
}

// The textbook's two passes against what is taken up one by one.
TEST(CellNull, IsWhatTwoPassesOverTheSumsGive) {
    const RandomStream stream(3);
    std::vector<double> sums;
    for (std::uint64_t r = 0; r < 100; ++r) sums.push_back(std::exp(3 * stream.normal(r) - 20));
    double mean = 0, squares = 0, plain = 0;
    for (const double x : sums) mean += std::log(x) / 100;
    for (const double x : sums) squares += (std::log(x) - mean) * (std::log(x) - mean), plain += x * x;
    const double rounding = 1e-13;  // of sums of a hundred doubles, relative
    const CellNull size = null_of(Direction::size, sums);
    EXPECT_NEAR(size.center, mean, rounding * std::abs(mean));
    EXPECT_NEAR(size.spread, std::sqrt(squares / 99), rounding * size.spread);
    EXPECT_NEAR(null_of(Direction::shift, sums).spread, std::sqrt(plain / 100), rounding * std::sqrt(plain / 100));
    EXPECT_TRUE(null_of(Direction::size, {0, 0, 0}).exact);
    EXPECT_FALSE(null_of(Direction::size, {0, 0, 1}).exact);
}

// Errors of the kernel and of the runs from a truth, and the same from every point that the bound lets it be at: the
// statistic is in the range.
// What no run makes (fp32 sums in another order) may move the root of a size by its floor for each standard deviation.
TEST(CellNull, ASizeMayBeLargerByWhatTheRunsLeaveOut) {
    const std::vector<double> runs{4.1, 3.9, 4.0, 4.2};
    for (const Direction direction : {Direction::size, Direction::element}) {
        const double power = direction == Direction::size ? 2 : 1, slack = 1.5;
        NullSums sums(direction);
        for (const double x : runs) sums.add(x);
        const CellNull none = sums.null(0, slack), some = sums.null(0.25 * 0.25, slack);
        EXPECT_EQ(none.t(3), some.t(3)) << "a size below the runs' is not helped";
        const double observed = 40, away = std::log(observed) - none.center - none.slack;
        EXPECT_NEAR(none.t(observed) * none.spread * std::sqrt(1.25), away, 1e-12);
        const double t = some.t(observed), middle = std::exp(some.center / power);
        EXPECT_NEAR(t * some.spread * std::sqrt(1.25) + power * std::log1p(t * 0.25 / middle), away, 1e-12);
        EXPECT_LT(t, none.t(observed));

        NullSums exact(direction);
        for (int i = 0; i < 4; ++i) exact.add(0);
        EXPECT_TRUE(std::isinf(exact.null(0, slack).t(1e-9)));
        EXPECT_NEAR(exact.null(0.25 * 0.25, slack).t(std::pow(0.75, power)), 3, 1e-12);
        EXPECT_EQ(exact.null(0.25 * 0.25, slack).t(0), 0);
    }
}

TEST(CellNull, TheRangeHoldsTheStatisticOfEveryTruthWithinTheBound) {
    constexpr std::ptrdiff_t rows = 6, cols = 2, block = 3;
    constexpr std::size_t runs = 12;
    const std::vector<double> sigma{1, 2, 0.5, 1, 1, 3}, key{0.6, 0.8};
    const std::vector<Cell> cells = cells_of(rows, cols, block, true);
    const RandomStream stream(11);
    std::uint64_t at = 0;
    const auto drawn = [&](double size) {
        Matrix m(rows, cols);
        for (double& x : m.values) x = size * stream.normal(at++);
        return m;
    };
    const Matrix kernel = drawn(2);
    std::vector<Matrix> of_runs;
    for (std::size_t r = 0; r < runs; ++r) of_runs.push_back(drawn(1));
    Matrix middle(rows, cols), bound(rows, cols);
    for (std::size_t a = 0; a < bound.values.size(); ++a) {
        middle.values[a] = 1 + 0.5 * static_cast<double>(a);
        bound.values[a] = 0.05 * static_cast<double>(a % 3);  // some are known exactly
    }
    // Errors are drawn; what is compared is the same errors seen from two truths.
    const auto statistics = [&](const Matrix& truth, std::vector<CellNull>& nulls, std::vector<double>& observed) {
        std::vector<NullSums> sums;
        for (const Cell& cell : cells) sums.emplace_back(cell.direction);
        const auto of = [&](const Matrix& error) {
            Matrix value = middle;
            for (std::size_t a = 0; a < value.values.size(); ++a) value.values[a] += error.values[a];
            return cell_sums(value.view(), truth.view(), bound.view(), sigma, block, key);
        };
        for (const Matrix& run : of_runs) {
            const std::vector<double> s = of(run);
            for (std::size_t c = 0; c < s.size(); ++c) sums[c].add(s[c]);
        }
        observed = of(kernel);
        nulls.clear();
        for (const NullSums& s : sums) nulls.push_back(s.null(0, 1));
    };
    std::vector<CellNull> nulls, others;
    std::vector<double> observed, seen;
    statistics(middle, nulls, observed);
    Matrix value = middle;
    for (std::size_t a = 0; a < value.values.size(); ++a) value.values[a] += kernel.values[a];
    const std::vector<double> doubts = cell_doubts(value.view(), middle.view(), bound.view(), sigma, block, key);
    for (int trial = 0; trial < 200; ++trial) {
        Matrix truth = middle;
        for (std::size_t a = 0; a < truth.values.size(); ++a)
            truth.values[a] += (stream.bits(at++) & 1) != 0 ? bound.values[a] : -bound.values[a];
        statistics(truth, others, seen);
        for (std::size_t c = 0; c < cells.size(); ++c) {
            if (cells[c].direction == Direction::element && cells[c].extent != Extent::head) continue;
            others[c].spread = is_signed(cells[c].direction) ? others[c].spread : nulls[c].spread;  // as documented
            const CellNull::Range range = nulls[c].t_range(observed[c], doubts[c]);
            const double t = is_signed(cells[c].direction) ? std::abs(others[c].t(seen[c])) : others[c].t(seen[c]);
            const double slack = 1e-12 * std::abs(t);
            EXPECT_GE(t, range.least - slack) << name(cells[c].direction) << ' ' << cells[c].where();
            EXPECT_LE(t, range.most + slack) << name(cells[c].direction) << ' ' << cells[c].where();
        }
    }
    const CellNull::Range sure = nulls[0].t_range(observed[0], 0);
    EXPECT_EQ(sure.least, nulls[0].t(observed[0]));
    EXPECT_EQ(sure.most, nulls[0].t(observed[0]));
}

TEST(Cells, WhereNothingIsRoundedTheBoundDecidesWhatIsAnError) {
    Matrix truth(1, 4), bound(1, 4), value(1, 4);
    bound.values = {1e-9, 1e-9, 0, 1e-9};
    value.values = {1e-10, 1e-8, 0, 0};
    const std::vector<double> doubts = cell_doubts(value.view(), truth.view(), bound.view(), {0}, 1, {});
    const std::vector<Cell> cells = cells_of(1, 4, 1, false);
    for (std::size_t c = 0; c < cells.size(); ++c)
        if (cells[c].extent == Extent::feature) {
            EXPECT_EQ(doubts[c] > 0, cells[c].index == 0 || cells[c].index == 3) << cells[c].where();
        }
}

TEST(CellNull, AGaussianSumGivesStudentsT) {
    // Sums that are normal with mean 0: the statistic passes its own 1% threshold in 1% of 4000 draws, within 4 standard
    // deviations of that count (6.3).
    constexpr int draws = 4000, runs = 32;
    const RandomStream stream(9);
    std::uint64_t at = 0;
    int beyond = 0, sizes_beyond = 0;
    for (int d = 0; d < draws; ++d) {
        std::vector<double> sums, sizes;
        for (int r = 0; r < runs; ++r) {
            sums.push_back(stream.normal(at++));
            sizes.push_back(std::exp(0.1 * stream.normal(at++)));
        }
        const CellNull null = null_of(Direction::shift, sums);
        beyond += null.log10_p(null.t(stream.normal(at++))) < -2;
        const CellNull size_null = null_of(Direction::size, sizes);
        sizes_beyond += size_null.log10_p(size_null.t(std::exp(0.1 * stream.normal(at++)))) < -2;
    }
    EXPECT_NEAR(beyond, 40, 26);
    EXPECT_NEAR(sizes_beyond, 40, 26);
}

}  // namespace
}  // namespace faultline::verdict
