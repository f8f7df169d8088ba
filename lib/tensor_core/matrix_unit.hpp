// SPDX-License-Identifier: Apache-2.0
// What distinguishes one matrix unit from another, as plain data for host and device. The rule itself is in
// fused_add.hpp; the units that exist, by name and with their sources, are in accumulate.hpp.
#pragma once

#include <faultline/base/host_device.hpp>

namespace faultline {

/// How a fused add writes its result: to fp32 by truncation (23 fraction bits), to fp32 with the last ten fraction bits
/// cleared (13 remain; the fp8 units of Ada and Hopper), or to fp16 by round-to-nearest-even.
enum class OutputFormat : unsigned char { f32_rz, e8m13_rz, f16_rne };

/// What exponent a product with a zero factor brings to the alignment: none; or the sum of its factors' exponents, with
/// the zero standing at its format's smallest normal exponent, or at fp32's (as MMA-Sim has it).
enum class ZeroOperand : unsigned char { ignored, at_minimum, at_fp32_minimum };

/// A unit that adds `terms` products and the accumulator in one fused step (arXiv:2511.10909, section 4).
struct MatrixUnit {
    int terms = 16;          ///< products per fused add, after the unit has split the instruction's k
    int fraction_bits = 25;  ///< fraction bits that survive alignment to the largest exponent, 1 to 40
    OutputFormat output = OutputFormat::f32_rz;
    int a_min_exponent = -126;    ///< exponent of the smallest normal number of A's format; subnormals stand at it
    int b_min_exponent = -126;    ///< the same of B's format
    int input_fraction_bits = 0;  ///< operands are truncated to so many fraction bits (tf32: 10); 0: taken as they are
    ZeroOperand zero = ZeroOperand::ignored;

    friend constexpr bool operator==(const MatrixUnit&, const MatrixUnit&) = default;
};

/// Exponent of the smallest normal number of the accumulator's format.
FAULTLINE_HD constexpr int accumulator_min_exponent(OutputFormat output) {
    return output == OutputFormat::f16_rne ? -14 : -126;
}

/// The exponent that `zero` gives to a zero of the format with this smallest normal exponent.
FAULTLINE_HD constexpr int zero_operand_exponent(ZeroOperand zero, int min_exponent) {
    return zero == ZeroOperand::at_fp32_minimum ? -126 : min_exponent;
}

/// A zero fp32 accumulator stands at this exponent, so the largest exponent of a fused add is never below it, whatever the
/// products; one of fp16 at -21 (fused::zero_exponent). Measured on an NVIDIA H200 (docs/results/tensor-core-rule.md).
/// Other generations were not measured and take the same; MMA-Sim puts them, untested, at -126.
constexpr int zero_accumulator_exponent = -133;

}  // namespace faultline
