// SPDX-License-Identifier: Apache-2.0
// What the rows of one query tile carry from key tile to key tile: row maximum, row sum and unnormalised output, and every site
// at which they change (FlashAttention-2, arXiv 2307.08691, algorithm 1).
#pragma once

#include <faultline/cpu/row_state.hpp>
#include <faultline/special/binary64.hpp>

namespace faultline::cpu {

template <class I>
class StreamingRows {
  public:
    /// Of a head: its mask and the columns of v.
    StreamingRows(Stage<I>& stage, const Schedule& schedule, const Scales& scales, const Mask& mask, int head,
                  std::ptrdiff_t d_v)
        : stage_(stage), schedule_(schedule), scales_(scales), mask_(mask), head_(head), d_v_(d_v) {}

    /// So many rows that have seen nothing; `sink_here`: the sink, if there is one, is theirs.
    void begin(std::ptrdiff_t rows, bool sink_here) {
        has_sink_ = sink_here && mask_.sink != nullptr;
        maximum_.assign(static_cast<std::size_t>(rows), has_sink_ && schedule_.sink_in_max ? sink_score() : -infinity);
        running_lse_.assign(static_cast<std::size_t>(rows), -infinity);
        sums_ = RowSums(rows, schedule_.row_sum_order);
        rounded_sums_ = RowSums(rows, schedule_.row_sum_order);
        o_ = Matrix(rows, d_v_);
    }

    [[nodiscard]] bool has_sink() const { return has_sink_; }
    /// In the unit of the scores.
    [[nodiscard]] const std::vector<double>& maximum() const { return maximum_; }
    /// [rows, d_v]; unnormalised until divide_output().
    [[nodiscard]] Matrix& output() { return o_; }
    /// FlashAttention-1's: of the key tiles so far.
    [[nodiscard]] const std::vector<double>& running_lse() const { return running_lse_; }

    /// m <- max(m, the scores of a key tile).
    void update_maximum(const TileAt& where, MatrixView<const double> s) {
        for (std::ptrdiff_t i = 0; i < s.rows; ++i) {
            double& m = maximum_[static_cast<std::size_t>(i)];
            m = next_maximum(s.row(i), s.cols, m, schedule_, scales_.logit_per_score(schedule_), scales_.exponent);
        }
        stage_.pass(Site::row_max, where, column(maximum_));
    }

    /// alpha = exp(scale (m_old - m_new)): subtract, scale, exp in most kernels, also in those that fuse the scores' own
    /// argument.
    [[nodiscard]] std::vector<double> rescale_factors(const TileAt& where, const std::vector<double>& old_maximum,
                                                      bool first) {
        std::vector<double> alpha(old_maximum.size(), 0.0);
        if (first) return alpha;
        for (std::size_t i = 0; i < alpha.size(); ++i)
            alpha[i] = old_maximum[i] - (maximum_[i] == -infinity ? 0.0 : maximum_[i]);
        const double c = scales_.exponent;
        const bool in_fp32 = stage_.rule(Site::rescale_argument).format == fp32;
        stage_.pass(
            Site::rescale_argument, where, column(alpha),
            [&](MatrixView<double> t) {
                for_each(t, [&](double, auto i, auto) {
                    const auto at = static_cast<std::size_t>(i);
                    return rescale_argument(
                        schedule_.rescale_argument, old_maximum[at], maximum_[at], c, in_fp32,
                        [&](double x) { return stage_.round_intermediate(Site::rescale_argument, x); });
                });
            },
            [&](MatrixView<double> t) { for_each(t, [&](double x, auto, auto) { return x * c; }); });
        stage_.pass(
            Site::rescale_factor, where, column(alpha),
            [&](MatrixView<double> t) { exponential(t, schedule_.exp_base, schedule_.functions); },
            [&](MatrixView<double> t) { exponential(t, schedule_.exp_base); });
        return alpha;
    }

    /// l <- alpha l + the sum of the tile's p.
    void update_sums(const TileAt& where, MatrixView<const double> p, const std::vector<double>& alpha) {
        add_tile(sums_, where, p, alpha, schedule_.row_sum_adds == RowSumAdds::rounded,
                 schedule_.row_sum_adds != RowSumAdds::two_sums);
        if (schedule_.row_sum_adds == RowSumAdds::two_sums) add_tile(rounded_sums_, where, p, alpha, true, true);
    }

