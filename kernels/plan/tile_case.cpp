// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include <faultline/plan/plan.hpp>

namespace faultline {
namespace {

bool fits(const TileCase& tile, int head_dim, bool causal, bool window) {
    return head_dim <= tile.head_dim && tile.causal.value_or(causal) == causal &&
           tile.window.value_or(window) == window;
}

}  // namespace

RoundingPlan for_head_dim(const RoundingPlan& plan, int head_dim, bool causal, bool window) {
    RoundingPlan settled = plan;
    settled.tiles.clear();
    const auto found = std::find_if(plan.tiles.begin(), plan.tiles.end(),
                                    [&](const TileCase& tile) { return fits(tile, head_dim, causal, window); });
    if (found == plan.tiles.end()) return settled;
    Schedule& schedule = settled.schedule;
    schedule.block_q = found->block_q.value_or(schedule.block_q);
    schedule.block_k = found->block_k.value_or(schedule.block_k);
    schedule.bwd_block_q = found->bwd_block_q.value_or(schedule.bwd_block_q);
    schedule.bwd_block_k = found->bwd_block_k.value_or(schedule.bwd_block_k);
    schedule.delta_threads = found->delta_threads.value_or(schedule.delta_threads);
    schedule.exp_poly_every = found->exp_poly_every.value_or(schedule.exp_poly_every);
    schedule.exp_poly_count = found->exp_poly_count.value_or(schedule.exp_poly_count);
    schedule.exp_poly_skip = found->exp_poly_skip.value_or(schedule.exp_poly_skip);
    return settled;
}

}  // namespace faultline
