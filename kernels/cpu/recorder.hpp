// SPDX-License-Identifier: Apache-2.0
// The recorder: an instrument that sums up each site's local error (value - exact result of the site's operation on the
// operands it really got) per head and tile, and keeps rows that attribution needs. It changes nothing.
#pragma once

#include <array>
#include <cstddef>
#include <vector>

#include <faultline/cpu/attention.hpp>
#include <faultline/cpu/instrument.hpp>
#include <faultline/cpu/row_sums.hpp>
#include <faultline/plan/site.hpp>
#include <faultline/tensor/matrix.hpp>

namespace faultline {

/// Local error of one site: [head, q_tile, k_tile], row-major. Tiles that the causal mask leaves out have count 0. Of score
/// tiles only the elements that reach the softmax count, from q k^T on: what the mask hides is computed by kernels that
/// hide it afterwards, and no rounding of it can do anything.
struct TileStatistics {
    Site site = Site::q_cast;
    int heads = 0, q_tiles = 0, k_tiles = 0;
    std::vector<double> signed_mean;  ///< mean of the error, in the site's unit
    std::vector<double> rms;          ///< of the error
    std::vector<double> value_rms;    ///< of the exact value, for scale
    std::vector<double> max_abs;      ///< largest |error|
    std::vector<double> count;        ///< elements summed up: those whose exact value and error are finite
    std::vector<double> nonfinite;    ///< elements whose exact value is finite and whose value is not

    /// Over all tiles: mean error / rms error (0 where nothing erred), and its t-statistic with tiles as samples, NaN where
    /// there are fewer than least_tiles or all have the same mean.
    static constexpr int least_tiles = 8;  ///< with fewer samples, t of no bias is often far from 0
    [[nodiscard]] double signed_bias() const;
    [[nodiscard]] double total_rms() const;
    [[nodiscard]] double t_statistic() const;
};

/// Per query head: what each row of the plan's run had.
struct RecordedRows {
    std::vector<double> delta;  ///< [n_q], after its site
    /// [n_q] of the score gradient at its site (row_sums.hpp), nat/logit; with a sink its share, -p_sink delta, is added.
    RowSums ds;
    std::vector<double> score_max;    ///< [n_q], largest score of the whole row as the softmax receives it, in the
                                      ///< plan's unit; -inf where the row sees no key
    std::vector<int> score_max_keys;  ///< [n_q], keys whose score is that number exactly
};

/// Watches every site of one kv head's group; recorders of several groups are joined in order.
class TileRecorder final : public Instrument {
  public:
    /// Of runs of this group under this plan; keeps what it needs of both, but the group's bias must outlive it.
    TileRecorder(const HeadGroup& group, const RoundingPlan& plan);
    [[nodiscard]] bool watches(Site site) const override;
    void at(Site site, const TileAt& where, MatrixView<double> value, MatrixView<const double> exact) override;

    [[nodiscard]] const std::vector<RecordedRows>& rows() const { return rows_; }
    /// The statistics of a site over this recorder's heads; sites of a whole kv head (casts of k, dk, …) stand under its
    /// first query head, and the other heads' count is 0.
    [[nodiscard]] TileStatistics statistics(Site site) const;

  private:
    struct Cell {
        double sum = 0, sum_squared = 0, value_squared = 0, max_abs = 0, count = 0, nonfinite = 0;
    };
    struct Grid {
        int q_tiles = 0, k_tiles = 0;
        std::vector<Cell> cells;  // [head, q_tile, k_tile]
    };
    Cell& cell(Site site, int head, int q_tile, int k_tile);
    void count_maxima();

    HeadGroup group_;  // for its shapes, mask and first head
    int heads_;
    ScoreGradientSite score_gradient_;
    std::vector<std::vector<double>> sink_p_;  // per head, where there is a sink
    std::array<Grid, site_count> grids_;
    std::vector<RecordedRows> rows_;
    Matrix scores_;  // the tile of scores seen last, until it is known that no site changes it any more
    TileAt scores_at_;
};

/// Heads of `next` appended after those of `first`; grids must agree.
[[nodiscard]] TileStatistics joined(const TileStatistics& first, const TileStatistics& next);

}  // namespace faultline
