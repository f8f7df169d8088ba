// SPDX-License-Identifier: Apache-2.0
// Private to this folder: one fused add of fused_fast.cpp for a block of columns, in vectors that the compiler makes of any
// instruction set. fused_v3.hpp has the same for AVX2.
#pragma once

#include <cstddef>
#include <cstdint>

#include <faultline/tensor_core/matrix_unit.hpp>

namespace faultline::fused {

/// The products of one fused add, for one row of A and one block of columns.
struct Group {
    const double* a;
    const float* a_narrow;
    const std::int16_t* a_exponents;
    const double* b;
    const float* b_narrow;
    const std::int16_t* b_exponents;
    std::ptrdiff_t stride;  // of all three of B
    int count;
};

/// So many products, and the accumulator, do not overflow an int32 in the narrow path.
int most_products(const MatrixUnit& unit);

/// One fused add in fp32 lanes; c holds `lanes::width` floats. Rounding mode: toward zero. False, with c untouched, when it is a
/// case for wide_add.
bool narrow_add(const MatrixUnit& unit, const Group& g, float* c);

/// One fused add in binary64 lanes; c holds `lanes::width` doubles. Rounding mode: toward zero.
void wide_add(const MatrixUnit& unit, const Group& g, double* c);

}  // namespace faultline::fused
