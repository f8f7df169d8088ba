// SPDX-License-Identifier: Apache-2.0
// Private to this folder: what ordered.cpp hands to the kernel of an instruction set. Nothing that other files could share
// (inline functions, the standard library) may be used by the files that are compiled for one.
#pragma once

#include <cstddef>

namespace faultline::ordered {

/// Rows that share one pass over B, so that a load of B serves several multiply-adds.
inline constexpr int row_block = 4;
/// Columns that are worked on together.
inline constexpr int block_width = 32;

/// One block of rows: a[r][k], b row-major with `stride`, c[r][block_width].
template <class T>
struct Block {
    const T* a[row_block];
    const T* b;
    std::ptrdiff_t stride;
    std::ptrdiff_t k;
    T (*c)[block_width];
};

// For AVX2, where g++ 12 takes the vectors of 512 bits of ordered.cpp apart through memory.
void exact_v3(const Block<double>& g);
void sequential_v3(const Block<float>& g);
void pairwise_v3(const Block<float>& g);

}  // namespace faultline::ordered
