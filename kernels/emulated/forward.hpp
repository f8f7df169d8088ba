// SPDX-License-Identifier: Apache-2.0
// The forward of one query tile, or of some of its rows: the streaming softmax over its key tiles, every site in the order in
// which the data flows (kernels/cpu/forward.hpp). Rows are independent of each other, so a team may have any of them.
#pragma once

#include <faultline/emulated/forward_memory.hpp>
#include <faultline/emulated/scores.hpp>
#include <faultline/emulated/split_merge.hpp>

namespace faultline::emulated {

template <class Stage>
class ForwardTile {
  public:
    FAULTLINE_HD ForwardTile(Stage& stage, const HeadProblem& problem, const ForwardMemory& memory,
                             const ForwardOutputs& out)
        : stage_(stage), team_(stage.team()), schedule_(stage.plan().schedule), x_(problem), m_(memory), out_(out) {}

    /// Rows [row0, row0 + rows) of the query tile.
    FAULTLINE_HD void run(const TileRange& tile, std::ptrdiff_t row0, std::ptrdiff_t rows) {
        tile_ = tile;
        row0_ = row0;
        rows_ = rows;
        // The whole tile's: a key tile that its last row sees is one that all of its rows pass.
        const std::ptrdiff_t last = visible_keys(tile.first + tile.count - 1, x_.n_q(), x_.n_k(), x_.causal);
        const TileAxis keys(x_.n_k(), schedule_.block_k);
        const int visited = static_cast<int>((last + keys.block() - 1) / keys.block());
        if (schedule_.key_splits == 1) {
            stream(keys, 0, visited, true);
            store();
            return;
        }
        const int per_split = (keys.count() + schedule_.key_splits - 1) / schedule_.key_splits;
        for (int split = 0; split < schedule_.key_splits; ++split) {
            const int begin = split * per_split, end = begin + per_split;
            stream(keys, begin < visited ? begin : visited, end < visited ? end : visited, split == 0);
            store_split(split);
        }
        store_merged();
    }

  private:
    [[nodiscard]] FAULTLINE_HD View<double> column(double* x) const { return emulated::column(x, rows_); }
    [[nodiscard]] FAULTLINE_HD View<double> output() const { return m_.o.shaped(rows_, m_.o.cols); }
    /// A site of rows, and one of the output tile.
    [[nodiscard]] FAULTLINE_HD static Place of_rows(Place where) {
        where.j0 = 0;
        where.cols = 1;
        return where;
    }
    [[nodiscard]] FAULTLINE_HD Place row_place() const {
        Place where;
        where.head = x_.head;
        where.query0 = tile_.first;
        where.q_tile = tile_.index;
        where.i0 = row0_ - tile_.first;
        return where;
    }
    [[nodiscard]] FAULTLINE_HD Place output_place() const {
        return row_place().of_product(row0_ - tile_.first, m_.o.cols);
    }

    FAULTLINE_HD void stream(const TileAxis& keys, int begin, int end, bool sink_here) {
        has_sink_ = sink_here && x_.has_sink;
        const double first_maximum = has_sink_ && schedule_.sink_in_max ? sink_score() : -infinity();
        each_row(team_, rows_, [&](std::ptrdiff_t i) {
            m_.maximum[i] = first_maximum;
            m_.running_lse[i] = -infinity();
            for (int t = 0; t < 4; ++t) m_.lanes[4 * i + t] = m_.rounded_lanes[4 * i + t] = 0;
        });
        const View<double> o = output();
        each(team_, o.rows, o.cols, [&](std::ptrdiff_t i, std::ptrdiff_t c) { o(i, c) = 0; });
        for (int step = 0; step < end - begin; ++step)
            key_tile(keys[schedule_.key_order == Order::ascending ? begin + step : end - 1 - step], step == 0);
        if (has_sink_ && (schedule_.normalize != Normalize::before_pv || begin == end)) add_sink(row_place());
    }

    /// The sink's logit in the unit of the row maximum.
    [[nodiscard]] FAULTLINE_HD double sink_score() const {
        return schedule_.scale_at == ScaleAt::exponent ? x_.sink / x_.scales.natural
                                                       : x_.sink * x_.scales.score_unit(schedule_.exp_base);
    }

