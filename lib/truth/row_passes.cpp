// SPDX-License-Identifier: Apache-2.0
#include <faultline/truth/row_passes.hpp>

#include <cmath>
#include <limits>

#include <faultline/base/clones.hpp>
#include <faultline/truth/aligned.hpp>
#include <faultline/truth/elementary.hpp>

namespace faultline::detail {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr double round_up = 1 + 0x1p-20;  // covers the roundings and products of errors in a bound's own arithmetic

}  // namespace

FAULTLINE_CLONES
double largest(const double* x, std::ptrdiff_t count) {
    double top[lanes];
    for (std::ptrdiff_t l = 0; l < lanes; ++l) top[l] = x[l];
    for (std::ptrdiff_t j = lanes; j < count; j += lanes)
        for (std::ptrdiff_t l = 0; l < lanes; ++l) top[l] = x[j + l] > top[l] ? x[j + l] : top[l];
    double r = top[0];
    for (std::ptrdiff_t l = 1; l < lanes; ++l) r = top[l] > r ? top[l] : r;
    return r;
}

double largest_exponent(const double* exponent, std::ptrdiff_t count) {
    const double r = largest(exponent, count);
    return r < none_exponent ? none_exponent : r;
}

FAULTLINE_CLONES
DoubleDouble tree_sum(double* __restrict high, double* __restrict low, std::ptrdiff_t count) {
    // blocks of eight onto blocks of eight, then the eight: all shapes of the tree depend on count alone
    while (count > lanes) {
        const std::ptrdiff_t kept = round_up_to_lanes((count + 1) / 2);
        const double* __restrict other_high = high + kept;
        const double* __restrict other_low = low + kept;
        for (std::ptrdiff_t j = 0; j < count - kept; ++j) {
            const DoubleDouble s = DoubleDouble{high[j], low[j]} + DoubleDouble{other_high[j], other_low[j]};
            high[j] = s.high;
            low[j] = s.low;
        }
        count = kept;
    }
    for (std::ptrdiff_t width = lanes / 2; width > 0; width /= 2)
        for (std::ptrdiff_t j = 0; j < width; ++j) {
            const DoubleDouble s = DoubleDouble{high[j], low[j]} + DoubleDouble{high[j + width], low[j + width]};
            high[j] = s.high;
            low[j] = s.low;
        }
    return {high[0], low[0]};
}

FAULTLINE_CLONES
double upper_sum(double* __restrict a, std::ptrdiff_t count) {
    while (count > lanes) {
        const std::ptrdiff_t kept = round_up_to_lanes((count + 1) / 2);
        const double* __restrict other = a + kept;
        for (std::ptrdiff_t j = 0; j < count - kept; ++j) a[j] += other[j];
        count = kept;
    }
    for (std::ptrdiff_t width = lanes / 2; width > 0; width /= 2)
        for (std::ptrdiff_t j = 0; j < width; ++j) a[j] += a[j + width];
    return a[0] * round_up;
}

FAULTLINE_CLONES
static void subtract_plain(const double* __restrict s_high, const double* __restrict s_low, DoubleDouble scale,
                           DoubleDouble pivot, std::ptrdiff_t seen, double* __restrict x_high,
                           double* __restrict x_low) {
    for (std::ptrdiff_t j = 0; j < seen; ++j) {
        const DoubleDouble x = scale * (DoubleDouble{s_high[j], s_low[j]} - pivot);
        x_high[j] = x.high;
        x_low[j] = x.low;
    }
}

FAULTLINE_CLONES
static void subtract_biased(const double* __restrict s_high, const double* __restrict s_low,
                            const double* __restrict bias, DoubleDouble scale, DoubleDouble pivot, double pivot_bias,
                            std::ptrdiff_t seen, double* __restrict x_high, double* __restrict x_low,
                            double* __restrict magnitude) {
    for (std::ptrdiff_t j = 0; j < seen; ++j) {
        const double given = bias[j];
        const double b = given == -infinity ? pivot_bias : given;
        const DoubleDouble y = scale * (DoubleDouble{s_high[j], s_low[j]} - pivot);
        const DoubleDouble x = y + two_sum(b, -pivot_bias);
        x_high[j] = x.high;
        x_low[j] = x.low;
        magnitude[j] = std::fabs(y.high);
    }
    for (std::ptrdiff_t j = 0; j < seen; ++j) {
        const bool masked = bias[j] == -infinity;
        x_high[j] = masked ? -infinity : x_high[j];
        x_low[j] = masked ? 0 : x_low[j];
        magnitude[j] = x_high[j] < exp_lowest ? 0 : magnitude[j];
    }
}