    /// p <- p / l.
    void normalize_probabilities(const TileAt& where, MatrixView<double> p) {
        const std::vector<double> sum = joined_sums(output_sums());
        divide(Site::p_normalize, where, sum, p);
    }

    /// FlashAttention-1: after every key tile o <- o / l, and the row's state becomes its lse: a row maximum of lse/scale
    /// with row sum 1 (fmha_fprop_kernel_1xN.h:433, 585-632).
    void normalize_state(const TileAt& where) {
        divide(Site::o_normalize, where, joined_sums(sums_), o_.view());
        running_lse_ = lse(where, -infinity);
        for (std::size_t i = 0; i < maximum_.size(); ++i) {
            maximum_[i] = running_lse_[i] / scales_.natural;
            double* lanes = sums_.row(static_cast<std::ptrdiff_t>(i));
            std::fill(lanes, lanes + sums_.lanes(), 0.0);
            lanes[0] = running_lse_[i] == -infinity ? 0.0 : 1.0;
        }
        TileAt after = where;  // the tile's second maximum
        after.part = 1;
        stage_.pass(Site::row_max, after, column(maximum_));
    }

    /// o <- o / row sum.
    void divide_output(const TileAt& where) { divide(Site::o_normalize, where, joined_sums(output_sums()), o_.view()); }

    /// o <- alpha o + p v, v [keys of the tile, d_v].
    void add_output(const TileAt& where, MatrixView<const double> p, const std::vector<double>& alpha,
                    MatrixView<const double> v, bool first) {
        const TileAt place{0, head_, where.query0, where.key0, where.q_tile, where.k_tile};
        const MatrixView<double> o = o_.view();
        if (!first) {
            for_each(o, [&](double x, auto i, auto) { return x * alpha[static_cast<std::size_t>(i)]; });
            stage_.pass(Site::o_rescale, place, o);
        }
        if (schedule_.pv_carry == Carry::chained || first) {
            stage_.accumulate(Site::pv_accumulate, place, p, v, o);
            return;
        }
        const MatrixView<double> part = part_.shaped(o.rows, o.cols);
        for_each(part, [](double, auto, auto) { return 0.0; });
        const Rule& rule = stage_.rule(Site::pv_accumulate);
        multiply_accumulate(rule.accumulation, p, v, part);
        stage_.pass(
            Site::pv_accumulate, place, o,
            [&](MatrixView<double> t) {
                stage_.round_intermediate(Site::pv_accumulate, part);
                for_each(t, [&](double x, auto i, auto j) { return x + part(i, j); });
            },
            [&](MatrixView<double> t) { multiply_accumulate(exact_sum, p, v, t); });
    }

    /// Row sums <- row sums + exp(sink - m). After the keys, with the maximum as it is then, in both kernels that are known
    /// to have a sink: flash_attn/cute/softmax.py, finalize; gpt-oss, triton/attention.py.
    /// `sink_p` [n_q of the head]: where p is kept, the sink's stands there.
    void add_sink(const TileAt& where, std::vector<double>& sink_p) {
        for (double& m : maximum_)
            if (m == -infinity) m = sink_score();  // no key was seen
        const bool in_exponent = schedule_.scale_at == ScaleAt::exponent;
        const double unit = schedule_.exp_base == ExpBase::two ? scales_.log2e : 1.0;
        std::vector<double> term(maximum_);
        const auto argument = [&](double m, auto&& rounded) {
            const double sink = rounded(*mask_.sink * unit);
            const double top = in_exponent ? rounded(m * scales_.exponent) : m;
            return rounded(rounded(sink - top) + schedule_.max_offset);
        };
        stage_.pass(
            Site::sink_exp, where, column(term),
            [&](MatrixView<double> t) {
                for_each(t, [&](double m, auto, auto) {
                    return argument(m, [&](double x) { return stage_.round_intermediate(Site::sink_exp, x); });
                });
                exponential(t, schedule_.exp_base, schedule_.functions);
            },
            [&](MatrixView<double> t) {
                for_each(t, [&](double m, auto, auto) { return argument(m, [](double x) { return x; }); });
                exponential(t, schedule_.exp_base);
            });
        add_sink_to(sums_, where, term, schedule_.row_sum_adds != RowSumAdds::two_sums);
        if (schedule_.row_sum_adds == RowSumAdds::two_sums) add_sink_to(rounded_sums_, where, term, true);
        if (!schedule_.p_saved) return;
        const std::vector<double> sum = joined_sums(output_sums());
        for (std::size_t i = 0; i < term.size(); ++i)
            sink_p[static_cast<std::size_t>(where.query0) + i] =
                stage_.round_intermediate(Site::p_normalize, term[i] / sum[i]);
    }

