// SPDX-License-Identifier: Apache-2.0
// A row-major matrix that owns its elements.
#pragma once

#include <cstddef>
#include <vector>

#include <faultline/tensor/matrix_view.hpp>

namespace faultline {

/// rows x cols doubles, row-major, contiguous.
struct Matrix {
    std::ptrdiff_t rows = 0;
    std::ptrdiff_t cols = 0;
    std::vector<double> values;

    Matrix() = default;
    Matrix(std::ptrdiff_t row_count, std::ptrdiff_t col_count, double fill = 0)
        : rows(row_count), cols(col_count), values(static_cast<std::size_t>(row_count * col_count), fill) {}
    explicit Matrix(MatrixView<const double> from) : Matrix(from.rows, from.cols) {
        for (std::ptrdiff_t i = 0; i < rows; ++i)
            for (std::ptrdiff_t j = 0; j < cols; ++j) (*this)(i, j) = from(i, j);
    }

    [[nodiscard]] double& operator()(std::ptrdiff_t i, std::ptrdiff_t j) {
        return values[static_cast<std::size_t>(i * cols + j)];
    }
    [[nodiscard]] double operator()(std::ptrdiff_t i, std::ptrdiff_t j) const {
        return values[static_cast<std::size_t>(i * cols + j)];
    }
    [[nodiscard]] MatrixView<double> view() { return {values.data(), rows, cols}; }
    [[nodiscard]] MatrixView<const double> view() const { return {values.data(), rows, cols}; }
    /// Rows [first, first + count).
    [[nodiscard]] MatrixView<double> view(std::ptrdiff_t first, std::ptrdiff_t count) {
        return view().middle_rows(first, count);
    }
    [[nodiscard]] MatrixView<const double> view(std::ptrdiff_t first, std::ptrdiff_t count) const {
        return view().middle_rows(first, count);
    }
    friend bool operator==(const Matrix&, const Matrix&) = default;
};

/// out <- in^T; out is in.cols x in.rows.
inline void transpose(MatrixView<const double> in, MatrixView<double> out) {
    constexpr std::ptrdiff_t block = 16;  // a block of 16 x 16 doubles stays in the first-level cache
    for (std::ptrdiff_t i0 = 0; i0 < in.rows; i0 += block)
        for (std::ptrdiff_t j0 = 0; j0 < in.cols; j0 += block)
            for (std::ptrdiff_t i = i0; i < in.rows && i < i0 + block; ++i)
                for (std::ptrdiff_t j = j0; j < in.cols && j < j0 + block; ++j) out(j, i) = in(i, j);
}

}  // namespace faultline
