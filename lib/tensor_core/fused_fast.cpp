// SPDX-License-Identifier: Apache-2.0
// Alignment by floating-point arithmetic. With E the largest exponent of a fused add, every product is scaled by 2^(F-E)
// and converted to an integer by truncation; the sum of the integers is exact. Two widths:
//
// narrow, fp32 lanes: operands of at most 12 significant bits, so that a product is exact in fp32. E must lie within
//   [narrow_lowest, narrow_highest]: a product that underflows fp32 is then below one unit after scaling and is truncated
//   to zero either way, and nothing overflows. Groups of products outside that window take the wide path.
// wide, binary64 lanes, any operands: the rounding mode is toward zero, so the rounded product truncates to the same
//   integer as the exact one (no multiple of the unit lies between them: the unit is at least 2^(E-40), the spacing of
//   binary64 at the product at most 2^(E-51)). E is never below zero_exponent(), so underflow in a product is
//   below one unit too.
//
// Infinities, NaN and exponents past `huge_exponent` in A or B take the reference. An accumulator that is infinite or NaN
// needs no care: it passes through the wide path's arithmetic as it does through the unit.
#include <faultline/tensor_core/fused_fast.hpp>

#include <cfenv>
#include <vector>
#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

#include <faultline/base/clones.hpp>
#include <faultline/tensor_core/fused_add.hpp>
#include <faultline/tensor_core/fused_lanes.hpp>
#include <faultline/tensor_core/fused_v3.hpp>
#include <faultline/tensor_core/instruction_set.hpp>
#include <faultline/tensor_core/lanes.hpp>
#include <faultline/tensor_core/reference.hpp>

namespace faultline::fused {
namespace {

using lanes::width;

// Past this exponent a product could leave binary64's range.
constexpr int huge_exponent = 500;

constexpr int narrow_significant_bits = 12;

/// A or B with inputs truncated, exponents as the unit aligns them, and what is known of all its elements.
struct Operands {
    lanes::Packed<double> wide;
    lanes::Packed<float> narrow;
    lanes::Packed<std::int16_t> exponents;
    bool is_narrow = false;
    bool is_ordinary = false;  // finite and not huge

    void assign(MatrixView<const double> m, const MatrixUnit& unit, int min_exponent);
};

struct Scan {
    std::uint64_t fractions;  // OR of all stored significands
    std::uint64_t not_float;  // nonzero when an element is not an fp32 number
    std::int32_t largest;     // of the exponent fields
};

FAULTLINE_CLONES Scan scan(const double* x, std::ptrdiff_t n, int min_exponent, std::int16_t zero,
                           std::int16_t* exponents, float* narrow) {
    Scan r{0, 0, 0};
    for (std::ptrdiff_t j = 0; j < n; ++j) {
        std::uint64_t bits;
        std::memcpy(&bits, x + j, sizeof bits);
        const std::int32_t field = static_cast<std::int32_t>(bits >> 52 & 0x7FF);
        const std::int32_t e = std::max(field - 1023, min_exponent);
        r.fractions |= bits << 12;
        r.largest = std::max(r.largest, field);
        exponents[j] = static_cast<std::int16_t>((bits << 1) == 0 ? zero : e);
        narrow[j] = static_cast<float>(x[j]);
        const double back = static_cast<double>(narrow[j]);
        std::uint64_t back_bits;
        std::memcpy(&back_bits, &back, sizeof back_bits);
        r.not_float |= back_bits ^ bits;
    }
    return r;
}

void Operands::assign(MatrixView<const double> m, const MatrixUnit& unit, int min_exponent) {
    const auto zero = unit.zero == ZeroOperand::ignored
                          ? no_exponent
                          : static_cast<std::int16_t>(zero_operand_exponent(unit.zero, min_exponent));
    wide.assign(m);
    narrow.stride = exponents.stride = wide.stride;
    narrow.values.resize(wide.values.size());
    exponents.values.resize(wide.values.size());
    if (unit.input_fraction_bits > 0)
        for (double& x : wide.values) x = truncate_input(x, unit.input_fraction_bits, min_exponent);
    const Scan all = scan(wide.values.data(), static_cast<std::ptrdiff_t>(wide.values.size()), min_exponent, zero,
                          exponents.values.data(), narrow.values.data());
    is_ordinary = all.largest <= huge_exponent + 1023;
    is_narrow = all.not_float == 0 && (all.fractions << (narrow_significant_bits - 1)) == 0;
}

/// Rounding toward zero while it lives and, where the processor can, underflow straight to zero: products of a softmax's
/// small probabilities underflow fp32 by the thousand, a subnormal number costs some 150 cycles, and both are below one
/// unit after scaling. Operands that are subnormal keep their value.
class TowardZero {
#if defined(__SSE2__)
    unsigned before_ = _mm_getcsr();