    /// `empty`: what a row without a visible key stores.
    [[nodiscard]] std::vector<double> lse(const TileAt& where, double empty) {
        const std::vector<double> sum = joined_sums(sums_);
        std::vector<double> out(maximum_);
        // The maximum is in units of the raw score where the scale stands in the exponent, and in log2 units where the
        // scores are.
        const double unit =
            schedule_.scale_at == ScaleAt::exponent ? scales_.natural : 1.0 / scales_.score_unit(schedule_.exp_base);
        const double offset = schedule_.max_offset * std::numbers::ln2;
        const auto kernel_log = [&](std::ptrdiff_t i) {
            return logarithm(sum[static_cast<std::size_t>(i)], schedule_.functions);
        };
        const auto log_sum = [&](std::ptrdiff_t i) {
            return binary64_functions::log(sum[static_cast<std::size_t>(i)]);
        };
        stage_.pass(
            Site::lse, where, column(out),
            [&](MatrixView<double> t) {
                for_each(t, [&](double m, auto i, auto) {
                    const auto rounded = [&](double x) { return stage_.round_intermediate(Site::lse, x); };
                    if (schedule_.lse_form == LseForm::log2_sum) {
                        const double ln2 = rounded(std::numbers::ln2);
                        const double of_sum = binary_logarithm(sum[static_cast<std::size_t>(i)], schedule_.functions);
                        return std::fma(rounded(of_sum - schedule_.max_offset), ln2,
                                        rounded(rounded(m * scales_.exponent) * ln2));
                    }
                    const double log_part = rounded(kernel_log(i) - offset);
                    if (schedule_.lse_form == LseForm::natural)
                        return std::fma(m, unit, log_part);  // max * scale + logf(sum) is contracted to one fma
                    return std::fma(rounded(m * scales_.exponent), rounded(std::numbers::ln2), log_part);
                });
            },
            [&](MatrixView<double> t) {
                for_each(t, [&](double m, auto i, auto) { return m * unit + (log_sum(i) - offset); });
            });
        for (std::size_t i = 0; i < out.size(); ++i)
            if (sum[i] == 0 || std::isnan(sum[i])) out[i] = empty;
        return out;
    }

  private:
    /// The sink's logit in the unit of the row maximum.
    [[nodiscard]] double sink_score() const {
        return schedule_.scale_at == ScaleAt::exponent ? *mask_.sink / scales_.natural
                                                       : *mask_.sink * scales_.score_unit(schedule_.exp_base);
    }

    void add_sink_to(RowSums& sums, const TileAt& where, const std::vector<double>& term, bool shown) {
        std::vector<double> total = joined_sums(sums);
        for (std::size_t i = 0; i < total.size(); ++i) total[i] += term[i];
        if (shown)
            stage_.pass(Site::sink_sum, where, column(total));
        else
            for (double& x : total) x = stage_.round_intermediate(Site::sink_sum, x);
        for (std::size_t i = 0; i < total.size(); ++i) {
            double* lanes = sums.row(static_cast<std::ptrdiff_t>(i));
            std::fill(lanes, lanes + sums.lanes(), 0.0);
            lanes[0] = total[i];
        }
    }

    /// The sum that divides the output; lse is made of sums_.
    [[nodiscard]] RowSums& output_sums() {
        return schedule_.row_sum_adds == RowSumAdds::two_sums ? rounded_sums_ : sums_;
    }

