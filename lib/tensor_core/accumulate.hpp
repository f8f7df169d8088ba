// SPDX-License-Identifier: Apache-2.0
// How a sum of products is formed: exactly enough to be called exact, in fp32 in one of three orders, or by a matrix
// unit. Sources: arXiv:2511.10909 (MMA-Sim) and arXiv:2512.07004 for the units; the rule stands in fused_add.hpp.
#pragma once

#include <iosfwd>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include <faultline/tensor/matrix_view.hpp>
#include <faultline/tensor_core/matrix_unit.hpp>

namespace faultline {

/// An order and width of summation. A value: compare it, print it, find it by name.
struct Accumulation {
    enum class Kind : unsigned char {
        exact,       ///< binary64: c <- c + a b in the order of k, product and sum rounded to nearest even
        sequential,  ///< fp32: product rounded, then added, in the order of k
        fma,         ///< fp32: fused multiply-add, in the order of k
        pairwise,    ///< fp32: products rounded, added as a tree of neighbours, then added to c
        fused,       ///< a matrix unit: fused adds of unit.terms products, in the order of k
    };
    Kind kind = Kind::exact;
    MatrixUnit unit{};  ///< of kind fused; otherwise left at its default

    friend constexpr bool operator==(const Accumulation&, const Accumulation&) = default;
};

/// A named accumulation and where its figures come from.
struct NamedAccumulation {
    std::string_view name;  ///< e.g. "hopper-wgmma-bf16"
    Accumulation accumulation;
    std::string_view description;  ///< one line
    std::string_view source;       ///< paper or document
};

/// All named accumulations: exact, the fp32 orders, then the units from Volta to Blackwell.
[[nodiscard]] std::span<const NamedAccumulation> accumulations();

/// By name; nothing when there is none of that name.
[[nodiscard]] std::optional<Accumulation> find_accumulation(std::string_view name);

/// The first name that stands for this value; an unnamed unit is spelled out, e.g.
/// "fused(terms=16, fraction_bits=20, output=f32_rz, a_min=-126, b_min=-126, input_bits=0, zero=ignored)".
[[nodiscard]] std::string name(const Accumulation& accumulation);

std::ostream& operator<<(std::ostream& out, const Accumulation& accumulation);

/// Throws RequestError, one sentence, when a unit's numbers make no sense.
void validate(const Accumulation& accumulation);

/// C (m x n) <- C + A (m x k) . B (k x n). C holds the accumulators' starting values and receives what the unit returns;
/// values are doubles that hold the low-precision numbers exactly.
///
/// fp32 kinds: A, B and C are first converted to fp32 (nearest even), which changes nothing for operands of 24 bits in
/// fp32's range. fused: k is cut into groups of unit.terms, the last one filled with zeros; operands with more bits than
/// the unit's format follow the same rule, their products formed exactly. k = 0 leaves C as it is.
/// A NaN result has an unspecified payload except in kind fused, where it is the unit's canonical NaN.
/// Throws RequestError when shapes disagree or the unit is not valid. C must not overlap A or B. The result does not
/// depend on the processor.
void multiply_accumulate(const Accumulation& accumulation, MatrixView<const double> a, MatrixView<const double> b,
                         MatrixView<double> c);

}  // namespace faultline
