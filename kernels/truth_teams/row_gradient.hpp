// SPDX-License-Identifier: Apache-2.0
// The rest of a row's way: gradient(), output() and query_gradient() of lib/truth/fast_head.cpp, cut where a product of
// the whole strip stands between.
#pragma once

#include <cmath>

#include <faultline/truth/settle_element.hpp>
#include <faultline/truth_teams/row_softmax.hpp>

namespace faultline::truth_teams {

FAULTLINE_HD inline void store(const detail::Settled& element, const Elements& out, std::ptrdiff_t at) {
    out.value[at] = element.value;
    out.bound[at] = element.bound;
    out.exponent[at] = element.exponent;
    out.decided[at] = element.decided ? 1 : 0;
}
/// settle_row for one element.
FAULTLINE_HD inline void settle(DoubleDouble x, double error, double exponent, const Elements& out, std::ptrdiff_t at) {
    if (std::fabs(exponent) <= detail::settle_near_scale) {
        const detail::Settled plainly = detail::settled_plainly(x.high, x.low, error, detail::power_of_two(exponent));
        if (plainly.decided) return store(plainly, out, at);
    }
    store(detail::settled({x, exponent, error}), out, at);
}

/// x over the probability to be kept.
FAULTLINE_HD inline WideSum over_keep(const FlatInputs& in, const WideSum& x) {
    if (in.keep == 1) return x;
    const DoubleDouble value = x.value * in.inverse_keep;
    return {
        value, x.exponent,
        1.01 * (x.error * in.inverse_keep.high + std::fabs(value.high) * (detail::mul_error + in.inverse_keep_error))};
}

/// dp (in s) to ds and delta; then p to a, on the scale of o's sum. `memory` as for SoftmaxJob.
struct GradientJob {
    FlatInputs in;
    Strip strip;

    template <class Team>
    FAULTLINE_HD void operator()(const Team& team, std::ptrdiff_t index, double* memory) const {
        const RowAt row(in, strip, index);
        double* partial = memory;
        double* scratch = memory + team.size();
        RowState state = strip.state[index];
        team.sync();  // before one thread writes it again
        const std::ptrdiff_t from = state.idle() ? 0 : row.width;
        each_row(team, padded(in.n_k) - from, [&](std::ptrdiff_t n) {
            const std::ptrdiff_t j = from + n;
            row.ds_high[j] = row.ds_low[j] = row.ds_error[j] = row.a_high[j] = row.a_low[j] = 0;
            row.ds_exponent[j] = detail::no_exponent;
        });
        if (!state.idle()) {
            gradient(team, row, state, partial, scratch);
            scale_probabilities(team, row, state, scratch);
        } else {
            state.power = 1;
        }
        if (team.rank() == 0) {
            strip.state[index] = state;
            strip.row_power[index] = state.power;
        }
    }

  private:
    template <class Team>
    FAULTLINE_HD void gradient(const Team& team, const RowAt& row, RowState& state, double* partial,
                               double* scratch) const {
        using namespace detail;
        const double error =
            dot_error(in.d_v, in.log2_d_v, in.dout_power[row.row], in.dout_width[row.row], in.v_largest, in.v_widest);
        const auto kept = [&](std::ptrdiff_t j) { return row.kept == nullptr || j >= row.seen || row.kept[j] != 0; };
        DoubleDouble pivot{0, 0};
        if (kept(state.pivot)) pivot = {row.s_high[state.pivot], row.s_low[state.pivot]};
        team.sync();
        each_row(team, row.width, [&](std::ptrdiff_t j) {
            DoubleDouble dp{0, 0};
            if (kept(j)) dp = {row.s_high[j], row.s_low[j]};
            const DoubleDouble difference = dp - pivot;
            row.s_high[j] = difference.high;
            row.s_low[j] = difference.low;
        });
        const WideSum sum = weighted_sum(team, row, state, 2 * error, partial, scratch);
        state.delta = over_keep(in, detail::add(WideSum{pivot, 0, error}, sum));
        const Rest rest = rest_of(sum);
        each_row(team, row.width, [&](std::ptrdiff_t j) {
            const WideBounded ds = j == state.pivot ? pivot_gradient(state, sum)
                                                    : gradient_element(row.p(j), state.p_error,
                                                                       {row.s_high[j], row.s_low[j]}, 2 * error, rest);
            store(row, state, j, ds);
        });
        if (in.has_cap())
            each_row(team, row.width, [&](std::ptrdiff_t j) {
                const WideBounded r =
                    chained(row.ds(j), row.ds_error[j], {row.slope_high[j], row.slope_low[j], row.slope_exponent[j]},
                            row.slope_error[j]);
                row.ds_high[j] = r.value.high;
                row.ds_low[j] = r.value.low;
                row.ds_exponent[j] = r.value.exponent;
                row.ds_error[j] = r.error;
            });
        state.first_ds = row.ds(0);
        state.first_ds_error = row.ds_error[0];
    }

