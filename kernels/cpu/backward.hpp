// SPDX-License-Identifier: Apache-2.0
// The backward of one query head: delta, then key tile by key tile p, dp, ds, and the three products dv, dk, dq.
#pragma once

#include <utility>

#include <faultline/cpu/backward_rows.hpp>
#include <faultline/cpu/zero_sum.hpp>

namespace faultline::cpu {

/// The operands of one query head after their casts, and transposes of those that are multiplied from the right.
struct BackwardOperands {
    MatrixView<const double> q, dout;   ///< [n_q, d], [n_q, d_v]
    MatrixView<const double> k_t, v_t;  ///< [d, n_k], [d_v, n_k]
    MatrixView<const double> k_for_dq;  ///< [n_k, d]: k, or k - mean k
};

template <class I>
class BackwardHead {
  public:
    BackwardHead(Stage<I>& stage, const RoundingPlan& plan, const Scales& scales, const Mask& mask, int head,
                 const BackwardOperands& operands, const HeadForward& forward)
        : stage_(stage),
          plan_(plan),
          schedule_(plan.schedule),
          scales_(scales),
          mask_(mask),
          head_(head),
          x_(operands),
          forward_(forward),
          quantities_(stage, plan, scales, mask, head, forward) {}

    /// dq, dk, dv before they are scaled and cast: dk and dv of this query head alone.
    void run(Matrix& dq, Matrix& dk, Matrix& dv) {
        dq = Matrix(mask_.n_q, x_.q.cols);
        dk = Matrix(mask_.n_k, x_.q.cols);
        dv = Matrix(mask_.n_k, x_.dout.cols);
        reference_ = quantities_.scaled_lse();
        if (mask_.sink != nullptr) sink_p_ = quantities_.sink_probabilities(reference_);
        delta_ = needs_dp(schedule_.delta_from) ? delta_from_probabilities() : quantities_.delta_from_output(x_.dout);
        if (schedule_.zero_sum != ZeroSum::none) collect_row_sums();
        walk([&](const TileAt& where, const TileRange& rows, const TileRange& keys) {
            score_gradient(where, rows, keys, true);
            products(where, rows, keys, dq, dk, dv);
        });
        if (projection_.active()) projection_.apply_rank_one(x_.q, dq, dk);
    }

    /// -sum_i p_sink delta, after run().
    double sink_gradient() { return quantities_.sink_gradient(sink_p_, delta_); }

  private:
    /// Key tiles outside, query tiles inside, as FlashAttention-2 does; tiles without a visible element are not visited.
    template <class F>
    void walk(F&& visit) {
        const TileAxis rows(mask_.n_q, schedule_.bwd_block_q);
        const TileAxis keys(mask_.n_k, schedule_.bwd_block_k);
        for (int a = 0; a < keys.count(); ++a) {
            const TileRange key_range = keys.walk(a, keys.count(), schedule_.bwd_key_order);
            for (int b = 0; b < rows.count(); ++b) {
                const TileRange row_range = rows.walk(b, rows.count(), schedule_.bwd_query_order);
                const std::ptrdiff_t last =
                    visible_keys(row_range.first + row_range.count - 1, mask_.n_q, mask_.n_k, mask_.causal);
                if (last <= key_range.first) continue;
                visit(score_place(mask_, head_, row_range, key_range), row_range, key_range);
            }
        }
    }

    /// rowsum(P o dP), or that over rowsum(P), with the P that ds is made of: before its cast, or after it (ds_p = cast), so
    /// that ds = p (dp - delta) sums to zero whichever it is. Two passes over the tiles: what a kernel that has no O to
    /// read must do.
    std::vector<double> delta_from_probabilities() {
        ProbabilitySums sums(static_cast<std::size_t>(mask_.n_q), mask_.sink == nullptr ? nullptr : &sink_p_);
        const bool is_exact = stage_.rule(Site::delta).is_exact();
        const auto f = [&](double x) { return is_exact ? x : static_cast<double>(static_cast<float>(x)); };
        walk([&](const TileAt& where, const TileRange& rows, const TileRange& keys) {
            recompute(where, rows, keys, false);
            for (std::ptrdiff_t i = 0; i < rows.count; ++i) {
                const auto row = static_cast<std::size_t>(rows.first + i);
                for (std::ptrdiff_t j = 0; j < keys.count; ++j) {
                    sums.p_dp[row] = f(sums.p_dp[row] + f(p_(i, j) * dp_(i, j)));
                    sums.exact_p_dp[row] += p_(i, j) * dp_(i, j);
                    sums.p[row] = f(sums.p[row] + p_(i, j));
                    sums.exact_p[row] += p_(i, j);
                }
            }
        });
        return quantities_.delta_of(std::move(sums));
    }

