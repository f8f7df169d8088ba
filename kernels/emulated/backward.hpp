// SPDX-License-Identifier: Apache-2.0
// The backward of one query head (kernels/cpu/backward.hpp) in parts that are independent of each other: delta and row sums
// by query tile, dq by query tile over its key tiles, dk and dv by key tile over its query tiles. Each part computes the
// score tiles anew; their values depend on their place alone, so dq, dk and dv are those of one walk over all tiles.
#pragma once

#include <faultline/emulated/scores.hpp>

namespace faultline::emulated {

/// Per row and key of one query head, filled part by part; whole matrices in global memory.
struct BackwardRows {
    double* lse = nullptr;                              ///< [n_q], of the forward
    View<const double> o;                               ///< [n_q, d_v]: what delta is made of, where it is made of o
    View<const double> p;                               ///< [n_q, n_k], where the plan saves it
    double *reference = nullptr, *delta = nullptr;      ///< [n_q]
    double *row_sum = nullptr, *p_sum = nullptr;        ///< [n_q]: of ds after its cast, and of p; for a projection
    double *largest = nullptr, *largest_key = nullptr;  ///< [n_q]: |ds| and its key, -1 for none
    double* open = nullptr;                             ///< [n_q]: keys that the row sees
    View<double> dq, dq_part;                           ///< [n_q, d]
    View<double> dk, dk_part;                           ///< [n_k, d]
    View<double> dv;                                    ///< [n_k, d_v]
};

/// What a team works in.
struct BackwardMemory {
    View<double> p, ds, w;  ///< [bwd_block_q, bwd_block_k]
    double* floats;

    FAULTLINE_HD BackwardMemory(Arena& arena, const Schedule& schedule, std::ptrdiff_t n_q, std::ptrdiff_t n_k) {
        const std::ptrdiff_t rows = TileAxis(n_q, schedule.bwd_block_q).block();
        const std::ptrdiff_t cols = TileAxis(n_k, schedule.bwd_block_k).block();
        p = arena.take(rows, cols);
        ds = arena.take(rows, cols);
        const bool projected = schedule.zero_sum == ZeroSum::uniform || schedule.zero_sum == ZeroSum::weighted;
        w = arena.take(projected ? rows : 0, cols);
        floats = arena.take(1);
    }
};

template <class Team>
class BackwardTile {
  public:
    FAULTLINE_HD BackwardTile(const Team& team, const Sites& sites, const HeadProblem& problem,
                              const BackwardRows& rows, const BackwardMemory& memory)
        : team_(team), sites_(sites), schedule_(sites.plan.schedule), x_(problem), r_(rows), m_(memory) {}

    /// What is subtracted in the exponent, and delta where it is made of o. The rows of one query tile.
    FAULTLINE_HD void prepare(const TileRange& rows) {
        each_row(team_, rows.count, [&](std::ptrdiff_t i) {
            const std::ptrdiff_t row = rows.first + i;
            r_.reference[row] = scaled_lse(row);
            if (!needs_dp(schedule_.delta_from)) r_.delta[row] = settled(row, delta_from_output(row));
        });
    }

    /// delta as rowsum(P o dP), or that over rowsum(P), with the P that ds is made of.
    FAULTLINE_HD void delta_from_probabilities(const TileRange& rows) {
        const bool exact = sites_.is_exact_rule(Site::delta);
        const auto f = [=](double x) { return exact ? x : to_float(x); };
        each_row(team_, rows.count, [&](std::ptrdiff_t i) {
            r_.delta[rows.first + i] = 0;
            r_.p_sum[rows.first + i] = 0;
            r_.open[rows.first + i] = 0;  // whether the row sees any key
        });
        walk_keys(rows, [&](const Place& where, const TileRange& keys) {
            recompute(where, rows, keys);
            each_row(team_, rows.count, [&](std::ptrdiff_t i) {
                double &delta = r_.delta[rows.first + i], &p_sum = r_.p_sum[rows.first + i];
                for (std::ptrdiff_t j = 0; j < keys.count; ++j) {
                    delta = f(delta + f(m_.p(i, j) * m_.ds(i, j)));
                    p_sum = f(p_sum + m_.p(i, j));
                    if (m_.p(i, j) != 0) r_.open[rows.first + i] = 1;
                }
            });
        });
        each_row(team_, rows.count, [&](std::ptrdiff_t i) {
            const std::ptrdiff_t row = rows.first + i;
            double delta = r_.delta[row];
            if (schedule_.delta_from == DeltaFrom::p_dp_normalized && r_.open[row] != 0)
                delta = f(delta / r_.p_sum[row]);
            r_.delta[row] = settled(row, delta);
        });
    }

