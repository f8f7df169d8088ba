// SPDX-License-Identifier: Apache-2.0
// One row of attention in interval arithmetic.
#pragma once

#include <vector>

#include <faultline/truth/interval.hpp>
#include <faultline/truth/truth.hpp>

namespace faultline::detail {

/// Row i of one query head. Entries of keys that the row does not see are [0, 0]. A sink stands behind the keys, as a key
/// whose dp is 0.
struct IntervalRow {
    IntervalRow(const TruthProblem& problem, int bits);

    std::vector<bool> visible;           // [n_k], and the sink
    std::vector<Interval> s, p, dp, ds;  // the same
    Interval lse, delta;
    bool empty = true;
    Interval scale;

    /// Without `gradient` only s, p and lse.
    void compute(const TruthProblem& problem, std::size_t head, std::ptrdiff_t i, bool gradient = true);
    /// The gradient with respect to scale q k_j: ds_j, or with a softcap that times 1 - tanh^2.
    [[nodiscard]] const Interval& dz(std::size_t j) const { return slope_.empty() ? ds[j] : dz_[j]; }
    /// r <- sum_j p_j v_jc and r <- scale sum_j dz_j k_jc
    void output(const TruthProblem& problem, std::size_t head, std::ptrdiff_t i, std::ptrdiff_t c, Interval& r) const;
    void query_gradient(const TruthProblem& problem, std::ptrdiff_t c, Interval& r) const;

  private:
    void compute_scores(const TruthProblem& problem, std::size_t head, std::ptrdiff_t i, bool gradient);
    void compute_gradient();
    /// What is added to the capped and scaled score.
    [[nodiscard]] double bias_of(const TruthProblem& problem, std::size_t head, std::ptrdiff_t i, std::size_t j) const;
    std::vector<Interval> raw_;     // q k^T
    std::vector<Interval> weight_;  // exp(s_j - s_w); sums divide by their sum last, so that equal keys give exact ties
    std::vector<Interval> capped_, slope_,
        dz_;  // c tanh(scale q k^T / c), 1 - tanh^2, ds times that; empty without a cap
    std::size_t largest_ = 0;
    Interval t_;
    Interval sum_;  // of the weights
};

}  // namespace faultline::detail
