// SPDX-License-Identifier: Apache-2.0
// How a call's tiles are dealt out to teams, and what memory it takes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include <faultline/cpu/attention.hpp>
#include <faultline/emulated/jobs.hpp>

namespace faultline::emulated {

/// How a back end wants its teams.
struct Limits {
    int wanted_teams = 1;                       ///< keep it busy
    std::ptrdiff_t least_rows = 1;              ///< of a tile, that a team may have
    std::ptrdiff_t fast_doubles = PTRDIFF_MAX;  ///< a team's tiles of at most so many stand in fast memory
};

/// Slabs that give the back end its teams, and each, if smaller ones can, its tiles in fast memory. `whole`: tiles are not cut
/// (what is shown is a tile). doubles(slabs): what a team of such takes.
template <class Doubles>
Slabs slabs_of(const TileAxis& axis, std::size_t heads, const Limits& limits, bool whole, Doubles&& doubles) {
    const auto of_rows = [&](std::ptrdiff_t rows) {
        return Slabs{axis.count(), static_cast<int>((axis.block() + rows - 1) / rows), rows};
    };
    const auto halved = [&](std::ptrdiff_t rows) { return std::max(limits.least_rows, (rows + 1) / 2); };
    Slabs slabs = of_rows(axis.block());
    if (whole) return slabs;
    while (slabs.rows > limits.least_rows && slabs.teams(static_cast<std::ptrdiff_t>(heads)) < limits.wanted_teams)
        slabs = of_rows(halved(slabs.rows));
    Slabs fast = slabs;
    while (fast.rows > limits.least_rows && doubles(fast) > limits.fast_doubles) fast = of_rows(halved(fast.rows));
    return doubles(fast) > limits.fast_doubles ? slabs : fast;
}

/// The slabs of a forward, and those of a part of a backward; doubles: what each team takes.
inline Slabs forward_slabs(const Schedule& schedule, std::ptrdiff_t n_q, std::ptrdiff_t n_k, std::ptrdiff_t d_v,
                           std::size_t heads, const Limits& limits, bool watched, std::ptrdiff_t& doubles) {
    const auto needed = [&](const Slabs& slabs) {
        Arena arena(nullptr);
        (void)ForwardMemory(arena, schedule, slabs.rows, n_k, d_v, watched);
        return arena.used();
    };
    const Slabs slabs = slabs_of(TileAxis(n_q, schedule.block_q), heads, limits, watched, needed);
    doubles = needed(slabs);
    return slabs;
}
struct BackwardShape {
    std::ptrdiff_t n_q, n_k, d, d_v;
    bool has_cap;
};
inline Slabs backward_slabs(const Schedule& schedule, BackwardPart part, const BackwardShape& x, std::size_t heads,
                            const Limits& limits, bool watched, std::ptrdiff_t& doubles) {
    const auto needed = [&](const Slabs& slabs) {
        Arena arena(nullptr);
        (void)BackwardMemory(arena, schedule, BackwardJob::tile_rows(schedule, part, slabs, x.n_q),
                             BackwardJob::tile_keys(schedule, part, slabs, x.n_k), x.d, x.d_v, x.has_cap, watched);
        return arena.used();
    };
    const TileAxis axis =
        part == BackwardPart::key ? TileAxis(x.n_k, schedule.bwd_block_k) : TileAxis(x.n_q, schedule.bwd_block_q);
    const Slabs slabs = slabs_of(axis, heads, limits, watched, needed);
    doubles = needed(slabs);
    return slabs;
}

/// Doubles that a call takes on the side that computes.
struct Need {
    std::size_t whole = 0;     ///< operands, outputs and rows of all groups
    std::size_t per_team = 0;  ///< tiles of a team
    std::ptrdiff_t teams = 0;  ///< in the largest of the call's jobs
};

inline std::size_t elements(std::ptrdiff_t rows, std::ptrdiff_t cols) { return static_cast<std::size_t>(rows * cols); }

inline Need forward_need(std::span<const HeadGroup> groups, const RoundingPlan& plan, const Limits& limits) {
    const HeadGroup& g = groups.front();
    const std::ptrdiff_t n_q = g.q.front().rows, n_k = g.k.rows, d = g.k.cols, d_v = g.v.cols;
    const std::size_t heads = groups.size() * g.q.size(), scores = elements(n_q, n_k);
    const bool saved = plan.schedule.p_saved;
    std::ptrdiff_t doubles = 0;
    const Slabs slabs = forward_slabs(plan.schedule, n_q, n_k, d_v, heads, limits, false, doubles);
    return {groups.size() * elements(n_k, d + d_v) +
                heads * (elements(n_q, d + 2 * d_v + 2) +
                         scores * ((g.bias.empty() ? 0u : 1u) + (g.dropout.empty() ? 0u : 1u) + (saved ? 1u : 0u) +
                                   (saved && g.softcap > 0 ? 1u : 0u))),
            static_cast<std::size_t>(doubles), slabs.teams(static_cast<std::ptrdiff_t>(heads))};
}

inline Need backward_need(std::span<const HeadGroup> groups, const RoundingPlan& plan, const Limits& limits) {
    const HeadGroup& g = groups.front();
    const BackwardShape shape{g.q.front().rows, g.k.rows, g.k.cols, g.v.cols, g.softcap > 0};
    const std::size_t heads = groups.size() * g.q.size();
    Need need = forward_need(groups, plan, limits);
    need.whole +=
        groups.size() * elements(shape.n_k, shape.d) +
        heads * (elements(shape.n_q, 2 * shape.d + shape.d_v + 12) + elements(shape.n_k, 2 * shape.d + shape.d_v));
    for (const BackwardPart part : {BackwardPart::query, BackwardPart::key}) {
        std::ptrdiff_t doubles = 0;
        const Slabs slabs = backward_slabs(plan.schedule, part, shape, heads, limits, false, doubles);
        need.per_team = std::max(need.per_team, static_cast<std::size_t>(doubles));
        need.teams = std::max(need.teams, slabs.teams(static_cast<std::ptrdiff_t>(heads)));
    }
    return need;
}

}  // namespace faultline::emulated
