// SPDX-License-Identifier: Apache-2.0
#include <faultline/truth/wide_real.hpp>

#include <algorithm>
#include <cmath>
#include <vector>

#include <mpfr.h>

#include <faultline/truth/mpfr_real.hpp>

namespace faultline {

WideReal::WideReal(double value, std::int64_t power) : mantissa(value) {
    if (value == 0 || !std::isfinite(value)) return;
    int shift = 0;
    mantissa = std::frexp(value, &shift) * 2;
    exponent = power + shift - 1;
}

double WideReal::to_double() const {
    constexpr std::int64_t far = 4096;  // beyond every double's exponent, within an int
    return std::ldexp(mantissa, static_cast<int>(std::clamp(exponent, -far, far)));
}

WideReal WideReal::operator-() const {
    WideReal r = *this;
    r.mantissa = -r.mantissa;
    return r;
}

WideReal operator+(const WideReal& a, const WideReal& b) {
    if (a.mantissa == 0) return b;
    if (b.mantissa == 0) return a;
    if (!std::isfinite(a.mantissa) || !std::isfinite(b.mantissa)) return {a.mantissa + b.mantissa, 0};
    const bool a_larger = a.exponent >= b.exponent;
    const WideReal& large = a_larger ? a : b;
    const WideReal& small = a_larger ? b : a;
    // Below 2^-200 of the larger the smaller only says on which side the sum lies, so its own exponent no longer matters.
    const auto gap = static_cast<int>(std::min<std::int64_t>(large.exponent - small.exponent, 200));
    return {large.mantissa + std::ldexp(small.mantissa, -gap), large.exponent};
}

WideReal operator*(const WideReal& a, const WideReal& b) { return {a.mantissa * b.mantissa, a.exponent + b.exponent}; }

WideReal operator/(const WideReal& a, const WideReal& b) { return {a.mantissa / b.mantissa, a.exponent - b.exponent}; }

bool operator<(const WideReal& a, const WideReal& b) {
    const bool plain = a.mantissa == 0 || b.mantissa == 0 || !std::isfinite(a.mantissa) || !std::isfinite(b.mantissa) ||
                       std::signbit(a.mantissa) != std::signbit(b.mantissa) || a.exponent == b.exponent;
    if (plain) return a.mantissa < b.mantissa;
    return (a.exponent < b.exponent) == (a.mantissa > 0);
}

WideReal sqrt(const WideReal& a) {
    if (a.mantissa == 0 || !std::isfinite(a.mantissa)) return {std::sqrt(a.mantissa), 0};
    const std::int64_t odd = a.exponent & 1;
    return {std::sqrt(odd != 0 ? 2 * a.mantissa : a.mantissa), (a.exponent - odd) / 2};
}

WideReal abs(const WideReal& a) {
    WideReal r = a;
    r.mantissa = std::fabs(r.mantissa);
    return r;
}

std::string WideReal::to_string(int digits) const {
    if (std::isnan(mantissa)) return "nan";
    if (std::isinf(mantissa)) return mantissa > 0 ? "inf" : "-inf";
    if (mantissa == 0) return "0";
    const detail::ExponentRange range;
    detail::Real x(53);
    mpfr_set_d(x, mantissa, MPFR_RNDN);
    mpfr_mul_2si(x, x, static_cast<long>(exponent), MPFR_RNDN);
    std::vector<char> text(static_cast<std::size_t>(std::max(digits, 1)) + 40);
    mpfr_snprintf(text.data(), text.size(), "%.*Re", std::max(digits, 1) - 1, static_cast<mpfr_srcptr>(x));
    return text.data();
}

}  // namespace faultline
