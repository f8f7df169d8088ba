// SPDX-License-Identifier: Apache-2.0
#include <faultline/verdict/student_t.hpp>

#include <cmath>
#include <limits>

namespace faultline {
namespace {

/// The continued fraction of the incomplete beta function (DLMF 8.17.22), evaluated as Lentz does; converges fast for
/// x < (a + 1) / (a + b + 2).
double beta_fraction(double a, double b, double x) {
    constexpr double tiny = 1e-300;
    constexpr double enough = 1e-15;
    double c = 1, d = 1 - (a + b) * x / (a + 1);
    if (std::abs(d) < tiny) d = tiny;
    d = 1 / d;
    double h = d;
    for (int m = 1; m < 10000; ++m) {
        const double even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m));
        d = 1 + even * d;
        c = 1 + even / c;
        if (std::abs(d) < tiny) d = tiny;
        if (std::abs(c) < tiny) c = tiny;
        d = 1 / d;
        h *= d * c;
        const double odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1));
        d = 1 + odd * d;
        c = 1 + odd / c;
        if (std::abs(d) < tiny) d = tiny;
        if (std::abs(c) < tiny) c = tiny;
        d = 1 / d;
        const double factor = d * c;
        h *= factor;
        if (std::abs(factor - 1) < enough) break;
    }
    return h;
}

/// ln I_x(a, b), with 1 - x given apart so that neither loses its digits.
double log_incomplete_beta(double a, double b, double x, double one_less_x) {
    if (x == 0) return -std::numeric_limits<double>::infinity();
    if (one_less_x == 0) return 0;
    const double front =
        std::lgamma(a + b) - std::lgamma(a) - std::lgamma(b) + a * std::log(x) + b * std::log(one_less_x);
    if (x < (a + 1) / (a + b + 2)) return front + std::log(beta_fraction(a, b, x) / a);
    return std::log1p(-std::exp(front) * beta_fraction(b, a, one_less_x) / b);
}

}  // namespace

double log10_two_sided_p(double t, double degrees) {
    if (std::isnan(t) || !(degrees > 0)) return std::numeric_limits<double>::quiet_NaN();
    if (std::isinf(t)) return -std::numeric_limits<double>::infinity();
    const double squared = t * t;
    const double x = std::isinf(squared) ? 0 : degrees / (degrees + squared);
    const double log_p = x == 0 ? 0.5 * degrees * (std::log(degrees) - 2 * std::log(std::abs(t))) +
                                      std::lgamma((degrees + 1) / 2) - std::lgamma(degrees / 2) - std::lgamma(0.5) -
                                      std::log(degrees / 2)
                                : log_incomplete_beta(degrees / 2, 0.5, x, squared / (degrees + squared));
    return log_p / std::log(10.0);
}

}  // namespace faultline