    /// First sweep of a projection: row sums of the cast score gradient and of p, and the place of the largest element.
    FAULTLINE_HD void collect(const TileRange& rows) {
        each_row(team_, rows.count, [&](std::ptrdiff_t i) {
            const std::ptrdiff_t row = rows.first + i;
            r_.row_sum[row] = r_.p_sum[row] = 0;
            r_.largest[row] = r_.largest_key[row] = -1;
            const std::ptrdiff_t visible = visible_keys(row, x_.n_q(), x_.n_k(), x_.causal);
            std::ptrdiff_t open = x_.bias.data == nullptr ? visible : 0;
            for (std::ptrdiff_t j = 0; x_.bias.data != nullptr && j < visible; ++j)
                open += x_.bias(row, j) != -infinity() ? 1 : 0;
            r_.open[row] = static_cast<double>(open);
        });
        walk_keys(rows, [&](const Place& where, const TileRange& keys) {
            recompute(where, rows, keys);
            form_score_gradient(where, rows, keys);
            each_row(team_, rows.count, [&](std::ptrdiff_t i) {
                const std::ptrdiff_t row = rows.first + i;
                for (std::ptrdiff_t j = 0; j < keys.count; ++j) {
                    r_.row_sum[row] = projected(r_.row_sum[row] + m_.ds(i, j));
                    r_.p_sum[row] = projected(r_.p_sum[row] + m_.p(i, j));
                    if (fabs(m_.ds(i, j)) > r_.largest[row]) {
                        r_.largest[row] = fabs(m_.ds(i, j));
                        r_.largest_key[row] = static_cast<double>(keys.first + j);
                    }
                }
            });
        });
    }

    FAULTLINE_HD void query_gradient(const TileRange& rows) {
        const std::ptrdiff_t d = x_.q.cols;
        each(team_, rows.count, d, [&](std::ptrdiff_t i, std::ptrdiff_t c) {
            r_.dq(rows.first + i, c) = 0;
            if (rank_one()) r_.dq_part(rows.first + i, c) = 0;
        });
        walk_keys(rows, [&](const Place& where, const TileRange& keys) {
            score_gradient(where, rows, keys);
            each(team_, rows.count, d, [&](std::ptrdiff_t i, std::ptrdiff_t c) {
                const Strided k{&x_.k_for_dq(keys.first, c), x_.k_for_dq.stride};
                if (rank_one()) {
                    double& part = r_.dq_part(rows.first + i, c);
                    part = dot(projection_sum(), keys.count, part, Strided{m_.w.row(i), 1}, k);
                }
                double& dq = r_.dq(rows.first + i, c);
                dq = accumulated(Site::dq_accumulate, schedule_.dq_carry, where, i * d + c, keys.count, dq,
                                 Strided{m_.ds.row(i), 1}, k);
            });
        });
        if (rank_one())
            each(team_, rows.count, d, [&](std::ptrdiff_t i, std::ptrdiff_t c) {
                double& dq = r_.dq(rows.first + i, c);
                dq = projected(dq - r_.dq_part(rows.first + i, c));
            });
    }

