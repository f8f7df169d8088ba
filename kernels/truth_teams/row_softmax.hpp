// SPDX-License-Identifier: Apache-2.0
// A row's scores to probabilities: score() and softmax() of lib/truth/fast_head.cpp.
#pragma once

#include <cmath>

#include <faultline/truth/products.hpp>
#include <faultline/truth_teams/passes.hpp>

namespace faultline::truth_teams {

// Relative error of scale (s_j - s_w): the subtraction, the product, and the scale's own.
inline constexpr double scaled_difference_error = detail::add_error + detail::mul_error + 1.01 * detail::u2;
// Relative errors beyond this are left to the slow path: products of two of them must not matter.
inline constexpr double tolerable_error = 0x1p-60;
inline constexpr double natural_log_2 = 0.6931471805599454;  // rounded up

FAULTLINE_HD inline double minus_infinity() { return -HUGE_VAL; }

/// One row of a strip.
struct RowAt {
    std::ptrdiff_t row, seen, width;  // row: of all heads' rows
    double *s_high, *s_low, *a_high, *a_low;
    double *p_high, *p_low, *p_exponent;
    double *ds_high, *ds_low, *ds_exponent, *ds_error;
    double *slope_high, *slope_low, *slope_exponent, *slope_error;
    const double *bias, *kept;

    FAULTLINE_HD RowAt(const FlatInputs& in, const Strip& strip, std::ptrdiff_t index) {
        row = strip.first + index;
        seen = in.seen(in.query(row));
        width = padded(seen);
        const std::ptrdiff_t at = index * padded(in.n_k);
        s_high = strip.s_high + at;
        s_low = strip.s_low + at;
        a_high = strip.a_high + at;
        a_low = strip.a_low + at;
        p_high = strip.p_high + at;
        p_low = strip.p_low + at;
        p_exponent = strip.p_exponent + at;
        ds_high = strip.ds_high + at;
        ds_low = strip.ds_low + at;
        ds_exponent = strip.ds_exponent + at;
        ds_error = strip.ds_error + at;
        slope_high = slope_low = slope_exponent = slope_error = nullptr;
        if (in.has_cap()) {
            slope_high = strip.slope_high + at;
            slope_low = strip.slope_low + at;
            slope_exponent = strip.slope_exponent + at;
            slope_error = strip.slope_error + at;
        }
        bias = in.bias_row(row);
        kept = in.kept_row(row);
    }
    [[nodiscard]] FAULTLINE_HD WideValue p(std::ptrdiff_t j) const { return {p_high[j], p_low[j], p_exponent[j]}; }
    [[nodiscard]] FAULTLINE_HD WideValue ds(std::ptrdiff_t j) const { return {ds_high[j], ds_low[j], ds_exponent[j]}; }
};

/// Bound of a row's dot products; 0 where nothing was rounded (lemma 2: all bits of every partial sum fit below sigma).
FAULTLINE_HD inline double dot_error(std::ptrdiff_t count, double log2_count, double power, double width,
                                     double largest_power, double widest) {
    const double bits = width + widest + 4 + log2_count;
    return bits <= 106 ? 0 : detail::accumulation_error(count) * 4 * power * largest_power;
}

/// `memory`: a number for each thread, then three rows.
struct SoftmaxJob {
    FlatInputs in;
    Strip strip;

    template <class Team>
    FAULTLINE_HD void operator()(const Team& team, std::ptrdiff_t index, double* memory) const {
        const RowAt row(in, strip, index);
        double* partial = memory;
        double* scratch = memory + team.size();
        RowState state{};
        state.seen = row.seen;
        state.tail_exponent = state.reference = detail::none_exponent;
        state.empty = row.seen == 0;
        if (!state.empty && row.bias != nullptr)
            state.empty = largest(team, row.seen, minus_infinity(), partial,
                                  [&](std::ptrdiff_t j) { return std::isinf(row.bias[j]) ? 0.0 : 1.0; }) != 1;
        if (!state.empty)
            state.lost = !(score(team, row, state, partial, scratch) && softmax(team, row, state, partial, scratch));
        const std::ptrdiff_t from = state.idle() ? 0 : row.width;
        each_row(team, padded(in.n_k) - from, [&](std::ptrdiff_t n) {
            row.p_high[from + n] = row.p_low[from + n] = 0;
            row.p_exponent[from + n] = detail::no_exponent;
        });
        if (team.rank() == 0) strip.state[index] = state;
    }

