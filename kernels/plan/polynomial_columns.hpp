// SPDX-License-Identifier: Apache-2.0
// Which columns of a forward tile take exp2 by a polynomial: one rule for every back end.
#pragma once

#include <cstddef>

#include <faultline/plan/schedule.hpp>

namespace faultline {

/// Whether column `column` of a tile of `columns` keys does (Schedule::exp_poly_every). A last tile that is short is padded to
/// block_k. Source: FlashAttention-4, flash_attn/cute/softmax.py, apply_exp2_convert.
FAULTLINE_HD constexpr bool takes_polynomial(const Schedule& schedule, std::ptrdiff_t column, std::ptrdiff_t columns) {
    constexpr std::ptrdiff_t fragment = 32;
    if (schedule.exp_poly_every == 0) return false;
    const std::ptrdiff_t padded = schedule.block_k > 0 ? schedule.block_k : columns;
    const std::ptrdiff_t fragments = (padded + fragment - 1) / fragment;
    const std::ptrdiff_t f = column / fragment, pair = column % fragment / 2 * 2;
    return f >= schedule.exp_poly_skip && f < fragments - 1 &&
           pair % schedule.exp_poly_every >= schedule.exp_poly_every - schedule.exp_poly_count;
}

}  // namespace faultline