    FAULTLINE_HD detail::WideBounded pivot_gradient(const RowState& state, const WideSum& rest) const {
        if (rest.exponent == detail::none_exponent) return {{0, 0, detail::no_exponent}, 0};
        const DoubleDouble ds = -(state.pivot_p * rest.value);
        return {{ds.high, ds.low, rest.exponent},
                1.01 * state.pivot_p.high *
                    (rest.error + std::fabs(rest.value.high) * (state.pivot_p_error + detail::mul_error))};
    }

    FAULTLINE_HD void store(const RowAt& row, const RowState&, std::ptrdiff_t j, const detail::WideBounded& ds) const {
        DoubleDouble value{ds.value.high, ds.value.low};
        double error = ds.error;
        if (in.keep != 1) {
            value = value * in.inverse_keep;
            error = 1.01 * (error * in.inverse_keep.high +
                            std::fabs(value.high) * (detail::mul_error + in.inverse_keep_error));
        }
        row.ds_high[j] = value.high;
        row.ds_low[j] = value.low;
        row.ds_exponent[j] = ds.value.exponent;
        row.ds_error[j] = error;
    }

    /// sum_j p_j D_j
    template <class Team>
    FAULTLINE_HD WideSum weighted_sum(const Team& team, const RowAt& row, const RowState& state, double d_error,
                                      double* partial, double* scratch) const {
        using namespace detail;
        WideSum sum;
        const auto term = [&](std::ptrdiff_t j) { return size_exponent(row.s_high[j], d_error, row.p_exponent[j]); };
        sum.exponent = largest(team, row.width, none_exponent, partial, term);
        if (sum.exponent == none_exponent) return sum;
        const double own_error = mul_error + add_error + tree_depth(row.width) * add_error;
        double* high = scratch;
        double* low = scratch + row.width;
        double* error = scratch + 2 * row.width;
        each_row(team, row.width, [&](std::ptrdiff_t j) {
            const ScaledTerm u = weighted_term(row.p(j), state.p_error, {row.s_high[j], row.s_low[j]}, d_error, term(j),
                                               sum.exponent, own_error);
            high[j] = u.value.high;
            low[j] = u.value.low;
            error[j] = u.error;
        });
        sum.error = upper_sum(team, error, row.width) * round_up;
        sum.value = truth_teams::tree_sum(team, high, low, row.width);
        return sum;
    }

    /// The first half of output(). state.error: what o's terms are off by, before the largest of v.
    template <class Team>
    FAULTLINE_HD void scale_probabilities(const Team& team, const RowAt& row, RowState& state, double* scratch) const {
        using namespace detail;
        state.apart = state.tail_exponent < -200 && state.tail_exponent != none_exponent;
        if (!state.apart && team.rank() == 0) restore_pivot(row, state);
        team.sync();
        state.reference = state.apart ? state.tail_exponent : 0;
        double* sizes = scratch;
        double* flags = scratch + row.width;
        each_row(team, row.width, [&](std::ptrdiff_t j) {
            const DoubleDouble scaled = scaled_to(row.p(j), state.reference);
            flags[j] = row.p_high[j] != 0 && scaled.high == 0 ? 1 : 0;
            const bool dropped = row.kept != nullptr && j < row.seen && row.kept[j] == 0;
            row.a_high[j] = dropped ? 0 : scaled.high;
            row.a_low[j] = dropped ? 0 : scaled.low;
            sizes[j] = row.a_high[j];
        });
        const double flushed = plain_sum(team, flags, row.width);
        state.magnitude = upper_sum(team, sizes, row.width);
        state.power = state.magnitude == 0 ? 0x1p-300 : power_beyond(state.magnitude);
        const double relative =
            state.p_error.alpha + state.p_error.beta * (std::fabs(state.reference) - flush_exponent);
        state.error = state.magnitude * relative + flushed * flushed_term;
    }

  public:
    FAULTLINE_HD static void restore_pivot(const RowAt& row, const RowState& state) {
        row.p_high[state.pivot] = state.pivot_p.high;
        row.p_low[state.pivot] = state.pivot_p.low;
        row.p_exponent[state.pivot] = 0;
    }
};

/// o from its product; then ds to a, on the scale of dq's sum.
struct OutputJob {
    FlatInputs in;
    Strip strip;
    std::ptrdiff_t product_stride;