    /// p_ and dp_ of a tile. Sweeps that only prepare delta or a correction pass every site again, unseen.
    void recompute(const TileAt& where, const TileRange& rows, const TileRange& keys, bool shown) {
        if (shown) return recompute_with(stage_, where, rows, keys);
        Unseen<I> repeated(stage_.instrument());
        Stage<I> unseen(plan_, repeated.get(), stage_.seed(), stage_.layer());
        recompute_with(unseen, where, rows, keys);
    }

    void recompute_with(Stage<I>& stage, const TileAt& where, const TileRange& rows, const TileRange& keys) {
        p_ = p_storage_.shaped(rows.count, keys.count);
        if (schedule_.p_saved) {
            copy(columns(forward_.p.view(rows.first, rows.count), keys), p_);
            if (scales_.cap > 0) {
                capped_ = capped_storage_.shaped(rows.count, keys.count);
                copy(columns(forward_.capped.view(rows.first, rows.count), keys), capped_);
            }
        } else {
            if (scales_.cap > 0) capped_ = capped_storage_.shaped(rows.count, keys.count);
            const double* reference = reference_.data() + rows.first;
            const bool in_accumulator = schedule_.lse_in == LseIn::accumulator && scales_.cap == 0;
            scores(stage, backward_sites, where, x_.q.middle_rows(rows.first, rows.count), columns(x_.k_t, keys),
                   scales_, plan_, mask_, p_, capped_, in_accumulator ? reference : nullptr);
            probabilities(stage, backward_sites, where, schedule_.bwd_argument, schedule_.bwd_exp_base, scales_, plan_,
                          in_accumulator ? nullptr : reference, !quantities_.subtracts_raw(), p_);
        }
        dp_ = dp_storage_.shaped(rows.count, keys.count);
        const double* delta = delta_.data() + rows.first;
        const bool starts_at_delta = schedule_.delta_in == DeltaIn::accumulator;
        for_each(dp_, [&](double, auto i, auto) { return starts_at_delta ? -delta[i] : 0.0; });
        stage.accumulate(Site::dp_accumulate, where, x_.dout.middle_rows(rows.first, rows.count), columns(x_.v_t, keys),
                         dp_);
        stage.pass(Site::dp_cast, where, dp_);
        if (schedule_.normalize == Normalize::before_pv)
            drop_and_scale(stage, Site::dp_dropout, where, mask_, scales_, dp_);
        else if (starts_at_delta && mask_.kept.data != nullptr)
            for_each(dp_, [&](double x, auto i, auto j) {
                return mask_.kept(where.query0 + i, where.key0 + j) == 0 ? -delta[i] : x;
            });
        else
            drop(mask_, where, dp_);
        if (schedule_.ds_p == DsP::cast) stage.pass(Site::bwd_p_cast, where, p_);
    }

    /// dp_ becomes ds, cast, as the products receive it.
    void form_score_gradient(Stage<I>& stage, const TileAt& where, const TileRange& rows) {
        const double scale = schedule_.ds_scale == DsScale::before ? scales_.gradient : 1.0;
        const double* delta = delta_.data() + rows.first;
        const bool subtracted = schedule_.delta_in == DeltaIn::accumulator;  // dp_ already holds dp - delta
        stage.pass(
            Site::ds, where, dp_,
            [&](MatrixView<double> t) {
                if (!subtracted) {
                    for_each(t, [&](double dp, auto i, auto) { return dp - delta[i]; });
                    stage.round_intermediate(Site::ds, t);
                }
                for_each(t, [&](double x, auto i, auto j) { return p_(i, j) * x; });
                if (scale != 1.0) {
                    stage.round_intermediate(Site::ds, t);
                    for_each(t, [&](double x, auto, auto) { return x * scale; });
                }
            },
            [&](MatrixView<double> t) {
                for_each(
                    t, [&](double dp, auto i, auto j) { return p_(i, j) * (subtracted ? dp : dp - delta[i]) * scale; });
            });
        // Autograd casts what the softmax's backward leaves, then undoes the cap; kernels do it before the one cast.
        const bool cap_first = schedule_.ds_scale != DsScale::after_cast;
        if (scales_.cap > 0 && cap_first) undo_cap(stage, where);
        stage.pass(Site::ds_cast, where, dp_);
        if (scales_.cap > 0 && !cap_first) undo_cap(stage, where);
        if (schedule_.ds_scale != DsScale::after_cast) return;
        for_each(dp_, [&](double x, auto, auto) { return x * scales_.gradient; });
        stage.pass(Site::ds_scaled, where, dp_);
    }

