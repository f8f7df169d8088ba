// SPDX-License-Identifier: Apache-2.0
#include <faultline/gpt/monitors.hpp>

#include <cmath>
#include <limits>

#include <Eigen/Eigenvalues>

namespace faultline::gpt {
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

}  // namespace

std::vector<double> singular_values(MatrixView<const float> w, int count) {
    const MatrixXd x = doubles(w);
    return roots(w.rows < w.cols ? MatrixXd(x * x.transpose()) : MatrixXd(x.transpose() * x), count);
}

std::vector<double> product_singular_values(MatrixView<const float> w_q, MatrixView<const float> w_k, int count) {
    const MatrixXd q = doubles(w_q), k = doubles(w_k);
    const MatrixXd gram_q = q.transpose() * q, gram_k = k.transpose() * k;
    if (!gram_q.allFinite() || !gram_k.allFinite())
        return std::vector<double>(static_cast<std::size_t>(count), std::numeric_limits<double>::quiet_NaN());
    const Eigen::SelfAdjointEigenSolver<MatrixXd> solver(gram_q);
    const MatrixXd root = solver.eigenvectors() * solver.eigenvalues().cwiseMax(0.0).cwiseSqrt().asDiagonal() *
                          solver.eigenvectors().transpose();
    return roots(root * gram_k * root, count);
}

}  // namespace faultline::gpt