    void add_tile(RowSums& sums, const TileAt& where, MatrixView<const double> p, const std::vector<double>& alpha,
                  bool rounded_p, bool shown) {
        const Rule& rule = stage_.rule(Site::row_sum);
        const bool exact = rule.accumulation == exact_sum;
        // Additions happen in fp32; the running sum may be held in something narrower between tiles.
        const auto add = [&](double x) { return exact ? x : static_cast<double>(static_cast<float>(x)); };
        std::vector<double> after(static_cast<std::size_t>(p.rows));
        std::vector<double> wanted(static_cast<std::size_t>(p.rows));
        std::vector<double> row(static_cast<std::size_t>(p.cols));
        MatrixView<const double> added = p;
        if (rounded_p) {  // as a whole tile at its place: a stochastic cast draws the bits that p_cast will draw
            const MatrixView<double> cast = cast_p_.shaped(p.rows, p.cols);
            copy(p, cast);
            stage_.round(Site::p_cast, where, cast);
            added = cast;
        }
        for (std::ptrdiff_t i = 0; i < p.rows; ++i) {
            const auto at = static_cast<std::size_t>(i);
            std::copy(added.row(i), added.row(i) + p.cols, row.begin());
            double* lanes = sums.row(i);
            if (stage_.watches(Site::row_sum) && shown) {
                wanted[at] = sums.joined(i, [](double x) { return x; }) * alpha[at];
                for (const double x : row) wanted[at] += x;
            }
            add_row(row.data(), p.cols, schedule_.row_sum_order, alpha[at], lanes, add);
            for (int t = 0; t < sums.lanes(); ++t) lanes[t] = stage_.round_intermediate(Site::row_sum, lanes[t]);
            after[at] = sums.joined(i, add);
        }
        if (!stage_.watches(Site::row_sum) || !shown) return;
        const std::vector<double> before = after;
        if (rule.is_exact()) wanted = after;  // the two differ by the order of binary64 additions
        stage_.show(Site::row_sum, where, column(after), column(wanted));
        for (std::ptrdiff_t i = 0; i < p.rows; ++i) {
            const auto at = static_cast<std::size_t>(i);
            carry_change(before[at], after[at], sums.row(i), sums.lanes());
        }
    }

    std::vector<double> joined_sums(RowSums& sums) {
        const bool exact = stage_.rule(Site::row_sum).accumulation == exact_sum;
        std::vector<double> joined(maximum_.size());
        for (std::size_t i = 0; i < joined.size(); ++i)
            joined[i] = sums.joined(static_cast<std::ptrdiff_t>(i),
                                    [&](double x) { return exact ? x : static_cast<double>(static_cast<float>(x)); });
        return joined;
    }

    /// x <- x / sum, as the kernel divides; rows without a visible key stay 0. The output is divided by the kept share too,
    /// which softmax.h:183 multiplies into 1/sum.
    void divide(Site site, const TileAt& where, const std::vector<double>& sum, MatrixView<double> x) {
        const auto safe = [&](std::ptrdiff_t i) {
            const double l = sum[static_cast<std::size_t>(i)];
            return l == 0 || std::isnan(l) ? 1.0 : l;  // softmax.h: inv_sum = 1 where the sum is 0 or NaN
        };
        const double share = site == Site::o_normalize ? scales_.inverse_keep : 1.0;
        stage_.pass(
            site, where, x,
            [&](MatrixView<double> t) {
                const bool divides = schedule_.division == Division::divide;
                for (std::ptrdiff_t i = 0; i < t.rows; ++i) {
                    double inverse = stage_.round_intermediate(site, 1.0 / safe(i));
                    if (share != 1.0) inverse = stage_.round_intermediate(site, inverse * share);
                    for (std::ptrdiff_t j = 0; j < t.cols; ++j)
                        t(i, j) = divides ? t(i, j) / safe(i) : t(i, j) * inverse;
                }
                if (!divides || share == 1.0) return;
                stage_.round_intermediate(site, t);
                for_each(t, [&](double o, auto, auto) { return o * share; });
            },
            [&](MatrixView<double> t) { for_each(t, [&](double o, auto i, auto) { return o / safe(i) * share; }); });
    }

    static MatrixView<double> column(std::vector<double>& x) {
        return {x.data(), static_cast<std::ptrdiff_t>(x.size()), 1};
    }

    Stage<I>& stage_;
    const Schedule& schedule_;
    const Scales& scales_;
    const Mask& mask_;
    int head_;
    std::ptrdiff_t d_v_;
    bool has_sink_ = false;
    std::vector<double> maximum_;
    std::vector<double> running_lse_;
    RowSums sums_{0, RowSumOrder::sequential};
    RowSums rounded_sums_{0, RowSumOrder::sequential};
    Matrix o_;
    Scratch part_, cast_p_;
};

}  // namespace faultline::cpu
