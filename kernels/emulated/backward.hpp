// SPDX-License-Identifier: Apache-2.0
// The backward of one query head (kernels/cpu/backward.hpp) in parts that are independent of each other: row sums by query
// tile, dq by query tile over its key tiles, dk and dv by key tile over its query tiles; of each tile a team may have some
// rows, or some keys. Each part computes the score tiles anew; their values depend on their place alone, so dq, dk and dv are
// those of one walk over all tiles.
#pragma once

#include <faultline/emulated/scores.hpp>

namespace faultline::emulated {

/// Per row and key of one query head; whole matrices. What the host has computed (kernels/cpu/backward_rows.hpp), and what
/// the parts leave.
struct BackwardRows {
    View<const double> p, capped;                                        ///< [n_q, n_k], where the plan saves them
    double *reference = nullptr, *delta = nullptr;                       ///< [n_q]
    double *p_dp = nullptr, *exact_p_dp = nullptr, *p_sum = nullptr;     ///< [n_q]: cpu::ProbabilitySums
    double* exact_p_sum = nullptr;                                       ///< [n_q]
    double *row_sum = nullptr, *weight_sum = nullptr;                    ///< [n_q]: of ds after its cast, and of p
    double *largest = nullptr, *largest_key = nullptr, *open = nullptr;  ///< [n_q]: |ds|, its key or -1, keys it sees
    View<double> dq, dq_part;                                            ///< [n_q, d]
    View<double> dk, dk_part;                                            ///< [n_k, d]
    View<double> dv;                                                     ///< [n_k, d_v]
};

/// What a team works in: tiles of `rows` rows and `cols` keys.
struct BackwardMemory {
    View<double> p, ds, w, capped;
    double* shift;    ///< [rows]
    double* exact;    ///< the largest tile that is shown; nullptr where nothing is
    double* scratch;  ///< one number

    FAULTLINE_HD BackwardMemory(Arena& arena, const Schedule& schedule, std::ptrdiff_t rows, std::ptrdiff_t cols,
                                std::ptrdiff_t d, std::ptrdiff_t d_v, bool has_cap, bool watched) {
        p = arena.take(rows, cols);
        ds = arena.take(rows, cols);
        w = arena.take(projects(schedule) ? rows : 0, cols);
        capped = arena.take(has_cap ? rows : 0, cols);
        shift = arena.take(rows);
        const std::ptrdiff_t longer = rows > cols ? rows : cols, wider = d > d_v ? d : d_v;
        exact = watched ? arena.take(longer * (longer > wider ? longer : wider)) : nullptr;
        scratch = arena.take(1);
    }
    [[nodiscard]] FAULTLINE_HD static bool projects(const Schedule& schedule) {
        return schedule.zero_sum == ZeroSum::uniform || schedule.zero_sum == ZeroSum::weighted;
    }
};

template <class Stage>
class BackwardTile {
  public:
    FAULTLINE_HD BackwardTile(Stage& stage, const HeadProblem& problem, const BackwardRows& rows,
                              const BackwardMemory& memory)
        : stage_(stage), team_(stage.team()), schedule_(stage.plan().schedule), x_(problem), r_(rows), m_(memory) {}