double subtract_pivot(const double* s_high, const double* s_low, const double* bias, DoubleDouble scale,
                      std::ptrdiff_t w, std::ptrdiff_t seen, std::ptrdiff_t count, double* x_high, double* x_low,
                      double* scratch) {
    const DoubleDouble pivot{s_high[w], s_low[w]};
    for (std::ptrdiff_t j = seen; j < count; ++j) {
        x_high[j] = -infinity;
        x_low[j] = 0;
        scratch[j] = 0;
    }
    if (bias == nullptr) {
        subtract_plain(s_high, s_low, scale, pivot, seen, x_high, x_low);
        return 0;  // not asked for: then x itself is the product
    }
    subtract_biased(s_high, s_low, bias, scale, pivot, bias[w], seen, x_high, x_low, scratch);
    return largest(scratch, count) * round_up;
}

FAULTLINE_CLONES
double scale_row(const WideRow& p, double reference, std::ptrdiff_t count, double* __restrict out_high,
                 double* __restrict out_low) {
    const double* __restrict high = p.high;
    const double* __restrict low = p.low;
    const double* __restrict exponent = p.exponent;
    for (std::ptrdiff_t j = 0; j < count; ++j) {
        const double k = exponent[j] - reference;
        const double factor = power_of_two(k < flush_exponent ? 0 : k);
        out_high[j] = high[j] * (k < flush_exponent ? 0 : factor);
        out_low[j] = low[j] * (k < flush_exponent ? 0 : factor);
    }
    double flushed = 0;
    for (std::ptrdiff_t j = 0; j < count; ++j) flushed += (high[j] != 0 && out_high[j] == 0) ? 1 : 0;
    return flushed;
}

FAULTLINE_CLONES
void multiply(double* __restrict high, double* __restrict low, DoubleDouble factor, std::ptrdiff_t count) {
    for (std::ptrdiff_t j = 0; j < count; ++j) {
        const DoubleDouble r = DoubleDouble{high[j], low[j]} * factor;
        high[j] = r.high;
        low[j] = r.low;
    }
}

FAULTLINE_CLONES
void subtract(double* __restrict high, double* __restrict low, DoubleDouble pivot, std::ptrdiff_t count) {
    for (std::ptrdiff_t j = 0; j < count; ++j) {
        const DoubleDouble r = DoubleDouble{high[j], low[j]} - pivot;
        high[j] = r.high;
        low[j] = r.low;
    }
}

FAULTLINE_CLONES
static void weigh_exponents(const double* __restrict exponent, const double* __restrict d_high, double d_error,
                            std::ptrdiff_t count, double* __restrict out) {
    for (std::ptrdiff_t j = 0; j < count; ++j) {
        const double size = std::fabs(d_high[j]) + d_error;
        const double e = exponent[j] + exponent_of(size);
        out[j] = size == 0 ? no_exponent : e;
    }
}

/// Terms into (high, low), their error bounds into `error`; terms[j] holds the exponent of term j at first.
FAULTLINE_CLONES
static void weigh_terms(const WideRow& p, RelativeError p_error, const double* __restrict d_high,
                        const double* __restrict d_low, double d_error, double reference, double own_error,
                        std::ptrdiff_t count, double* __restrict high, double* __restrict low,
                        double* __restrict error) {
    const double* __restrict p_high = p.high;
    const double* __restrict p_low = p.low;
    const double* __restrict exponent = p.exponent;
    for (std::ptrdiff_t j = 0; j < count; ++j) {
        const double term = high[j] - reference;
        const double k = exponent[j] - reference;
        const double factor = power_of_two(term < flush_exponent ? 0 : k);
        const double f = term < flush_exponent ? 0 : factor;
        const DoubleDouble weight{p_high[j] * f, p_low[j] * f};
        const DoubleDouble u = weight * DoubleDouble{d_high[j], d_low[j]};
        const double flushed = term < flush_exponent ? flushed_term : 0;
        high[j] = u.high;
        low[j] = u.low;
        error[j] = std::fabs(u.high) * (p_error.alpha + p_error.beta * std::fabs(exponent[j]) + own_error) +
                   weight.high * d_error + (p_high[j] == 0 ? 0 : flushed);
    }
}

