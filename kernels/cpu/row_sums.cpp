// SPDX-License-Identifier: Apache-2.0
#include <faultline/cpu/row_sums.hpp>

#include <cmath>

namespace faultline {

ScoreGradientSite score_gradient_site(const Schedule& schedule, double scale, bool softcap) {
    const bool scaled_after_cast = schedule.ds_scale == DsScale::after_cast && !softcap;
    const bool holds_scale = schedule.ds_scale == DsScale::before || scaled_after_cast;
    return {softcap ? Site::ds : scaled_after_cast ? Site::ds_scaled : Site::ds_cast, holds_scale ? scale : 1.0};
}

void RowSums::add(const TileAt& where, MatrixView<const double> tile, double unit) {
    for (std::ptrdiff_t i = 0; i < tile.rows; ++i)
        for (std::ptrdiff_t j = 0; j < tile.cols; ++j)
            add_column(static_cast<std::size_t>(where.query0 + i), tile(i, j) / unit);
}

void RowSums::add_column(std::size_t row, double ds) {
    sum[row] += ds;
    magnitude[row] += std::abs(ds);
}

}  // namespace faultline