    /// Row sums of P o dP and P, with the P that ds is made of. Rows [row0, row0 + rows) of a query tile, here and below.
    FAULTLINE_HD void sum_probabilities(const TileRange& tile, std::ptrdiff_t row0, std::ptrdiff_t rows) {
        stage_.show_as(Shown::unseen);
        const bool exact = stage_.is_exact_rule(Site::delta);
        const auto f = [=](double x) { return exact ? x : to_float(x); };
        walk_keys(tile, row0, rows, [&](const Place& where, const TileRange&) {
            recompute(where);
            each_row(team_, rows, [&](std::ptrdiff_t i) {
                const std::ptrdiff_t row = row0 + i;
                double p_dp = r_.p_dp[row], exact_p_dp = r_.exact_p_dp[row];
                double p_sum = r_.p_sum[row], exact_p_sum = r_.exact_p_sum[row];
                for (std::ptrdiff_t j = 0; j < p_.cols; ++j) {
                    const double p = p_(i, j), product = p * ds_(i, j);
                    p_dp = f(p_dp + f(product));
                    exact_p_dp += product;
                    p_sum = f(p_sum + p);
                    exact_p_sum += p;
                }
                r_.p_dp[row] = p_dp;
                r_.exact_p_dp[row] = exact_p_dp;
                r_.p_sum[row] = p_sum;
                r_.exact_p_sum[row] = exact_p_sum;
            });
        });
    }

    /// First sweep of a projection: row sums of the cast score gradient and of p, and the place of the largest element.
    FAULTLINE_HD void collect(const TileRange& tile, std::ptrdiff_t row0, std::ptrdiff_t rows) {
        stage_.show_as(Shown::unseen);
        each_row(team_, rows, [&](std::ptrdiff_t i) {
            const std::ptrdiff_t row = row0 + i;
            r_.row_sum[row] = r_.weight_sum[row] = 0;
            r_.largest[row] = r_.largest_key[row] = -1;
            const std::ptrdiff_t visible = visible_keys(row, x_.n_q(), x_.n_k(), x_.causal);
            std::ptrdiff_t open = x_.bias.data == nullptr ? visible : 0;
            for (std::ptrdiff_t j = 0; x_.bias.data != nullptr && j < visible; ++j)
                open += x_.bias(row, j) != -infinity() ? 1 : 0;
            r_.open[row] = static_cast<double>(open);
        });
        walk_keys(tile, row0, rows, [&](const Place& where, const TileRange& keys) {
            recompute(where);
            form_score_gradient(where);
            each_row(team_, rows, [&](std::ptrdiff_t i) {
                const std::ptrdiff_t row = row0 + i;
                double row_sum = r_.row_sum[row], weight_sum = r_.weight_sum[row], largest = r_.largest[row];
                for (std::ptrdiff_t j = 0; j < p_.cols; ++j) {
                    row_sum = projected(row_sum + ds_(i, j));
                    weight_sum = projected(weight_sum + p_(i, j));
                    if (fabs(ds_(i, j)) > largest) {
                        largest = fabs(ds_(i, j));
                        r_.largest_key[row] = static_cast<double>(keys.first + j);
                    }
                }
                r_.row_sum[row] = row_sum;
                r_.weight_sum[row] = weight_sum;
                r_.largest[row] = largest;
            });
        });
    }

    FAULTLINE_HD void query_gradient(const TileRange& tile, std::ptrdiff_t row0, std::ptrdiff_t rows) {
        const std::ptrdiff_t d = x_.q.cols;
        const View<double> dq = r_.dq.part(row0, 0, rows, d);
        each(team_, rows, d, [&](std::ptrdiff_t i, std::ptrdiff_t c) {
            dq(i, c) = 0;
            if (rank_one()) r_.dq_part(row0 + i, c) = 0;
        });
        walk_keys(tile, row0, rows, [&](const Place& where, const TileRange& keys) {
            stage_.show_as(Shown::twice);  // kept where dk and dv are
            score_gradient(where);
            stage_.show_as(Shown::yes);
            const auto by_keys = [&](const View<double>& t) {
                return Operands{t.data, t.stride, 1, x_.k_for_dq.row(keys.first), 1, x_.k_for_dq.stride, keys.count};
            };
            if (rank_one()) multiply(team_, projection_sum(), by_keys(w_), r_.dq_part.part(row0, 0, rows, d));
            accumulate(Site::dq_accumulate, schedule_.dq_carry, where.of_product(where.i0, d), dq, by_keys(ds_));
        });
        if (rank_one())
            each(team_, rows, d,
                 [&](std::ptrdiff_t i, std::ptrdiff_t c) { dq(i, c) = projected(dq(i, c) - r_.dq_part(row0 + i, c)); });
    }

