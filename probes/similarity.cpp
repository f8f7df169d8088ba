// SPDX-License-Identifier: Apache-2.0
#include <faultline/probes/similarity.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>

#include <Eigen/Eigenvalues>
#include <Eigen/QR>
#include <Eigen/SVD>

#include <faultline/probes/spectra.hpp>

namespace faultline {
namespace {

using Eigen::MatrixXd;
constexpr double nan_value = std::numeric_limits<double>::quiet_NaN();

auto mapped(MatrixView<const double> m) {
    using Rows = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
    return Eigen::Map<const Rows, 0, Eigen::OuterStride<>>(m.data, m.rows, m.cols, Eigen::OuterStride<>(m.stride));
}

/// Unit rows, so that products of gram matrices neither overflow nor underflow; a row of NaN where it is 0 or not finite.
MatrixXd unit_rows(MatrixView<const double> m) {
    MatrixXd x = mapped(m);
    for (Eigen::Index i = 0; i < x.rows(); ++i) {
        const double norm = x.row(i).stableNorm();
        if (norm > 0 && std::isfinite(norm))
            x.row(i) /= norm;
        else
            x.row(i).setConstant(nan_value);
    }
    return x;
}

void expect_rows(MatrixView<const double> a, MatrixView<const double> b) {
    if (a.rows != b.rows) throw std::invalid_argument("similarity: the factors have different numbers of terms");
}

/// Orthonormal basis of the columns' space.
MatrixXd basis(const MatrixXd& x) {
    if (x.size() == 0) return MatrixXd(x.rows(), 0);
    Eigen::ColPivHouseholderQR<MatrixXd> qr(x);
    qr.setThreshold(0x1p-40);
    return qr.householderQ() * MatrixXd::Identity(x.rows(), qr.rank());
}

}  // namespace

Matrix term_cosines(MatrixView<const double> a, MatrixView<const double> b) {
    expect_rows(a, b);
    const MatrixXd x = unit_rows(a), y = unit_rows(b);
    const MatrixXd cosines = (x * x.transpose()).cwiseProduct(y * y.transpose());
    Matrix out(a.rows, a.rows);
    for (std::ptrdiff_t i = 0; i < a.rows; ++i)
        for (std::ptrdiff_t j = 0; j < a.rows; ++j) out(i, j) = std::clamp(cosines(i, j), -1.0, 1.0);
    return out;
}

double TermStructure::leading(std::size_t k) const {
    if (energies.empty()) return nan_value;
    if (k >= energies.size()) return 1;
    double sum = 0, all = 0;
    for (std::size_t i = 0; i < energies.size(); ++i) {
        all += energies[i];
        if (i < k) sum += energies[i];
    }
    return sum / all;
}

TermStructure term_structure(const Matrix& cosines) {
    std::vector<std::ptrdiff_t> used;
    for (std::ptrdiff_t i = 0; i < cosines.rows; ++i)
        if (std::isfinite(cosines(i, i))) used.push_back(i);
    TermStructure s;
    s.used = used.size();
    const auto n = static_cast<Eigen::Index>(used.size());
    MatrixXd gram(n, n);
    double sum = 0, magnitude = 0;
    for (Eigen::Index i = 0; i < n; ++i)
        for (Eigen::Index j = 0; j < n; ++j) {
            gram(i, j) = cosines(used[static_cast<std::size_t>(i)], used[static_cast<std::size_t>(j)]);
            if (i == j) continue;
            sum += gram(i, j);
            magnitude += std::abs(gram(i, j));
        }
    const double pairs = static_cast<double>(n) * static_cast<double>(n - 1);
    s.mean_cosine = n > 1 ? sum / pairs : nan_value;
    s.mean_abs_cosine = n > 1 ? magnitude / pairs : nan_value;
    s.effective_rank = s.stable_rank = nan_value;
    if (n == 0) return s;
    const Eigen::SelfAdjointEigenSolver<MatrixXd> solver(gram, Eigen::EigenvaluesOnly);
    for (Eigen::Index i = n - 1; i >= 0; --i)
        s.energies.push_back(std::max(0.0, solver.eigenvalues()(i)) / static_cast<double>(n));
    s.effective_rank = effective_rank(s.energies);
    s.stable_rank = stable_rank(s.energies);
    return s;
}

Matrix weighted_sum(MatrixView<const double> a, MatrixView<const double> b, std::span<const double> weights) {
    expect_rows(a, b);
    const Eigen::Map<const Eigen::VectorXd> w(weights.data(), static_cast<Eigen::Index>(weights.size()));
    const MatrixXd sum = mapped(a).transpose() * w.asDiagonal() * mapped(b);
    Matrix out(a.cols, b.cols);
    for (std::ptrdiff_t i = 0; i < out.rows; ++i)
        for (std::ptrdiff_t j = 0; j < out.cols; ++j) out(i, j) = sum(i, j);
    return out;
}

double resultant(MatrixView<const double> a, MatrixView<const double> b, std::span<const double> weights) {
    expect_rows(a, b);
    // A scale on the weights cancels; without it weights of 1e-200 would square to 0.
    double largest = 0;
    for (const double w : weights) largest = std::max(largest, std::abs(w));
    if (!(largest > 0) || !std::isfinite(largest)) return nan_value;
    Eigen::VectorXd w(a.rows);
    double parts = 0;
    for (std::ptrdiff_t t = 0; t < a.rows; ++t) {
        w(t) = weights[static_cast<std::size_t>(t)] / largest;
        parts += std::abs(w(t)) * mapped(a).row(t).norm() * mapped(b).row(t).norm();
    }
    if (!(parts > 0) || !std::isfinite(parts)) return nan_value;
    return (mapped(a).transpose() * w.asDiagonal() * mapped(b)).norm() / parts;
}

std::vector<double> principal_angles(MatrixView<const double> u, MatrixView<const double> v) {
    if (u.rows != v.rows) throw std::invalid_argument("principal_angles: the spaces lie in different ones");
    const MatrixXd x = mapped(u), y = mapped(v);
    if (!x.allFinite() || !y.allFinite()) return {nan_value};
    MatrixXd p = basis(x), q = basis(y);
    if (p.cols() == 0 || q.cols() == 0) return {};
    if (p.cols() < q.cols()) std::swap(p, q);  // every direction of the smaller space, q, has its angle
    const Eigen::JacobiSVD<MatrixXd> cosines(p.transpose() * q, Eigen::ComputeThinV);
    // sin of the i-th angle: what of the i-th principal vector of q lies outside p.
    const MatrixXd principal = q * cosines.matrixV();
    const MatrixXd outside = principal - p * (p.transpose() * principal);
    std::vector<double> angles;
    for (Eigen::Index i = 0; i < q.cols(); ++i)
        angles.push_back(std::atan2(outside.col(i).norm(), std::min(1.0, cosines.singularValues()(i))));
    std::sort(angles.begin(), angles.end());
    return angles;
}

}  // namespace faultline
