// SPDX-License-Identifier: Apache-2.0
// Block power iteration against Eigen's two-sided Jacobi SVD, cold, warm, and in the hard cases.
#include <gtest/gtest.h>

#include <Eigen/QR>
#include <Eigen/SVD>

#include <faultline/probes/leading.hpp>
#include <faultline/random/random_stream.hpp>

namespace faultline {
namespace {

Eigen::MatrixXd gaussian(Eigen::Index rows, Eigen::Index cols, std::uint64_t seed) {
    const RandomStream stream(seed);
    Eigen::MatrixXd m(rows, cols);
    for (Eigen::Index i = 0; i < m.size(); ++i) m.data()[i] = stream.normal(static_cast<std::uint64_t>(i));
    return m;
}

Eigen::MatrixXd orthonormal(Eigen::Index n, Eigen::Index k, std::uint64_t seed) {
    return Eigen::HouseholderQR<Eigen::MatrixXd>(gaussian(n, k, seed)).householderQ() * Eigen::MatrixXd::Identity(n, k);
}

Eigen::MatrixXd with_spectrum(Eigen::Index rows, Eigen::Index cols, const std::vector<double>& sigma,
                              std::uint64_t seed) {
    const auto k = static_cast<Eigen::Index>(sigma.size());
    const Eigen::VectorXd s = Eigen::Map<const Eigen::VectorXd>(sigma.data(), k);
    return orthonormal(rows, k, seed) * s.asDiagonal() * orthonormal(cols, k, seed + 1).transpose();
}

/// Largest sine of an angle between the spaces that the columns span.
double sine(const Eigen::MatrixXd& a, const Eigen::MatrixXd& b) {
    return Eigen::JacobiSVD<Eigen::MatrixXd>(b - a * (a.transpose() * b)).singularValues()(0);
}

constexpr double tolerance = 1e-10;
// A residual r sigma_1 puts singular values within r^2 sigma_1^2/gap (here gap > sigma_1/100) and directions within
// r sigma_1/gap of the true ones (Davis and Kahan; Golub and Van Loan 8.1.12); both are then below 1e-7.
constexpr double direction_bound = 100 * tolerance * 10;

void expect_leading(const Eigen::MatrixXd& w, int k, const LeadingDirections& found) {
    const Eigen::JacobiSVD<Eigen::MatrixXd> svd(w, Eigen::ComputeThinU | Eigen::ComputeThinV);
    for (int i = 0; i < k; ++i) EXPECT_NEAR(found.sigma()(i), svd.singularValues()(i), 1e-9 * svd.singularValues()(0));
    EXPECT_LT(sine(svd.matrixU().leftCols(k), found.left()), direction_bound);
    EXPECT_LT(sine(svd.matrixV().leftCols(k), found.right()), direction_bound);
    EXPECT_LT((found.left().transpose() * found.left() - Eigen::MatrixXd::Identity(k, k)).norm(), 1e-12);
    EXPECT_LT((found.right().transpose() * found.right() - Eigen::MatrixXd::Identity(k, k)).norm(), 1e-12);
}

TEST(LeadingDirections, AgreeWithJacobi) {
    for (const auto& [rows, cols] : {std::pair<int, int>{64, 64}, {32, 96}, {96, 32}}) {
        const Eigen::MatrixXd w = with_spectrum(rows, cols, {10, 7, 5, 3, 2, 1.5, 1, 0.5, 0.3, 0.1}, 5);
        LeadingDirections found(3);
        found.update(w, tolerance, 1000);
        EXPECT_LE(found.residual(), tolerance);
        expect_leading(w, 3, found);
    }
}

// A random matrix has gaps of a few percent: slow from nothing, and the block's extra directions help.
TEST(LeadingDirections, AgreeOnARandomMatrix) {
    const Eigen::MatrixXd w = gaussian(64, 64, 9);
    LeadingDirections found(3, 8);
    found.update(w, tolerance, 5000);
    expect_leading(w, 3, found);
}

// The use: a weight that moves by a thousandth of itself at each step is followed in a few iterations.
TEST(LeadingDirections, FollowASlowWeight) {
    Eigen::MatrixXd w = with_spectrum(64, 64, {10, 7, 5, 3, 2, 1.5, 1, 0.5}, 6);
    LeadingDirections found(3);
    found.update(w, tolerance, 1000);
    for (int step = 0; step < 50; ++step) {
        w += 1e-3 * gaussian(64, 64, 100 + static_cast<std::uint64_t>(step));
        EXPECT_LE(found.update(w, 1e-6), 12) << step;
        EXPECT_LE(found.residual(), 1e-6);
    }
    found.update(w, tolerance, 1000);
    expect_leading(w, 3, found);
}

TEST(LeadingDirections, EqualSingularValuesGiveTheirSpace) {
    const Eigen::MatrixXd w = with_spectrum(40, 40, {4, 4, 4, 1, 0.5}, 7);
    LeadingDirections found(3);
    found.update(w, tolerance, 1000);
    const Eigen::JacobiSVD<Eigen::MatrixXd> svd(w, Eigen::ComputeThinU);
    EXPECT_LT(sine(svd.matrixU().leftCols(3), found.left()), direction_bound);
}

TEST(LeadingDirections, SmallMatricesGiveWhatTheyHave) {
    const Eigen::MatrixXd w = gaussian(5, 2, 8);
    LeadingDirections found(3);
    found.update(w, tolerance, 1000);
    EXPECT_EQ(found.sigma().size(), 2);
    expect_leading(w, 2, found);
    LeadingDirections zero(3);
    EXPECT_EQ(zero.update(Eigen::MatrixXd::Zero(8, 8)), 1);
    EXPECT_EQ(zero.sigma()(0), 0.0);
}

// W_Q W_K^T from its factors, cold and then warm, against the SVD of the product: within the 1e-6 that the probe promises.
TEST(LeadingDirections, OfAProductFromItsFactors) {
    constexpr double promised = 1e-6;
    Eigen::MatrixXd a = gaussian(96, 24, 30), b = gaussian(80, 24, 31);
    LeadingDirections found(3);
    for (int step = 0; step < 5; ++step) {
        found.update_product(a, b);
        EXPECT_LE(found.residual(), promised) << step;
        const Eigen::JacobiSVD<Eigen::MatrixXd> svd(a * b.transpose());
        for (int i = 0; i < 3; ++i)
            EXPECT_NEAR(found.sigma()(i), svd.singularValues()(i), promised * svd.singularValues()(i)) << step;
        a += 1e-3 * gaussian(96, 24, 32 + static_cast<std::uint64_t>(step));
    }
    // Rank 1, and fewer directions than asked for.
    LeadingDirections one(3);
    one.update_product(gaussian(10, 1, 40), gaussian(12, 1, 41));
    EXPECT_EQ(one.sigma().size(), 1);
    EXPECT_NEAR(one.sigma()(0), gaussian(10, 1, 40).norm() * gaussian(12, 1, 41).norm(), 1e-12 * one.sigma()(0));
}

// A weight that is not finite must not hang the run that is to be stopped for it.
TEST(LeadingDirections, NotFiniteEnds) {
    Eigen::MatrixXd w = gaussian(16, 16, 3);
    w(3, 4) = std::nan("");
    LeadingDirections found(3);
    EXPECT_EQ(found.update(w), 1);
    EXPECT_TRUE(found.left().array().isNaN().all() && found.right().array().isNaN().all());
    EXPECT_TRUE(found.sigma().array().isNaN().all() && std::isnan(found.residual()));
    found.update(gaussian(16, 16, 3));  // and begins anew
    EXPECT_TRUE(found.left().allFinite());
}

TEST(LeadingDirections, ABlockIsTheWholeState) {
    const Eigen::MatrixXd first = gaussian(32, 32, 20), second = first + 1e-3 * gaussian(32, 32, 21);
    LeadingDirections a(3), b(3);
    a.update(first);
    b.set_block(a.block());
    a.update(second);
    b.update(second);
    EXPECT_EQ(a.left(), b.left());
    EXPECT_EQ(a.block(), b.block());
}

}  // namespace
}  // namespace faultline