    /// dp_ <- dp_ (1 - tanh^2): the gradient of the capped score becomes that of scale q k^T. The slope in fp32, also where
    /// the product is a bf16 tensor (calculate_dtanh; PyTorch's tanh_backward computes in fp32).
    void undo_cap(Stage<I>& stage, const TileAt& where) {
        const auto slope = [&](auto i, auto j) { return 1.0 - capped_(i, j) * capped_(i, j); };
        stage.pass(
            Site::ds_softcap, where, dp_,
            [&](MatrixView<double> t) {
                for_each(t, [&](double x, auto i, auto j) {
                    return x * static_cast<double>(static_cast<float>(slope(i, j)));
                });
            },
            [&](MatrixView<double> t) { for_each(t, [&](double x, auto i, auto j) { return x * slope(i, j); }); });
    }

    void score_gradient(const TileAt& where, const TileRange& rows, const TileRange& keys, bool shown) {
        recompute(where, rows, keys, shown);
        if (shown) {
            form_score_gradient(stage_, where, rows);
        } else {
            Unseen<I> repeated(stage_.instrument());
            Stage<I> unseen(plan_, repeated.get(), stage_.seed(), stage_.layer());
            form_score_gradient(unseen, where, rows);
        }
        if (shown && projection_.active()) projection_.adjust_tile(where, p_, dp_);
    }

    void collect_row_sums() {
        projection_ = ZeroSumProjection(schedule_.zero_sum, mask_, stage_.rule(Site::dq_accumulate).is_exact());
        walk([&](const TileAt& where, const TileRange& rows, const TileRange& keys) {
            score_gradient(where, rows, keys, false);
            projection_.collect(where, p_, dp_);
        });
        projection_.finish(x_.k_for_dq);
    }

    void products(const TileAt& where, const TileRange& rows, const TileRange& keys, Matrix& dq, Matrix& dk,
                  Matrix& dv) {
        const MatrixView<const double> dout = x_.dout.middle_rows(rows.first, rows.count);
        const MatrixView<const double> q = x_.q.middle_rows(rows.first, rows.count);
        if (projection_.active())
            projection_.accumulate_rank_one(where, p_, x_.k_for_dq.middle_rows(keys.first, keys.count), q);
        if (schedule_.ds_p == DsP::unrounded) stage_.pass(Site::bwd_p_cast, where, p_);
        if (schedule_.normalize == Normalize::before_pv) {  // what the forward multiplied with V
            Unseen<I> repeated(stage_.instrument());
            Stage<I> unseen(plan_, repeated.get(), stage_.seed(), stage_.layer());
            drop_and_scale(unseen, Site::p_dropout, where, mask_, scales_, p_);
        } else {
            drop(mask_, where, p_);
        }
        const MatrixView<double> p_t = transposed_.shaped(keys.count, rows.count);
        transpose(p_, p_t);
        sum(Site::dv_accumulate, schedule_.dkv_carry, where, p_t, dout, dv.view(keys.first, keys.count));
        transpose(dp_, p_t);
        sum(Site::dk_accumulate, schedule_.dkv_carry, where, p_t, q, dk.view(keys.first, keys.count));
        sum(Site::dq_accumulate, schedule_.dq_carry, where, dp_, x_.k_for_dq.middle_rows(keys.first, keys.count),
            dq.view(rows.first, rows.count));
    }

    void sum(Site site, Carry carry, const TileAt& where, MatrixView<const double> a, MatrixView<const double> b,
             MatrixView<double> c) {
        if (carry == Carry::chained) return stage_.accumulate(site, where, a, b, c);
        const MatrixView<double> part = part_.shaped(c.rows, c.cols);
        for_each(part, [](double, auto, auto) { return 0.0; });
        multiply_accumulate(stage_.rule(site).accumulation, a, b, part);
        stage_.round_intermediate(site, part);
        stage_.pass(
            site, where, c,
            [&](MatrixView<double> t) { for_each(t, [&](double x, auto i, auto j) { return x + part(i, j); }); },
            [&](MatrixView<double> t) { multiply_accumulate(exact_sum, a, b, t); });
    }

    template <class T>
    static MatrixView<T> columns(MatrixView<T> m, const TileRange& keys) {
        return {m.data + keys.first, m.rows, keys.count, m.stride};
    }

    Stage<I>& stage_;
    const RoundingPlan& plan_;
    const Schedule& schedule_;
    const Scales& scales_;
    const Mask& mask_;
    int head_;
    BackwardOperands x_;
    const HeadForward& forward_;
    RowQuantities<I> quantities_;
    std::vector<double> reference_, delta_, sink_p_;
    ZeroSumProjection projection_;
    MatrixView<double> p_, dp_, capped_{};
    Scratch p_storage_, dp_storage_, capped_storage_, transposed_, part_;
};

}  // namespace faultline::cpu
