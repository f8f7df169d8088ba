// SPDX-License-Identifier: Apache-2.0
// The forward of one query head, tile by tile, in the order in which the data flows: which tiles and splits there are, and where
// what comes of them goes. streaming_rows.hpp has what happens to the rows on the way.
#pragma once

#include <faultline/cpu/split_merge.hpp>
#include <faultline/cpu/streaming_rows.hpp>

namespace faultline::cpu {

template <class I>
class ForwardHead {
  public:
    /// q [n_q, d], k_t [d, n_k], v [n_k, d_v]: after their casts.
    ForwardHead(Stage<I>& stage, const RoundingPlan& plan, const Scales& scales, const Mask& mask, int head,
                MatrixView<const double> q, MatrixView<const double> k_t, MatrixView<const double> v)
        : stage_(stage),
          plan_(plan),
          schedule_(plan.schedule),
          scales_(scales),
          mask_(mask),
          head_(head),
          q_(q),
          k_t_(k_t),
          v_(v),
          rows_(stage, plan.schedule, scales, mask, head, v.cols) {}

    HeadForward run() {
        out_.o = Matrix(mask_.n_q, v_.cols);
        out_.o_unrounded = Matrix(mask_.n_q, v_.cols);
        out_.lse.assign(static_cast<std::size_t>(mask_.n_q), infinity);
        if (schedule_.p_saved) out_.p = Matrix(mask_.n_q, mask_.n_k);
        if (schedule_.p_saved && scales_.cap > 0) out_.capped = Matrix(mask_.n_q, mask_.n_k);
        if (schedule_.p_saved && mask_.sink != nullptr) out_.sink_p.assign(static_cast<std::size_t>(mask_.n_q), 0.0);
        const TileAxis rows(mask_.n_q, schedule_.block_q);
        for (int t = 0; t < rows.count(); ++t) query_tile(rows[t]);
        return std::move(out_);
    }

  private:
    void query_tile(const TileRange& rows) {
        const std::ptrdiff_t last_visible =
            visible_keys(rows.first + rows.count - 1, mask_.n_q, mask_.n_k, mask_.causal);
        const TileAxis keys(mask_.n_k, schedule_.block_k);
        const int visited = static_cast<int>((last_visible + keys.block() - 1) / keys.block());
        if (schedule_.key_splits == 1) {
            stream(rows, keys, 0, visited, true);
            store(rows);
            return;
        }
        const int per_split = (keys.count() + schedule_.key_splits - 1) / schedule_.key_splits;
        SplitMerge merge(schedule_.key_splits, rows.count, v_.cols);
        for (int split = 0; split < schedule_.key_splits; ++split) {
            stream(rows, keys, std::min(split * per_split, visited), std::min((split + 1) * per_split, visited),
                   split == 0);
            store_split(rows, split, merge);
        }
        store_merged(rows, merge);
    }

    /// The streaming softmax of these rows over key tiles [begin, end), and the sink where it is this split's.
    void stream(const TileRange& rows, const TileAxis& keys, int begin, int end, bool sink_here) {
        rows_.begin(rows.count, sink_here);
        for (int step = 0; step < end - begin; ++step)
            key_tile(rows, keys[schedule_.key_order == Order::ascending ? begin + step : end - 1 - step], step == 0);
        if (rows_.has_sink() && (schedule_.normalize != Normalize::before_pv || begin == end))
            rows_.add_sink(TileAt{0, head_, rows.first, 0, rows.index, 0}, out_.sink_p);
    }

