// SPDX-License-Identifier: Apache-2.0
// Conservation laws of attention, row by row. Softmax does not change when a constant is added to its scores, so the
// gradient with respect to the scores sums to 0 over each row; that sum, r_i, is what leaks r_i times a mean key into dq and,
// in sign-coherent runs, into W_Q (arXiv 2510.04212, section 3.2, where r_i is minus the error of delta).
//
// With s the scores that softmax receives: p = softmax(s), dp = dO V^T, delta_i = sum_j p_ij dp_ij,
// ds = p (dp - delta). A sink is one more column of score `sink` and value 0. Under a softcap, s = cap tanh(z/cap): the law
// holds for ds, the gradient at s; that at z, ds (1 - (s/cap)^2), sums to nothing in particular.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include <faultline/tensor/matrix.hpp>

namespace faultline {

/// One query head of one sequence. Views of what outlives it; values are exact in binary64.
struct HeadInputs {
    MatrixView<const double> q;     ///< [n_q, d]
    MatrixView<const double> k;     ///< [n_k, d]
    MatrixView<const double> v;     ///< [n_k, d_v]
    MatrixView<const double> dout;  ///< [n_q, d_v], or nothing: forward only
    MatrixView<const double> bias;  ///< [n_q, n_k] added to the scaled score, -inf masks; or nothing
    double scale = 1;
    bool causal = true;          ///< key j is visible to query i when j <= i + n_k - n_q
    double softcap = 0;          ///< 0: none
    std::optional<double> sink;  ///< score of the sink column
};

/// A head's scores and their gradient, [n_q, n_k] each: 32 n_q n_k bytes.
struct ScoreGradient {
    Matrix s;                    ///< logit; -inf where masked
    Matrix p;                    ///< 1
    Matrix dp, ds;               ///< nat/logit; empty without dout
    std::vector<double> lse;     ///< [n_q] logit: what p was made with
    std::vector<double> delta;   ///< [n_q] nat/logit: what ds was made with; empty without dout
    std::vector<double> p_sink;  ///< [n_q]; empty without a sink
};
/// In binary64. `lse` [n_q] and `delta` [n_q], where given, stand in place of those of the scores: a kernel's, as its backward
/// uses them. Without a given delta, dp - delta is formed from differences to the row's largest p, so that a saturated row
/// keeps its small gradient. Rows that see no key have p = ds = 0. NaN inputs give NaN in what depends on them.
[[nodiscard]] ScoreGradient score_gradient(const HeadInputs& in, std::span<const double> lse = {},
                                           std::span<const double> delta = {});

/// The same head with another lse and delta, from its s and dp.
[[nodiscard]] ScoreGradient with_statistics(const ScoreGradient& g, const HeadInputs& in, std::span<const double> lse,
                                            std::span<const double> delta);

/// sum_d dO_id O_id: delta as kernels make it. [n_q]
[[nodiscard]] std::vector<double> delta_of_output(MatrixView<const double> dout, MatrixView<const double> o);
/// sum_j p_ij dp_ij: delta of the other side. [n_q]
[[nodiscard]] std::vector<double> delta_of_scores(const ScoreGradient& g);

struct Conservation {
    std::vector<double> p_sum;           ///< [n_q] sum_j p_ij, with the sink's; law: 1
    std::vector<double> gradient_sum;    ///< [n_q] r_i = sum_j ds_ij, with the sink's; law: 0; nat/logit
    std::vector<double> gradient_abs;    ///< [n_q] sum_j |ds_ij|
    std::vector<double> before_softcap;  ///< [n_q] the sum of the gradient at z: no law, to show the difference; empty
                                         ///< without a softcap
};
/// `softcap` and `bias` of the inputs: the slope of the cap is that of the capped score, before the bias is added.
[[nodiscard]] Conservation conservation(const ScoreGradient& g, double softcap = 0, MatrixView<const double> bias = {});

/// How far a row is off the law, over its terms: r_i / sum_j |ds_ij|; 0 where no ds differs from 0, which keeps it.
[[nodiscard]] double relative_row_sum(double sum, double magnitude);
/// The rms of it over the rows that see two keys or more: of one key, whose ds is 0 in exact arithmetic, it is |x|/|x| = 1
/// however small x. A NaN stays; NaN too where there is no such row. `keys`: how many each row sees.
[[nodiscard]] double relative_row_sum_rms(std::span<const double> relative, std::span<const double> keys);

/// r_1, r_1 + r_2, …: what a run or a sequence has added up. A NaN stays in all sums behind it.
[[nodiscard]] std::vector<double> running_sum(std::span<const double> values);

}  // namespace faultline