    /// Row sums <- row sums + exp(sink - m), after the keys, with the maximum as it is then.
    FAULTLINE_HD_CALLED void add_sink(const Place& where) {
        const bool in_exponent = schedule_.scale_at == ScaleAt::exponent;
        const double unit = schedule_.exp_base == ExpBase::two ? x_.scales.log2e : 1.0;
        each_row(team_, rows_, [&](std::ptrdiff_t i) {
            if (m_.maximum[i] == -infinity()) m_.maximum[i] = sink_score();  // no key was seen
            m_.term[i] = m_.maximum[i];
        });
        const auto argument = [&](double m, auto&& rounded) {
            const double sink = rounded(x_.sink * unit);
            const double top = in_exponent ? rounded(m * x_.scales.exponent) : m;
            return rounded(rounded(sink - top) + schedule_.max_offset);
        };
        stage_.pass(
            Site::sink_exp, of_rows(where), column(m_.term),
            [&](double m, std::ptrdiff_t, std::ptrdiff_t) {
                return exponential(argument(m, [&](double x) { return stage_.intermediate(Site::sink_exp, x); }),
                                   schedule_.exp_base, schedule_.functions);
            },
            [&](double m, std::ptrdiff_t, std::ptrdiff_t) {
                return exponential(argument(m, [](double x) { return x; }), schedule_.exp_base);
            });
        add_sink_to(m_.lanes, where, schedule_.row_sum_adds != RowSumAdds::two_sums);
        if (schedule_.row_sum_adds == RowSumAdds::two_sums) add_sink_to(m_.rounded_lanes, where, true);
        if (!schedule_.p_saved) return;
        each_row(team_, rows_, [&](std::ptrdiff_t i) {
            out_.sink_p[row0_ + i] = stage_.intermediate(Site::p_normalize, m_.term[i] / joined(output_lanes(i)));
        });
    }

    FAULTLINE_HD void add_sink_to(double* lanes, const Place& where, bool shown) {
        each_row(team_, rows_, [&](std::ptrdiff_t i) { m_.joined[i] = joined(lanes + 4 * i) + m_.term[i]; });
        if (shown)
            stage_.pass(Site::sink_sum, of_rows(where), column(m_.joined));
        else
            each_row(team_, rows_,
                     [&](std::ptrdiff_t i) { m_.joined[i] = stage_.intermediate(Site::sink_sum, m_.joined[i]); });
        each_row(team_, rows_, [&](std::ptrdiff_t i) {
            for (int t = 0; t < 4; ++t) lanes[4 * i + t] = 0;
            lanes[4 * i] = m_.joined[i];
        });
    }

    FAULTLINE_HD void key_tile(const TileRange& keys, bool first) {
        const Place where = score_place(x_, tile_, keys, row0_, keys.first);
        const View<double> p = m_.s.shaped(rows_, keys.count);
        scores(stage_, forward_sites(), where, x_, p,
               out_.capped.data == nullptr ? View<double>{} : out_.capped.part(row0_, keys.first, rows_, keys.count));
        row_maxima(team_, p, m_.maxima, m_.joined);
        each_row(team_, rows_, [&](std::ptrdiff_t i) {
            const auto repeats = [&](double least) {
                std::ptrdiff_t found = 0;
                for (std::ptrdiff_t j = 0; j < keys.count; ++j) found += p(i, j) >= least ? 1 : 0;
                return found;
            };
            m_.old_maximum[i] = m_.maximum[i];
            m_.maximum[i] = next_maximum(m_.joined[i], repeats, m_.maximum[i], schedule_, x_.scales.logit_per_score,
                                         x_.scales.exponent);
        });
        stage_.pass(Site::row_max, of_rows(where), column(m_.maximum));
        rescale_factors(of_rows(where), first);
        probabilities(stage_, forward_sites(), where, x_.scales, m_.maximum, false, m_.shift, p);
        update_sums(where, p);
        if (schedule_.normalize == Normalize::before_pv) {
            if (has_sink_) add_sink(where);
            divide(Site::p_normalize, where, output_lanes(0), p);
        }
        if (schedule_.p_saved)
            each(team_, rows_, keys.count,
                 [&](std::ptrdiff_t i, std::ptrdiff_t j) { out_.p(row0_ + i, keys.first + j) = p(i, j); });
        stage_.pass(Site::p_cast, where, p);
        if (schedule_.normalize == Normalize::before_pv)
            drop_and_scale(stage_, Site::p_dropout, where, x_, p);
        else
            drop(stage_, where, x_, p);  // 1/keep: when the output is divided by the row sum
        add_output(where, p, keys, first);
        if (schedule_.normalize == Normalize::each_tile) normalize_state(where);
    }