  private:
    /// x = s - s_w into a, for a pivot w with s_w (almost) the largest.
    template <class Team>
    FAULTLINE_HD bool score(const Team& team, const RowAt& row, RowState& state, double* partial,
                            double* scratch) const {
        state.score_error =
            dot_error(in.d, in.log2_d, in.q_power[row.row], in.q_width[row.row], in.k_largest, in.k_widest);
        if (in.has_cap()) cap(team, row, state, partial);
        const auto logit = [&](std::ptrdiff_t j) {
            return in.score_scale().high * row.s_high[j] + (row.bias == nullptr ? 0 : row.bias[j]);
        };
        state.pivot = first(team, row.seen, partial, largest(team, row.seen, minus_infinity(), partial, logit), logit);
        constexpr int most_attempts = 4;
        for (int attempt = 0; attempt < most_attempts; ++attempt) {
            subtract_pivot(team, row, state, partial, scratch);
            const auto x = [&](std::ptrdiff_t j) { return row.a_high[j]; };
            const double top = largest(team, row.width, minus_infinity(), partial, x);
            if (top <= 0) return true;
            state.pivot = first(team, row.width, partial, top, x);
        }
        return false;
    }

    /// The first j with value(j) == top.
    template <class Team, class F>
    FAULTLINE_HD std::ptrdiff_t first(const Team& team, std::ptrdiff_t count, double* partial, double top,
                                      F&& value) const {
        return static_cast<std::ptrdiff_t>(-largest(team, count, minus_infinity(), partial, [&](std::ptrdiff_t j) {
            return value(j) == top ? -static_cast<double>(j) : minus_infinity();
        }));
    }

    /// SoftcapRow::apply
    template <class Team>
    FAULTLINE_HD void cap(const Team& team, const RowAt& row, RowState& state, double* partial) const {
        const detail::SoftcapErrors errors = detail::softcap_errors(in.softcap, state.score_error);
        each_row(team, row.width, [&](std::ptrdiff_t j) {
            const DoubleDouble x = detail::softcap_argument({row.s_high[j], row.s_low[j]}, in.softcap.factor);
            const WideValue e = detail::exp_or_masked(x.high, detail::exp_above_lowest(*in.exp, x.high, x.low));
            const detail::CappedScore c = detail::capped(in.softcap.cap, in.softcap.positive, errors.x_relative,
                                                         errors.x_absolute, row.s_high[j], x.high, e);
            row.s_high[j] = c.score.high;
            row.s_low[j] = c.score.low;
            row.slope_high[j] = c.slope.high;
            row.slope_low[j] = c.slope.low;
            row.slope_exponent[j] = c.slope.exponent;
            row.slope_error[j] = c.slope_error;
        });
        state.negligible = largest(team, row.width, 0, partial,
                                   [&](std::ptrdiff_t j) { return row.slope_high[j] == 0 ? 1.0 : 0.0; }) > 0;
        state.score_error = errors.score;
    }

    /// Also the largest product, which a bias may hide: its error counts in full.
    template <class Team>
    FAULTLINE_HD void subtract_pivot(const Team& team, const RowAt& row, RowState& state, double* partial,
                                     double* scratch) const {
        state.pivot_score = {row.s_high[state.pivot], row.s_low[state.pivot]};
        state.pivot_bias = row.bias == nullptr ? 0 : row.bias[state.pivot];
        each_row(team, row.width, [&](std::ptrdiff_t j) {
            double magnitude = 0;
            DoubleDouble x{minus_infinity(), 0};
            if (j < row.seen) {
                const DoubleDouble y =
                    in.score_scale() * (DoubleDouble{row.s_high[j], row.s_low[j]} - state.pivot_score);
                if (row.bias == nullptr) {
                    x = y;
                } else if (row.bias[j] != minus_infinity()) {
                    x = y + detail::two_sum(row.bias[j], -state.pivot_bias);
                    magnitude = x.high < detail::exp_lowest ? 0 : std::fabs(y.high);
                }
            }
            row.a_high[j] = x.high;
            row.a_low[j] = x.low;
            scratch[j] = magnitude;
        });
        state_product_size(team, row, state, partial, scratch);
    }
    template <class Team>
    FAULTLINE_HD void state_product_size(const Team& team, const RowAt& row, RowState& state, double* partial,
                                         const double* scratch) const {
        state.magnitude = 0;
        if (row.bias != nullptr)
            state.magnitude =
                largest(team, row.width, 0, partial, [&](std::ptrdiff_t j) { return scratch[j]; }) * detail::round_up;
    }

