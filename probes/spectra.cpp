// SPDX-License-Identifier: Apache-2.0
#include <faultline/probes/spectra.hpp>

#include <algorithm>
#include <cmath>
#include <limits>

#include <Eigen/Eigenvalues>
#include <Eigen/QR>

namespace faultline {
namespace {

using Eigen::MatrixXd;

MatrixXd doubles(MatrixView<const float> w) {
    using Rows = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
    return Eigen::Map<const Rows, 0, Eigen::OuterStride<>>(w.data, w.rows, w.cols, Eigen::OuterStride<>(w.stride))
        .cast<double>();
}

/// Square roots of the largest eigenvalues of a symmetric matrix.
std::vector<double> roots(const MatrixXd& gram, int count) {
    std::vector<double> values(static_cast<std::size_t>(count), 0.0);
    if (!gram.allFinite()) {
        values.assign(values.size(), std::numeric_limits<double>::quiet_NaN());
        return values;
    }
    const Eigen::SelfAdjointEigenSolver<MatrixXd> solver(gram, Eigen::EigenvaluesOnly);
    const Eigen::Index n = gram.rows();
    for (Eigen::Index i = 0; i < std::min<Eigen::Index>(count, n); ++i)
        values[static_cast<std::size_t>(i)] = std::sqrt(std::max(0.0, solver.eigenvalues()(n - 1 - i)));
    return values;
}

/// R of W = Q R, [min(rows, cols), cols].
MatrixXd upper_factor(const MatrixXd& w) {
    const Eigen::HouseholderQR<MatrixXd> qr(w);
    const Eigen::Index n = std::min(w.rows(), w.cols());
    return MatrixXd(qr.matrixQR().topRows(n)).triangularView<Eigen::Upper>();
}

}  // namespace

std::vector<double> singular_values(MatrixView<const float> w, int count) {
    const MatrixXd x = doubles(w);
    return roots(w.rows < w.cols ? MatrixXd(x * x.transpose()) : MatrixXd(x.transpose() * x), count);
}

std::vector<double> product_singular_values(MatrixView<const float> w_q, MatrixView<const float> w_k, int count) {
    const MatrixXd q = doubles(w_q), k = doubles(w_k);
    if (!q.allFinite() || !k.allFinite())
        return std::vector<double>(static_cast<std::size_t>(count), std::numeric_limits<double>::quiet_NaN());
    const MatrixXd core = upper_factor(q) * upper_factor(k).transpose();
    return roots(core * core.transpose(), count);
}

double effective_rank(std::span<const double> energies) {
    double sum = 0;
    for (const double e : energies) sum += std::isnan(e) ? e : std::max(0.0, e);
    if (!(sum > 0) || !std::isfinite(sum)) return std::numeric_limits<double>::quiet_NaN();
    double entropy = 0;
    for (const double e : energies)
        if (e > 0) entropy -= e / sum * std::log(e / sum);
    return std::exp(entropy);
}

double stable_rank(std::span<const double> energies) {
    double sum = 0, largest = 0;
    for (const double e : energies) {
        sum += std::isnan(e) ? e : std::max(0.0, e);
        largest = std::max(largest, e);
    }
    return sum > 0 && std::isfinite(sum) ? sum / largest : std::numeric_limits<double>::quiet_NaN();
}

Alignment alignment(MatrixView<const double> dw, MatrixView<const double> u, MatrixView<const double> v) {
    using Rows = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
    const auto map = [](MatrixView<const double> m) {
        return Eigen::Map<const Rows, 0, Eigen::OuterStride<>>(m.data, m.rows, m.cols, Eigen::OuterStride<>(m.stride));
    };
    const double total = map(dw).squaredNorm();
    const double nan = std::numeric_limits<double>::quiet_NaN();
    if (!(total > 0) || !std::isfinite(total) || !map(u).allFinite() || !map(v).allFinite())
        return {nan, nan, nan, nan};
    const MatrixXd rows = map(u).transpose() * map(dw);
    Alignment a;
    a.left = rows.squaredNorm() / total;
    a.right = (map(dw) * map(v)).squaredNorm() / total;
    a.two_sided = (rows * map(v)).squaredNorm() / total;
    a.one_sided = a.left + a.right - a.two_sided;
    return a;
}

}  // namespace faultline
