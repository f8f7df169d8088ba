// SPDX-License-Identifier: Apache-2.0
// The fast path over one query head, row by row: o, lse, delta, dq, and the rows of p and ds that dk and dv are made of.
#pragma once

#include <deque>
#include <vector>

#include <faultline/tensor/matrix.hpp>
#include <faultline/truth/fast_inputs.hpp>
#include <faultline/truth/fast_values.hpp>
#include <faultline/truth/row_passes.hpp>
#include <faultline/truth/settle.hpp>

namespace faultline::detail {

/// p and ds of one query head, each high + low times 2^exponent, [n_q, n_k].
struct HeadRows {
    HeadRows(std::ptrdiff_t n_q, std::ptrdiff_t n_k);

    AlignedMatrix p_high, p_low, p_exponent;
    std::vector<RelativeError> p_error;  // per row
    AlignedMatrix ds_high, ds_low, ds_exponent, ds_error;

    [[nodiscard]] WideRow p(std::ptrdiff_t i) { return {p_high.row(i), p_low.row(i), p_exponent.row(i)}; }
    [[nodiscard]] WideRow ds(std::ptrdiff_t i) { return {ds_high.row(i), ds_low.row(i), ds_exponent.row(i)}; }
};

/// Fills truth.heads[head] and `rows`.
void fast_head(const FastInputs& in, std::size_t head, HeadRows& rows, GroupTruth& truth, FastReport& report);

/// The problem with each head's sink as one more key, the first, which every row sees: k and v are 0 there, and the bias is
/// the sink's logit. What it has for the others is what attention has for the whole, so that the fast path needs no sink.
struct SinkAsKey {
    explicit SinkAsKey(const TruthProblem& given);
    TruthProblem problem;

  private:
    std::deque<Matrix> storage_;
};
/// dsink of each head: the sum of the first key's ds. To be called after fast_head, before fast_columns scales the rows.
void fast_sink(std::vector<HeadRows>& heads, GroupTruth& truth, FastReport& report);
/// The same for one head from its first key's ds and their errors, one for each of `padded` queries, a multiple of 8.
void sink_gradient(const WideRow& ds, const double* error, std::ptrdiff_t padded, std::size_t head, GroupTruth& truth,
                   FastReport& report);
/// What was computed for SinkAsKey, as that of the problem: without the first key. `report` likewise.
void drop_sink_key(GroupTruth& truth, FastReport& report);

/// dk and dv from all heads' rows.
void fast_columns(const FastInputs& in, std::vector<HeadRows>& heads, GroupTruth& truth, FastReport& report);

}  // namespace faultline::detail
