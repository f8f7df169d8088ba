// SPDX-License-Identifier: Apache-2.0
// Similarity of rank-1 terms and spectra, on matrices whose answers are known in closed form.
#include <cmath>
#include <limits>
#include <numbers>

#include <gtest/gtest.h>

#include <Eigen/SVD>

#include <faultline/probes/similarity.hpp>
#include <faultline/probes/spectra.hpp>
#include <faultline/random/random_stream.hpp>

namespace faultline {
namespace {

constexpr double nan_value = std::numeric_limits<double>::quiet_NaN();
// Sums of some hundred products in binary64, each off by 2^-53 of at most 1.
constexpr double rounding = 1e-13;

Matrix gaussian(std::ptrdiff_t rows, std::ptrdiff_t cols, std::uint64_t seed) {
    const RandomStream stream(seed);
    Matrix m(rows, cols);
    for (std::size_t i = 0; i < m.values.size(); ++i) m.values[i] = stream.normal(i);
    return m;
}

/// Row t is factor_t times one vector.
Matrix planted(std::span<const double> factors, std::ptrdiff_t cols, std::uint64_t seed) {
    const Matrix direction = gaussian(1, cols, seed);
    Matrix m(static_cast<std::ptrdiff_t>(factors.size()), cols);
    for (std::ptrdiff_t t = 0; t < m.rows; ++t)
        for (std::ptrdiff_t j = 0; j < cols; ++j) m(t, j) = factors[static_cast<std::size_t>(t)] * direction(0, j);
    return m;
}

/// Columns e_i for the i given.
Matrix axes_of(std::ptrdiff_t n, std::initializer_list<std::ptrdiff_t> which) {
    Matrix m(n, static_cast<std::ptrdiff_t>(which.size()));
    std::ptrdiff_t c = 0;
    for (const std::ptrdiff_t i : which) m(i, c++) = 1;
    return m;
}

TEST(Similarity, APlantedDirectionHasRankOne) {
    const std::vector<double> up{1, 2, 0.5, 3}, mixed{1, -2, 1, -1};
    const Matrix a = planted(up, 5, 1), b = planted(mixed, 7, 2);
    const Matrix c = term_cosines(a.view(), b.view());
    for (std::ptrdiff_t i = 0; i < 4; ++i)
        for (std::ptrdiff_t j = 0; j < 4; ++j)
            EXPECT_NEAR(c(i, j), mixed[i] * mixed[j] > 0 ? 1 : -1, rounding) << i << j;
    const TermStructure s = term_structure(c);
    EXPECT_NEAR(s.effective_rank, 1, 1e-10);  // p log p has a steep tangent at 0: 2^-50 there counts for 50 2^-50
    EXPECT_NEAR(s.stable_rank, 1, rounding);
    EXPECT_NEAR(s.leading(1), 1, rounding);
    EXPECT_NEAR(s.mean_abs_cosine, 1, rounding);
    EXPECT_NEAR(s.mean_cosine, -4.0 / 12, rounding);  // 2 against 2: 4 pairs of one sign, 8 of the other, ordered
    EXPECT_EQ(s.used, 4u);
    // Weights with the signs of b make the terms add up, weights of one sign let them cancel:
    // |sum w b| / sum |w b| = |1 - 4 + 0.5 - 3| / 8.5.
    const std::vector<double> ones{1, 1, 1, 1}, signs{1, -1, 1, -1};
    EXPECT_NEAR(resultant(a.view(), b.view(), signs), 1, rounding);
    EXPECT_NEAR(resultant(a.view(), b.view(), ones), 5.5 / 8.5, rounding);
    // A scale on the weights cancels, also one whose square underflows.
    const std::vector<double> tiny{1e-200, 1e-200, 1e-200, 1e-200};
    EXPECT_NEAR(resultant(a.view(), b.view(), tiny), 5.5 / 8.5, rounding);
}

TEST(Similarity, OrthogonalTermsHaveFullRank) {
    const Matrix a = axes_of(3, {0, 1, 2}), b = gaussian(3, 4, 3);
    const Matrix c = term_cosines(a.view(), b.view());
    for (std::ptrdiff_t i = 0; i < 3; ++i)
        for (std::ptrdiff_t j = 0; j < 3; ++j) EXPECT_NEAR(c(i, j), i == j, rounding);
    const TermStructure s = term_structure(c);
    EXPECT_NEAR(s.effective_rank, 3, rounding);
    EXPECT_NEAR(s.stable_rank, 3, rounding);
    EXPECT_NEAR(s.leading(2), 2.0 / 3, rounding);
    EXPECT_EQ(s.leading(9), 1);
}

// The judge forms the terms, flattens them and takes their singular values.
TEST(Similarity, EnergiesAreThoseOfTheFormedTerms) {
    const Matrix a = gaussian(6, 4, 4), b = gaussian(6, 5, 5);
    Eigen::MatrixXd flat(6, 20);
    for (int t = 0; t < 6; ++t) {
        for (int i = 0; i < 4; ++i)
            for (int j = 0; j < 5; ++j) flat(t, i * 5 + j) = a(t, i) * b(t, j);
        flat.row(t).normalize();
    }
    const Eigen::VectorXd sigma = Eigen::JacobiSVD<Eigen::MatrixXd>(flat).singularValues();
    const TermStructure s = term_structure(term_cosines(a.view(), b.view()));
    for (std::size_t i = 0; i < 6; ++i)
        EXPECT_NEAR(s.energies[i], sigma(static_cast<int>(i)) * sigma(static_cast<int>(i)) / 6, rounding);
    const std::vector<double> w{1, -1, 2, 0.5, 3, -0.25};
    const Matrix sum = weighted_sum(a.view(), b.view(), w);
    double expected = 0;
    for (std::size_t t = 0; t < 6; ++t) expected += w[t] * a(static_cast<int>(t), 2) * b(static_cast<int>(t), 3);
    EXPECT_NEAR(sum(2, 3), expected, rounding);
}

TEST(Similarity, DegenerateTerms) {
    const Matrix none(0, 3);
    EXPECT_EQ(term_cosines(none.view(), none.view()).rows, 0);
    const TermStructure empty = term_structure(Matrix());
    EXPECT_EQ(empty.used, 0u);
    EXPECT_TRUE(std::isnan(empty.effective_rank) && std::isnan(empty.mean_cosine) && std::isnan(empty.leading(1)));
    EXPECT_TRUE(std::isnan(resultant(none.view(), none.view(), {})));

    Matrix a = gaussian(4, 3, 6);
    a(1, 0) = nan_value;
    for (std::ptrdiff_t j = 0; j < 3; ++j) a(2, j) = 0;
    const Matrix c = term_cosines(a.view(), a.view());
    EXPECT_TRUE(std::isnan(c(1, 1)) && std::isnan(c(0, 2)));
    EXPECT_NEAR(c(0, 0), 1, rounding);
    EXPECT_EQ(term_structure(c).used, 2u);

    const Matrix one = gaussian(1, 3, 7);  // a single row
    const TermStructure single = term_structure(term_cosines(one.view(), one.view()));
    EXPECT_NEAR(single.effective_rank, 1, rounding);
    EXPECT_TRUE(std::isnan(single.mean_cosine));
    const Matrix two(2, 3);
    EXPECT_THROW((void)term_cosines(one.view(), two.view()), std::invalid_argument);
}

TEST(PrincipalAngles, KnownSpaces) {
    const Matrix u = axes_of(6, {0, 1}), v = axes_of(6, {2, 3, 4});
    EXPECT_EQ(principal_angles(u.view(), u.view()), (std::vector<double>{0, 0}));
    const std::vector<double> orthogonal = principal_angles(u.view(), v.view());
    ASSERT_EQ(orthogonal.size(), 2u);
    for (const double angle : orthogonal) EXPECT_NEAR(angle, std::numbers::pi / 2, rounding);
    // Turned by 0.3 in the plane (1, 4) and by 1e-9 in (0, 5): an angle that a cosine cannot tell from 0.
    Matrix w(6, 2);
    w(0, 0) = std::cos(1e-9), w(5, 0) = std::sin(1e-9);
    w(1, 1) = std::cos(0.3), w(4, 1) = std::sin(0.3);
    const std::vector<double> angles = principal_angles(u.view(), w.view());
    ASSERT_EQ(angles.size(), 2u);
    EXPECT_NEAR(angles[0], 1e-9, 1e-15);
    EXPECT_NEAR(angles[1], 0.3, rounding);
    // The space counts, not its basis, and columns that others span do not count.
    Matrix mixed(6, 3);
    for (std::ptrdiff_t i = 0; i < 6; ++i) {
        mixed(i, 0) = w(i, 0) + 2 * w(i, 1);
        mixed(i, 1) = w(i, 0) - w(i, 1);
        mixed(i, 2) = 5 * mixed(i, 0);
    }
    const std::vector<double> same = principal_angles(mixed.view(), u.view());
    ASSERT_EQ(same.size(), 2u);
    EXPECT_NEAR(same[0], 1e-9, 1e-14);
    EXPECT_NEAR(same[1], 0.3, rounding);
}

TEST(PrincipalAngles, DegenerateSpaces) {
    const Matrix u = axes_of(4, {0}), nothing(4, 0), zeros(4, 2);
    EXPECT_TRUE(principal_angles(u.view(), nothing.view()).empty());
    EXPECT_TRUE(principal_angles(zeros.view(), u.view()).empty());
    Matrix bad = u;
    bad(2, 0) = nan_value;
    ASSERT_EQ(principal_angles(u.view(), bad.view()).size(), 1u);
    EXPECT_TRUE(std::isnan(principal_angles(u.view(), bad.view())[0]));
    const Matrix line(1, 1, 3.0);  // a space of one dimension
    EXPECT_EQ(principal_angles(line.view(), line.view()), std::vector<double>{0});
}

TEST(Spectra, RanksOfKnownEnergies) {
    const std::vector<double> equal{2, 2, 2, 2}, one{5, 0, 0}, two_to_one{2, 1};
    EXPECT_NEAR(effective_rank(equal), 4, rounding);
    EXPECT_NEAR(stable_rank(equal), 4, rounding);
    EXPECT_EQ(effective_rank(one), 1);
    EXPECT_EQ(stable_rank(one), 1);
    // exp(-(2/3) log(2/3) - (1/3) log(1/3)) = 3 / 2^(2/3).
    EXPECT_NEAR(effective_rank(two_to_one), 3 / std::pow(2, 2.0 / 3), rounding);
    EXPECT_EQ(stable_rank(two_to_one), 1.5);
    for (const std::vector<double>& none : {std::vector<double>{}, {0, 0}, {1, nan_value}, {1, HUGE_VAL}}) {
        EXPECT_TRUE(std::isnan(effective_rank(none)));
        EXPECT_TRUE(std::isnan(stable_rank(none)));
    }
}

TEST(Spectra, SingularValuesOfKnownMatrices) {
    const std::vector<float> diagonal{3, 0, 0, 0, -7, 0};  // [2, 3]
    const std::vector<double> found = singular_values({diagonal.data(), 2, 3}, 3);
    EXPECT_NEAR(found[0], 7, 1e-14);
    EXPECT_NEAR(found[1], 3, 1e-14);
    EXPECT_EQ(found[2], 0);
    // W_Q = (1, 2)^T, W_K = (2, 0, 1)^T of one column: W_Q W_K^T has sqrt(5) sqrt(5).
    const std::vector<float> q{1, 2}, k{2, 0, 1};
    EXPECT_NEAR(product_singular_values({q.data(), 2, 1}, {k.data(), 3, 1}, 2)[0], 5, 1e-14);
    const std::vector<float> bad{1, std::numeric_limits<float>::quiet_NaN()};
    EXPECT_TRUE(std::isnan(singular_values({bad.data(), 1, 2}, 1)[0]));
}

// W_Q = 60 (e_0 f_0 + c e_1 f_1), W_K = 60 (c e_0 f_0 + e_1 f_1) in rotated f: the product has 3600 c twice, while each
// weight's own square root would lose c^2.
TEST(Spectra, AProductOfWeightsThatLeadElsewhere) {
    constexpr float c = 0x1p-20F, h = 0.5F;
    const std::vector<float> q{60 * h, 60 * h, 60 * h, 60 * h, 60 * c * h, -60 * c * h, 60 * c * h, -60 * c * h},
        k{60 * c * h, 60 * c * h, 60 * c * h, 60 * c * h, 60 * h, -60 * h, 60 * h, -60 * h};
    const std::vector<double> found = product_singular_values({q.data(), 2, 4}, {k.data(), 2, 4}, 3);
    const double exact = 3600.0 * c;
    EXPECT_NEAR(found[0], exact, 1e-9 * exact);  // 2^-50 |W_Q| |W_K| / sigma_1 = 2^-30
    EXPECT_NEAR(found[1], exact, 1e-9 * exact);
    EXPECT_EQ(found[2], 0);
}

TEST(Spectra, AlignmentOfKnownUpdates) {
    const Matrix u = axes_of(4, {0, 1}), v = axes_of(3, {2});
    Matrix dw(4, 3);
    dw(0, 2) = 3;   // in both
    dw(1, 0) = 4;   // left alone
    dw(3, 2) = 12;  // right alone
    dw(3, 1) = 84;  // neither: 9 + 16 + 144 + 7056 = 7225 = 85^2
    const Alignment a = alignment(dw.view(), u.view(), v.view());
    EXPECT_NEAR(a.two_sided, 9.0 / 7225, rounding);
    EXPECT_NEAR(a.left, 25.0 / 7225, rounding);
    EXPECT_NEAR(a.right, 153.0 / 7225, rounding);
    EXPECT_NEAR(a.one_sided, 169.0 / 7225, rounding);
    const Matrix zero(4, 3);
    EXPECT_TRUE(std::isnan(alignment(zero.view(), u.view(), v.view()).two_sided));
    dw(2, 2) = nan_value;
    EXPECT_TRUE(std::isnan(alignment(dw.view(), u.view(), v.view()).left));
}

}  // namespace
}  // namespace faultline
