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
        const DoubleDouble scaled = scaled_to({high[j], low[j], exponent[j]}, reference);
        out_high[j] = scaled.high;
        out_low[j] = scaled.low;
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
        out[j] = size_exponent(d_high[j], d_error, exponent[j]);
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
        const ScaledTerm u = weighted_term({p_high[j], p_low[j], exponent[j]}, p_error, {d_high[j], d_low[j]}, d_error,
                                           high[j], reference, own_error);
        high[j] = u.value.high;
        low[j] = u.value.low;
        error[j] = u.error;
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
                          const double* __restrict d_low, double d_error, Rest rest, std::ptrdiff_t count,
                          const WideRow& ds, double* __restrict error) {
    const double* __restrict p_high = p.high;
    const double* __restrict p_low = p.low;
    const double* __restrict p_exponent = p.exponent;
    double* __restrict high = ds.high;
    double* __restrict low = ds.low;
    double* __restrict exponent = ds.exponent;
    for (std::ptrdiff_t j = 0; j < count; ++j) {
        const WideBounded r =
            gradient_element({p_high[j], p_low[j], p_exponent[j]}, p_error, {d_high[j], d_low[j]}, d_error, rest);
        high[j] = r.value.high;
        low[j] = r.value.low;
        error[j] = r.error;
        exponent[j] = r.value.exponent;
    }
}

void softmax_gradient(const WideRow& p, RelativeError p_error, const double* d_high, const double* d_low,
                      double d_error, const WideSum& rest, std::ptrdiff_t count, const WideRow& ds, double* error) {
    gradient_loop(p, p_error, d_high, d_low, d_error, rest_of(rest), count, ds, error);
}

FAULTLINE_CLONES
static void own_exponents(const WideRow& a, const double* __restrict error, std::ptrdiff_t count,
                          double* __restrict out) {
    const double* __restrict high = a.high;
    const double* __restrict exponent = a.exponent;
    for (std::ptrdiff_t j = 0; j < count; ++j) {
        out[j] = size_exponent(high[j], error[j], exponent[j]);
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
        const ScaledTerm scaled = scaled_to({high[j], low[j], exponent[j]}, error[j], reference);
        out_high[j] = scaled.value.high;
        out_low[j] = scaled.value.low;
        magnitude[j] = scaled.magnitude;
        out_error[j] = scaled.error;
    }
}

FAULTLINE_CLONES
static void centre_exponents(const WideRow& a, const double* __restrict error, const double* __restrict column,
                             double pivot, std::ptrdiff_t count, double* __restrict out) {
    const double* __restrict high = a.high;
    const double* __restrict exponent = a.exponent;
    for (std::ptrdiff_t j = 0; j < count; ++j) {
        out[j] = centred_exponent(high[j], error[j], exponent[j], column[j], pivot);
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
        const ScaledTerm u =
            centred_term({high[j], low[j], exponent[j]}, error[j], column[j], pivot, terms[j], reference, own_error);
        terms[j] = u.value.high;
        terms_low[j] = u.value.low;
        terms_error[j] = u.error;
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
