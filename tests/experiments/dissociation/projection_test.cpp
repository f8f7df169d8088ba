// SPDX-License-Identifier: Apache-2.0
// What the projections and their controls take out of an update.
#include <gtest/gtest.h>

#include <Eigen/QR>

#include <faultline/dissociation/projection.hpp>

namespace faultline {
namespace {

constexpr Eigen::Index rows = 40, cols = 24, k = 3;
constexpr double noise = 1e-12;  // binary64 sums of 40 terms of size 1, squared norms of 1000

Eigen::MatrixXd gaussian(Eigen::Index r, Eigen::Index c, std::uint64_t seed) {
    const RandomStream stream(seed);
    Eigen::MatrixXd m(r, c);
    for (Eigen::Index i = 0; i < m.size(); ++i) m.data()[i] = stream.normal(static_cast<std::uint64_t>(i));
    return m;
}
Eigen::MatrixXd orthonormal(Eigen::Index n, std::uint64_t seed) {
    return Eigen::HouseholderQR<Eigen::MatrixXd>(gaussian(n, k, seed)).householderQ() * Eigen::MatrixXd::Identity(n, k);
}

struct Case {
    Eigen::MatrixXd u = orthonormal(rows, 1), v = orthonormal(cols, 2), d = gaussian(rows, cols, 3);
};
constexpr std::array all_sides{Sides::both, Sides::either, Sides::left, Sides::right};

TEST(Projection, LeavesNothingAlongTheLeadingDirections) {
    for (const Sides sides : all_sides) {
        Case c;
        const Eigen::MatrixXd before = c.d;
        const RemovedEnergy e = remove(c.d, c.u, c.v, sides, Removal::leading, {});
        EXPECT_LT((c.u.transpose() * c.d * c.v).norm(), noise);
        if (sides == Sides::left || sides == Sides::either) {
            EXPECT_LT((c.u.transpose() * c.d).norm(), noise);
        }
        if (sides == Sides::right || sides == Sides::either) {
            EXPECT_LT((c.d * c.v).norm(), noise);
        }
        // An orthogonal projection: energies add up (Pythagoras).
        EXPECT_NEAR(e.removed, e.leading, noise * e.update);
        EXPECT_NEAR(e.changed, e.leading, noise * e.update);
        EXPECT_NEAR(e.update, before.squaredNorm(), noise * e.update);
        const Eigen::MatrixXd once = c.d;
        (void)remove(c.d, c.u, c.v, sides, Removal::leading, {});
        EXPECT_LT((c.d - once).norm(), noise);  // idempotent
    }
}

// Of a random update each of rows x cols components has the same energy: both takes k^2, left k cols, right k rows of them,
// either k rows + k cols - k^2.
TEST(Projection, TakesItsShareOfARandomUpdate) {
    const std::array<double, 4> expected{9, 3.0 * (rows + cols) - 9, 3.0 * cols, 3.0 * rows};
    for (const Sides sides : all_sides) {
        double share = 0;
        constexpr int draws = 200;
        for (int i = 0; i < draws; ++i) {
            Case c;
            c.d = gaussian(rows, cols, 50 + static_cast<std::uint64_t>(i));
            share += remove(c.d, c.u, c.v, sides, Removal::leading, {}).fraction() / draws;
        }
        const double n = rows * cols, wanted = expected[static_cast<std::size_t>(sides)] / n;
        // A share of m components out of n has a standard deviation of at most sqrt(2 m)/n in each draw.
        EXPECT_NEAR(share, wanted, 4 * std::sqrt(2 * wanted * n) / n / std::sqrt(draws)) << name(sides);
    }
}

TEST(Projection, ElsewhereTakesTheSameEnergyAndLeavesTheLeadingPart) {
    for (const Sides sides : {Sides::both, Sides::left, Sides::right}) {
        Case c;
        c.d += 8 * c.u * c.v.transpose();  // a part of a third of the energy, as an Adam update of these weights has
        const Eigen::MatrixXd before = c.d;
        const RemovedEnergy e = remove(c.d, c.u, c.v, sides, Removal::elsewhere, RandomStream(4));
        EXPECT_NEAR(e.removed, e.leading, noise * e.update) << name(sides);
        EXPECT_EQ(e.missing, 0.0);
        EXPECT_LT((c.u.transpose() * (c.d - before)).norm(), noise);
        EXPECT_LT(((c.d - before) * c.v).norm(), noise);
    }
}

TEST(Projection, ElsewhereSaysWhatItDidNotFind) {
    Case c;
    c.d = 10 * c.u * c.v.transpose() + 0.01 * c.d;
    const RemovedEnergy e = remove(c.d, c.u, c.v, Sides::both, Removal::elsewhere, RandomStream(4));
    EXPECT_NEAR(e.removed + e.missing, e.leading, noise * e.update);
    EXPECT_GT(e.missing, 0.9 * e.leading);
}

TEST(Projection, ShrinkKeepsTheDirection) {
    Case c;
    const Eigen::MatrixXd before = c.d;
    const RemovedEnergy e = remove(c.d, c.u, c.v, Sides::either, Removal::shrink, {});
    EXPECT_NEAR(e.removed, e.leading, noise * e.update);
    EXPECT_NEAR(c.d.cwiseProduct(before).sum(), c.d.norm() * before.norm(), noise * e.update);
}

// Subtracting a component of the part's norm where the component is smaller reverses it and adds energy.
TEST(Projection, OvershootAddsEnergy) {
    Case c;
    c.d += 8 * c.u * c.v.transpose();
    const RemovedEnergy e = remove(c.d, c.u, c.v, Sides::both, Removal::overshoot, RandomStream(4));
    EXPECT_NEAR(e.changed, e.leading, noise * e.update);
    EXPECT_LT(e.removed, 0);
}

TEST(Projection, RandomDirectionsAreNamedByTheirStream) {
    for (const Removal removal : {Removal::elsewhere, Removal::overshoot}) {
        Case a, b, other;
        (void)remove(a.d, a.u, a.v, Sides::both, removal, RandomStream(4, 1));
        (void)remove(b.d, b.u, b.v, Sides::both, removal, RandomStream(4, 1));
        (void)remove(other.d, other.u, other.v, Sides::both, removal, RandomStream(4, 2));
        EXPECT_EQ(a.d, b.d);
        EXPECT_GT((a.d - other.d).norm(), 0.1);
    }
}

TEST(Projection, NoUpdateIsNone) {
    for (const Removal removal : {Removal::leading, Removal::elsewhere, Removal::shrink, Removal::overshoot}) {
        Case c;
        c.d.setZero();
        const RemovedEnergy e = remove(c.d, c.u, c.v, Sides::both, removal, {});
        EXPECT_EQ(c.d.norm(), 0.0);
        EXPECT_EQ(e.fraction(), 0.0);
    }
}

}  // namespace
}  // namespace faultline
