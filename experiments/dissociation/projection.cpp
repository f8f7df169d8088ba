// SPDX-License-Identifier: Apache-2.0
#include <faultline/dissociation/projection.hpp>

#include <algorithm>
#include <cmath>

#include <Eigen/QR>

namespace faultline {
namespace {

/// Columns that complete those of `basis` to an orthonormal basis of the space, in random directions.
Eigen::MatrixXd random_complement(const Eigen::MatrixXd& basis, const RandomStream& stream) {
    const Eigen::Index n = basis.rows(), k = basis.cols();
    Eigen::MatrixXd start(n, n);
    start.leftCols(k) = basis;
    for (Eigen::Index i = n * k; i < n * n; ++i) start.data()[i] = stream.normal(static_cast<std::uint64_t>(i));
    const Eigen::MatrixXd q = Eigen::HouseholderQR<Eigen::MatrixXd>(start).householderQ();
    return q.rightCols(n - k);
}

Eigen::MatrixXd off(const Eigen::MatrixXd& d, const Eigen::MatrixXd& u, const Eigen::MatrixXd& v) {
    const Eigen::MatrixXd rest = d - u * (u.transpose() * d);
    return rest - (rest * v) * v.transpose();
}

/// Removes `energy` from D along random directions orthogonal to the leading ones.
void remove_elsewhere(Eigen::MatrixXd& d, const Eigen::MatrixXd& u, const Eigen::MatrixXd& v, double energy,
                      const RandomStream& stream, RemovedEnergy& found) {
    const Eigen::MatrixXd q = random_complement(v, stream);
    const Eigen::MatrixXd components = off(d, u, v) * q;  // one column for each direction q_j
    double left = energy;
    for (Eigen::Index j = 0; j < q.cols() && left > 0; ++j) {
        const double here = components.col(j).squaredNorm();
        if (here == 0) continue;
        // A fraction f of a component takes (1 - (1 - f)^2) of its energy.
        const double f = here <= left ? 1.0 : 1.0 - std::sqrt(1.0 - left / here);
        d -= f * components.col(j) * q.col(j).transpose();
        left -= std::min(here, left);
    }
    found.missing = left;
}

void overshoot(Eigen::MatrixXd& d, const Eigen::MatrixXd& u, const Eigen::MatrixXd& v, double energy, Sides sides,
               const RandomStream& stream) {
    const Eigen::Index k = u.cols();
    if (d.rows() < 2 * k || d.cols() < 2 * k) return;
    const Eigen::MatrixXd left = random_complement(u, stream.child(1)).leftCols(k);
    const Eigen::MatrixXd right = random_complement(v, stream.child(2)).leftCols(k);
    const Eigen::MatrixXd part = part_along(d, left, right, sides);
    const double norm = part.norm();
    if (norm > 0) d -= std::sqrt(energy) / norm * part;
}

}  // namespace

std::string_view name(Sides sides) {
    switch (sides) {
        case Sides::both:
            return "both";
        case Sides::either:
            return "either";
        case Sides::left:
            return "left";
        case Sides::right:
            return "right";
    }
    return "?";
}

std::string_view name(Removal removal) {
    switch (removal) {
        case Removal::leading:
            return "leading";
        case Removal::elsewhere:
            return "elsewhere";
        case Removal::shrink:
            return "shrink";
        case Removal::overshoot:
            return "overshoot";
    }
    return "?";
}

Eigen::MatrixXd part_along(const Eigen::MatrixXd& d, const Eigen::MatrixXd& u, const Eigen::MatrixXd& v, Sides sides) {
    switch (sides) {
        case Sides::both:
            return u * (u.transpose() * d * v) * v.transpose();
        case Sides::either:
            return d - off(d, u, v);
        case Sides::left:
            return u * (u.transpose() * d);
        case Sides::right:
            return (d * v) * v.transpose();
    }
    return d;
}

RemovedEnergy remove(Eigen::MatrixXd& d, const Eigen::MatrixXd& u, const Eigen::MatrixXd& v, Sides sides,
                     Removal removal, const RandomStream& stream) {
    const Eigen::MatrixXd before = d;
    const Eigen::MatrixXd part = part_along(d, u, v, sides);
    RemovedEnergy found;
    found.update = d.squaredNorm();
    found.leading = part.squaredNorm();
    switch (removal) {
        case Removal::leading:
            d -= part;
            break;
        case Removal::elsewhere:
            remove_elsewhere(d, u, v, found.leading, stream, found);
            break;
        case Removal::shrink:
            if (found.update > 0) d *= std::sqrt(std::max(0.0, 1.0 - found.leading / found.update));
            break;
        case Removal::overshoot:
            overshoot(d, u, v, found.leading, sides, stream);
            break;
    }
    found.removed = found.update - d.squaredNorm();
    found.changed = (before - d).squaredNorm();
    return found;
}

}  // namespace faultline
