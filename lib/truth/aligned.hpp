// SPDX-License-Identifier: Apache-2.0
// Arrays for vector loops: 64-byte aligned, because a 512-bit access that straddles cache lines costs double.
#pragma once

#include <cstddef>
#include <new>
#include <vector>

#include <faultline/tensor/matrix_view.hpp>

namespace faultline::detail {

template <class T>
struct CacheLineAllocator {
    using value_type = T;
    static constexpr std::align_val_t alignment{64};

    CacheLineAllocator() = default;
    template <class U>
    CacheLineAllocator(const CacheLineAllocator<U>&) {}
    T* allocate(std::size_t n) { return static_cast<T*>(::operator new(n * sizeof(T), alignment)); }
    void deallocate(T* p, std::size_t) { ::operator delete(p, alignment); }
    friend bool operator==(const CacheLineAllocator&, const CacheLineAllocator&) { return true; }
};

using AlignedVector = std::vector<double, CacheLineAllocator<double>>;

inline constexpr std::ptrdiff_t lanes = 8;  // doubles in a cache line and in a 512-bit register
constexpr std::ptrdiff_t round_up_to_lanes(std::ptrdiff_t n) { return (n + lanes - 1) / lanes * lanes; }

/// rows x cols, each row starting a cache line and padded with zeros to a multiple of one.
struct AlignedMatrix {
    std::ptrdiff_t rows = 0;
    std::ptrdiff_t cols = 0;
    std::ptrdiff_t stride = 0;
    AlignedVector values;

    AlignedMatrix() = default;
    AlignedMatrix(std::ptrdiff_t row_count, std::ptrdiff_t col_count)
        : rows(row_count),
          cols(col_count),
          stride(round_up_to_lanes(col_count)),
          values(static_cast<std::size_t>(row_count * stride)) {}
    [[nodiscard]] double* row(std::ptrdiff_t i) { return values.data() + i * stride; }
    [[nodiscard]] const double* row(std::ptrdiff_t i) const { return values.data() + i * stride; }
};

inline AlignedMatrix aligned_copy(MatrixView<const double> a) {
    AlignedMatrix r(a.rows, a.cols);
    for (std::ptrdiff_t i = 0; i < a.rows; ++i)
        for (std::ptrdiff_t j = 0; j < a.cols; ++j) r.row(i)[j] = a(i, j);
    return r;
}

inline AlignedMatrix aligned_transpose(MatrixView<const double> a) {
    AlignedMatrix r(a.cols, a.rows);
    for (std::ptrdiff_t i = 0; i < a.rows; ++i)
        for (std::ptrdiff_t j = 0; j < a.cols; ++j) r.row(j)[i] = a(i, j);
    return r;
}

}  // namespace faultline::detail