WideSum weighted_sum(const WideRow& p, RelativeError p_error, const double* d_high, const double* d_low, double d_error,
                     std::ptrdiff_t count, double* const scratch[3]) {
    WideSum sum;
    weigh_exponents(p.exponent, d_high, d_error, count, scratch[0]);
    sum.exponent = largest_exponent(scratch[0], count);
    if (sum.exponent == none_exponent) return sum;
    const double own_error = mul_error + add_error + tree_depth(count) * add_error;
    weigh_terms(p, p_error, d_high, d_low, d_error, sum.exponent, own_error, count, scratch[0], scratch[1], scratch[2]);
    sum.error = upper_sum(scratch[2], count) * round_up;
    sum.value = tree_sum(scratch[0], scratch[1], count);
    return sum;
}

FAULTLINE_CLONES
static void gradient_loop(const WideRow& p, RelativeError p_error, const double* __restrict d_high,
                          const double* __restrict d_low, double d_error, WideSum rest, DoubleDouble near_rest,
                          double near_error, std::ptrdiff_t count, const WideRow& ds, double* __restrict error) {
    const double* __restrict p_high = p.high;
    const double* __restrict p_low = p.low;
    const double* __restrict p_exponent = p.exponent;
    double* __restrict high = ds.high;
    double* __restrict low = ds.low;
    double* __restrict exponent = ds.exponent;
    for (std::ptrdiff_t j = 0; j < count; ++j) {
        const double d = d_high[j];
        const bool alone = std::fabs(d) + d_error == 0;  // d_j is exactly 0: then d_j - rest is -rest, on any scale
        const DoubleDouble subtrahend{alone ? rest.value.high : near_rest.high, alone ? rest.value.low : near_rest.low};
        const DoubleDouble g = DoubleDouble{d, d_low[j]} - subtrahend;
        const double g_error =
            d_error + (alone ? rest.error : near_error) + add_error * (std::fabs(d) + std::fabs(g.high));
        const DoubleDouble r = DoubleDouble{p_high[j], p_low[j]} * g;
        const double p_relative = p_error.alpha + p_error.beta * std::fabs(p_exponent[j]) + mul_error;
        high[j] = r.high;
        low[j] = r.low;
        error[j] = p_high[j] * (g_error + std::fabs(g.high) * p_relative) * round_up;
        exponent[j] = p_exponent[j] + (alone ? rest.exponent : 0);
    }
}

void softmax_gradient(const WideRow& p, RelativeError p_error, const double* d_high, const double* d_low,
                      double d_error, const WideSum& rest, std::ptrdiff_t count, const WideRow& ds, double* error) {
    // The sum on the scale of the d_j themselves. Below 2^-900 it is lost on them: they are 2^-550 at least.
    constexpr double lost = -900;
    DoubleDouble near_rest;
    double near_error = 0;
    if (rest.exponent >= lost) {
        const double factor = power_of_two(rest.exponent);
        near_rest = {rest.value.high * factor, rest.value.low * factor};
        near_error = rest.error * factor;
    } else if (rest.exponent != none_exponent) {
        near_error = 0x1p-800;  // mantissa below count * 8 < 2^60
    }
    gradient_loop(p, p_error, d_high, d_low, d_error, rest, near_rest, near_error, count, ds, error);
}

FAULTLINE_CLONES
static void own_exponents(const WideRow& a, const double* __restrict error, std::ptrdiff_t count,
                          double* __restrict out) {
    const double* __restrict high = a.high;
    const double* __restrict exponent = a.exponent;
    for (std::ptrdiff_t j = 0; j < count; ++j) {
        const double size = std::fabs(high[j]) + error[j];
        const double e = exponent[j] + exponent_of(size);
        out[j] = size == 0 ? no_exponent : e;
    }
}

