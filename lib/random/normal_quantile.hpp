// SPDX-License-Identifier: Apache-2.0
// The inverse of the standard normal distribution function: Wichura, "Algorithm AS 241: the percentage points of the
// normal distribution", Applied Statistics 37 (1988), routine PPND16, relative error about 1e-16. Additions,
// multiplications, divisions and square roots only (the logarithm is written out), so that host and device agree bit for
// bit where contraction to fma is off.
#pragma once

#include <faultline/base/host_device.hpp>
#include <faultline/random/bits_as.hpp>

#include <cmath>
#include <cstdint>

namespace faultline {
namespace detail {

/// c[0] + c[1] x + ... + c[N-1] x^(N-1), Horner.
template <int N>
FAULTLINE_HD constexpr double polynomial(const double (&c)[N], double x) {
    double sum = c[N - 1];
    for (int i = N - 2; i >= 0; --i) sum = sum * x + c[i];
    return sum;
}

/// Natural logarithm of a normal positive number, to about 2 ulp: x = 2^k m with m in [sqrt(1/2), sqrt(2)), and
/// log m = 2 atanh((m-1)/(m+1)), |(m-1)/(m+1)| < 0.1716, whose series needs 11 terms (0.1716^23/23 < 2^-62).
FAULTLINE_HD constexpr double portable_log(double x) {
    constexpr double ln2 = 0x1.62e42fefa39efp-1;
    const auto bits = detail::bits_as<std::uint64_t>(x);
    int k = static_cast<int>(bits >> 52) - 1023;
    double m = detail::bits_as<double>((bits & 0xFFFFFFFFFFFFFu) | 0x3FF0000000000000u);
    if (m > 0x1.6a09e667f3bcdp0) {  // sqrt(2)
        m *= 0.5;
        ++k;
    }
    const double t = (m - 1) / (m + 1);
    const double t2 = t * t;
    double sum = 0;
    for (int n = 21; n >= 1; n -= 2) sum = sum * t2 + 1.0 / n;
    return k * ln2 + 2 * t * sum;
}

}  // namespace detail

/// z with P(Z <= z) = p for standard normal Z; 0 < p < 1.
[[nodiscard]] FAULTLINE_HD inline double normal_quantile(double p) {
    constexpr double a[] = {3.3871328727963666080e0,  1.3314166789178437745e+2, 1.9715909503065514427e+3,
                            1.3731693765509461125e+4, 4.5921953931549871457e+4, 6.7265770927008700853e+4,
                            3.3430575583588128105e+4, 2.5090809287301226727e+3};
    constexpr double b[] = {1.0,
                            4.2313330701600911252e+1,
                            6.8718700749205790830e+2,
                            5.3941960214247511077e+3,
                            2.1213794301586595867e+4,
                            3.9307895800092710610e+4,
                            2.8729085735721942674e+4,
                            5.2264952788528545610e+3};
    constexpr double c[] = {1.42343711074968357734e0,  4.63033784615654529590e0, 5.76949722146069140550e0,
                            3.64784832476320460504e0,  1.27045825245236838258e0, 2.41780725177450611770e-1,
                            2.27238449892691845833e-2, 7.74545014278341407640e-4};
    constexpr double d[] = {1.0,
                            2.05319162663775882187e0,
                            1.67638483018380384940e0,
                            6.89767334985100004550e-1,
                            1.48103976427480074590e-1,
                            1.51986665636164571966e-2,
                            5.47593808499534494600e-4,
                            1.05075007164441684324e-9};
    constexpr double e[] = {6.65790464350110377720e0,  5.46378491116411436990e0,  1.78482653991729133580e0,
                            2.96560571828504891230e-1, 2.65321895265761230930e-2, 1.24266094738807843860e-3,
                            2.71155556874348757815e-5, 2.01033439929228813265e-7};
    constexpr double f[] = {1.0,
                            5.99832206555887937690e-1,
                            1.36929880922735805310e-1,
                            1.48753612908506148525e-2,
                            7.86869131145613259100e-4,
                            1.84631831751005468180e-5,
                            1.42151175831644588870e-7,
                            2.04426310338993978564e-15};
    const double q = p - 0.5;
    if (std::fabs(q) <= 0.425) {
        const double r = 0.180625 - q * q;
        return q * detail::polynomial(a, r) / detail::polynomial(b, r);
    }
    const double r = std::sqrt(-detail::portable_log(q < 0 ? p : 1 - p));
    const double magnitude = r <= 5 ? detail::polynomial(c, r - 1.6) / detail::polynomial(d, r - 1.6)
                                    : detail::polynomial(e, r - 5) / detail::polynomial(f, r - 5);
    return q < 0 ? -magnitude : magnitude;
}

}  // namespace faultline
