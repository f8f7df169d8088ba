// SPDX-License-Identifier: Apache-2.0
#include <faultline/truth/softcap_row.hpp>

#include <cmath>
#include <limits>

#include <faultline/base/clones.hpp>
#include <faultline/truth/elementary.hpp>

namespace faultline::detail {
namespace {

constexpr double more = 1.01;               // covers products of errors and the bound's own arithmetic
constexpr double lost_on_one = 0x1p-296;    // E below 2^-300 (mantissa below 2.1) is lost on the 1 that it is added to
constexpr double largest_product = 0.3679;  // of t e^-t, rounded up: |x| E

}  // namespace

SoftcapRow::SoftcapRow(std::size_t width) {
    for (AlignedVector* a : {&x_high_, &x_low_, &high_, &low_, &exponent_, &relative_error_}) a->resize(width);
}

FAULTLINE_CLONES
static void arguments(const double* __restrict s_high, const double* __restrict s_low, DoubleDouble factor,
                      std::ptrdiff_t count, double* __restrict x_high, double* __restrict x_low) {
    for (std::ptrdiff_t j = 0; j < count; ++j) {
        const DoubleDouble u = DoubleDouble{s_high[j], s_low[j]} * factor;
        const double sign = u.high > 0 ? -2.0 : 2.0;
        x_high[j] = sign * u.high;
        x_low[j] = sign * u.low;
    }
}

/// s <- +-c (1 - E)/(1 + E), (high, low, exponent) <- 4E/(1 + E)^2, relative_error <- that of the latter.
FAULTLINE_CLONES
static void cap_and_slope(double cap, double positive, double x_relative, double x_absolute, const double* __restrict x,
                          std::ptrdiff_t count, double* __restrict s_high, double* __restrict s_low,
                          double* __restrict high, double* __restrict low, double* __restrict exponent,
                          double* __restrict relative_error) {
    for (std::ptrdiff_t j = 0; j < count; ++j) {
        const bool lost = exponent[j] < flush_exponent;
        const double f = power_of_two(lost ? 0 : exponent[j]);
        const DoubleDouble e{lost ? 0 : high[j] * f, lost ? 0 : low[j] * f};
        const DoubleDouble one{1, 0};
        const DoubleDouble sum = one + e;
        const DoubleDouble t = (one - e) / sum;
        const double sign = s_high[j] * positive < 0 ? -cap : cap;
        const DoubleDouble s = t * sign;
        s_high[j] = s.high;
        s_low[j] = s.low;
        const DoubleDouble slope = DoubleDouble{4 * high[j], 4 * low[j]} / (sum * sum);
        const bool none = high[j] == 0;
        high[j] = none ? 0 : slope.high;
        low[j] = none ? 0 : slope.low;
        const double of_e = exp_error + more * (std::fabs(x[j]) * x_relative + x_absolute);
        relative_error[j] = none ? 0 : more * (3 * of_e + 2 * add_error + mul_error + div_error + 2 * lost_on_one);
    }
}

double SoftcapRow::apply(const FastInputs& in, double error, std::ptrdiff_t count, double* s_high, double* s_low,
                         bool& vanished) {
    const double cap = in.problem.softcap;
    const DoubleDouble factor = in.scale / DoubleDouble{cap, 0};
    const double x_relative = more * (in.scale_error + div_error + mul_error);
    const double x_absolute = more * 2 * std::fabs(factor.high) * error;
    arguments(s_high, s_low, factor, count, x_high_.data(), x_low_.data());
    exp(x_high_.data(), x_low_.data(), count, high_.data(), low_.data(), exponent_.data());
    for (std::ptrdiff_t j = 0; j < count && !vanished; ++j) vanished = high_[static_cast<std::size_t>(j)] == 0;
    cap_and_slope(cap, in.scale.high < 0 ? -1 : 1, x_relative, x_absolute, x_high_.data(), count, s_high, s_low,
                  high_.data(), low_.data(), exponent_.data(), relative_error_.data());
    // E is off by E exp_error + E |x| x_relative + E x_absolute, and dtanh/dE = -2/(1 + E)^2 is at most 2
    const double of_e = exp_error + more * (largest_product * x_relative + x_absolute);
    constexpr double first_order = 0x1p-40;  // above it the errors of E are not small, and the row goes the slow way
    if (!(of_e <= first_order)) return std::numeric_limits<double>::infinity();
    const double of_tanh = more * (2 * of_e + 2 * add_error + div_error + lost_on_one);
    return more * cap * (of_tanh + mul_double_error);
}

FAULTLINE_CLONES
static void chain_loop(const double* __restrict slope_high, const double* __restrict slope_low,
                       const double* __restrict slope_exponent, const double* __restrict slope_error,
                       std::ptrdiff_t count, double* __restrict high, double* __restrict low,
                       double* __restrict exponent, double* __restrict error) {
    for (std::ptrdiff_t j = 0; j < count; ++j) {
        const bool none = slope_high[j] == 0;
        const DoubleDouble r = DoubleDouble{high[j], low[j]} * DoubleDouble{slope_high[j], slope_low[j]};
        high[j] = r.high;
        low[j] = r.low;
        error[j] = more * (slope_high[j] * error[j] + std::fabs(r.high) * (slope_error[j] + mul_error));
        exponent[j] = none ? no_exponent : exponent[j] + slope_exponent[j];
    }
}

void SoftcapRow::chain(std::ptrdiff_t count, const WideRow& ds, double* error) const {
    chain_loop(high_.data(), low_.data(), exponent_.data(), relative_error_.data(), count, ds.high, ds.low, ds.exponent,
               error);
}

}  // namespace faultline::detail
