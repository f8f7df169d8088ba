// SPDX-License-Identifier: Apache-2.0
// The forward of one query tile: the streaming softmax over its key tiles, every site in the order in which the data flows
// (kernels/cpu/forward.hpp). Query tiles are independent, one team each.
#pragma once

#include <faultline/cpu/row_arithmetic.hpp>
#include <faultline/emulated/scores.hpp>

namespace faultline::emulated {

/// What a team works in: tiles and row statistics of one query tile.
struct ForwardMemory {
    View<double> s, cast, o, split_o;  ///< [block_q, block_k], the same, [block_q, d_v], [splits * block_q, d_v]
    double *maximum, *old_maximum, *alpha, *running_lse, *lanes, *rounded_lanes, *joined, *lse, *split_lse, *weights;
    double* floats;  ///< one number: 1 while every operand of a fused argument is a float

    FAULTLINE_HD ForwardMemory(Arena& arena, const Schedule& schedule, std::ptrdiff_t n_q, std::ptrdiff_t n_k,
                               std::ptrdiff_t d_v) {
        const std::ptrdiff_t rows = TileAxis(n_q, schedule.block_q).block(),
                             cols = TileAxis(n_k, schedule.block_k).block();
        const std::ptrdiff_t splits = schedule.key_splits;
        s = arena.take(rows, cols);
        cast = arena.take(rows, cols);
        o = arena.take(rows, d_v);
        split_o = arena.take(splits > 1 ? splits * rows : 0, d_v);
        maximum = arena.take(rows);
        old_maximum = arena.take(rows);
        alpha = arena.take(rows);
        running_lse = arena.take(rows);
        lanes = arena.take(4 * rows);
        rounded_lanes = arena.take(4 * rows);
        joined = arena.take(rows);
        lse = arena.take(rows);
        split_lse = arena.take(splits > 1 ? splits * rows : 0);
        weights = arena.take(splits > 1 ? 2 * splits * rows : 0);  // the tree of merged_lse, per row
        floats = arena.take(1);
    }
};

template <class Team>
class ForwardTile {
  public:
    FAULTLINE_HD ForwardTile(const Team& team, const Sites& sites, const HeadProblem& problem,
                             const ForwardMemory& memory, const ForwardOutputs& out)
        : team_(team), sites_(sites), schedule_(sites.plan.schedule), x_(problem), m_(memory), out_(out) {}

    FAULTLINE_HD void run(const TileRange& rows) {
        rows_ = rows;
        const std::ptrdiff_t last = visible_keys(rows.first + rows.count - 1, x_.n_q(), x_.n_k(), x_.causal);
        const TileAxis keys(x_.n_k(), schedule_.block_k);
        const int visited = static_cast<int>((last + keys.block() - 1) / keys.block());
        if (schedule_.key_splits == 1) {
            stream(keys, 0, visited);
            store();
            return;
        }
        const int per_split = (keys.count() + schedule_.key_splits - 1) / schedule_.key_splits;
        for (int split = 0; split < schedule_.key_splits; ++split) {
            const int begin = split * per_split, end = begin + per_split;
            stream(keys, begin < visited ? begin : visited, end < visited ? end : visited);
            store_split(split);
        }
        store_merged();
    }

  private:
    [[nodiscard]] FAULTLINE_HD Place row_place(std::ptrdiff_t key0 = 0, int part = 0) const {
        return {x_.head, rows_.first, key0, part};
    }

    FAULTLINE_HD void stream(const TileAxis& keys, int begin, int end) {
        each_row(team_, rows_.count, [&](std::ptrdiff_t i) {
            m_.maximum[i] = m_.running_lse[i] = -infinity();
            for (int t = 0; t < 4; ++t) m_.lanes[4 * i + t] = m_.rounded_lanes[4 * i + t] = 0;
        });
        each(team_, rows_.count, m_.o.cols, [&](std::ptrdiff_t i, std::ptrdiff_t c) { m_.o(i, c) = 0; });
        for (int step = 0; step < end - begin; ++step)
            key_tile(keys[schedule_.key_order == Order::ascending ? begin + step : end - 1 - step], step == 0);
    }

