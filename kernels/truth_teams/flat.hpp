// SPDX-License-Identifier: Apache-2.0
// The fast path of lib/truth in the form that a device runs: what lies in the memory of the side that computes. A team
// of threads does a row or a tile, as in kernels/emulated; rows of all query heads of one key/value head are numbered
// through, so that row r is query r % n_q of head r / n_q. What is done with one element are the headers of lib/truth;
// what exists twice is the order of the steps, and tests hold the two to the same bits.
#pragma once

#include <cstddef>
#include <cstdint>

#include <faultline/base/host_device.hpp>
#include <faultline/truth/exp_element.hpp>
#include <faultline/truth/softcap_element.hpp>
#include <faultline/truth/wide_elements.hpp>

namespace faultline::truth_teams {

using detail::DoubleDouble;
using detail::RelativeError;
using detail::WideSum;
using detail::WideValue;

/// Rows are padded with zeros to a multiple of this, as on the processor: sums have the same trees.
constexpr std::ptrdiff_t lanes = 8;
FAULTLINE_HD constexpr std::ptrdiff_t padded(std::ptrdiff_t n) { return (n + lanes - 1) / lanes * lanes; }

/// FastInputs as they are sent. Matrices are row-major.
struct FlatInputs {
    std::ptrdiff_t n_q, n_k, d, d_v, heads;
    bool causal;
    const double *q, *dout;                           // [heads n_q, padded(d)], [heads n_q, padded(d_v)]
    const double *k, *v;                              // [n_k, padded(d)], [n_k, padded(d_v)]
    const double *k_transposed, *v_transposed;        // [d, padded(n_k)], [d_v, padded(n_k)]
    const double *q_power, *q_width;                  // DotSide, [heads n_q]
    const double *dout_power, *dout_width;            //
    const double *k_power, *v_power;                  // DotSide, [padded(n_k)]
    double k_largest, k_widest, v_largest, v_widest;  //
    double log2_d, log2_d_v;
    const double *k_columns, *v_columns, *q_columns, *dout_columns;  // ColumnSide::power, [padded(d)] or [padded(d_v)]
    const double *k_running, *v_running;                             // ColumnSide::running, [n_k, padded(d or d_v)]
    const double *q_running, *dout_running;                          // [n_q, padded(d or d_v)]
    const std::ptrdiff_t* constant_keys;                             // [d]
    const double *bias, *kept;                                       // [1 or heads, n_q, n_k], null: none
    std::ptrdiff_t bias_heads, kept_heads;
    DoubleDouble scale, inverse_keep;
    double scale_error, scale_size, keep, inverse_keep_error;
    detail::Softcap softcap;
    const detail::ExpConstants* exp;

    [[nodiscard]] FAULTLINE_HD std::ptrdiff_t query(std::ptrdiff_t row) const { return row % n_q; }
    [[nodiscard]] FAULTLINE_HD std::ptrdiff_t head(std::ptrdiff_t row) const { return row / n_q; }
    /// How many keys, from the first, query i is not kept from by causality.
    [[nodiscard]] FAULTLINE_HD std::ptrdiff_t seen(std::ptrdiff_t i) const {
        const std::ptrdiff_t end = causal ? i + (n_k - n_q) + 1 : n_k;
        return end < 0 ? 0 : end;
    }
    /// The first query that may see key j.
    [[nodiscard]] FAULTLINE_HD std::ptrdiff_t first_query(std::ptrdiff_t j) const {
        const std::ptrdiff_t i = causal ? j - (n_k - n_q) : 0;
        return i < 0 ? 0 : (i > n_q ? n_q : i);
    }
    [[nodiscard]] FAULTLINE_HD bool has_cap() const { return softcap.cap > 0; }
    // What is still to be multiplied into the scores: the scale, or 1 where the cap has it.
    [[nodiscard]] FAULTLINE_HD DoubleDouble score_scale() const { return has_cap() ? DoubleDouble{1, 0} : scale; }
    [[nodiscard]] FAULTLINE_HD double score_scale_error() const { return has_cap() ? 0 : scale_error; }
    [[nodiscard]] FAULTLINE_HD double score_scale_size() const { return has_cap() ? 1 : scale_size; }
    [[nodiscard]] FAULTLINE_HD const double* bias_row(std::ptrdiff_t row) const {
        return mask_row(bias, bias_heads, row);
    }
    [[nodiscard]] FAULTLINE_HD const double* kept_row(std::ptrdiff_t row) const {
        return mask_row(kept, kept_heads, row);
    }

  private:
    [[nodiscard]] FAULTLINE_HD const double* mask_row(const double* mask, std::ptrdiff_t mask_heads,
                                                      std::ptrdiff_t row) const {
        if (mask == nullptr) return nullptr;
        return mask + ((mask_heads == 1 ? 0 : head(row)) * n_q + query(row)) * n_k;
    }
};

/// What is known of a row between its steps, and what the host makes lse, delta and dsink of.
struct RowState {
    bool empty, lost, negligible;
    bool apart;               // o without the pivot, on the scale of its tail
    std::int32_t no_padding;  // every byte has a value when a row is copied to the host
    std::ptrdiff_t seen, pivot;
    DoubleDouble pivot_score;  // q k^T of the pivot, or its capped score
    double pivot_bias;
    double score_error;  // absolute, of each q k^T (or capped score)
    DoubleDouble pivot_p;
    double pivot_p_error;  // relative
    RelativeError p_error;
    double tail_exponent;  // of the largest p beside the pivot's, none_exponent where there is no other key
    DoubleDouble tail;     // sum of the others before normalisation, times 2^tail_exponent
    double tail_error;
    WideSum delta;
    double power, magnitude, error;  // of the product in hand: row's sigma, sum of sizes and of errors
    double reference;                // scale of the row in hand, none_exponent: nothing there
    WideValue first_ds;              // of key 0
    double first_ds_error;

    [[nodiscard]] FAULTLINE_HD bool idle() const { return empty || lost; }
};

/// Values, bounds, exponents of CertifiedMatrix and whether the bound decides the value.
struct Elements {
    double *value, *bound;
    std::int64_t* exponent;
    unsigned char* decided;
};

/// Memory of rows [first, first + count); each matrix [count, padded(n_k)] but where another shape stands.
struct Strip {
    std::ptrdiff_t first, count;
    double *s_high, *s_low;  // scores; then dp and D
    double *a_high, *a_low;  // arguments of exp; then a row of p or ds on one scale
    double *p_high, *p_low, *p_exponent;
    double *ds_high, *ds_low, *ds_exponent, *ds_error;
    double *slope_high, *slope_low, *slope_exponent, *slope_error;  // null without a softcap
    double *product_high, *product_low;                             // [count, padded(max(d, d_v))]
    RowState* state;                                                // [count]
    double* row_power;                                              // [count]
    Elements o, dq;                                                 // [count, d_v], [count, d]
};

/// dk or dv in the making.
struct Columns {
    double *reference, *magnitude, *error;  // [padded(n_k)]
    double *acc, *low;                      // [n_k, padded(cols)]
    double* power;                          // [padded(n_k)] sigma of each key
    Elements out;                           // [n_k, cols]
};

}  // namespace faultline::truth_teams
