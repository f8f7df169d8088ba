// SPDX-License-Identifier: Apache-2.0
// A row-major matrix that somebody else owns: the argument type of everything that works on a tile or a head.
#pragma once

#include <cstddef>
#include <type_traits>

namespace faultline {

/// rows x cols elements, row-major, consecutive rows `stride` elements apart (stride >= cols).
template <class T>
struct MatrixView {
    T* data = nullptr;
    std::ptrdiff_t rows = 0;
    std::ptrdiff_t cols = 0;
    std::ptrdiff_t stride = 0;

    MatrixView() = default;
    MatrixView(T* first, std::ptrdiff_t row_count, std::ptrdiff_t col_count)
        : data(first), rows(row_count), cols(col_count), stride(col_count) {}
    MatrixView(T* first, std::ptrdiff_t row_count, std::ptrdiff_t col_count, std::ptrdiff_t row_stride)
        : data(first), rows(row_count), cols(col_count), stride(row_stride) {}
    /// A view of non-const elements reads as a view of const ones.
    template <class U>
    requires std::is_same_v<const U, T> MatrixView(const MatrixView<U>& other)
        : data(other.data), rows(other.rows), cols(other.cols), stride(other.stride) {}

    [[nodiscard]] T* row(std::ptrdiff_t i) const { return data + i * stride; }
    [[nodiscard]] T& operator()(std::ptrdiff_t i, std::ptrdiff_t j) const { return data[i * stride + j]; }
    /// Rows [first, first + count), same columns.
    [[nodiscard]] MatrixView middle_rows(std::ptrdiff_t first, std::ptrdiff_t count) const {
        return {data + first * stride, count, cols, stride};
    }
};

}  // namespace faultline