    /// p, but the pivot's apart and 0 in the row.
    template <class Team>
    FAULTLINE_HD bool softmax(const Team& team, const RowAt& row, RowState& state, double* partial,
                              double* scratch) const {
        double negligible = 0;
        each_row(team, row.width, [&](std::ptrdiff_t j) {
            const double x = row.a_high[j];
            WideValue e = detail::exp_or_masked(x, detail::exp_above_lowest(*in.exp, x, row.a_low[j]));
            if (e.high == 0 && x > minus_infinity()) negligible = 1;
            if (j == state.pivot) e = {0, 0, detail::no_exponent};
            row.p_high[j] = e.high;
            row.p_low[j] = e.low;
            row.p_exponent[j] = e.exponent;
        });
        if (largest(team, 1, negligible, partial, [&](std::ptrdiff_t) { return negligible; }) > 0)
            state.negligible = true;
        state.tail_exponent = largest(team, row.width, detail::none_exponent, partial,
                                      [&](std::ptrdiff_t j) { return row.p_exponent[j]; });
        state.pivot_p = {1, 0};
        state.pivot_p_error = 0;
        state.p_error = {0, 0};
        if (state.tail_exponent == detail::none_exponent) return true;
        return normalise(team, row, state, scratch);
    }

    /// p <- p / (1 + tail); relative errors of what there is.
    template <class Team>
    FAULTLINE_HD bool normalise(const Team& team, const RowAt& row, RowState& state, double* scratch) const {
        using namespace detail;
        // |x| <= (|exponent| + 1.02) ln 2, and an absolute error of x is a relative one of p
        const double x_relative = row.bias == nullptr ? scaled_difference_error : add_error;
        const double beta = 1.01 * natural_log_2 * x_relative;
        const double alpha =
            1.01 * (2 * in.score_scale_size() * state.score_error + scaled_difference_error * state.magnitude) +
            exp_error + 2 * beta;
        double* high = scratch;
        double* low = scratch + row.width;
        double* flags = scratch + 2 * row.width;
        each_row(team, row.width, [&](std::ptrdiff_t j) {
            const DoubleDouble scaled = scaled_to(row.p(j), state.tail_exponent);
            high[j] = scaled.high;
            low[j] = scaled.low;
            flags[j] = row.p_high[j] != 0 && scaled.high == 0 ? 1 : 0;
        });
        const double flushed = plain_sum(team, flags, row.width);
        state.tail = truth_teams::tree_sum(team, high, low, row.width);
        state.tail_error = state.tail.high * (alpha + beta * (std::fabs(state.tail_exponent) - flush_exponent) +
                                              tree_depth(row.width) * add_error) +
                           flushed * flushed_term;
        // the tail on the scale of the pivot's 1
        DoubleDouble tail;
        double sum_error = flushed_term * 8 * static_cast<double>(row.width);
        if (state.tail_exponent >= flush_exponent) {
            const double factor = power_of_two(state.tail_exponent);
            tail = {state.tail.high * factor, state.tail.low * factor};
            sum_error = state.tail_error * factor;
        }
        const DoubleDouble sum = DoubleDouble{1, 0} + tail;
        state.pivot_p = DoubleDouble{1, 0} / sum;
        // relative errors of 1 + tail and of its inverse; both operations are exact where the tail is lost on the 1
        const double rounding = tail.high == 0 ? 0 : add_error + div_error;
        state.pivot_p_error = 1.01 * (sum_error / sum.high + rounding);
        each_row(team, row.width, [&](std::ptrdiff_t j) {
            const DoubleDouble p = DoubleDouble{row.p_high[j], row.p_low[j]} * state.pivot_p;
            row.p_high[j] = p.high;
            row.p_low[j] = p.low;
        });
        state.p_error = {1.01 * (alpha + state.pivot_p_error + mul_error), 1.01 * beta};
        return state.p_error.alpha + state.p_error.beta * (std::fabs(state.tail_exponent) - flush_exponent) <=
               tolerable_error;
    }
};

}  // namespace faultline::truth_teams