  public:
    TowardZero() { _mm_setcsr(before_ | _MM_ROUND_TOWARD_ZERO | _MM_FLUSH_ZERO_ON); }
    ~TowardZero() {
        _mm_setcsr((_mm_getcsr() & ~(_MM_ROUND_MASK | _MM_FLUSH_ZERO_MASK)) |
                   (before_ & (_MM_ROUND_MASK | _MM_FLUSH_ZERO_MASK)));
    }
#else
    int before_ = std::fegetround();

  public:
    TowardZero() { std::fesetround(FE_TOWARDZERO); }
    ~TowardZero() { std::fesetround(before_); }
#endif
    TowardZero(const TowardZero&) = delete;
    TowardZero& operator=(const TowardZero&) = delete;
};

/// A block as fp32; whether that changed nothing.
FAULTLINE_CLONES bool narrowed(const double* from, float* to) {
    std::uint64_t changed = 0;
    for (int j = 0; j < width; ++j) {
        to[j] = static_cast<float>(from[j]);
        const double back = static_cast<double>(to[j]);
        changed |= static_cast<std::uint64_t>(back != from[j]);
    }
    return changed == 0;
}
FAULTLINE_CLONES void widened(const float* from, double* to) {
    for (int j = 0; j < width; ++j) to[j] = static_cast<double>(from[j]);
}

/// One row of C, padded to whole blocks, through all its fused adds. A block is held as fp32 while it can be.
struct Row {
    std::vector<double> wide;
    std::vector<float> narrow;
    std::vector<unsigned char> is_narrow;  // by block

    explicit Row(std::ptrdiff_t cols)
        : wide(static_cast<std::size_t>(lanes::padded(cols))), narrow(wide.size()), is_narrow(wide.size() / width) {}

    // False too for subnormal numbers, which the conversion flushes.
    bool narrow_block(std::ptrdiff_t j) { return narrowed(wide.data() + j, narrow.data() + j); }
    void widen_block(std::ptrdiff_t j) { widened(narrow.data() + j, wide.data() + j); }
};

/// Both paths on this processor.
class FusedAdd {
  public:
    explicit FusedAdd(const MatrixUnit& unit)
        : unit_(unit),
          cut_{unit.fraction_bits, accumulator_min_exponent(unit.output), zero_exponent(unit.output),
               most_products(unit), unit.output == OutputFormat::e8m13_rz ? 13 : 23},
          by_v3_(takes_v3_kernels() && unit.output != OutputFormat::f16_rne) {}

    /// narrow_add().
    bool narrow(const Group& g, float* c) const {
#if defined(FAULTLINE_V3_KERNELS)
        if (by_v3_)
            return narrow_add_v3(cut_, {g.a_narrow, g.a_exponents, g.b_narrow, g.b_exponents, g.stride, g.count}, c);
#endif
        return narrow_add(unit_, g, c);
    }
    /// wide_add().
    void wide(const Group& g, double* c) const {
#if defined(FAULTLINE_V3_KERNELS)
        if (by_v3_) return wide_add_v3(cut_, {g.a, g.a_exponents, g.b, g.b_exponents, g.stride, g.count}, c);
#endif
        wide_add(unit_, g, c);
    }