    template <class Team>
    FAULTLINE_HD void operator()(const Team& team, std::ptrdiff_t index, double* memory) const {
        const RowAt row(in, strip, index);
        double* partial = memory;
        double* scratch = memory + team.size();
        RowState state = strip.state[index];
        team.sync();
        if (state.idle()) return idle(team, index);
        each_row(team, in.d_v, [&](std::ptrdiff_t c) { output(row, state, index, c); });
        if (state.apart && team.rank() == 0) GradientJob::restore_pivot(row, state);
        team.sync();
        scale_gradient(team, row, state, partial, scratch);
        if (team.rank() == 0) {
            strip.state[index] = state;
            strip.row_power[index] = state.power;
        }
    }

  private:
    /// Zeros that the slow path, for a lost row, overwrites.
    template <class Team>
    FAULTLINE_HD void idle(const Team& team, std::ptrdiff_t index) const {
        const unsigned char decided = strip.state[index].lost ? 0 : 1;
        each_row(team, in.d_v, [&](std::ptrdiff_t c) {
            truth_teams::store({0, 0, decided != 0, 0}, strip.o, index * in.d_v + c);
        });
        each_row(team, in.d, [&](std::ptrdiff_t c) {
            truth_teams::store({0, 0, decided != 0, 0}, strip.dq, index * in.d + c);
        });
    }

    FAULTLINE_HD void output(const RowAt& row, const RowState& state, std::ptrdiff_t index, std::ptrdiff_t c) const {
        using namespace detail;
        DoubleDouble sum{strip.product_high[index * product_stride + c], strip.product_low[index * product_stride + c]};
        const double top = in.v_running[(row.seen - 1) * padded(in.d_v) + c];
        const double sums = accumulation_error(row.seen) * 4 * state.power * in.v_columns[c];
        double error = top == 0 ? 0 : 1.01 * (state.error * top + sums);
        const std::ptrdiff_t at = index * in.d_v + c;
        if (state.apart) {
            // The row's mass sits on one key: what the others add may show only where that key's v is 0.
            const bool dropped = row.kept != nullptr && row.kept[state.pivot] == 0;
            const DoubleDouble own = state.pivot_p * (dropped ? 0 : in.v[state.pivot * padded(in.d_v) + c]);
            const bool is_one = state.pivot_p.low == 0 && state.pivot_p.high == 1;
            const WideSum base{own, 0,
                               1.01 * std::fabs(own.high) * state.pivot_p_error +
                                   (is_one ? 0 : mul_double_error * std::fabs(own.high))};
            const WideSum tail{sum, sum.high == 0 && error == 0 ? none_exponent : state.tail_exponent, error};
            return truth_teams::store(settled(over_keep(in, detail::add(base, tail))), strip.o, at);
        }
        if (in.keep != 1) {
            sum = sum * in.inverse_keep;
            error = 1.01 * (error * in.inverse_keep.high + std::fabs(sum.high) * (mul_error + in.inverse_keep_error));
        }
        settle(sum, error, 0, strip.o, at);
    }

    /// The first half of query_gradient().
    template <class Team>
    FAULTLINE_HD void scale_gradient(const Team& team, const RowAt& row, RowState& state, double* partial,
                                     double* scratch) const {
        using namespace detail;
        state.reference = largest(team, row.width, none_exponent, partial, [&](std::ptrdiff_t j) {
            return size_exponent(row.ds_high[j], row.ds_error[j], row.ds_exponent[j]);
        });
        state.power = 1;
        if (in.scale_size == 0) state.reference = none_exponent;
        double* magnitude = scratch;
        double* error = scratch + row.width;
        const bool none = state.reference == none_exponent;
        each_row(team, row.width, [&](std::ptrdiff_t j) {
            const ScaledTerm scaled = none ? ScaledTerm{} : scaled_to(row.ds(j), row.ds_error[j], state.reference);
            row.a_high[j] = scaled.value.high;
            row.a_low[j] = scaled.value.low;
            magnitude[j] = scaled.magnitude;
            error[j] = scaled.error;
        });
        if (none) return;
        state.magnitude = upper_sum(team, magnitude, row.width);
        state.error = upper_sum(team, error, row.width);
        if (state.magnitude != 0) state.power = power_beyond(state.magnitude);
    }
};

/// dq from its product. Then p of dropped keys becomes 0, which dv is made of.
struct QueryJob {
    FlatInputs in;
    Strip strip;
    std::ptrdiff_t product_stride;

