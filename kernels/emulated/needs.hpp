// SPDX-License-Identifier: Apache-2.0
// How a call's tiles are dealt out to teams, and what memory it takes: the driver takes its slabs and tapes from here, and so
// does who asks beforehand whether there is room.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <faultline/cpu/scores.hpp>
#include <faultline/emulated/jobs.hpp>
#include <faultline/emulated/tape.hpp>

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

/// Doubles of a team's tape in the forward, and in a part of the backward; taped: the sites, as Watch has them.
inline std::ptrdiff_t forward_tape(const Schedule& schedule, std::uint64_t taped, std::ptrdiff_t n_q,
                                   std::ptrdiff_t n_k, std::ptrdiff_t d_v) {
    const TileAxis keys(n_k, schedule.block_k);
    return tape_capacity(taped, Pass::forward, keys.count(), schedule.key_splits + 3,
                         TileAxis(n_q, schedule.block_q).block(), keys.block(), d_v);
}
inline std::ptrdiff_t backward_tape(const Schedule& schedule, BackwardPart part, std::uint64_t taped,
                                    const BackwardShape& x) {
    const TileAxis queries(x.n_q, schedule.bwd_block_q), keys(x.n_k, schedule.bwd_block_k);
    return tape_capacity(taped, Pass::backward, part == BackwardPart::key ? queries.count() : keys.count(), 0,
                         queries.block(), keys.block(), std::max(x.d, x.d_v));
}
/// The tiles of dq_accumulate are taped by the teams of queries, all others of the backward by those of keys.
inline constexpr std::uint64_t taped_by_queries = std::uint64_t{1} << index(Site::dq_accumulate);

/// What a piece of a call's memory is rounded up to, in bytes.
inline constexpr std::size_t piece_bytes = 256;

/// Memory that a call takes on the side that computes, to the byte.
struct Need {
    /// The teams of one launch.
    struct Launch {
        std::ptrdiff_t teams = 0;
        std::ptrdiff_t tiles = 0;  ///< doubles of a team; 0 where they stand in fast memory
        std::ptrdiff_t tape = 0;   ///< the same; 0 where nothing is observed

        /// How many work at once where all their tapes, and all their tiles, may have so many bytes; one has what it needs.
        [[nodiscard]] std::ptrdiff_t taped_at_once(std::size_t most) const {
            return tape == 0 ? teams : at_once(teams, tape, most / sizeof(double));
        }
        [[nodiscard]] std::size_t tile_bytes(std::size_t most) const {
            return tiles == 0 ? 0 : bytes(at_once(taped_at_once(most), tiles, most / sizeof(double)) * tiles);
        }
        [[nodiscard]] std::size_t tape_bytes(std::size_t most) const { return bytes(taped_at_once(most) * tape); }

      private:
        static std::size_t bytes(std::ptrdiff_t doubles) { return static_cast<std::size_t>(doubles) * sizeof(double); }
    };
    std::size_t operands = 0;  ///< bytes: operands, outputs, rows and descriptions of all groups, each a piece
    std::vector<Launch> launches;

    /// Of the launch that takes most, since they follow each other.
    [[nodiscard]] std::size_t tile_bytes(std::size_t most) const {
        std::size_t largest = 0;
        for (const Launch& launch : launches) largest = std::max(largest, launch.tile_bytes(most));
        return largest;
    }
    /// Of all launches: a tape is kept to the end of the call.
    [[nodiscard]] std::size_t tape_bytes(std::size_t most) const {
        std::size_t sum = 0;
        for (const Launch& launch : launches) sum += launch.tape_bytes(most);
        return sum;
    }
};

/// Which passes one call makes; `both` keeps on that side what the backward takes from the forward.
enum class Passes : unsigned char { forward, backward, both };

/// Adds up what the driver takes (Heads, detail::Forward, detail::Backward), in their order.
class NeedOf {
  public:
    /// Groups of one shape; their shapes are read, no values. instrument: as the call would be given it.
    NeedOf(std::span<const HeadGroup> groups, const RoundingPlan& plan, const Limits& limits,
           const Instrument* instrument)
        : schedule_(plan.schedule),
          limits_(limits),
          g_(groups.front()),
          x_{g_.q.front().rows, g_.k.rows, g_.k.cols, g_.v.cols, cpu::Scales(plan, g_).cap > 0},
          groups_(groups.size()),
          heads_(groups.size() * g_.q.size()),
          watch_(instrument, g_.layer, g_.first_head, heads_) {}