    FAULTLINE_HD void key_gradients(const TileRange& keys) {
        const std::ptrdiff_t d = x_.q.cols, d_v = x_.v.cols;
        each(team_, keys.count, d, [&](std::ptrdiff_t j, std::ptrdiff_t c) {
            r_.dk(keys.first + j, c) = 0;
            if (rank_one()) r_.dk_part(keys.first + j, c) = 0;
        });
        each(team_, keys.count, d_v, [&](std::ptrdiff_t j, std::ptrdiff_t c) { r_.dv(keys.first + j, c) = 0; });
        walk_queries(keys, [&](const Place& where, const TileRange& rows) {
            score_gradient(where, rows, keys);
            each(team_, keys.count, d, [&](std::ptrdiff_t j, std::ptrdiff_t c) {
                const Strided q{&x_.q(rows.first, c), x_.q.stride};
                if (rank_one()) {
                    double& part = r_.dk_part(keys.first + j, c);
                    part = dot(projection_sum(), rows.count, part, Strided{&m_.w(0, j), m_.w.stride}, q);
                }
                double& dk = r_.dk(keys.first + j, c);
                dk = accumulated(Site::dk_accumulate, schedule_.dkv_carry, where, j * d + c, rows.count, dk,
                                 Strided{&m_.ds(0, j), m_.ds.stride}, q);
            });
            each(team_, keys.count, d_v, [&](std::ptrdiff_t j, std::ptrdiff_t c) {
                double& dv = r_.dv(keys.first + j, c);
                dv = accumulated(Site::dv_accumulate, schedule_.dkv_carry, where, j * d_v + c, rows.count, dv,
                                 Strided{&m_.p(0, j), m_.p.stride}, Strided{&x_.dout(rows.first, c), x_.dout.stride});
            });
        });
        if (rank_one())
            each(team_, keys.count, d, [&](std::ptrdiff_t j, std::ptrdiff_t c) {
                double& dk = r_.dk(keys.first + j, c);
                dk = projected(dk - r_.dk_part(keys.first + j, c));
            });
    }

  private:
    [[nodiscard]] FAULTLINE_HD bool visits(const TileRange& rows, const TileRange& keys) const {
        return visible_keys(rows.first + rows.count - 1, x_.n_q(), x_.n_k(), x_.causal) > keys.first;
    }
    template <class F>
    FAULTLINE_HD void walk_keys(const TileRange& rows, F&& visit) {
        const TileAxis axis(x_.n_k(), schedule_.bwd_block_k);
        for (int a = 0; a < axis.count(); ++a) {
            const TileRange keys = axis.walk(a, axis.count(), schedule_.bwd_key_order);
            if (visits(rows, keys)) visit(Place{x_.head, rows.first, keys.first, 0}, keys);
        }
    }
    template <class F>
    FAULTLINE_HD void walk_queries(const TileRange& keys, F&& visit) {
        const TileAxis axis(x_.n_q(), schedule_.bwd_block_q);
        for (int b = 0; b < axis.count(); ++b) {
            const TileRange rows = axis.walk(b, axis.count(), schedule_.bwd_query_order);
            if (visits(rows, keys)) visit(Place{x_.head, rows.first, keys.first, 0}, rows);
        }
    }

    /// (s - lse/scale) c: what is subtracted is in units of the raw score.
    [[nodiscard]] FAULTLINE_HD bool subtracts_raw() const {
        return schedule_.bwd_argument == ArgumentForm::subtract_then_scale && schedule_.scale_at == ScaleAt::exponent;
    }
    [[nodiscard]] FAULTLINE_HD double scaled_lse(std::ptrdiff_t row) const {
        const double lse = r_.lse[row];
        const Place at{x_.head, 0, 0, 0};
        if (schedule_.p_saved) return lse;
        if (subtracts_raw()) {
            const auto in_scores = [&] { return lse / x_.scales.natural; };
            return sites_.pass(Site::lse_scale, at, row, in_scores, in_scores);
        }
        if (schedule_.bwd_exp_base != ExpBase::two) return lse;
        constexpr double log2e_fp32 = 1.44269502162933349609375, log2e = 1.44269504088896340735992468100189214;
        return sites_.pass(
            Site::lse_scale, at, row, [&] { return lse * log2e_fp32; }, [&] { return lse * log2e; });
    }

