// SPDX-License-Identifier: Apache-2.0
// The conservation laws on the kernel of a plan: what its own roundings leave of them, and what it makes of inputs whose
// outputs are known or may not change.
#pragma once

#include <vector>

#include <faultline/cpu/attention.hpp>
#include <faultline/cpu/backend.hpp>
#include <faultline/cpu/instrument.hpp>
#include <faultline/cpu/row_sums.hpp>

namespace faultline {

/// Rows of one query head in a plan's backward, [n_q] each.
struct PlanRows {
    std::vector<double> delta;       ///< after its site; nat/logit
    std::vector<double> delta_p_dp;  ///< sum_j p_ij dp_ij of the p and dp that ds is made of
    std::vector<double> p_sum;       ///< sum_j p_ij of that p; law: 1
    RowSums gradient;                ///< of ds at its site (row_sums.hpp); law: 0; nat/logit
};

/// An instrument of the backward that keeps them; it changes nothing. For one run of one group.
class ConservationWatch final : public Instrument {
  public:
    /// `forward` is needed where the plan saves p, and must outlive the watch.
    ConservationWatch(const HeadGroup& in, const RoundingPlan& plan, const GroupForward& forward);
    [[nodiscard]] bool watches(Site site) const override;
    void at(Site site, const TileAt& where, MatrixView<double> value, MatrixView<const double> exact) override;
    /// Per query head.
    [[nodiscard]] const std::vector<PlanRows>& rows() const { return rows_; }

  private:
    const GroupForward& forward_;
    Schedule schedule_;
    ScoreGradientSite gradient_;
    Site p_site_;
    int first_head_;
    Matrix p_;  ///< of the tile at hand
    std::vector<PlanRows> rows_;
};

/// Forward and backward of a group, watched. The group has dout. The plan's tiles are settled (for_head_dim).
[[nodiscard]] std::vector<PlanRows> plan_conservation(const HeadGroup& in, const RoundingPlan& plan,
                                                      const AttentionBackend& backend = cpu_backend());

/// How much a plan's outputs change where in exact arithmetic nothing changes: |changed - plain|_F / |plain|_F over the
/// group's query heads. NaN where plain is 0 or, for dq, where there is no dout.
struct Invariance {
    double shift_o = 0, shift_dq = 0;              ///< `shift` added to every score
    double permutation_o = 0, permutation_dq = 0;  ///< keys in reverse order, the mask with them
    double ones_largest = 0;                       ///< V = 1: largest |o - 1| over rows that see a key
    double ones_mean = 0;                          ///< V = 1: mean of o - 1: a bias of the weights' sum
};
/// `shift` in logits; a power of two is added exactly to scores much smaller. Plain and changed run with a bias tensor, so
/// that both take the same way through the kernel; that tensor has 8 n_q n_k bytes per query head.
[[nodiscard]] Invariance plan_invariance(const HeadGroup& in, const RoundingPlan& plan, double shift = 16,
                                         const AttentionBackend& backend = cpu_backend());

}  // namespace faultline