    void key_tile(const TileRange& rows, const TileRange& keys, bool first) {
        const TileAt where = score_place(mask_, head_, rows, keys);
        const MatrixView<double> p = s_.shaped(rows.count, keys.count);
        scores(stage_, forward_sites, where, q_.middle_rows(rows.first, rows.count), columns(k_t_, keys), scales_,
               plan_, mask_, p,
               out_.capped.values.empty() ? MatrixView<double>{}
                                          : columns(out_.capped.view(rows.first, rows.count), keys));
        const std::vector<double> old_maximum = rows_.maximum();
        rows_.update_maximum(where, p);
        const std::vector<double> alpha = rows_.rescale_factors(where, old_maximum, first);
        probabilities(stage_, forward_sites, where, schedule_.argument, schedule_.exp_base, scales_, plan_,
                      rows_.maximum().data(), false, p);
        rows_.update_sums(where, p, alpha);
        if (schedule_.normalize == Normalize::before_pv) {
            if (rows_.has_sink()) rows_.add_sink(where, out_.sink_p);
            rows_.normalize_probabilities(where, p);
        }
        if (schedule_.p_saved) copy(p, columns(out_.p.view(rows.first, rows.count), keys));
        stage_.pass(Site::p_cast, where, p);
        if (schedule_.normalize == Normalize::before_pv)
            drop_and_scale(stage_, Site::p_dropout, where, mask_, scales_, p);
        else
            drop(mask_, where, p);  // 1/keep: when the output is divided by the row sum
        rows_.add_output(where, p, alpha, v_.middle_rows(keys.first, keys.count), first);
        if (schedule_.normalize == Normalize::each_tile) rows_.normalize_state(where);
    }

    template <class T>
    static MatrixView<T> columns(MatrixView<T> m, const TileRange& keys) {
        return {m.data + keys.first, m.rows, keys.count, m.stride};
    }

    void store(const TileRange& rows) {
        const TileAt where{0, head_, rows.first, 0, rows.index, 0};
        if (schedule_.normalize == Normalize::after_pv) rows_.divide_output(where);
        store_output(where, rows);
        store_lse(where, rows);
    }

    void store_output(const TileAt& where, const TileRange& rows) {
        const MatrixView<double> o = rows_.output().view();
        copy(o, out_.o_unrounded.view(rows.first, rows.count));
        stage_.pass(Site::o_cast, where, o);
        copy(o, out_.o.view(rows.first, rows.count));
    }

    void store_lse(const TileAt& where, const TileRange& rows) {
        std::vector<double> lse;
        if (schedule_.normalize == Normalize::each_tile) {
            lse = rows_.running_lse();
            std::replace(lse.begin(), lse.end(), -infinity, infinity);
        } else {
            lse = rows_.lse(where, infinity);
        }
        std::copy(lse.begin(), lse.end(), out_.lse.begin() + rows.first);
    }

    void store_split(const TileRange& rows, int split, SplitMerge& merge) {
        const TileAt where{0, head_, rows.first, 0, rows.index, split, split};
        rows_.divide_output(where);
        stage_.pass(Site::partial_o_cast, where, rows_.output().view());
        merge.o[static_cast<std::size_t>(split)] = rows_.output();
        merge.lse[static_cast<std::size_t>(split)] = rows_.lse(where, -infinity);
    }

    void store_merged(const TileRange& rows, SplitMerge& merge) {
        const TileAt where{0, head_, rows.first, 0, rows.index, 0};
        const auto same = [](double x) { return x; };
        const auto rounded = [&](Site site) {
            return [this, site](double x) { return stage_.round_intermediate(site, x); };
        };
        const int all = schedule_.key_splits;  // after those of the splits
        std::vector<double> lse(static_cast<std::size_t>(rows.count));
        stage_.pass(
            Site::lse, TileAt{0, head_, rows.first, 0, rows.index, all, all},
            MatrixView<double>(lse.data(), rows.count, 1),
            [&](MatrixView<double> t) { merge.merged_lse(rounded(Site::lse), t); },
            [&](MatrixView<double> t) { merge.merged_lse(same, t); });
        rows_.output() = Matrix(rows.count, v_.cols);
        stage_.pass(
            Site::merge, where, rows_.output().view(),
            [&](MatrixView<double> t) { merge.merged_output(lse, rounded(Site::merge), t); },
            [&](MatrixView<double> t) { merge.merged_output(lse, same, t); });
        for (std::size_t i = 0; i < lse.size(); ++i)
            out_.lse[static_cast<std::size_t>(rows.first) + i] = lse[i] == -infinity ? infinity : lse[i];
        store_output(where, rows);
    }

    Stage<I>& stage_;
    const RoundingPlan& plan_;
    const Schedule& schedule_;
    const Scales& scales_;
    const Mask& mask_;
    int head_;
    MatrixView<const double> q_, k_t_, v_;
    HeadForward out_;
    StreamingRows<I> rows_;  // of the query tile and split in hand
    Scratch s_;
};

}  // namespace faultline::cpu
