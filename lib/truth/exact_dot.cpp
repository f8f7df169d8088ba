// SPDX-License-Identifier: Apache-2.0
#include <faultline/truth/exact_dot.hpp>

#include <algorithm>
#include <bit>
#include <cmath>

namespace faultline::detail {
namespace {

using Wide = __int128;

/// r <- x 2^unit, rounded to r's precision in the given direction.
void set(Real& r, Wide x, int unit, mpfr_rnd_t rounding) {
    Real exact(192);  // the two halves and their sum
    const auto high = static_cast<std::int64_t>(x >> 64);
    mpfr_set_sj_2exp(exact, high, 64, MPFR_RNDN);
    Real low(64);
    mpfr_set_uj(low, static_cast<std::uint64_t>(x), MPFR_RNDN);
    mpfr_add(exact, exact, low, MPFR_RNDN);
    mpfr_mul_2si(r, exact, unit, rounding);
}

}  // namespace

IntegerRows::IntegerRows(MatrixView<const double> a)
    : cols_(a.cols),
      integers_(static_cast<std::size_t>(a.rows * a.cols)),
      units_(static_cast<std::size_t>(a.rows), 0),
      bits_(static_cast<std::size_t>(a.rows), 0) {
    constexpr int significand = 53;
    for (std::ptrdiff_t i = 0; i < a.rows; ++i) {
        int lowest = 1 << 20, highest = -(1 << 20);
        for (std::ptrdiff_t c = 0; c < a.cols; ++c) {
            if (a(i, c) == 0) continue;
            int exponent = 0;
            const auto integer = static_cast<std::int64_t>(std::ldexp(std::frexp(a(i, c), &exponent), significand));
            const auto zeros = std::countr_zero(static_cast<std::uint64_t>(integer));
            lowest = std::min(lowest, exponent - significand + zeros);
            highest = std::max(highest, exponent);
        }
        if (highest < lowest) continue;  // all zeros
        const auto at = static_cast<std::size_t>(i);
        units_[at] = lowest;
        bits_[at] = highest - lowest;
        for (std::ptrdiff_t c = 0; c < a.cols && has(i); ++c)
            integers_[static_cast<std::size_t>(i * a.cols + c)] =
                static_cast<std::int64_t>(std::ldexp(a(i, c), -lowest));
    }
}

bool exact_dot(const IntegerRows& a, std::ptrdiff_t i, const IntegerRows& b, std::ptrdiff_t j, std::ptrdiff_t count,
               Real& sum, Real& size) {
    constexpr int most_bits = 126;
    const auto of_count = static_cast<int>(std::bit_width(static_cast<std::size_t>(count)));
    if (!a.has(i) || !b.has(j) || a.bits(i) + b.bits(j) + of_count > most_bits) return false;
    const std::int64_t* x = a.row(i);
    const std::int64_t* y = b.row(j);
    Wide signed_sum = 0, absolute = 0;
    for (std::ptrdiff_t c = 0; c < count; ++c) {
        const Wide product = static_cast<Wide>(x[c]) * y[c];
        signed_sum += product;
        absolute += product < 0 ? -product : product;
    }
    const int unit = a.unit(i) + b.unit(j);
    set(sum, signed_sum, unit, MPFR_RNDN);
    set(size, absolute, unit, MPFR_RNDU);
    return true;
}

}  // namespace faultline::detail
