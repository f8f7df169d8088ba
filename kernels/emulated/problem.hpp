// SPDX-License-Identifier: Apache-2.0
// One query head as the emulated kernel sees it, and the memory that a team works in.
#pragma once

#include <faultline/emulated/machine.hpp>

namespace faultline::emulated {

/// The scale as the kernel holds it: cpu::Scales, which the host computes.
struct ScaleValues {
    double exponent = 1;         ///< c of exp2(s c - m c); 1 where the scores are scaled before
    double bwd_exponent = 1;     ///< the same with the backward's base
    double natural = 1;          ///< scale, or the cap, for lse
    double gradient = 1;         ///< scale, for dq, dk
    double cap = 0;              ///< 0: no softcap
    double into_cap = 0;         ///< scale/cap, where the scale stands in the exponent
    double inverse_keep = 1;     ///< 1/keep, 1 where nothing is dropped
    double log2e = 1;            ///< where scores are turned into log2 units in a step of their own
    double logit_per_score = 1;  ///< nats in a unit of the scores, where the row maximum is taken

    [[nodiscard]] FAULTLINE_HD double score_unit(ExpBase base) const { return base == ExpBase::two ? log2e : 1.0; }
};

/// Inputs after their casts.
struct HeadProblem {
    View<const double> q;         ///< [n_q, d]
    View<const double> k;         ///< [n_k, d]
    View<const double> v;         ///< [n_k, d_v]
    View<const double> dout;      ///< [n_q, d_v]; this and what follows of the backward alone
    View<const double> k_for_dq;  ///< [n_k, d]: k, or k - mean k
    View<const double> bias;      ///< [n_q, n_k], or data == nullptr
    View<const double> kept;      ///< [n_q, n_k], dropout's mask, or data == nullptr
    ScaleValues scales;
    double sink = 0;
    bool has_sink = false;
    bool causal = true;
    int head = 0;

    [[nodiscard]] FAULTLINE_HD std::ptrdiff_t n_q() const { return q.rows; }
    [[nodiscard]] FAULTLINE_HD std::ptrdiff_t n_k() const { return k.rows; }
    [[nodiscard]] FAULTLINE_HD bool drops(std::ptrdiff_t row, std::ptrdiff_t key) const {
        return kept.data != nullptr && kept(row, key) == 0;
    }
};

/// What the forward of one query head leaves (HeadForward of kernels/cpu/attention.hpp).
struct ForwardOutputs {
    View<double> o, o_unrounded;  ///< [n_q, d_v]
    double* lse = nullptr;        ///< [n_q]
    View<double> p;               ///< [n_q, n_k], only where the plan saves it
    View<double> capped;          ///< [n_q, n_k], only where it does and there is a softcap
    double* sink_p = nullptr;     ///< [n_q], only where it does and there is a sink
};

/// Parts of one array of doubles, in order. The same calls on the host say how much is needed (data == nullptr).
class Arena {
  public:
    FAULTLINE_HD explicit Arena(double* data) : data_(data) {}
    FAULTLINE_HD double* take(std::ptrdiff_t count) {
        double* part = data_ == nullptr ? nullptr : data_ + used_;
        used_ += count;
        return part;
    }
    FAULTLINE_HD View<double> take(std::ptrdiff_t rows, std::ptrdiff_t cols) {
        return {take(rows * cols), rows, cols, cols};
    }
    [[nodiscard]] FAULTLINE_HD std::ptrdiff_t used() const { return used_; }

  private:
    double* data_;
    std::ptrdiff_t used_ = 0;
};

}  // namespace faultline::emulated