    template <class Team>
    FAULTLINE_HD void operator()(const Team& team, std::ptrdiff_t index, double* memory) const {
        const RowState state = strip.state[index];
        if (state.idle()) return;
        const RowAt row(in, strip, index);
        if (state.reference == detail::none_exponent) {
            each_row(team, in.d, [&](std::ptrdiff_t c) { store({0, 0, true, 0}, strip.dq, index * in.d + c); });
        } else {
            each_row(team, in.d, [&](std::ptrdiff_t c) { query_gradient(row, state, index, c); });
            for (std::ptrdiff_t c = 0; c < in.d && !in.has_cap(); ++c)
                if (strip.dq.decided[index * in.d + c] == 0)
                    centred(team, row, state, index, c, memory, memory + team.size());
        }
        if (row.kept != nullptr) drop(team, row);
    }

    template <class Team>
    FAULTLINE_HD static void drop(const Team& team, const RowAt& row) {
        each_row(team, row.seen, [&](std::ptrdiff_t j) {
            if (row.kept[j] != 0) return;
            row.p_high[j] = row.p_low[j] = 0;
            row.p_exponent[j] = detail::no_exponent;
        });
    }

  private:
    FAULTLINE_HD void query_gradient(const RowAt& row, const RowState& state, std::ptrdiff_t index,
                                     std::ptrdiff_t c) const {
        using namespace detail;
        DoubleDouble sum{strip.product_high[index * product_stride + c], strip.product_low[index * product_stride + c]};
        sum = sum * in.scale;
        const double top = in.k_running[(row.seen - 1) * padded(in.d) + c];
        const double sums = accumulation_error(row.seen) * 4 * state.power * in.k_columns[c];
        double error = top == 0 ? 0
                                : 1.01 * (in.scale_size * (state.error * top + sums) +
                                          (mul_error + in.scale_error) * std::fabs(sum.high));
        // sum_j ds_j = 0 unless a cap's slopes stand in it: over keys that agree in a column its gradient is exactly 0
        if (!in.has_cap() && in.constant_keys[c] >= row.seen) {
            sum = {0, 0};
            error = 0;
        }
        settle(sum, error, state.reference, strip.dq, index * in.d + c);
    }

    /// dq_c = scale sum_j ds_j (k_jc - k_wc), in which keys that agree with the pivot's are exactly 0.
    template <class Team>
    FAULTLINE_HD void centred(const Team& team, const RowAt& row, const RowState& state, std::ptrdiff_t index,
                              std::ptrdiff_t c, double* partial, double* scratch) const {
        using namespace detail;
        const double* column = in.k_transposed + c * padded(in.n_k);
        const double pivot = in.k[state.pivot * padded(in.d) + c];
        WideSum sum;
        const auto term = [&](std::ptrdiff_t j) {
            return centred_exponent(row.ds_high[j], row.ds_error[j], row.ds_exponent[j], column[j], pivot);
        };
        sum.exponent = largest(team, row.width, none_exponent, partial, term);
        if (sum.exponent != none_exponent) {
            const double own_error = mul_error + tree_depth(row.width) * add_error;
            double* high = scratch;
            double* low = scratch + row.width;
            double* error = scratch + 2 * row.width;
            each_row(team, row.width, [&](std::ptrdiff_t j) {
                const ScaledTerm u =
                    centred_term(row.ds(j), row.ds_error[j], column[j], pivot, term(j), sum.exponent, own_error);
                high[j] = u.value.high;
                low[j] = u.value.low;
                error[j] = u.error;
            });
            sum.error = upper_sum(team, error, row.width) * round_up;
            sum.value = truth_teams::tree_sum(team, high, low, row.width);
        }
        sum.value = sum.value * in.scale;
        sum.error = 1.01 * (sum.error * in.scale_size + (mul_error + in.scale_error) * std::fabs(sum.value.high));
        if (team.rank() == 0) store(settled(sum), strip.dq, index * in.d + c);
        team.sync();
    }
};

/// For a strip that is computed again for its columns alone: p as QueryJob leaves it.
struct RestoreJob {
    FlatInputs in;
    Strip strip;

    template <class Team>
    FAULTLINE_HD void operator()(const Team& team, std::ptrdiff_t index, double*) const {
        const RowState& state = strip.state[index];
        if (state.idle()) return;
        const RowAt row(in, strip, index);
        if (state.apart && team.rank() == 0) GradientJob::restore_pivot(row, state);
        team.sync();
        if (row.kept != nullptr) QueryJob::drop(team, row);
    }
};

}  // namespace faultline::truth_teams
