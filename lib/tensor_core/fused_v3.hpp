// SPDX-License-Identifier: Apache-2.0
// Private to this folder: what fused_fast.cpp hands to the kernels for AVX2. Nothing that other files
// could share (inline functions, the standard library) may be used by the file that is compiled for it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace faultline::fused {

/// Stands in for the exponent of a zero factor that takes no part. Two of them, or one and the largest exponent (500),
/// stay below any exponent that takes part, and within 16 bits.
inline constexpr std::int16_t no_exponent = -8000;
inline constexpr int no_product = -4000;

inline constexpr int narrow_fraction_bits = 25;  // products below 2^27, so that 15 of them fit an int32
inline constexpr int narrow_lowest = narrow_fraction_bits - 125;
inline constexpr int narrow_highest = 100;  // the sum is below 2^(100 + 2 + 10), so no overflow either

/// An accumulator past this exponent (no fp32 number is) exceeds any sum of products and gives infinity whatever the
/// alignment; the cap keeps the scale a normal number.
inline constexpr int exponent_cap = 1015;

/// What is the same for all fused adds of a unit whose result is cut.
struct CutUnit {
    int fraction_bits;   ///< in the narrow path at most narrow_fraction_bits
    int c_min_exponent;  ///< of the smallest normal number of the accumulator
    int zero_exponent;   ///< where an accumulator of zero stands
    int most_products;   ///< that may be added, with the accumulator, before an int32 could overflow
    int written_bits;    ///< fraction bits that the unit writes
};

/// The products of one fused add, for one row of A and one block of 32 columns.
struct NarrowGroup {
    const float* a;
    const std::int16_t* a_exponents;
    const float* b;                   ///< [count, 32]
    const std::int16_t* b_exponents;  ///< [count, 32]
    std::ptrdiff_t stride;            ///< of both of B
    int count;
};

/// One fused add; c holds 32 floats. Rounding mode: toward zero. False, with c untouched, where an exponent is outside
/// [narrow_lowest, narrow_highest] or the sum outside int32. Needs AVX2.
bool narrow_add_v3(const CutUnit& unit, const NarrowGroup& group, float* c);

/// The same of the wide path.
struct WideGroup {
    const double* a;
    const std::int16_t* a_exponents;
    const double* b;                  ///< [count, 32]
    const std::int16_t* b_exponents;  ///< [count, 32]
    std::ptrdiff_t stride;            ///< of both of B
    int count;
};

/// One fused add of any operands up to fused_fast.cpp's huge_exponent; c holds 32 doubles. Rounding mode: toward zero. Needs AVX2
/// and FMA.
void wide_add_v3(const CutUnit& unit, const WideGroup& group, double* c);

}  // namespace faultline::fused