    /// alpha = exp(scale (m_old - m_new)).
    FAULTLINE_HD void rescale_factors(const Place& where, bool first) {
        each_row(team_, rows_, [&](std::ptrdiff_t i) {
            m_.alpha[i] = first ? 0.0 : m_.old_maximum[i] - (m_.maximum[i] == -infinity() ? 0.0 : m_.maximum[i]);
        });
        if (first) return;
        const double c = x_.scales.exponent;
        const bool in_fp32 = is_fp32(stage_.rule(Site::rescale_argument).format);
        stage_.pass(
            Site::rescale_argument, where, column(m_.alpha),
            [&](double, std::ptrdiff_t i, std::ptrdiff_t) {
                return rescale_argument(schedule_.rescale_argument, m_.old_maximum[i], m_.maximum[i], c, in_fp32,
                                        [&](double x) { return stage_.intermediate(Site::rescale_argument, x); });
            },
            [&](double x, std::ptrdiff_t, std::ptrdiff_t) { return x * c; });
        stage_.pass(
            Site::rescale_factor, where, column(m_.alpha),
            [&](double x, std::ptrdiff_t, std::ptrdiff_t) {
                return exponential(x, schedule_.exp_base, schedule_.functions);
            },
            [&](double x, std::ptrdiff_t, std::ptrdiff_t) { return exponential(x, schedule_.exp_base); });
    }

    FAULTLINE_HD void update_sums(const Place& where, const View<double>& p) {
        const bool two = schedule_.row_sum_adds == RowSumAdds::two_sums;
        if (schedule_.row_sum_adds != RowSumAdds::unrounded)
            // As a whole tile at its place: a stochastic cast draws the bits that p_cast will draw.
            stage_.round(Site::p_cast, where, p, m_.cast.shaped(p.rows, p.cols));
        add_tile(m_.lanes, where, schedule_.row_sum_adds == RowSumAdds::rounded ? m_.cast.shaped(p.rows, p.cols) : p,
                 !two);
        if (two) add_tile(m_.rounded_lanes, where, m_.cast.shaped(p.rows, p.cols), true);
    }

    /// Additions happen in fp32; the running sum may be held in something narrower between tiles.
    [[nodiscard]] FAULTLINE_HD double added(double x) const {
        return stage_.rule(Site::row_sum).accumulation.kind == Accumulation::Kind::exact ? x : to_float(x);
    }
    FAULTLINE_HD void add_tile(double* all_lanes, const Place& where, const View<double>& p, bool shown) {
        const bool seen = shown && stage_.watches(Site::row_sum);
        const bool exact = stage_.is_exact_rule(Site::row_sum);
        double* wanted = stage_.exact();
        if (seen)
            each_row(team_, rows_, [&](std::ptrdiff_t i) {
                const auto same = [](double x) { return x; };
                double sum = joined_lanes(all_lanes + 4 * i, schedule_.row_sum_order, same) * m_.alpha[i];
                for (std::ptrdiff_t j = 0; j < p.cols; ++j) sum += p(i, j);
                wanted[i] = sum;
            });
        add_rows(
            team_, p, schedule_.row_sum_order, m_.alpha, m_.tree, all_lanes, [&](double x) { return added(x); },
            [&](double x) { return stage_.intermediate(Site::row_sum, x); });
        if (!seen) return;
        each_row(team_, rows_, [&](std::ptrdiff_t i) {
            m_.joined[i] = m_.term[i] = joined(all_lanes + 4 * i);
            if (exact) wanted[i] = m_.joined[i];  // the two differ by the order of binary64 additions
        });
        stage_.show(Site::row_sum, of_rows(where), column(m_.joined), column(wanted));
        each_row(team_, rows_, [&](std::ptrdiff_t i) {
            carry_change(m_.term[i], m_.joined[i], all_lanes + 4 * i, lanes_of(schedule_.row_sum_order));
        });
    }
    [[nodiscard]] FAULTLINE_HD double joined(const double* lanes) const {
        return joined_lanes(lanes, schedule_.row_sum_order, [&](double x) { return added(x); });
    }
    /// The sum that divides the output; lse is made of lanes.
    [[nodiscard]] FAULTLINE_HD const double* output_lanes(std::ptrdiff_t i) const {
        return (schedule_.row_sum_adds == RowSumAdds::two_sums ? m_.rounded_lanes : m_.lanes) + 4 * i;
    }