    /// Keys [key0, key0 + keys) of a key tile.
    FAULTLINE_HD void key_gradients(const TileRange& tile, std::ptrdiff_t key0, std::ptrdiff_t keys) {
        stage_.show_as(Shown::yes);
        const std::ptrdiff_t d = x_.q.cols, d_v = x_.v.cols;
        const View<double> dk = r_.dk.part(key0, 0, keys, d), dv = r_.dv.part(key0, 0, keys, d_v);
        each(team_, keys, d, [&](std::ptrdiff_t j, std::ptrdiff_t c) {
            dk(j, c) = 0;
            if (rank_one()) r_.dk_part(key0 + j, c) = 0;
        });
        each(team_, keys, d_v, [&](std::ptrdiff_t j, std::ptrdiff_t c) { dv(j, c) = 0; });
        walk_queries(tile, key0, keys, [&](const Place& where, const TileRange& rows) {
            score_gradient(where);
            const auto transposed_by = [&](const View<double>& t, const View<const double>& y) {
                return Operands{t.data, 1, t.stride, y.row(rows.first), 1, y.stride, rows.count};
            };
            if (rank_one())
                multiply(team_, projection_sum(), transposed_by(w_, x_.q), r_.dk_part.part(key0, 0, keys, d));
            accumulate(Site::dv_accumulate, schedule_.dkv_carry, where.of_product(where.j0, d_v), dv,
                       transposed_by(p_, x_.dout));
            accumulate(Site::dk_accumulate, schedule_.dkv_carry, where.of_product(where.j0, d), dk,
                       transposed_by(ds_, x_.q));
        });
        if (rank_one())
            each(team_, keys, d,
                 [&](std::ptrdiff_t j, std::ptrdiff_t c) { dk(j, c) = projected(dk(j, c) - r_.dk_part(key0 + j, c)); });
    }

  private:
    [[nodiscard]] FAULTLINE_HD bool visits(const TileRange& rows, const TileRange& keys) const {
        return visible_keys(rows.first + rows.count - 1, x_.n_q(), x_.n_k(), x_.causal) > keys.first;
    }
    FAULTLINE_HD void shape(std::ptrdiff_t rows, std::ptrdiff_t cols) {
        p_ = m_.p.shaped(rows, cols);
        ds_ = m_.ds.shaped(rows, cols);
        w_ = m_.w.shaped(rows, cols);
        capped_ = m_.capped.shaped(rows, cols);
    }
    template <class F>
    FAULTLINE_HD void walk_keys(const TileRange& tile, std::ptrdiff_t row0, std::ptrdiff_t rows, F&& visit) {
        const TileAxis axis(x_.n_k(), schedule_.bwd_block_k);
        for (int a = 0; a < axis.count(); ++a) {
            const TileRange keys = axis.walk(a, axis.count(), schedule_.bwd_key_order);
            if (!visits(tile, keys)) continue;
            shape(rows, keys.count);
            visit(score_place(x_, tile, keys, row0, keys.first), keys);
        }
    }
    template <class F>
    FAULTLINE_HD void walk_queries(const TileRange& tile, std::ptrdiff_t key0, std::ptrdiff_t keys, F&& visit) {
        const TileAxis axis(x_.n_q(), schedule_.bwd_block_q);
        for (int b = 0; b < axis.count(); ++b) {
            const TileRange rows = axis.walk(b, axis.count(), schedule_.bwd_query_order);
            if (!visits(rows, tile)) continue;
            shape(rows.count, keys);
            visit(score_place(x_, rows, tile, rows.first, key0), rows);
        }
    }

    /// (s - lse/scale) c: what is subtracted is in units of the raw score.
    [[nodiscard]] FAULTLINE_HD bool subtracts_raw() const {
        return schedule_.bwd_argument == ArgumentForm::subtract_then_scale && schedule_.scale_at == ScaleAt::exponent;
    }

