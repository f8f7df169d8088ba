// SPDX-License-Identifier: Apache-2.0
#include <faultline/probes/leading.hpp>

#include <algorithm>
#include <limits>

#include <Eigen/QR>
#include <Eigen/SVD>

#include <faultline/random/random_stream.hpp>

namespace faultline {
namespace {

Eigen::MatrixXd orthonormal(const Eigen::MatrixXd& x) {
    return Eigen::HouseholderQR<Eigen::MatrixXd>(x).householderQ() * Eigen::MatrixXd::Identity(x.rows(), x.cols());
}

Eigen::MatrixXd random_block(Eigen::Index rows, Eigen::Index cols) {
    constexpr std::uint64_t any_seed = 3;  // of no consequence once the iteration has converged
    const RandomStream stream(any_seed);
    Eigen::MatrixXd x(rows, cols);
    for (Eigen::Index i = 0; i < x.size(); ++i) x.data()[i] = stream.normal(static_cast<std::uint64_t>(i));
    return x;
}

}  // namespace

Eigen::MatrixXd to_eigen(MatrixView<const float> w) {
    Eigen::MatrixXd m(w.rows, w.cols);
    for (std::ptrdiff_t i = 0; i < w.rows; ++i)
        for (std::ptrdiff_t j = 0; j < w.cols; ++j) m(i, j) = static_cast<double>(w(i, j));
    return m;
}

Eigen::MatrixXd LeadingDirections::cold_start(Eigen::Index columns) const {
    return orthonormal(random_block(columns, std::min<Eigen::Index>(k_ + extra_, columns)));
}

template <class Apply, class ApplyTransposed>
int LeadingDirections::iterate(Eigen::Index rows, Eigen::Index cols, Eigen::Index rank, const Apply& apply,
                               const ApplyTransposed& apply_transposed, double tolerance, int max_iterations) {
    const Eigen::Index smaller = std::min({rows, cols, rank});
    const Eigen::Index width = std::min<Eigen::Index>(k_ + extra_, smaller);
    const Eigen::Index k = std::min<Eigen::Index>(k_, smaller);
    if (block_.rows() != cols || block_.cols() != width || !block_.allFinite())
        block_ = orthonormal(random_block(cols, width));
    int iterations = 0;
    for (;;) {
        ++iterations;
        // Rayleigh-Ritz on the right block: W B = U S R^T, so the directions are U and B R.
        const Eigen::MatrixXd image = apply(block_);
        if (!image.allFinite()) {  // no directions; the SVD would leave its vectors as memory was
            constexpr double nan = std::numeric_limits<double>::quiet_NaN();
            sigma_ = Eigen::VectorXd::Constant(k, nan);
            left_ = Eigen::MatrixXd::Constant(rows, k, nan);
            right_ = Eigen::MatrixXd::Constant(cols, k, nan);
            residual_ = nan;
            block_.resize(0, 0);
            return iterations;
        }
        const Eigen::JacobiSVD<Eigen::MatrixXd> svd(image, Eigen::ComputeThinU | Eigen::ComputeThinV);
        const Eigen::MatrixXd right = block_ * svd.matrixV();
        const Eigen::MatrixXd back = apply_transposed(svd.matrixU());
        sigma_ = svd.singularValues().head(k);
        left_ = svd.matrixU().leftCols(k);
        right_ = right.leftCols(k);
        residual_ = 0;
        for (Eigen::Index i = 0; i < k && sigma_(0) > 0; ++i)
            residual_ = std::max(residual_, (back.col(i) - sigma_(i) * right.col(i)).norm() / sigma_(0));
        block_ = orthonormal(back);
        if (!(residual_ > tolerance) || iterations >= max_iterations) return iterations;
    }
}

int LeadingDirections::update(const Eigen::MatrixXd& w, double tolerance, int max_iterations) {
    return iterate(
        w.rows(), w.cols(), std::min(w.rows(), w.cols()),
        [&](const Eigen::MatrixXd& x) -> Eigen::MatrixXd { return w * x; },
        [&](const Eigen::MatrixXd& x) -> Eigen::MatrixXd { return w.transpose() * x; }, tolerance, max_iterations);
}

int LeadingDirections::update_product(const Eigen::MatrixXd& a, const Eigen::MatrixXd& b, double tolerance,
                                      int max_iterations) {
    return iterate(
        a.rows(), b.rows(), a.cols(),
        [&](const Eigen::MatrixXd& x) -> Eigen::MatrixXd { return a * (b.transpose() * x); },
        [&](const Eigen::MatrixXd& x) -> Eigen::MatrixXd { return b * (a.transpose() * x); }, tolerance,
        max_iterations);
}

}  // namespace faultline
