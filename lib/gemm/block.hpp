// SPDX-License-Identifier: Apache-2.0
// What the kernels for each instruction set are given. Private to lib/gemm.
//
// The files that include this are compiled for instruction sets that the machine may not have, so nothing that could be
// shared with other files (inline functions of the standard library) may be used there.
#pragma once

#include <cstddef>

namespace faultline::gemm_detail {

/// c [m, n] (row stride c_row) <- (accumulate ? c : 0) + a b, a(i, t) = a[i a_row + t a_col], b likewise.
template <class T>
struct Problem {
    std::ptrdiff_t m, n, k;
    const T* a;
    std::ptrdiff_t a_row, a_col;
    const T* b;
    std::ptrdiff_t b_row, b_col;
    T* c;
    std::ptrdiff_t c_row;
    bool accumulate;
    T* packed;  ///< scratch: packed_size(n) elements, 64-byte aligned
};

/// Depth of a block of B that is packed at a time: 256 x 64 floats are 64 KiB, which the second-level cache keeps.
inline constexpr std::ptrdiff_t block_k = 256;
/// Columns of packed B at a time.
inline constexpr std::ptrdiff_t block_n = 1024;
/// Rows of A that meet a packed block before the next rows do: 192 x 256 floats are 192 KiB.
inline constexpr std::ptrdiff_t block_m = 192;
inline constexpr std::ptrdiff_t packed_size = block_k * block_n;

void multiply_v4(const Problem<float>& problem);
void multiply_v4(const Problem<double>& problem);
void multiply_v3(const Problem<float>& problem);
void multiply_v3(const Problem<double>& problem);
void multiply_plain(const Problem<float>& problem);
void multiply_plain(const Problem<double>& problem);

}  // namespace faultline::gemm_detail
