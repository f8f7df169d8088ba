// SPDX-License-Identifier: Apache-2.0
#include <faultline/cpu/recorder.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>

namespace faultline {

TileRecorder::TileRecorder(const HeadGroup& group, const RoundingPlan& plan)
    : group_(group),
      heads_(static_cast<int>(group.q.size())),
      score_gradient_(score_gradient_site(plan.schedule, group.scale, group.softcap > 0)),
      sink_p_(group.q.size()) {
    // From here on the share that the plan's delta carries (backward.hpp, delta_share).
    if (group_.dropout.empty() || plan.schedule.normalize == Normalize::before_pv) group_.keep = 1;
    const auto rows = static_cast<std::size_t>(group.q.at(0).rows);
    rows_.assign(group.q.size(), RecordedRows{std::vector<double>(rows, 0.0), RowSums(rows),
                                              std::vector<double>(rows, -std::numeric_limits<double>::infinity()),
                                              std::vector<int>(rows, 0)});
}

bool TileRecorder::watches(Site) const { return true; }

TileRecorder::Cell& TileRecorder::cell(Site site, int head, int q_tile, int k_tile) {
    Grid& grid = grids_[index(site)];
    if (q_tile >= grid.q_tiles ||
        k_tile >= grid.k_tiles) {  // tiles arrive in the kernel's order, which may be descending
        Grid larger{std::max(grid.q_tiles, q_tile + 1), std::max(grid.k_tiles, k_tile + 1), {}};
        larger.cells.resize(static_cast<std::size_t>(heads_ * larger.q_tiles * larger.k_tiles));
        for (int h = 0; h < heads_; ++h)
            for (int q = 0; q < grid.q_tiles; ++q)
                for (int k = 0; k < grid.k_tiles; ++k)
                    larger.cells[static_cast<std::size_t>((h * larger.q_tiles + q) * larger.k_tiles + k)] =
                        grid.cells[static_cast<std::size_t>((h * grid.q_tiles + q) * grid.k_tiles + k)];
        grid = std::move(larger);
    }
    return grid.cells[static_cast<std::size_t>((head * grid.q_tiles + q_tile) * grid.k_tiles + k_tile)];
}

void TileRecorder::count_maxima() {
    if (scores_.values.empty()) return;
    const auto head = static_cast<std::size_t>(scores_at_.head - group_.first_head);
    RecordedRows& rows = rows_[head];
    for (std::ptrdiff_t i = 0; i < scores_.rows; ++i)
        for (std::ptrdiff_t j = 0; j < scores_.cols; ++j) {
            if (!is_visible(group_, head, scores_at_.query0 + i, scores_at_.key0 + j)) continue;
            const double s = scores_.view()(i, j);
            const auto row = static_cast<std::size_t>(scores_at_.query0 + i);
            if (s > rows.score_max[row]) {
                rows.score_max[row] = s;
                rows.score_max_keys[row] = 1;
            } else if (s == rows.score_max[row] && std::isfinite(s)) {
                ++rows.score_max_keys[row];
            }
        }
    scores_ = Matrix();
}

void TileRecorder::at(Site site, const TileAt& where, MatrixView<double> value, MatrixView<const double> exact) {
    if (site == Site::s_cast) count_maxima();  // a tile whose exponent was not shown
    if (site == Site::s_cast || site == Site::softcap || site == Site::s_scale) {
        scores_ = Matrix(MatrixView<const double>(value));
        scores_at_ = where;
    }
    if (site == Site::exp_argument) count_maxima();
    const int head = where.head - group_.first_head;
    Cell& c = cell(site, head, where.q_tile, where.k_tile);
    const bool scores = info(site).shape == SiteShape::score_tile;
    for (std::ptrdiff_t i = 0; i < value.rows; ++i)
        for (std::ptrdiff_t j = 0; j < value.cols; ++j) {
            const double v = value(i, j);
            const double x = exact(i, j);
            if (!std::isfinite(x)) continue;
            if (scores && !is_visible(group_, static_cast<std::size_t>(head), where.query0 + i, where.key0 + j))
                continue;
            if (!std::isfinite(v)) {
                c.nonfinite += 1;
                continue;
            }
            const double e = v - x;
            c.sum += e;
            c.sum_squared += e * e;
            c.value_squared += x * x;
            c.max_abs = std::max(c.max_abs, std::abs(e));
            c.count += 1;
        }
    RecordedRows& rows = rows_[static_cast<std::size_t>(head)];
    if (site == Site::sink_p)
        for (std::ptrdiff_t i = 0; i < value.rows; ++i) sink_p_[static_cast<std::size_t>(head)].push_back(value(i, 0));
    if (site == Site::delta)
        for (std::ptrdiff_t i = 0; i < value.rows; ++i) {
            const auto row = static_cast<std::size_t>(where.query0 + i);
            rows.delta[row] = value(i, 0) / group_.keep;
            const std::vector<double>& sink = sink_p_[static_cast<std::size_t>(head)];
            if (!sink.empty()) rows.ds.add_column(row, -sink[row] * value(i, 0));
        }
    if (site == score_gradient_.site) rows.ds.add(where, value, score_gradient_.unit);
}

TileStatistics TileRecorder::statistics(Site site) const {
    const Grid& grid = grids_[index(site)];
    TileStatistics s{.site = site,
                     .heads = heads_,
                     .q_tiles = grid.q_tiles,
                     .k_tiles = grid.k_tiles,
                     .signed_mean = {},
                     .rms = {},
                     .value_rms = {},
                     .max_abs = {},
                     .count = {},
                     .nonfinite = {}};
    for (const Cell& c : grid.cells) {
        const double n = std::max(c.count, 1.0);
        s.signed_mean.push_back(c.sum / n);
        s.rms.push_back(std::sqrt(c.sum_squared / n));
        s.value_rms.push_back(std::sqrt(c.value_squared / n));
        s.max_abs.push_back(c.max_abs);
        s.count.push_back(c.count);
        s.nonfinite.push_back(c.nonfinite);
    }
    return s;
}

double TileStatistics::total_rms() const {
    double squares = 0, n = 0;
    for (std::size_t i = 0; i < count.size(); ++i) {
        squares += rms[i] * rms[i] * count[i];
        n += count[i];
    }
    return n > 0 ? std::sqrt(squares / n) : 0;
}

double TileStatistics::signed_bias() const {
    double sum = 0, n = 0;
    for (std::size_t i = 0; i < count.size(); ++i) {
        sum += signed_mean[i] * count[i];
        n += count[i];
    }
    const double size = total_rms();
    return size > 0 ? sum / n / size : 0;
}

double TileStatistics::t_statistic() const {
    double mean = 0, spread = 0, tiles = 0;  // Welford 1962: a mean much larger than its scatter keeps that scatter
    for (std::size_t i = 0; i < count.size(); ++i) {
        if (count[i] == 0) continue;
        tiles += 1;
        const double away = signed_mean[i] - mean;
        mean += away / tiles;
        spread += away * (signed_mean[i] - mean);
    }
    if (tiles < least_tiles || spread == 0) return std::numeric_limits<double>::quiet_NaN();
    return mean / std::sqrt(spread / (tiles - 1) / tiles);
}

TileStatistics joined(const TileStatistics& first, const TileStatistics& next) {
    if (first.heads == 0) return next;
    if (next.q_tiles != first.q_tiles || next.k_tiles != first.k_tiles)
        throw std::invalid_argument("joined: tile grids of two head groups differ");
    TileStatistics all = first;
    all.heads += next.heads;
    const auto append = [](std::vector<double>& to, const std::vector<double>& from) {
        to.insert(to.end(), from.begin(), from.end());
    };
    append(all.signed_mean, next.signed_mean);
    append(all.rms, next.rms);
    append(all.value_rms, next.value_rms);
    append(all.max_abs, next.max_abs);
    append(all.count, next.count);
    append(all.nonfinite, next.nonfinite);
    return all;
}

}  // namespace faultline