    [[nodiscard]] FAULTLINE_HD double settled(std::ptrdiff_t row, double delta) const {
        return sites_.rounded(Site::delta, Place{x_.head, 0, 0, 0}, row, delta);
    }
    /// The sum of dO o O in the order of the schedule, every addition rounded to float.
    [[nodiscard]] FAULTLINE_HD double delta_from_output(std::ptrdiff_t row) const {
        const std::ptrdiff_t cols = r_.o.cols;
        const auto product = [&](std::ptrdiff_t j) {
            return sites_.rounded(Site::delta_product, Place{x_.head, 0, 0, 0}, row * cols + j,
                                  x_.dout(row, j) * r_.o(row, j));
        };
        double sum = 0;
        if (sites_.is_exact_rule(Site::delta)) {
            for (std::ptrdiff_t j = 0; j < cols; ++j) sum += product(j);
            return sum;
        }
        if (schedule_.delta_order == DeltaOrder::sequential) {
            for (std::ptrdiff_t j = 0; j < cols; ++j) sum = to_float(sum + to_float(product(j)));
            return sum;
        }
        return octets(cols, product);
    }
    /// delta_threads threads take eight columns each in turn; joined by a tree over thread xor half, …, 1. That tree is the
    /// one of neighbours over the threads in bit-reversed order, which needs no array of them.
    template <class F>
    [[nodiscard]] FAULTLINE_HD double octets(std::ptrdiff_t cols, F&& product) const {
        const int threads = schedule_.delta_threads;
        int bits = 0;
        while ((1 << bits) < threads) ++bits;
        const auto lane = [&](std::ptrdiff_t at) {
            int thread = 0;
            for (int b = 0; b < bits; ++b) thread |= ((static_cast<int>(at) >> b) & 1) << (bits - 1 - b);
            return lane_sum(cols, thread, product);
        };
        return tree_of_neighbours(threads, lane, [](double sum) { return to_float(sum); });
    }
    template <class F>
    [[nodiscard]] FAULTLINE_HD double lane_sum(std::ptrdiff_t cols, int thread, F&& product) const {
        const std::ptrdiff_t step = schedule_.delta_order == DeltaOrder::octet_pairs ? 2 : 1;
        double sum = 0;
        for (std::ptrdiff_t octet = 8 * static_cast<std::ptrdiff_t>(thread); octet < cols;
             octet += 8 * static_cast<std::ptrdiff_t>(schedule_.delta_threads))
            for (std::ptrdiff_t j = octet; j < octet + 8 && j < cols; j += step) {
                double term = to_float(product(j));
                if (step == 2 && j + 1 < cols) term = to_float(term + to_float(product(j + 1)));
                sum = to_float(sum + term);
            }
        return sum;
    }

    /// m_.p and, in m_.ds, dp of a tile.
    FAULTLINE_HD_CALLED void recompute(const Place& where, const TileRange& rows, const TileRange& keys) {
        const ScoreSites at = backward_sites();
        const double c = x_.scales.bwd_exponent;
        if (team_.rank() == 0) *m_.floats = is_float(c) ? 1 : 0;
        team_.sync();
        each(team_, rows.count, keys.count, [&](std::ptrdiff_t i, std::ptrdiff_t j) {
            if (schedule_.p_saved) {
                m_.p(i, j) = r_.p(rows.first + i, keys.first + j);
                return;
            }
            const double s = score(sites_, at, where, x_, i, j, keys.count);
            m_.p(i, j) = s;
            if (!is_float(s) || !is_float(reference(rows.first + i).shift)) *m_.floats = 0;
        });
        const bool floats = is_fp32(sites_.plan[at.argument].format) && *m_.floats != 0;
        each(team_, rows.count, keys.count, [&](std::ptrdiff_t i, std::ptrdiff_t j) {
            const std::ptrdiff_t row = rows.first + i, key = keys.first + j, counter = i * keys.count + j;
            double p = m_.p(i, j);
            if (!schedule_.p_saved) {
                const double a =
                    argument(sites_, at, where, counter, schedule_.bwd_argument, c, 0.0, reference(row), floats, p);
                p = probability(sites_, at, where, i, j, keys.count, a);
            }
            const double start = schedule_.delta_in == DeltaIn::accumulator ? -r_.delta[row] : 0.0;
            double dp = dot(sites_.plan[Site::dp_accumulate].accumulation, x_.v.cols, start,
                            Strided{x_.dout.row(row), 1}, Strided{x_.v.row(key), 1});
            dp = sites_.rounded(Site::dp_accumulate, where, counter, dp);
            m_.ds(i, j) = sites_.rounded(Site::dp_cast, where, counter, dp);
            m_.p(i, j) = schedule_.ds_p == DsP::cast ? sites_.rounded(Site::bwd_p_cast, where, counter, p) : p;
        });
    }
    [[nodiscard]] FAULTLINE_HD Reference reference(std::ptrdiff_t row) const {
        return reference_of(sites_, backward_sites(), r_.reference[row], !subtracts_raw(), x_.scales.bwd_exponent, 0.0);
    }