    /// x <- x / sum, as the kernel divides; rows without a visible key stay 0. The output is divided by the kept share too.
    FAULTLINE_HD_CALLED void divide(Site site, const Place& where, const double* lanes, const View<double>& x) {
        const double share = site == Site::o_normalize ? x_.scales.inverse_keep : 1.0;
        const bool divides = schedule_.division == Division::divide;
        each_row(team_, rows_, [&](std::ptrdiff_t i) {
            const double sum = joined(lanes + 4 * i);
            m_.joined[i] = sum == 0 || sum != sum ? 1.0 : sum;
            m_.inverse[i] = stage_.intermediate(site, 1.0 / m_.joined[i]);
            if (share != 1.0) m_.inverse[i] = stage_.intermediate(site, m_.inverse[i] * share);
        });
        stage_.pass(
            site, where, x,
            [&](double o, std::ptrdiff_t i, std::ptrdiff_t) {
                if (!divides) return o * m_.inverse[i];
                o = o / m_.joined[i];
                return share == 1.0 ? o : stage_.intermediate(site, o) * share;
            },
            [&](double o, std::ptrdiff_t i, std::ptrdiff_t) { return o / m_.joined[i] * share; });
    }

    FAULTLINE_HD void add_output(const Place& tile, const View<double>& p, const TileRange& keys, bool first) {
        const View<double> o = output();
        Place where = tile.of_product(row0_ - tile_.first, o.cols);
        where.visible0 = PTRDIFF_MAX / 2;
        where.biased = false;
        if (!first) {
            const auto rescaled = [&](double x, std::ptrdiff_t i, std::ptrdiff_t) { return x * m_.alpha[i]; };
            stage_.pass(Site::o_rescale, where, o, rescaled, rescaled);
        }
        const Operands of_output{p.data, p.stride, 1, &x_.v(keys.first, 0), 1, x_.v.stride, keys.count};
        const bool chained = schedule_.pv_carry == Carry::chained || first;
        stage_.accumulate(Site::pv_accumulate, where, o, of_output, chained ? Begin::At::c : Begin::At::added);
    }

    /// FlashAttention-1: after every key tile o <- o / l, and the row's state becomes its lse.
    FAULTLINE_HD_CALLED void normalize_state(const Place& tile) {
        Place where = tile.of_product(row0_ - tile_.first, m_.o.cols);
        divide(Site::o_normalize, where, m_.lanes, output());
        lse_of_rows(of_rows(tile), -infinity(), m_.running_lse);
        each_row(team_, rows_, [&](std::ptrdiff_t i) {
            m_.maximum[i] = m_.running_lse[i] / x_.scales.natural;
            for (int t = 0; t < 4; ++t) m_.lanes[4 * i + t] = 0;
            m_.lanes[4 * i] = m_.running_lse[i] == -infinity() ? 0.0 : 1.0;
        });
        Place after = of_rows(tile);  // the tile's second maximum
        after.part = 1;
        stage_.pass(Site::row_max, after, column(m_.maximum));
    }

    /// `empty`: what a row without a visible key stores.
    FAULTLINE_HD_CALLED void lse_of_rows(const Place& where, double empty, double* lse) {
        const double score_unit = x_.scales.score_unit(schedule_.exp_base);
        const double unit = schedule_.scale_at == ScaleAt::exponent ? x_.scales.natural : 1.0 / score_unit;
        constexpr double ln2 = 0.693147180559945309417232121458176568;
        const double offset = schedule_.max_offset * ln2;
        each_row(team_, rows_, [&](std::ptrdiff_t i) {
            lse[i] = m_.maximum[i];
            m_.joined[i] = joined(m_.lanes + 4 * i);
        });
        stage_.pass(
            Site::lse, where, column(lse),
            [&](double m, std::ptrdiff_t i, std::ptrdiff_t) {
                const auto rounded = [&](double x) { return stage_.intermediate(Site::lse, x); };
                if (schedule_.lse_form == LseForm::log2_sum) {
                    const double factor = rounded(ln2);
                    const double of_sum = binary_logarithm(m_.joined[i], schedule_.functions);
                    return fma(rounded(of_sum - schedule_.max_offset), factor,
                               rounded(rounded(m * x_.scales.exponent) * factor));
                }
                const double log_part = rounded(logarithm(m_.joined[i], schedule_.functions) - offset);
                if (schedule_.lse_form == LseForm::natural) return fma(m, unit, log_part);
                return fma(rounded(m * x_.scales.exponent), rounded(ln2), log_part);
            },
            [&](double m, std::ptrdiff_t i, std::ptrdiff_t) {
                return m * unit + (binary64_functions::log(m_.joined[i]) - offset);
            });
        each_row(team_, rows_, [&](std::ptrdiff_t i) {
            if (m_.joined[i] == 0 || m_.joined[i] != m_.joined[i]) lse[i] = empty;
        });
    }

