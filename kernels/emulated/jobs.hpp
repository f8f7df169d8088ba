// SPDX-License-Identifier: Apache-2.0
// What the teams of one launch do: which head, which tile, which part of it.
#pragma once

#include <faultline/emulated/backward.hpp>
#include <faultline/emulated/forward.hpp>

namespace faultline::emulated {

/// How a tiled dimension is dealt out: every tile in slabs of so many rows (or keys), one team each. Small problems have few
/// tiles, and elements and rows of a tile do not depend on each other.
struct Slabs {
    int tiles = 0, per_tile = 1;
    std::ptrdiff_t rows = 1;  ///< of a slab; the last of a tile may be short or empty

    FAULTLINE_HD std::ptrdiff_t teams(std::ptrdiff_t heads) const { return heads * tiles * per_tile; }
};

/// The slab of a team.
struct Share {
    std::ptrdiff_t head;
    TileRange tile;
    std::ptrdiff_t first, count;  ///< rows (or keys) of the whole sequence

    /// Tiles are taken in `order`.
    FAULTLINE_HD Share(const Slabs& slabs, const TileAxis& axis, Order order, std::ptrdiff_t team) {
        const std::ptrdiff_t per_head = static_cast<std::ptrdiff_t>(slabs.tiles) * slabs.per_tile;
        head = team / per_head;
        tile = axis.walk(static_cast<int>(team % per_head / slabs.per_tile), slabs.tiles, order);
        first = tile.first + team % slabs.per_tile * slabs.rows;
        const std::ptrdiff_t left = tile.first + tile.count - first;
        count = left < slabs.rows ? left : slabs.rows;
    }
};

/// What all jobs have: teams [first, …) of the launch.
struct JobBase {
    /// Without a bound nvcc takes nearly all registers of a multiprocessor for one team, whose waits nothing then hides.
    static constexpr int teams_at_once = 2;
    /// Of the memory that a team's threads share: for operands; behind them stand its tiles, where they have room.
    static constexpr std::size_t shared_bytes = product::staging_bytes;

    const FlatPlan* plan;
    const HeadProblem* problems;
    std::uint64_t seed;
    int layer;
    Watch watch;
    bool watched;  ///< something stands at some site
    Slabs slabs;
    bool last_first = false;  ///< under a causal mask the last query tile sees most keys: it is begun first
    std::ptrdiff_t first_team = 0;
};

struct ForwardJob : JobBase {
    const ForwardOutputs* outputs;

    [[nodiscard]] const char* name() const { return "forward"; }
    template <class Team>
    FAULTLINE_HD void operator()(const Team& team, std::ptrdiff_t index, double* memory) const {
        const Schedule& schedule = plan->schedule;
        const std::ptrdiff_t n_q = problems->n_q();
        const Share share(slabs, TileAxis(n_q, schedule.block_q), last_first ? Order::descending : Order::ascending,
                          first_team + index);
        if (share.count <= 0) return;
        const HeadProblem& x = problems[share.head];
        Arena arena(memory);
        const ForwardMemory tile(arena, schedule, slabs.rows, x.n_k(), x.v.cols, watched);
        using TeamStage = Stage<Team>;
        TeamStage stage(team, *plan, seed, layer, watch.of_team(index), tile.exact, tile.scratch);
        ForwardTile<TeamStage>(stage, x, tile, outputs[share.head]).run(share.tile, share.first, share.count);
    }
};

enum class BackwardPart : unsigned char { sum_probabilities, collect, query, key };

struct BackwardJob : JobBase {
    const BackwardRows* rows;
    BackwardPart part;
    const int* open = nullptr;  ///< [head]: those with 0 are done already; nullptr: none is

    [[nodiscard]] const char* name() const {
        return part == BackwardPart::query ? "dq" : part == BackwardPart::key ? "dk and dv" : "row sums";
    }

    /// Rows and keys of the tiles that a team works in.
    FAULTLINE_HD static std::ptrdiff_t tile_rows(const Schedule& schedule, BackwardPart part, const Slabs& slabs,
                                                 std::ptrdiff_t n_q) {
        return part == BackwardPart::key ? TileAxis(n_q, schedule.bwd_block_q).block() : slabs.rows;
    }
    FAULTLINE_HD static std::ptrdiff_t tile_keys(const Schedule& schedule, BackwardPart part, const Slabs& slabs,
                                                 std::ptrdiff_t n_k) {
        return part == BackwardPart::key ? slabs.rows : TileAxis(n_k, schedule.bwd_block_k).block();
    }

    template <class Team>
    FAULTLINE_HD void operator()(const Team& team, std::ptrdiff_t index, double* memory) const {
        const Schedule& schedule = plan->schedule;
        const std::ptrdiff_t n_q = problems->n_q(), n_k = problems->n_k();
        const bool by_key = part == BackwardPart::key;
        const TileAxis axis = by_key ? TileAxis(n_k, schedule.bwd_block_k) : TileAxis(n_q, schedule.bwd_block_q);
        const Share share(slabs, axis,
                          last_first ? (by_key ? Order::ascending : Order::descending)
                          : by_key   ? schedule.bwd_key_order
                                     : schedule.bwd_query_order,
                          first_team + index);
        if (share.count <= 0 || (open != nullptr && open[share.head] == 0)) return;
        const HeadProblem& x = problems[share.head];
        Arena arena(memory);
        const BackwardMemory tile_memory(arena, schedule, tile_rows(schedule, part, slabs, n_q),
                                         tile_keys(schedule, part, slabs, n_k), x.q.cols, x.v.cols, x.scales.cap > 0,
                                         watched);
        using TeamStage = Stage<Team>;
        TeamStage stage(team, *plan, seed, layer, watch.of_team(index), tile_memory.exact, tile_memory.scratch);
        BackwardTile<TeamStage> tile(stage, x, rows[share.head], tile_memory);
        switch (part) {
            case BackwardPart::sum_probabilities:
                return tile.sum_probabilities(share.tile, share.first, share.count);
            case BackwardPart::collect:
                return tile.collect(share.tile, share.first, share.count);
            case BackwardPart::query:
                return tile.query_gradient(share.tile, share.first, share.count);
            case BackwardPart::key:
                return tile.key_gradients(share.tile, share.first, share.count);
        }
    }
};

}  // namespace faultline::emulated
