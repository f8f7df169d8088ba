// SPDX-License-Identifier: Apache-2.0
// dk and dv: lib/truth/fast_columns.cpp. A key's column of ds or p over all rows, on the scale of its largest entry.
#pragma once

#include <faultline/truth/products.hpp>
#include <faultline/truth_teams/row_gradient.hpp>

namespace faultline::truth_teams {

/// The columns of ds (dk) or of p (dv).
struct ColumnsOf {
    FlatInputs in;
    Strip strip;
    bool is_dk;

    [[nodiscard]] FAULTLINE_HD std::ptrdiff_t cols() const { return is_dk ? in.d : in.d_v; }
    [[nodiscard]] FAULTLINE_HD WideValue value(std::ptrdiff_t index, std::ptrdiff_t j) const {
        const std::ptrdiff_t at = index * padded(in.n_k) + j;
        if (is_dk) return {strip.ds_high[at], strip.ds_low[at], strip.ds_exponent[at]};
        return {strip.p_high[at], strip.p_low[at], strip.p_exponent[at]};
    }
    [[nodiscard]] FAULTLINE_HD double error(std::ptrdiff_t index, std::ptrdiff_t j, const WideValue& x) const {
        if (is_dk) return strip.ds_error[index * padded(in.n_k) + j];
        return x.high == 0 ? 0 : x.high * detail::relative_error(strip.state[index].p_error, x.exponent);
    }
};

constexpr std::ptrdiff_t keys_per_team = 256, rows_per_chunk = 64;

/// partial[chunk, j] <- the largest exponent of key j in rows [64 chunk, 64 chunk + 64) of the strip.
struct ChunkReferenceJob {
    ColumnsOf of;
    double* partial;  // [chunks, padded(n_k)]

    template <class Team>
    FAULTLINE_HD void operator()(const Team& team, std::ptrdiff_t index, double*) const {
        const std::ptrdiff_t keys = padded(of.in.n_k), across = (keys + keys_per_team - 1) / keys_per_team;
        const std::ptrdiff_t chunk = index / across, first = index % across * keys_per_team;
        const std::ptrdiff_t from = chunk * rows_per_chunk;
        const std::ptrdiff_t to = from + rows_per_chunk < of.strip.count ? from + rows_per_chunk : of.strip.count;
        each_row(team, first + keys_per_team < keys ? keys_per_team : keys - first, [&](std::ptrdiff_t n) {
            const std::ptrdiff_t j = first + n;
            double top = detail::none_exponent;
            for (std::ptrdiff_t r = from; r < to; ++r) {
                const WideValue x = of.value(r, j);
                const double e = detail::size_exponent(x.high, of.error(r, j, x), x.exponent);
                top = e > top ? e : top;
            }
            partial[chunk * keys + j] = top;
        });
    }
};

/// reference <- the largest of itself and the chunks'.
struct ReferenceJob {
    const double* partial;
    std::ptrdiff_t chunks, keys;
    double* reference;

    template <class Team>
    FAULTLINE_HD void operator()(const Team& team, std::ptrdiff_t index, double*) const {
        const std::ptrdiff_t first = index * keys_per_team;
        each_row(team, first + keys_per_team < keys ? keys_per_team : keys - first, [&](std::ptrdiff_t n) {
            double top = reference[first + n];
            for (std::ptrdiff_t c = 0; c < chunks; ++c) {
                const double e = partial[c * keys + first + n];
                top = e > top ? e : top;
            }
            reference[first + n] = top;
        });
    }
};

constexpr std::ptrdiff_t keys_per_sum = 32;

/// Adds the rows' sizes and errors, in their order, to those of each key.
struct ColumnSumsJob {
    ColumnsOf of;
    Columns columns;