    [[nodiscard]] Need of(Passes passes) {
        need_ = {};
        operands();
        if (passes != Passes::backward) forward();
        if (passes != Passes::forward) backward(passes == Passes::both);
        return need_;
    }

  private:
    void take(std::size_t times, std::ptrdiff_t rows, std::ptrdiff_t cols) {
        need_.operands += times * rounded(static_cast<std::size_t>(rows * cols) * sizeof(double));
    }
    template <class T>
    void take_values(std::size_t count) {
        need_.operands += rounded(count * sizeof(T));
    }
    static std::size_t rounded(std::size_t bytes) { return (bytes + piece_bytes - 1) / piece_bytes * piece_bytes; }

    void operands() {
        take(groups_, x_.n_k, x_.d);
        take(groups_, x_.n_k, x_.d_v);
        take(heads_, x_.n_q, x_.d);
        if (!g_.bias.empty()) take(heads_, x_.n_q, x_.n_k);
        if (!g_.dropout.empty()) take(heads_, x_.n_q, x_.n_k);
    }
    /// The plan, the heads and what stands at the sites, of one pass.
    void descriptions() {
        take_values<FlatPlan>(1);
        take_values<HeadProblem>(heads_);
        if (!watch_.active()) return;
        take_values<Alteration>(watch_.alterations());
        take_values<int>(watch_.firsts());
    }
    void launch(const Slabs& slabs, std::ptrdiff_t tiles, std::ptrdiff_t tape) {
        need_.launches.push_back(
            {slabs.teams(static_cast<std::ptrdiff_t>(heads_)), tiles > limits_.fast_doubles ? tiles : 0, tape});
    }

    void forward() {
        take(2 * heads_, x_.n_q, x_.d_v);
        take(heads_, x_.n_q, 1);
        if (schedule_.p_saved) {
            take((x_.has_cap ? 2 : 1) * heads_, x_.n_q, x_.n_k);
            if (!g_.sink.empty()) take(heads_, x_.n_q, 1);
        }
        descriptions();
        take_values<ForwardOutputs>(heads_);
        if (x_.n_q == 0) return;
        std::ptrdiff_t doubles = 0;
        const Slabs slabs = forward_slabs(schedule_, x_.n_q, x_.n_k, x_.d_v, heads_, limits_, watch_.active(), doubles);
        launch(slabs, doubles,
               watch_.taped() == 0 ? 0 : forward_tape(schedule_, watch_.taped(), x_.n_q, x_.n_k, x_.d_v));
    }

    /// keeps: P stands there since the forward.
    void backward(bool keeps) {
        if (schedule_.key_centering) take(groups_, x_.n_k, x_.d);
        take(heads_, x_.n_q, x_.d_v);
        rows(keeps);
        descriptions();
        take_values<BackwardRows>(heads_);
        if (x_.n_q == 0) return;
        if (needs_dp(schedule_.delta_from)) part(BackwardPart::sum_probabilities, 0);
        if (schedule_.zero_sum != ZeroSum::none) part(BackwardPart::collect, 0);
        if (x_.n_k > 0) part(BackwardPart::key, watch_.taped() & ~taped_by_queries);
        part(BackwardPart::query, watch_.taped() & taped_by_queries);
    }
    void rows(bool keeps) {
        take((needs_dp(schedule_.delta_from) ? 6 : 2) * heads_, x_.n_q, 1);
        if (schedule_.p_saved && !keeps) take((x_.has_cap ? 2 : 1) * heads_, x_.n_q, x_.n_k);
        if (schedule_.zero_sum != ZeroSum::none) take(5 * heads_, x_.n_q, 1);
        const std::size_t times = BackwardMemory::projects(schedule_) ? 2 * heads_ : heads_;
        take(times, x_.n_q, x_.d);
        take(times, x_.n_k, x_.d);
        take(heads_, x_.n_k, x_.d_v);
    }
    void part(BackwardPart part, std::uint64_t taped) {
        std::ptrdiff_t doubles = 0;
        const Slabs slabs = backward_slabs(schedule_, part, x_, heads_, limits_, watch_.active(), doubles);
        launch(slabs, doubles, taped == 0 ? 0 : backward_tape(schedule_, part, taped, x_));
    }

    const Schedule& schedule_;
    Limits limits_;
    const HeadGroup& g_;
    BackwardShape x_;
    std::size_t groups_, heads_;
    CallWatch watch_;
    Need need_;
};

}  // namespace faultline::emulated