double largest_exponent(const WideRow& a, const double* error, std::ptrdiff_t count, double* scratch) {
    own_exponents(a, error, count, scratch);
    return largest_exponent(scratch, count);
}

FAULTLINE_CLONES
static void scale_loop(const WideRow& a, const double* __restrict error, double reference, std::ptrdiff_t count,
                       double* __restrict out_high, double* __restrict out_low, double* __restrict magnitude,
                       double* __restrict out_error) {
    const double* __restrict high = a.high;
    const double* __restrict low = a.low;
    const double* __restrict exponent = a.exponent;
    for (std::ptrdiff_t j = 0; j < count; ++j) {
        const double size = std::fabs(high[j]) + error[j];
        const double k = exponent[j] - reference;
        const bool flush = k + exponent_of(size) < flush_exponent;
        const double factor = power_of_two(flush ? 0 : k);
        const double f = flush ? 0 : factor;
        const double flushed = flush ? flushed_term : 0;
        out_high[j] = high[j] * f;
        out_low[j] = low[j] * f;
        magnitude[j] = std::fabs(high[j]) * f;
        out_error[j] = error[j] * f + (size == 0 ? 0 : flushed);
    }
}

FAULTLINE_CLONES
static void centre_exponents(const WideRow& a, const double* __restrict error, const double* __restrict column,
                             double pivot, std::ptrdiff_t count, double* __restrict out) {
    const double* __restrict high = a.high;
    const double* __restrict exponent = a.exponent;
    for (std::ptrdiff_t j = 0; j < count; ++j) {
        const double size = (std::fabs(high[j]) + error[j]) * std::fabs(column[j] - pivot);
        const double e = exponent[j] + exponent_of(size);
        out[j] = size == 0 ? no_exponent : e;
    }
}

/// terms[j] holds the exponent of term j at first.
FAULTLINE_CLONES
static void centre_terms(const WideRow& a, const double* __restrict error, const double* __restrict column,
                         double pivot, double reference, double own_error, std::ptrdiff_t count,
                         double* __restrict terms, double* __restrict terms_low, double* __restrict terms_error) {
    const double* __restrict high = a.high;
    const double* __restrict low = a.low;
    const double* __restrict exponent = a.exponent;
    for (std::ptrdiff_t j = 0; j < count; ++j) {
        const bool flush = terms[j] - reference < flush_exponent;
        const double factor = power_of_two(flush ? 0 : exponent[j] - reference);
        const double f = flush ? 0 : factor;
        const DoubleDouble difference = two_sum(column[j], -pivot);
        const DoubleDouble u = DoubleDouble{high[j] * f, low[j] * f} * difference;
        const double flushed = flush & (terms[j] > none_exponent) ? flushed_term : 0;
        terms[j] = u.high;
        terms_low[j] = u.low;
        terms_error[j] = error[j] * f * std::fabs(difference.high) + own_error * std::fabs(u.high) + flushed;
    }
}

WideSum centred_sum(const WideRow& a, const double* error, const double* column, double pivot, std::ptrdiff_t count,
                    double* const scratch[3]) {
    WideSum sum;
    centre_exponents(a, error, column, pivot, count, scratch[0]);
    sum.exponent = largest_exponent(scratch[0], count);
    if (sum.exponent == none_exponent) return sum;
    const double own_error = mul_error + tree_depth(count) * add_error;
    centre_terms(a, error, column, pivot, sum.exponent, own_error, count, scratch[0], scratch[1], scratch[2]);
    sum.error = upper_sum(scratch[2], count) * round_up;
    sum.value = tree_sum(scratch[0], scratch[1], count);
    return sum;
}

ScaledRow scale_row(const WideRow& a, const double* error, double reference, std::ptrdiff_t count, double* out_high,
                    double* out_low, double* const scratch[2]) {
    scale_loop(a, error, reference, count, out_high, out_low, scratch[0], scratch[1]);
    return {upper_sum(scratch[0], count), upper_sum(scratch[1], count)};
}

}  // namespace faultline::detail
