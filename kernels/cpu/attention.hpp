// SPDX-License-Identifier: Apache-2.0
// Attention as a schedule of sites, emulated on the CPU: forward and backward of one key head and the query heads that
// share it, under any rounding plan. Values are binary64 numbers that hold exactly what the kernel's formats hold; a
// site whose rule is exact keeps binary64, so the exact plan is accurate to some 2^-50 and not better (lib/truth is).
#pragma once

#include <cstdint>
#include <vector>

#include <faultline/cpu/instrument.hpp>
#include <faultline/plan/plan.hpp>
#include <faultline/tensor/matrix.hpp>

namespace faultline {

/// One key head with the query heads that share it (several in grouped-query attention).
struct HeadGroup {
    std::vector<MatrixView<const double>> q;     ///< per query head: [n_q, d]
    std::vector<MatrixView<const double>> dout;  ///< per query head: [n_q, d_v]; may be empty for a forward alone
    MatrixView<const double> k;                  ///< [n_k, d]
    MatrixView<const double> v;                  ///< [n_k, d_v]
    double scale = 0;                            ///< 1/sqrt(d), or what the model uses
    bool causal = true;                          ///< key j is visible to query i when j <= i + n_k - n_q
    std::vector<MatrixView<const double>>
        bias;                  ///< empty, or per query head [n_q, n_k], added to the scaled score; -inf masks
    double softcap = 0;        ///< c of c tanh(scale q k^T / c), before the bias; 0: none
    std::vector<double> sink;  ///< empty, or per query head the logit of a key without value, in the denominator alone
    /// Empty, or per query head [n_q, n_k]: 1 where p is kept, 0 where it is dropped.
    std::vector<MatrixView<const double>> dropout;
    double keep = 1;  ///< the probability that an element is kept: what is kept is divided by it
    int first_head =
        0;  ///< index of q[0] in the layer, over all batch elements: names tiles, and seeds stochastic rounding
    int layer = 0;
    std::uint64_t seed = 0;
};

/// What the problem has beyond scores, mask and bias.
[[nodiscard]] Extras extras_of(const HeadGroup& in);

/// Whether key `key` reaches the softmax of row `query` of in.q[head]: by the causal mask, and not -inf in the bias.
[[nodiscard]] bool is_visible(const HeadGroup& in, std::size_t head, std::ptrdiff_t query, std::ptrdiff_t key);

/// [d], the mean of the rows of k ([n_k, d]: in.k or what was made of it) over the keys that some row of some query head
/// sees; zeros where none is seen. Padding takes no part. Under the causal mask the last row sees every key, so all count,
/// also for rows that see only the first of them: a row's gradient does not change by any vector that is taken off all of
/// its keys, and one mean serves all rows.
[[nodiscard]] std::vector<double> mean_visible_key(const HeadGroup& in, MatrixView<const double> k);

/// What the forward of one query head leaves.
struct HeadForward {
    Matrix o;                 ///< [n_q, d_v], as stored
    Matrix o_unrounded;       ///< [n_q, d_v], before o_cast
    std::vector<double> lse;  ///< [n_q], natural units, as stored; +inf where every key is masked, as FlashAttention-2
    Matrix p;                 ///< [n_q, n_k] normalised, before p_cast and dropout, only if the plan saves it
    Matrix capped;            ///< [n_q, n_k] tanh(scale q k^T / c), only if the plan saves p and there is a softcap
    std::vector<double> sink_p;  ///< [n_q], the sink's probability, only if the plan saves p and there is a sink
};

struct GroupForward {
    std::vector<HeadForward> heads;
};

struct GroupBackward {
    std::vector<Matrix> dq;     ///< per query head [n_q, d]
    Matrix dk;                  ///< [n_k, d], summed over the query heads
    Matrix dv;                  ///< [n_k, d_v]
    std::vector<double> dsink;  ///< per query head, where there is a sink
};

/// Shapes must agree (asserted by the caller that reads files); throws std::invalid_argument where they do not, and
/// RequestError where the plan cannot run the problem (problem_with).
/// `instrument` may be null. Deterministic: the result depends on the arguments alone.
[[nodiscard]] GroupForward attention_forward(const HeadGroup& in, const RoundingPlan& plan,
                                             Instrument* instrument = nullptr);
[[nodiscard]] GroupBackward attention_backward(const HeadGroup& in, const GroupForward& fwd, const RoundingPlan& plan,
                                               Instrument* instrument = nullptr);

}  // namespace faultline
