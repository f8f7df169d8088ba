// SPDX-License-Identifier: Apache-2.0
#include <faultline/truth/softcap_row.hpp>

#include <faultline/base/clones.hpp>
#include <faultline/truth/elementary.hpp>
#include <faultline/truth/softcap_element.hpp>

namespace faultline::detail {

SoftcapRow::SoftcapRow(std::size_t width) {
    for (AlignedVector* a : {&x_high_, &x_low_, &high_, &low_, &exponent_, &relative_error_}) a->resize(width);
}

FAULTLINE_CLONES
static void arguments(const double* __restrict s_high, const double* __restrict s_low, DoubleDouble factor,
                      std::ptrdiff_t count, double* __restrict x_high, double* __restrict x_low) {
    for (std::ptrdiff_t j = 0; j < count; ++j) {
        const DoubleDouble x = softcap_argument({s_high[j], s_low[j]}, factor);
        x_high[j] = x.high;
        x_low[j] = x.low;
    }
}

/// s <- +-c (1 - E)/(1 + E), (high, low, exponent) <- 4E/(1 + E)^2, relative_error <- that of the latter.
FAULTLINE_CLONES
static void cap_and_slope(double cap, double positive, double x_relative, double x_absolute, const double* __restrict x,
                          std::ptrdiff_t count, double* __restrict s_high, double* __restrict s_low,
                          double* __restrict high, double* __restrict low, double* __restrict exponent,
                          double* __restrict relative_error) {
    for (std::ptrdiff_t j = 0; j < count; ++j) {
        const CappedScore c =
            capped(cap, positive, x_relative, x_absolute, s_high[j], x[j], {high[j], low[j], exponent[j]});
        s_high[j] = c.score.high;
        s_low[j] = c.score.low;
        high[j] = c.slope.high;
        low[j] = c.slope.low;
        relative_error[j] = c.slope_error;
    }
}

double SoftcapRow::apply(const FastInputs& in, double error, std::ptrdiff_t count, double* s_high, double* s_low,
                         bool& vanished) {
    const Softcap cap = in.softcap;
    const SoftcapErrors errors = softcap_errors(cap, error);
    arguments(s_high, s_low, cap.factor, count, x_high_.data(), x_low_.data());
    exp(x_high_.data(), x_low_.data(), count, high_.data(), low_.data(), exponent_.data());
    for (std::ptrdiff_t j = 0; j < count && !vanished; ++j) vanished = high_[static_cast<std::size_t>(j)] == 0;
    cap_and_slope(cap.cap, cap.positive, errors.x_relative, errors.x_absolute, x_high_.data(), count, s_high, s_low,
                  high_.data(), low_.data(), exponent_.data(), relative_error_.data());
    return errors.score;
}

FAULTLINE_CLONES
static void chain_loop(const double* __restrict slope_high, const double* __restrict slope_low,
                       const double* __restrict slope_exponent, const double* __restrict slope_error,
                       std::ptrdiff_t count, double* __restrict high, double* __restrict low,
                       double* __restrict exponent, double* __restrict error) {
    for (std::ptrdiff_t j = 0; j < count; ++j) {
        const WideBounded r = chained({high[j], low[j], exponent[j]}, error[j],
                                      {slope_high[j], slope_low[j], slope_exponent[j]}, slope_error[j]);
        high[j] = r.value.high;
        low[j] = r.value.low;
        error[j] = r.error;
        exponent[j] = r.value.exponent;
    }
}

void SoftcapRow::chain(std::ptrdiff_t count, const WideRow& ds, double* error) const {
    chain_loop(high_.data(), low_.data(), exponent_.data(), relative_error_.data(), count, ds.high, ds.low, ds.exponent,
               error);
}

}  // namespace faultline::detail