    FAULTLINE_HD void key_tile(const TileRange& keys, bool first) {
        const Place where{x_.head, rows_.first, keys.first, 0};
        const double c = x_.scales.exponent, offset = schedule_.max_offset;
        const ScoreSites at = forward_sites();
        if (team_.rank() == 0) *m_.floats = is_float(c) ? 1 : 0;
        team_.sync();
        each(team_, rows_.count, keys.count, [&](std::ptrdiff_t i, std::ptrdiff_t j) {
            const double s = score(sites_, at, where, x_, i, j, keys.count);
            m_.s(i, j) = s;
            if (!is_float(s)) *m_.floats = 0;  // whoever writes, writes the same
        });
        each_row(team_, rows_.count, [&](std::ptrdiff_t i) {
            m_.old_maximum[i] = m_.maximum[i];
            const double m = next_maximum(m_.s.row(i), keys.count, m_.maximum[i], schedule_, x_.scales.logit_per_score,
                                          x_.scales.exponent);
            m_.maximum[i] = sites_.rounded(Site::row_max, where, i, m);
            m_.alpha[i] = rescale_factor(where, i, first);
            if (!is_float(reference_of(sites_, at, m_.maximum[i], false, c, offset).shift)) *m_.floats = 0;
        });
        const bool floats = is_fp32(sites_.plan[at.argument].format) && *m_.floats != 0;
        each(team_, rows_.count, keys.count, [&](std::ptrdiff_t i, std::ptrdiff_t j) {
            const Reference r = reference_of(sites_, at, m_.maximum[i], false, c, offset);
            const double a =
                argument(sites_, at, where, i * keys.count + j, schedule_.argument, c, offset, r, floats, m_.s(i, j));
            const double p = probability(sites_, at, where, i, j, keys.count, a);
            m_.s(i, j) = p;
            if (schedule_.row_sum_adds != RowSumAdds::unrounded)
                m_.cast(i, j) = sites_.rounded(Site::p_cast, where, i * keys.count + j, p);
        });
        each_row(team_, rows_.count, [&](std::ptrdiff_t i) {
            const bool rounded = schedule_.row_sum_adds == RowSumAdds::rounded;
            add_tile(m_.lanes + 4 * i, rounded ? m_.cast.row(i) : m_.s.row(i), keys.count, m_.alpha[i]);
            if (schedule_.row_sum_adds == RowSumAdds::two_sums)
                add_tile(m_.rounded_lanes + 4 * i, m_.cast.row(i), keys.count, m_.alpha[i]);
            m_.joined[i] = joined(output_lanes(i));
        });
        each(team_, rows_.count, keys.count, [&](std::ptrdiff_t i, std::ptrdiff_t j) {
            double p = m_.s(i, j);
            const std::ptrdiff_t counter = i * keys.count + j;
            if (schedule_.normalize == Normalize::before_pv)
                p = divided(Site::p_normalize, where, counter, m_.joined[i], p);
            if (schedule_.p_saved) out_.p(rows_.first + i, keys.first + j) = p;
            m_.s(i, j) = sites_.rounded(Site::p_cast, where, counter, p);
        });
        add_output(where, keys, first);
        if (schedule_.normalize == Normalize::each_tile) normalize_state(where);
    }

    /// alpha = exp(scale (m_old - m_new)): subtract, scale, exp.
    [[nodiscard]] FAULTLINE_HD double rescale_factor(const Place& where, std::ptrdiff_t i, bool first) const {
        if (first) return 0;
        const double c = x_.scales.exponent;
        const double difference = m_.old_maximum[i] - (m_.maximum[i] == -infinity() ? 0.0 : m_.maximum[i]);
        const double a = sites_.pass(
            Site::rescale_argument, where, i,
            [&] { return sites_.intermediate(Site::rescale_argument, difference) * c; },
            [&] { return difference * c; });
        return sites_.pass(
            Site::rescale_factor, where, i, [&] { return exponential(a, schedule_.exp_base, schedule_.functions); },
            [&] { return exponential(a, schedule_.exp_base); });
    }

    /// Additions happen in fp32; the running sum may be held in something narrower between tiles.
    [[nodiscard]] FAULTLINE_HD double added(double x) const {
        return sites_.plan[Site::row_sum].accumulation.kind == Accumulation::Kind::exact ? x : to_float(x);
    }
    FAULTLINE_HD void add_tile(double* lanes, const double* p, std::ptrdiff_t count, double alpha) const {
        add_row(p, count, schedule_.row_sum_order, alpha, lanes, [&](double x) { return added(x); });
        for (int t = 0; t < lanes_of(schedule_.row_sum_order); ++t)
            lanes[t] = sites_.intermediate(Site::row_sum, lanes[t]);
    }
    [[nodiscard]] FAULTLINE_HD double joined(const double* lanes) const {
        return joined_lanes(lanes, schedule_.row_sum_order, [&](double x) { return added(x); });
    }
    /// The sum that divides the output; lse is made of lanes.
    [[nodiscard]] FAULTLINE_HD const double* output_lanes(std::ptrdiff_t i) const {
        return (schedule_.row_sum_adds == RowSumAdds::two_sums ? m_.rounded_lanes : m_.lanes) + 4 * i;
    }

