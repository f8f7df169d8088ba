// SPDX-License-Identifier: Apache-2.0
#include <faultline/truth/settle.hpp>

#include <algorithm>
#include <cmath>
#include <limits>

#include <faultline/base/clones.hpp>

namespace faultline::detail {
namespace {

constexpr double comfortable = 900;  // exponents of CertifiedMatrix::value

/// RN(high + z) = high for all z in [low - error, low + error]: by monotony the ends suffice. `slack` covers the rounding
/// of low +- error, at most u (|low| + error). Without an error high is RN(high + low), ties to even as they should be.
[[gnu::always_inline]] inline bool decides(double high, double low, double error) {
    const double slack = error * (1 + 0x1p-40) + std::fabs(low) * 0x1p-52;
    const bool both_ends = (high + (low + slack) == high) & (high + (low - slack) == high) & (high != 0);
    return both_ends | ((error == 0) & (high + low == high));
}

/// (|low| + error) * factor, rounded up even where it underflows; 0 stays 0.
[[gnu::always_inline]] inline double bound_of(double low, double error, double factor) {
    const double size = std::fabs(low) + error;
    return size * (1 + 0x1p-50) * factor + (size == 0 ? 0 : std::numeric_limits<double>::denorm_min());
}

FAULTLINE_CLONES
std::ptrdiff_t settle_loop(const double* __restrict high, const double* __restrict low, const double* __restrict error,
                           double factor, std::ptrdiff_t cols, double* __restrict value, double* __restrict bound) {
    // An element that needs the scalar path, for its range or its rounding, gets the bound -1.
    std::ptrdiff_t open = 0;
    for (std::ptrdiff_t c = 0; c < cols; ++c) {
        const double v = high[c] * factor;
        const double size = std::fabs(v);
        const bool plain = ((size >= 0x1p-900) & (size <= 0x1p900)) | ((size == 0) & (high[c] == 0));
        const bool good = plain & decides(high[c], low[c], error[c]);
        value[c] = v;
        const double b = bound_of(low[c], error[c], factor);
        bound[c] = good ? b : -1;
        open += good ? 0 : 1;
    }
    return open;
}

}  // namespace

WideSum add(const WideSum& a, const WideSum& b) {
    constexpr double lost = -900;
    if (b.exponent == none_exponent) return a;
    if (a.value.high == 0 && a.error == 0) return b;
    if (b.exponent < lost) return {a.value, 0, a.error + (std::fabs(b.value.high) + b.error) * 0x1p-890 + 0x1p-1000};
    const double factor = power_of_two(b.exponent);
    const DoubleDouble sum = a.value + DoubleDouble{b.value.high * factor, b.value.low * factor};
    return {sum, 0, (a.error + b.error * factor + add_error * std::fabs(sum.high)) * (1 + 0x1p-40)};
}

bool settle(const WideSum& x, CertifiedMatrix& out, std::size_t at) {
    const DoubleDouble sum = two_sum(x.value.high, x.value.low);
    const double size = std::max(std::fabs(sum.high), sum.high == 0 ? x.error : 0);
    if (x.exponent == none_exponent || size == 0) {
        out.value[at] = 0;
        out.bound[at] = 0;
        out.exponent[at] = 0;
        return true;
    }
    const double own = exponent_of(size);
    const bool fits = std::fabs(own + x.exponent) <= comfortable;
    const int shift = static_cast<int>(fits ? x.exponent : -own);
    out.value[at] = std::ldexp(sum.high, shift);
    out.bound[at] = bound_of(sum.low, x.error, std::ldexp(1.0, shift));
    out.exponent[at] = fits ? 0 : static_cast<std::int64_t>(x.exponent + own);
    return decides(sum.high, sum.low, x.error);
}

void settle_row(const double* high, const double* low, const double* error, double exponent, CertifiedMatrix& out,
                std::ptrdiff_t row, std::vector<std::ptrdiff_t>& left) {
    double* value = out.value.data() + row * out.cols;
    double* bound = out.bound.data() + row * out.cols;
    constexpr double far = 400;
    const bool near = std::fabs(exponent) <= far;
    if (near && settle_loop(high, low, error, power_of_two(exponent), out.cols, value, bound) == 0) return;
    for (std::ptrdiff_t c = 0; c < out.cols; ++c) {
        if (near && bound[c] >= 0) continue;
        if (!settle({{high[c], low[c]}, exponent, error[c]}, out, out.index(row, c))) left.push_back(c);
    }
}

}  // namespace faultline::detail
