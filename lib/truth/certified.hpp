// SPDX-License-Identifier: Apache-2.0
// Matrices of real numbers known to within a bound, with an exponent range in which a saturated row's gradient of
// e^(-10^7) is a number.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <faultline/tensor/matrix_view.hpp>
#include <faultline/truth/wide_real.hpp>

namespace faultline {

/// rows x cols real numbers, row-major: element = value * 2^exponent with an error of at most bound * 2^exponent.
/// exponent is 0 wherever |value| lies in [2^-900, 2^900] or is 0; elsewhere |value| is in [1, 2).
struct CertifiedMatrix {
    std::ptrdiff_t rows = 0;
    std::ptrdiff_t cols = 0;
    std::vector<double> value;
    std::vector<double> bound;  // >= 0; 0: exact
    std::vector<std::int64_t> exponent;

    CertifiedMatrix() = default;
    CertifiedMatrix(std::ptrdiff_t row_count, std::ptrdiff_t col_count)
        : rows(row_count), cols(col_count), value(size(), 0.0), bound(size(), 0.0), exponent(size(), 0) {}

    [[nodiscard]] std::size_t size() const { return static_cast<std::size_t>(rows * cols); }
    [[nodiscard]] std::size_t index(std::ptrdiff_t i, std::ptrdiff_t j) const {
        return static_cast<std::size_t>(i * cols + j);
    }
    /// The double nearest to the element; 0 or subnormal where that underflows.
    [[nodiscard]] double operator()(std::ptrdiff_t i, std::ptrdiff_t j) const;
    [[nodiscard]] WideReal at(std::ptrdiff_t i, std::ptrdiff_t j) const {
        return {value[index(i, j)], exponent[index(i, j)]};
    }
    /// An upper bound of the error of at(i, j).
    [[nodiscard]] WideReal bound_at(std::ptrdiff_t i, std::ptrdiff_t j) const {
        return {bound[index(i, j)], exponent[index(i, j)]};
    }
    /// Whether some element lies outside what a double holds comfortably.
    [[nodiscard]] bool wide() const;
    /// out(i, j) <- (*this)(i, j); out has rows x cols.
    void copy_to(MatrixView<double> out) const;
};

/// Frobenius norm; the sum of squares runs over the elements in row-major order.
[[nodiscard]] WideReal frobenius_norm(const CertifiedMatrix& a);
/// Frobenius norm of the bounds: |frobenius_norm(a) - true norm| is at most this (up to the rounding of the norm itself).
[[nodiscard]] WideReal frobenius_bound(const CertifiedMatrix& a);
/// Frobenius norm of observed - truth; both rows x cols.
[[nodiscard]] WideReal frobenius_distance(MatrixView<const double> observed, const CertifiedMatrix& truth);

}  // namespace faultline