    template <class Team>
    FAULTLINE_HD void operator()(const Team& team, std::ptrdiff_t index, double*) const {
        const std::ptrdiff_t keys = padded(of.in.n_k), first = index * keys_per_sum;
        each_row(team, first + keys_per_sum < keys ? keys_per_sum : keys - first, [&](std::ptrdiff_t n) {
            const std::ptrdiff_t j = first + n;
            const double reference = columns.reference[j];
            double magnitude = columns.magnitude[j], error = columns.error[j];
#ifdef __CUDACC__
#pragma unroll 8  // loads ahead of the sums, which wait for each other
#endif
            for (std::ptrdiff_t r = 0; r < of.strip.count; ++r) {
                const WideValue x = of.value(r, j);
                const detail::ScaledTerm scaled = detail::scaled_to(x, of.error(r, j, x), reference);
                magnitude += scaled.magnitude;
                error += scaled.error;
            }
            columns.magnitude[j] = magnitude;
            columns.error[j] = error;
        });
    }
};

/// The power of two that a key's sigma is made of.
struct ColumnPowerJob {
    Columns columns;
    std::ptrdiff_t keys;

    template <class Team>
    FAULTLINE_HD void operator()(const Team& team, std::ptrdiff_t index, double*) const {
        const std::ptrdiff_t first = index * keys_per_team;
        each_row(team, first + keys_per_team < keys ? keys_per_team : keys - first, [&](std::ptrdiff_t n) {
            // sums of n positive doubles, and their use, err by less than this factor
            const double slack = 1 + 0x1p-20;
            const double magnitude = columns.magnitude[first + n];
            columns.power[first + n] = magnitude == 0 ? 1 : detail::power_beyond(magnitude * slack);
        });
    }
};

/// a <- the row's entries on the scales of their keys.
struct ScaleColumnsJob {
    ColumnsOf of;
    Columns columns;

    template <class Team>
    FAULTLINE_HD void operator()(const Team& team, std::ptrdiff_t index, double*) const {
        const std::ptrdiff_t keys = padded(of.in.n_k);
        each_row(team, keys, [&](std::ptrdiff_t j) {
            const WideValue x = of.value(index, j);
            const detail::ScaledTerm scaled = detail::scaled_to(x, of.error(index, j, x), columns.reference[j]);
            of.strip.a_high[index * keys + j] = scaled.value.high;
            of.strip.a_low[index * keys + j] = scaled.value.low;
        });
    }
};

/// dk or dv from the sums; a team a key.
struct FinishColumnsJob {
    FlatInputs in;
    Columns columns;
    bool is_dk;

    template <class Team>
    FAULTLINE_HD void operator()(const Team& team, std::ptrdiff_t key, double*) const {
        const std::ptrdiff_t cols = is_dk ? in.d : in.d_v;
        const double reference = columns.reference[key];
        const bool none = reference == detail::none_exponent || (is_dk && in.scale_size == 0);  // exactly 0
        each_row(team, cols, [&](std::ptrdiff_t c) {
            if (none)
                store({0, 0, true, 0}, columns.out, key * cols + c);
            else
                element(key, c, cols, reference);
        });
    }

  private:
    FAULTLINE_HD void element(std::ptrdiff_t key, std::ptrdiff_t c, std::ptrdiff_t cols, double reference) const {
        using namespace detail;
        const double column_power = (is_dk ? in.q_columns : in.dout_columns)[c];
        const double power = columns.power[key];
        const std::ptrdiff_t at = key * padded(cols) + c;
        DoubleDouble sum = finished(6 * power * column_power, columns.acc[at], columns.low[at]);
        const bool has_keep = !is_dk && in.keep != 1;
        if (is_dk || has_keep) sum = sum * (is_dk ? in.scale : in.inverse_keep);
        const double factor = is_dk ? in.scale_size : in.inverse_keep.high * (1 + 0x1p-40);
        const double own = is_dk ? mul_error + in.scale_error : (has_keep ? mul_error + in.inverse_keep_error : 0);
        const std::ptrdiff_t begin = in.first_query(key);
        const double top = (is_dk ? in.q_running : in.dout_running)[begin * padded(cols) + c];
        const double sums = accumulation_error((in.n_q - begin) * in.heads) * 4 * power;
        const double error = factor * (columns.error[key] * top + sums * column_power) + own * std::fabs(sum.high);
        settle(sum, top == 0 ? 0 : 1.01 * error, reference, columns.out, key * cols + c);
    }
};

}  // namespace faultline::truth_teams