    /// x / sum, as the kernel divides; rows without a visible key stay 0.
    [[nodiscard]] FAULTLINE_HD double divided(Site site, const Place& where, std::ptrdiff_t counter, double sum,
                                              double x) const {
        const double l = sum == 0 || sum != sum ? 1.0 : sum;
        return sites_.pass(
            site, where, counter,
            [&] { return schedule_.division == Division::reciprocal ? x * sites_.intermediate(site, 1.0 / l) : x / l; },
            [&] { return x / l; });
    }

    FAULTLINE_HD void add_output(const Place& where, const TileRange& keys, bool first) {
        const std::ptrdiff_t cols = m_.o.cols;
        const Rule& rule = sites_.plan[Site::pv_accumulate];
        each(team_, rows_.count, cols, [&](std::ptrdiff_t i, std::ptrdiff_t c) {
            const std::ptrdiff_t counter = i * cols + c;
            const Strided p{m_.s.row(i), 1}, v{&x_.v(keys.first, c), x_.v.stride};
            const auto sum = [&](const Accumulation& order, double start) {
                return dot(order, keys.count, start, p, v);
            };
            double o = m_.o(i, c);
            if (!first) o = sites_.rounded(Site::o_rescale, where, counter, o * m_.alpha[i]);
            if (schedule_.pv_carry == Carry::chained || first)
                o = sites_.rounded(Site::pv_accumulate, where, counter, sum(rule.accumulation, o));
            else
                o = sites_.pass(
                    Site::pv_accumulate, where, counter,
                    [&] { return o + sites_.intermediate(Site::pv_accumulate, sum(rule.accumulation, 0.0)); },
                    [&] { return sum(exact_order(), o); });
            m_.o(i, c) = o;
        });
    }

    /// FlashAttention-1: after every key tile o <- o / l, and the row's state becomes its lse.
    FAULTLINE_HD void normalize_state(const Place& where) {
        const std::ptrdiff_t cols = m_.o.cols;
        each_row(team_, rows_.count, [&](std::ptrdiff_t i) { m_.joined[i] = joined(m_.lanes + 4 * i); });
        each(team_, rows_.count, cols, [&](std::ptrdiff_t i, std::ptrdiff_t c) {
            m_.o(i, c) = divided(Site::o_normalize, where, i * cols + c, m_.joined[i], m_.o(i, c));
        });
        Place after = where;  // the tile's second maximum
        after.part = 1;
        each_row(team_, rows_.count, [&](std::ptrdiff_t i) {
            m_.running_lse[i] = lse_of_row(where, i, -infinity());
            m_.maximum[i] = sites_.rounded(Site::row_max, after, i, m_.running_lse[i] / x_.scales.natural);
            for (int t = 0; t < 4; ++t) m_.lanes[4 * i + t] = 0;
            m_.lanes[4 * i] = m_.running_lse[i] == -infinity() ? 0.0 : 1.0;
        });
    }

    /// `empty`: what a row without a visible key stores.
    [[nodiscard]] FAULTLINE_HD double lse_of_row(const Place& where, std::ptrdiff_t i, double empty) const {
        const double sum = joined(m_.lanes + 4 * i), m = m_.maximum[i];
        const double score_unit = schedule_.exp_base == ExpBase::two ? x_.scales.log2e : 1.0;
        const double unit = schedule_.scale_at == ScaleAt::exponent ? x_.scales.natural : 1.0 / score_unit;
        constexpr double ln2 = 0.693147180559945309417232121458176568;
        const double offset = schedule_.max_offset * ln2;
        const double lse = sites_.pass(
            Site::lse, where, i,
            [&] {
                const double log_part = sites_.intermediate(Site::lse, logarithm(sum, schedule_.functions) - offset);
                if (schedule_.lse_form == LseForm::natural) return fma(m, unit, log_part);
                const double in_log2 = sites_.intermediate(Site::lse, m * x_.scales.exponent);
                return fma(in_log2, sites_.intermediate(Site::lse, ln2), log_part);
            },
            [&] { return m * unit + (binary64_functions::log(sum) - offset); });
        return sum == 0 || sum != sum ? empty : lse;
    }

    FAULTLINE_HD void store() {
        const Place where = row_place();
        if (schedule_.normalize == Normalize::after_pv) normalize_output(where);
        store_output(where);
        each_row(team_, rows_.count, [&](std::ptrdiff_t i) {
            double lse;
            if (schedule_.normalize == Normalize::each_tile)
                lse = m_.running_lse[i] == -infinity() ? infinity() : m_.running_lse[i];
            else
                lse = lse_of_row(where, i, infinity());
            out_.lse[rows_.first + i] = lse;
        });
    }