    /// m_.ds: dp becomes ds, cast, as the products receive it.
    FAULTLINE_HD_CALLED void form_score_gradient(const Place& where, const TileRange& rows, const TileRange& keys) {
        const double scale = schedule_.ds_scale == DsScale::before ? x_.scales.natural : 1.0;
        const bool subtracted = schedule_.delta_in == DeltaIn::accumulator;
        each(team_, rows.count, keys.count, [&](std::ptrdiff_t i, std::ptrdiff_t j) {
            const std::ptrdiff_t counter = i * keys.count + j;
            const double dp = m_.ds(i, j), p = m_.p(i, j), delta = r_.delta[rows.first + i];
            double ds = sites_.pass(
                Site::ds, where, counter,
                [&] {
                    double y = subtracted ? dp : sites_.intermediate(Site::ds, dp - delta);
                    y = p * y;
                    return scale != 1.0 ? sites_.intermediate(Site::ds, y) * scale : y;
                },
                [&] { return p * (subtracted ? dp : dp - delta) * scale; });
            ds = sites_.rounded(Site::ds_cast, where, counter, ds);
            if (schedule_.ds_scale == DsScale::after_cast)
                ds = sites_.rounded(Site::ds_scaled, where, counter, ds * x_.scales.natural);
            m_.ds(i, j) = ds;
        });
    }

    /// p as dv receives it and ds as dq and dk do, with what a projection changes.
    FAULTLINE_HD_CALLED void score_gradient(const Place& where, const TileRange& rows, const TileRange& keys) {
        recompute(where, rows, keys);
        form_score_gradient(where, rows, keys);
        each(team_, rows.count, keys.count, [&](std::ptrdiff_t i, std::ptrdiff_t j) {
            const std::ptrdiff_t row = rows.first + i, key = keys.first + j;
            if (schedule_.zero_sum == ZeroSum::largest && r_.largest_key[row] == static_cast<double>(key))
                m_.ds(i, j) = projected(m_.ds(i, j) - r_.row_sum[row]);
            if (rank_one()) m_.w(i, j) = projected(r_.row_sum[row] * weight(row, key, m_.p(i, j)));
            if (schedule_.ds_p == DsP::unrounded)
                m_.p(i, j) = sites_.rounded(Site::bwd_p_cast, where, i * keys.count + j, m_.p(i, j));
        });
    }

    [[nodiscard]] FAULTLINE_HD bool rank_one() const {
        return schedule_.zero_sum == ZeroSum::uniform || schedule_.zero_sum == ZeroSum::weighted;
    }
    [[nodiscard]] FAULTLINE_HD bool projects_exactly() const { return sites_.is_exact_rule(Site::dq_accumulate); }
    [[nodiscard]] FAULTLINE_HD double projected(double x) const { return projects_exactly() ? x : to_float(x); }
    [[nodiscard]] FAULTLINE_HD Accumulation projection_sum() const {
        return projects_exactly() ? exact_order() : fp32_order();
    }
    [[nodiscard]] FAULTLINE_HD double weight(std::ptrdiff_t row, std::ptrdiff_t key, double p) const {
        if (key >= visible_keys(row, x_.n_q(), x_.n_k(), x_.causal)) return 0;
        if (x_.bias.data != nullptr && x_.bias(row, key) == -infinity()) return 0;
        if (schedule_.zero_sum == ZeroSum::weighted) return r_.p_sum[row] > 0 ? p / r_.p_sum[row] : 0;
        return 1.0 / r_.open[row];
    }

    [[nodiscard]] FAULTLINE_HD_CALLED double accumulated(Site site, Carry carry, const Place& where,
                                                         std::ptrdiff_t counter, std::ptrdiff_t count, double sum,
                                                         Strided x, Strided y) const {
        const Accumulation& order = sites_.plan[site].accumulation;
        if (carry == Carry::chained) return sites_.rounded(site, where, counter, dot(order, count, sum, x, y));
        return sites_.pass(
            site, where, counter, [&] { return sum + sites_.intermediate(site, dot(order, count, 0.0, x, y)); },
            [&] { return dot(exact_order(), count, sum, x, y); });
    }

    const Team& team_;
    const Sites& sites_;
    const Schedule& schedule_;
    const HeadProblem& x_;
    const BackwardRows& r_;
    const BackwardMemory& m_;
};

}  // namespace faultline::emulated