    /// p_ and, in ds_, dp of a tile.
    FAULTLINE_HD_CALLED void recompute(const Place& where) {
        const std::ptrdiff_t row0 = where.query0 + where.i0, key0 = where.key0 + where.j0;
        const bool has_cap = x_.scales.cap > 0;
        if (schedule_.p_saved) {
            each(team_, p_.rows, p_.cols, [&](std::ptrdiff_t i, std::ptrdiff_t j) {
                p_(i, j) = r_.p(row0 + i, key0 + j);
                if (has_cap) capped_(i, j) = r_.capped(row0 + i, key0 + j);
            });
        } else {
            const double* reference = r_.reference + row0;
            const bool in_accumulator = schedule_.lse_in == LseIn::accumulator && !has_cap;
            scores(stage_, backward_sites(), where, x_, p_, has_cap ? capped_ : View<double>{},
                   in_accumulator ? reference : nullptr);
            probabilities(stage_, backward_sites(), where, x_.scales, in_accumulator ? nullptr : reference,
                          !subtracts_raw(), m_.shift, p_);
        }
        const bool starts_at_delta = schedule_.delta_in == DeltaIn::accumulator;
        const double* delta = r_.delta + row0;
        if (starts_at_delta)
            each(team_, ds_.rows, ds_.cols, [&](std::ptrdiff_t i, std::ptrdiff_t j) { ds_(i, j) = -delta[i]; });
        const Operands of_dp{x_.dout.row(row0), x_.dout.stride, 1, x_.v.row(key0), x_.v.stride, 1, x_.v.cols};
        stage_.accumulate(Site::dp_accumulate, where, ds_, of_dp, starts_at_delta ? Begin::At::c : Begin::At::zero);
        stage_.pass(Site::dp_cast, where, ds_);
        if (schedule_.normalize == Normalize::before_pv)
            drop_and_scale(stage_, Site::dp_dropout, where, x_, ds_);
        else if (starts_at_delta && x_.kept.data != nullptr)
            each(team_, ds_.rows, ds_.cols, [&](std::ptrdiff_t i, std::ptrdiff_t j) {
                if (x_.drops(row0 + i, key0 + j)) ds_(i, j) = -delta[i];
            });
        else
            drop(stage_, where, x_, ds_);
        if (schedule_.ds_p == DsP::cast) stage_.pass(Site::bwd_p_cast, where, p_);
    }

    /// ds_: dp becomes ds, cast, as the products receive it.
    FAULTLINE_HD_CALLED void form_score_gradient(const Place& where) {
        const double scale = schedule_.ds_scale == DsScale::before ? x_.scales.gradient : 1.0;
        const bool subtracted = schedule_.delta_in == DeltaIn::accumulator;
        const double* delta = r_.delta + where.query0 + where.i0;
        stage_.pass(
            Site::ds, where, ds_,
            [&](double dp, std::ptrdiff_t i, std::ptrdiff_t j) {
                double y = subtracted ? dp : stage_.intermediate(Site::ds, dp - delta[i]);
                y = p_(i, j) * y;
                return scale != 1.0 ? stage_.intermediate(Site::ds, y) * scale : y;
            },
            [&](double dp, std::ptrdiff_t i, std::ptrdiff_t j) {
                return p_(i, j) * (subtracted ? dp : dp - delta[i]) * scale;
            });
        // Autograd casts what the softmax's backward leaves, then undoes the cap; kernels do it before the one cast.
        const bool has_cap = x_.scales.cap > 0, cap_first = schedule_.ds_scale != DsScale::after_cast;
        if (has_cap && cap_first) undo_cap(where);
        stage_.pass(Site::ds_cast, where, ds_);
        if (has_cap && !cap_first) undo_cap(where);
        if (schedule_.ds_scale != DsScale::after_cast) return;
        const auto scaled = [&](double x, std::ptrdiff_t, std::ptrdiff_t) { return x * x_.scales.gradient; };
        stage_.pass(Site::ds_scaled, where, ds_, scaled, scaled);
    }