    FAULTLINE_HD void normalize_output(const Place& where) {
        const std::ptrdiff_t cols = m_.o.cols;
        each_row(team_, rows_.count, [&](std::ptrdiff_t i) { m_.joined[i] = joined(output_lanes(i)); });
        each(team_, rows_.count, cols, [&](std::ptrdiff_t i, std::ptrdiff_t c) {
            m_.o(i, c) = divided(Site::o_normalize, where, i * cols + c, m_.joined[i], m_.o(i, c));
        });
    }

    FAULTLINE_HD void store_output(const Place& where) {
        const std::ptrdiff_t cols = m_.o.cols;
        each(team_, rows_.count, cols, [&](std::ptrdiff_t i, std::ptrdiff_t c) {
            out_.o_unrounded(rows_.first + i, c) = m_.o(i, c);
            out_.o(rows_.first + i, c) = sites_.rounded(Site::o_cast, where, i * cols + c, m_.o(i, c));
        });
    }

    FAULTLINE_HD void store_split(int split) {
        const Place where = row_place(0, split);
        const std::ptrdiff_t cols = m_.o.cols;
        normalize_output(where);
        each(team_, rows_.count, cols, [&](std::ptrdiff_t i, std::ptrdiff_t c) {
            m_.split_o(split * rows_.count + i, c) =
                sites_.rounded(Site::partial_o_cast, where, i * cols + c, m_.o(i, c));
        });
        each_row(team_, rows_.count,
                 [&](std::ptrdiff_t i) { m_.split_lse[split * rows_.count + i] = lse_of_row(where, i, -infinity()); });
    }

    /// The combine kernel: log sum_i exp(lse_i) as a tree over i xor half, …, 1, then sum_i exp(lse_i - lse) o_i.
    FAULTLINE_HD void store_merged() {
        const int splits = schedule_.key_splits;
        const std::ptrdiff_t cols = m_.o.cols;
        const Place merged = row_place(0, splits);
        each_row(team_, rows_.count, [&](std::ptrdiff_t i) {
            m_.lse[i] = sites_.pass(
                Site::lse, merged, i,
                [&] { return merged_lse(i, [&](double x) { return sites_.intermediate(Site::lse, x); }); },
                [&] { return merged_lse(i, [](double x) { return x; }); });
            out_.lse[rows_.first + i] = m_.lse[i] == -infinity() ? infinity() : m_.lse[i];
        });
        const Place where = row_place();
        each(team_, rows_.count, cols, [&](std::ptrdiff_t i, std::ptrdiff_t c) {
            m_.o(i, c) = sites_.pass(
                Site::merge, where, i * cols + c,
                [&] { return merged_output(i, c, [&](double x) { return sites_.intermediate(Site::merge, x); }); },
                [&] { return merged_output(i, c, [](double x) { return x; }); });
        });
        store_output(where);
    }

    template <class Round>
    [[nodiscard]] FAULTLINE_HD double merged_lse(std::ptrdiff_t i, Round&& rounded) const {
        const int splits = schedule_.key_splits;
        double top = m_.split_lse[i];
        for (int s = 1; s < splits; ++s) {
            const double lse = m_.split_lse[s * rows_.count + i];
            top = top < lse ? lse : top;
        }
        if (top == infinity() || top == -infinity()) return top;
        int lanes = 1;
        while (lanes < splits) lanes *= 2;
        double* part = m_.weights + i * 2 * splits;
        for (int s = 0; s < lanes; ++s)
            part[s] =
                s < splits ? rounded(binary64_functions::exp(rounded(m_.split_lse[s * rows_.count + i] - top))) : 0.0;
        for (int half = lanes / 2; half > 0; half /= 2)
            for (int s = 0; s < half; ++s) part[s] = rounded(part[s] + part[s + half]);
        return rounded(rounded(binary64_functions::log(part[0])) + top);
    }

    template <class Round>
    [[nodiscard]] FAULTLINE_HD double merged_output(std::ptrdiff_t i, std::ptrdiff_t c, Round&& rounded) const {
        const double total = m_.lse[i];
        double o = 0;
        if (total == infinity() || total == -infinity()) return o;
        for (int s = 0; s < schedule_.key_splits; ++s) {
            const double weight = rounded(binary64_functions::exp(rounded(m_.split_lse[s * rows_.count + i] - total)));
            o = rounded(fma(weight, m_.split_o(s * rows_.count + i, c), o));
        }
        return o;
    }

    const Team& team_;
    const Sites& sites_;
    const Schedule& schedule_;
    const HeadProblem& x_;
    const ForwardMemory& m_;
    const ForwardOutputs& out_;
    TileRange rows_{};
};

}  // namespace faultline::emulated
