// SPDX-License-Identifier: Apache-2.0
// Private to this folder: a block of columns as GCC and Clang vectors, which the compiler splits where the processor's
// registers are narrower. Plain loops over arrays were rejected: g++ 12 then keeps the sums in memory.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include <faultline/tensor/matrix_view.hpp>

namespace faultline::lanes {

using Float16 [[gnu::vector_size(64)]] = float;
using Double8 [[gnu::vector_size(64)]] = double;
using Int16 [[gnu::vector_size(64)]] = std::int32_t;
using Short16 [[gnu::vector_size(32)]] = std::int16_t;
using Short32 [[gnu::vector_size(64)]] = std::int16_t;

/// Columns that are worked on together: two vectors of fp32, four of binary64.
constexpr int width = 32;

constexpr std::ptrdiff_t padded(std::ptrdiff_t n) { return (n + width - 1) / width * width; }

template <class Vector, class T>
[[gnu::always_inline]] inline void load(Vector& to, const T* from) {
    std::memcpy(&to, from, sizeof to);
}

template <class Vector, class T>
[[gnu::always_inline]] inline void store(T* to, const Vector& from) {
    std::memcpy(to, &from, sizeof from);
}

/// B as T, rows padded with zeros to a multiple of `width`.
template <class T>
struct Packed {
    std::vector<T> values;
    std::ptrdiff_t stride = 0;

    void assign(MatrixView<const double> m) {
        stride = padded(m.cols);
        values.resize(static_cast<std::size_t>(stride * m.rows));
        for (std::ptrdiff_t i = 0; i < m.rows; ++i) {
            T* to = row(i);
            const double* from = m.row(i);
            for (std::ptrdiff_t j = 0; j < m.cols; ++j) to[j] = static_cast<T>(from[j]);
            std::fill(to + m.cols, to + stride, T{});
        }
    }
    [[nodiscard]] T* row(std::ptrdiff_t i) { return values.data() + i * stride; }
    [[nodiscard]] const T* row(std::ptrdiff_t i) const { return values.data() + i * stride; }
};

}  // namespace faultline::lanes