    FAULTLINE_HD void store() {
        if (schedule_.normalize == Normalize::after_pv)
            divide(Site::o_normalize, output_place(), output_lanes(0), output());
        store_output();
        if (schedule_.normalize == Normalize::each_tile)
            each_row(team_, rows_, [&](std::ptrdiff_t i) {
                m_.lse[i] = m_.running_lse[i] == -infinity() ? infinity() : m_.running_lse[i];
            });
        else
            lse_of_rows(row_place(), infinity(), m_.lse);
        each_row(team_, rows_, [&](std::ptrdiff_t i) { out_.lse[row0_ + i] = m_.lse[i]; });
    }

    FAULTLINE_HD void store_output() {
        const View<double> o = output();
        each(team_, o.rows, o.cols,
             [&](std::ptrdiff_t i, std::ptrdiff_t c) { out_.o_unrounded(row0_ + i, c) = o(i, c); });
        stage_.pass(Site::o_cast, output_place(), o);
        each(team_, o.rows, o.cols, [&](std::ptrdiff_t i, std::ptrdiff_t c) { out_.o(row0_ + i, c) = o(i, c); });
    }

    FAULTLINE_HD void store_split(int split) {
        Place where = output_place(), of_lse = row_place();
        where.part = where.k_tile = of_lse.part = of_lse.k_tile = split;
        const View<double> o = output();
        divide(Site::o_normalize, where, output_lanes(0), o);
        stage_.pass(Site::partial_o_cast, where, o);
        each(team_, o.rows, o.cols,
             [&](std::ptrdiff_t i, std::ptrdiff_t c) { m_.split_o(split * rows_ + i, c) = o(i, c); });
        lse_of_rows(of_lse, -infinity(), m_.split_lse + split * rows_);
    }

    /// The combine kernel: log sum_i exp(lse_i) as a tree over i xor half, …, 1, then sum_i exp(lse_i - lse) o_i.
    FAULTLINE_HD_CALLED void store_merged() {
        const SplitMerge merge{m_.split_lse, m_.weights, m_.split_o, schedule_.key_splits, rows_};
        Place merged = row_place();
        merged.part = merged.k_tile = schedule_.key_splits;  // after those of the splits
        const auto same = [](double x) { return x; };
        stage_.pass(
            Site::lse, merged, column(m_.lse),
            [&](double, std::ptrdiff_t i, std::ptrdiff_t) {
                return merge.lse_of(i, [&](double x) { return stage_.intermediate(Site::lse, x); });
            },
            [&](double, std::ptrdiff_t i, std::ptrdiff_t) { return merge.lse_of(i, same); });
        each_row(team_, rows_,
                 [&](std::ptrdiff_t i) { out_.lse[row0_ + i] = m_.lse[i] == -infinity() ? infinity() : m_.lse[i]; });
        stage_.pass(
            Site::merge, output_place(), output(),
            [&](double, std::ptrdiff_t i, std::ptrdiff_t c) {
                return merge.output(i, c, m_.lse[i], [&](double x) { return stage_.intermediate(Site::merge, x); });
            },
            [&](double, std::ptrdiff_t i, std::ptrdiff_t c) { return merge.output(i, c, m_.lse[i], same); });
        store_output();
    }

    Stage& stage_;
    const typename Stage::Team& team_;
    const Schedule& schedule_;
    const HeadProblem& x_;
    const ForwardMemory& m_;
    const ForwardOutputs& out_;
    TileRange tile_{};
    std::ptrdiff_t row0_ = 0, rows_ = 0;
    bool has_sink_ = false;  // of the split in hand
};

}  // namespace faultline::emulated