    /// ds_ <- ds_ (1 - tanh^2), the slope in fp32.
    FAULTLINE_HD void undo_cap(const Place& where) {
        const auto slope = [&](std::ptrdiff_t i, std::ptrdiff_t j) { return 1.0 - capped_(i, j) * capped_(i, j); };
        stage_.pass(
            Site::ds_softcap, where, ds_,
            [&](double x, std::ptrdiff_t i, std::ptrdiff_t j) { return x * to_float(slope(i, j)); },
            [&](double x, std::ptrdiff_t i, std::ptrdiff_t j) { return x * slope(i, j); });
    }

    /// p as dv receives it and ds as dq and dk do, with what a projection changes.
    FAULTLINE_HD_CALLED void score_gradient(const Place& where) {
        recompute(where);
        form_score_gradient(where);
        const std::ptrdiff_t row0 = where.query0 + where.i0, key0 = where.key0 + where.j0;
        if (schedule_.zero_sum != ZeroSum::none)
            each(team_, p_.rows, p_.cols, [&](std::ptrdiff_t i, std::ptrdiff_t j) {
                const std::ptrdiff_t row = row0 + i, key = key0 + j;
                if (schedule_.zero_sum == ZeroSum::largest && r_.largest_key[row] == static_cast<double>(key))
                    ds_(i, j) = projected(ds_(i, j) - r_.row_sum[row]);
                if (rank_one()) w_(i, j) = projected(r_.row_sum[row] * weight(row, key, p_(i, j)));
            });
        if (schedule_.ds_p == DsP::unrounded) stage_.pass(Site::bwd_p_cast, where, p_);
        if (schedule_.normalize == Normalize::before_pv) {  // what the forward multiplied with V
            const Shown shown = stage_.shown();
            stage_.show_as(Shown::unseen);
            drop_and_scale(stage_, Site::p_dropout, where, x_, p_);
            stage_.show_as(shown);
        } else {
            drop(stage_, where, x_, p_);
        }
    }

    [[nodiscard]] FAULTLINE_HD bool rank_one() const { return BackwardMemory::projects(schedule_); }
    [[nodiscard]] FAULTLINE_HD bool projects_exactly() const { return stage_.is_exact_rule(Site::dq_accumulate); }
    [[nodiscard]] FAULTLINE_HD double projected(double x) const { return projects_exactly() ? x : to_float(x); }
    [[nodiscard]] FAULTLINE_HD Accumulation projection_sum() const {
        return projects_exactly() ? exact_order() : fp32_order();
    }
    [[nodiscard]] FAULTLINE_HD double weight(std::ptrdiff_t row, std::ptrdiff_t key, double p) const {
        if (key >= visible_keys(row, x_.n_q(), x_.n_k(), x_.causal)) return 0;
        if (x_.bias.data != nullptr && x_.bias(row, key) == -infinity()) return 0;
        if (schedule_.zero_sum == ZeroSum::weighted) return r_.weight_sum[row] > 0 ? p / r_.weight_sum[row] : 0;
        return 1.0 / r_.open[row];
    }

    FAULTLINE_HD void accumulate(Site site, Carry carry, const Place& where, const View<double>& c,
                                 const Operands& in) {
        stage_.accumulate(site, where, c, in, carry == Carry::chained ? Begin::At::c : Begin::At::added);
    }

    Stage& stage_;
    const typename Stage::Team& team_;
    const Schedule& schedule_;
    const HeadProblem& x_;
    const BackwardRows& r_;
    const BackwardMemory& m_;
    View<double> p_, ds_, w_, capped_;
};

}  // namespace faultline::emulated