  private:
    const MatrixUnit& unit_;
    CutUnit cut_;
    [[maybe_unused]] bool by_v3_;
};

/// Whether a fused add whose products are all zero leaves what the unit has written as it is: zeros take no part in the alignment,
/// and every bit that the unit writes survives it.
bool keeps_written(const MatrixUnit& unit) {
    const int written_bits = unit.output == OutputFormat::f16_rne    ? 10
                             : unit.output == OutputFormat::e8m13_rz ? 13
                                                                     : 23;
    return unit.zero == ZeroOperand::ignored && unit.fraction_bits >= written_bits;
}

bool all_zero(const std::int16_t* exponents, int count) {
    for (int t = 0; t < count; ++t)
        if (exponents[t] != no_exponent) return false;
    return true;
}

/// All columns before the next group of k: neighbouring blocks do not wait for each other.
void accumulate_row(const MatrixUnit& unit, const Operands& a, const Operands& b, std::ptrdiff_t i, std::ptrdiff_t k,
                    Row& c) {
    const bool may_narrow = a.is_narrow && b.is_narrow && unit.fraction_bits <= narrow_fraction_bits;
    const auto cols = static_cast<std::ptrdiff_t>(c.wide.size());
    const FusedAdd add(unit);
    const bool skips = keeps_written(unit);
    for (std::ptrdiff_t j = 0; j < cols; j += width) c.is_narrow[j / width] = may_narrow && c.narrow_block(j);
    for (std::ptrdiff_t t = 0; t < k; t += unit.terms) {
        const int count = static_cast<int>(std::min<std::ptrdiff_t>(unit.terms, k - t));
        // Masked keys, probabilities that underflow: of a saturated row nearly all. The first add writes c in the unit's format.
        if (skips && t > 0 && all_zero(a.exponents.row(i) + t, count)) continue;
        for (std::ptrdiff_t j = 0; j < cols; j += width) {
            unsigned char& narrow = c.is_narrow[j / width];
            const Group g{a.wide.row(i) + t,   a.narrow.row(i) + t,    a.exponents.row(i) + t, b.wide.row(t) + j,
                          b.narrow.row(t) + j, b.exponents.row(t) + j, b.wide.stride,          count};
            if (narrow && add.narrow(g, c.narrow.data() + j)) continue;
            if (narrow) c.widen_block(j);
            add.wide(g, c.wide.data() + j);
            narrow = may_narrow && c.narrow_block(j);
        }
    }
    for (std::ptrdiff_t j = 0; j < cols; j += width)
        if (c.is_narrow[j / width]) c.widen_block(j);
}

}  // namespace

void multiply_accumulate(const MatrixUnit& unit, MatrixView<const double> a, MatrixView<const double> b,
                         const MatrixView<double>& c) {
    thread_local Operands operands_a, operands_b;
    operands_a.assign(a, unit, unit.a_min_exponent);
    operands_b.assign(b, unit, unit.b_min_exponent);
    if (!operands_a.is_ordinary || !operands_b.is_ordinary) {
        reference::multiply_accumulate({Accumulation::Kind::fused, unit}, a, b, c);
        return;
    }
    Row row(c.cols);
    const TowardZero rounding;
    for (std::ptrdiff_t i = 0; i < c.rows; ++i) {
        std::copy_n(c.row(i), c.cols, row.wide.begin());
        std::fill(row.wide.begin() + c.cols, row.wide.end(), 0.0);
        accumulate_row(unit, operands_a, operands_b, i, a.cols, row);
        std::copy_n(row.wide.begin(), c.cols, c.row(i));
    }
}

}  // namespace faultline::fused
