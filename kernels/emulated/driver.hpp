// SPDX-License-Identifier: Apache-2.0
// Forward and backward of head groups of one shape on a back end that has teams: the host (one thread a team) or a CUDA
// device (one block a team). What is done once a call (casts of inputs, the scale) the host does as kernels/cpu does it.
//
// A Backend has
//   double* zeros(n), const double* upload(from, n), void download(from, n, to)    memory of the side that computes
//   const T* upload_value(value)                                                   one structure, the same
//   void run(job, teams, doubles)     job(team, index, memory) for index < teams, each with so many doubles of memory
#pragma once

#include <algorithm>
#include <cmath>
#include <span>
#include <vector>

#include <faultline/base/error.hpp>
#include <faultline/cpu/attention.hpp>
#include <faultline/cpu/scores.hpp>
#include <faultline/emulated/backward.hpp>
#include <faultline/emulated/forward.hpp>

namespace faultline::emulated {

struct ForwardJob {
    const FlatPlan* plan;
    const HeadProblem* problems;
    const ForwardOutputs* outputs;
    std::uint64_t seed;
    int layer, tiles;

    template <class Team>
    FAULTLINE_HD void operator()(const Team& team, std::ptrdiff_t index, double* memory) const {
        const HeadProblem& x = problems[index / tiles];
        const Sites sites{*plan, seed, layer};
        Arena arena(memory);
        const ForwardMemory tile(arena, plan->schedule, x.n_q(), x.n_k(), x.v.cols);
        ForwardTile<Team>(team, sites, x, tile, outputs[index / tiles])
            .run(TileAxis(x.n_q(), plan->schedule.block_q)[static_cast<int>(index % tiles)]);
    }
};

enum class BackwardPart : unsigned char { prepare, delta, collect, query, key };

struct BackwardJob {
    const FlatPlan* plan;
    const HeadProblem* problems;
    const BackwardRows* rows;
    std::uint64_t seed;
    int layer, tiles;
    BackwardPart part;

    template <class Team>
    FAULTLINE_HD void operator()(const Team& team, std::ptrdiff_t index, double* memory) const {
        const HeadProblem& x = problems[index / tiles];
        const Sites sites{*plan, seed, layer};
        Arena arena(memory);
        const BackwardMemory tile_memory(arena, plan->schedule, x.n_q(), x.n_k());
        BackwardTile<Team> tile(team, sites, x, rows[index / tiles], tile_memory);
        const int t = static_cast<int>(index % tiles);
        const TileRange queries = TileAxis(x.n_q(), plan->schedule.bwd_block_q)[part == BackwardPart::key ? 0 : t];
        switch (part) {
            case BackwardPart::prepare:
                return tile.prepare(queries);
            case BackwardPart::delta:
                return tile.delta_from_probabilities(queries);
            case BackwardPart::collect:
                return tile.collect(queries);
            case BackwardPart::query:
                return tile.query_gradient(queries);
            case BackwardPart::key:
                return tile.key_gradients(TileAxis(x.n_k(), plan->schedule.bwd_block_k)[t]);
        }
    }
};

/// Gradients of one group after their sums: scaled, cast, and dk and dv summed over the query heads.
struct FinishJob {
    const FlatPlan* plan;
    const View<double>* parts;  ///< [group][head]
    const View<double>* sums;   ///< [group]; for dq, [group][head]
    const int* heads;           ///< [group] the name of its first head, which seeds stochastic rounding
    std::uint64_t seed;
    int layer, per_group;
    double factor;
    Site cast;

    template <class Team>
    FAULTLINE_HD void operator()(const Team& team, std::ptrdiff_t group, double*) const {
        const Sites sites{*plan, seed, layer};
        const View<double>* part = parts + group * per_group;
        const bool after_cast = plan->schedule.group_reduce == GroupReduce::after_cast;
        each(team, part->rows, part->cols, [&](std::ptrdiff_t i, std::ptrdiff_t c) {
            const std::ptrdiff_t counter = i * part->cols + c;
            const auto finished = [&](double x, int head, int p) {
                return sites.pass(
                    cast, Place{head, 0, 0, p}, counter, [&] { return to_float(x * factor); },
                    [&] { return x * factor; });
            };
            if (cast == Site::dq_cast) {
                for (int h = 0; h < per_group; ++h) part[h](i, c) = finished(part[h](i, c), heads[group] + h, 0);
                return;
            }
            double sum = 0;
            for (int h = 0; h < per_group; ++h) {
                const double x = part[h](i, c);
                const double y = after_cast ? finished(x, heads[group], h) : x;
                sum = h == 0 ? y : sum + y;
            }
            if (per_group > 1)
                sum = sites.rounded(Site::kv_group_reduce, Place{heads[group], 0, 0, cast == Site::dv_cast ? 1 : 0},
                                    counter, sum);
            sums[group](i, c) = after_cast ? sum : finished(sum, heads[group], 0);
        });
    }
};

/// Whether the problem has what the device's form does not: softcap, sinks, dropout.
inline bool beyond(const HeadGroup& group) {
    return group.softcap != 0 || !group.sink.empty() || !group.dropout.empty();
}

inline FlatPlan flat(const RoundingPlan& plan) {
    FlatPlan out;
    out.schedule = plan.schedule;
    for (std::size_t s = 0; s < site_count; ++s) out.rules[s] = plan[static_cast<Site>(s)];
    return out;
}

/// The groups' operands after their casts, on the side that computes. All groups have the shapes of the first.
template <class Backend>
class Heads {
  public:
    Heads(Backend& backend, std::span<const HeadGroup> groups, const RoundingPlan& plan, bool backward)
        : backend_(backend), plan_(plan), scales_(plan, groups.front()) {
        const Schedule& schedule = plan.schedule;
        values_ = {scales_.exponent, scales_.bwd_exponent, scales_.natural, scales_.log2e,
                   scales_.logit_per_score(schedule)};
        for (const HeadGroup& group : groups) {
            if (beyond(group))
                throw RequestError(
                    "the device form of the kernel: has no softcap, sinks and dropout: expected none of them");
            const View<const double> k = cast(Site::k_cast, group, group.first_head, group.k, scales_.inputs);
            const View<const double> v = cast(Site::v_cast, group, group.first_head, group.v, 1.0);
            const View<const double> centered = backward ? centered_keys(group, k) : k;
            for (std::size_t h = 0; h < group.q.size(); ++h) {
                const int head = group.first_head + static_cast<int>(h);
                HeadProblem x;
                x.q = cast(Site::q_cast, group, head, group.q[h], scales_.inputs);
                x.k = k;
                x.v = v;
                x.k_for_dq = centered;
                if (backward) x.dout = cast(Site::do_cast, group, head, group.dout[h], 1.0);
                if (!group.bias.empty()) x.bias = sent(group.bias[h]);
                x.scales = values_;
                x.causal = group.causal;
                x.head = head;
                problems.push_back(x);
            }
        }
    }

    [[nodiscard]] const cpu::Scales& scales() const { return scales_; }
    std::vector<HeadProblem> problems;  ///< [group][head]

  private:
    View<const double> sent(MatrixView<const double> x) {
        const Matrix whole(x);
        return {backend_.upload(whole.values.data(), whole.values.size()), x.rows, x.cols, x.cols};
    }
    View<const double> cast(Site site, const HeadGroup& group, int head, MatrixView<const double> x, double factor) {
        Matrix out(x);
        if (factor != 1.0)
            for (double& value : out.values) value *= factor;
        cpu::NoInstrument none;
        cpu::Stage<cpu::NoInstrument> stage(plan_, &none, group.seed, group.layer);
        stage.pass(site, TileAt{0, head, 0, 0, 0, 0}, out.view());
        if (site == Site::k_cast) keys_ = out;
        return sent(out.view());
    }
    /// k, or with key centering k - mean k, cast as k is.
    View<const double> centered_keys(const HeadGroup& group, View<const double> k) {
        if (!plan_.schedule.key_centering) return k;
        const std::vector<double> mean = mean_visible_key(group, keys_.view());
        Matrix centered = keys_;
        cpu::for_each(centered.view(), [&](double x, auto, auto c) {
            return faultline::round(x - mean[static_cast<std::size_t>(c)], plan_[Site::k_cast].format,
                                    Rounding::nearest_even);
        });
        return sent(centered.view());
    }

    Backend& backend_;
    const RoundingPlan& plan_;
    cpu::Scales scales_;
    ScaleValues values_;
    Matrix keys_;
};

template <class Backend, class T>
const T* sent_all(Backend& backend, const std::vector<T>& values) {
    return backend.upload_values(values.data(), values.size());
}
template <class Backend>
View<double> zero_matrix(Backend& backend, std::ptrdiff_t rows, std::ptrdiff_t cols) {
    return {backend.zeros(static_cast<std::size_t>(rows * cols)), rows, cols, cols};
}
template <class Backend>
Matrix fetched(Backend& backend, const View<double>& from) {
    Matrix to(from.rows, from.cols);
    backend.download(from.data, to.values.size(), to.values.data());
    return to;
}

/// Doubles that a call takes on the side that computes.
struct Need {
    std::size_t whole = 0;     ///< operands, outputs and rows of all groups
    std::size_t per_team = 0;  ///< tiles of a team
    std::ptrdiff_t teams = 0;  ///< in the largest of the call's jobs
};

inline std::size_t elements(std::ptrdiff_t rows, std::ptrdiff_t cols) { return static_cast<std::size_t>(rows * cols); }

inline Need forward_need(std::span<const HeadGroup> groups, const RoundingPlan& plan) {
    const HeadGroup& g = groups.front();
    const std::ptrdiff_t n_q = g.q.front().rows, n_k = g.k.rows, d = g.k.cols, d_v = g.v.cols;
    const std::size_t heads = groups.size() * g.q.size();
    Need need;
    need.whole = groups.size() * (2 * elements(n_k, d) + 2 * elements(n_k, d_v)) +
                 heads * (elements(n_q, d) + 2 * elements(n_q, d_v + 1));
    if (!g.bias.empty()) need.whole += heads * elements(n_q, n_k);
    if (plan.schedule.p_saved) need.whole += heads * elements(n_q, n_k);
    Arena tiles(nullptr);
    (void)ForwardMemory(tiles, plan.schedule, n_q, n_k, d_v);
    need.per_team = static_cast<std::size_t>(tiles.used());
    need.teams = static_cast<std::ptrdiff_t>(heads) * TileAxis(n_q, plan.schedule.block_q).count();
    return need;
}

inline Need backward_need(std::span<const HeadGroup> groups, const RoundingPlan& plan) {
    const HeadGroup& g = groups.front();
    const std::ptrdiff_t n_q = g.q.front().rows, n_k = g.k.rows, d = g.k.cols, d_v = g.v.cols;
    const std::size_t heads = groups.size() * g.q.size();
    Need need = forward_need(groups, plan);
    need.whole += groups.size() * 2 * elements(n_k, d + d_v) +
                  heads * (elements(n_q, d_v) + 2 * elements(n_q, d) + 2 * elements(n_k, d) + elements(n_k, d_v) +
                           8 * elements(n_q, 1));
    Arena tiles(nullptr);
    (void)BackwardMemory(tiles, plan.schedule, n_q, n_k);
    need.per_team = static_cast<std::size_t>(tiles.used());
    const int tiles_q = TileAxis(n_q, plan.schedule.bwd_block_q).count();
    const int tiles_k = TileAxis(n_k, plan.schedule.bwd_block_k).count();
    need.teams = static_cast<std::ptrdiff_t>(heads) * std::max(tiles_q, tiles_k);
    return need;
}

/// The same as attention_forward of each group.
template <class Backend>
std::vector<GroupForward> forward(Backend& backend, std::span<const HeadGroup> groups, const RoundingPlan& plan) {
    const Heads<Backend> heads(backend, groups, plan, false);
    const HeadProblem& first = heads.problems.front();
    std::vector<ForwardOutputs> outputs;
    for (const HeadProblem& x : heads.problems) {
        ForwardOutputs out;
        out.o = zero_matrix(backend, x.n_q(), x.v.cols);
        out.o_unrounded = zero_matrix(backend, x.n_q(), x.v.cols);
        out.lse = backend.zeros(static_cast<std::size_t>(x.n_q()));
        if (plan.schedule.p_saved) out.p = zero_matrix(backend, x.n_q(), x.n_k());
        outputs.push_back(out);
    }
    Arena needed(nullptr);
    (void)ForwardMemory(needed, plan.schedule, first.n_q(), first.n_k(), first.v.cols);
    const int tiles = TileAxis(first.n_q(), plan.schedule.block_q).count();
    const std::vector<FlatPlan> flat_plan{flat(plan)};
    if (first.n_q() > 0)
        backend.run(ForwardJob{sent_all(backend, flat_plan), sent_all(backend, heads.problems),
                               sent_all(backend, outputs), groups.front().seed, groups.front().layer, tiles},
                    static_cast<std::ptrdiff_t>(heads.problems.size()) * tiles, needed.used());
    std::vector<GroupForward> out;
    std::size_t at = 0;
    for (const HeadGroup& group : groups) {
        GroupForward& result = out.emplace_back();
        for (std::size_t h = 0; h < group.q.size(); ++h, ++at) {
            HeadForward& head = result.heads.emplace_back();
            head.o = fetched(backend, outputs[at].o);
            head.o_unrounded = fetched(backend, outputs[at].o_unrounded);
            head.lse.resize(static_cast<std::size_t>(first.n_q()));
            backend.download(outputs[at].lse, head.lse.size(), head.lse.data());
            if (plan.schedule.p_saved) head.p = fetched(backend, outputs[at].p);
        }
    }
    return out;
}

/// The same as attention_backward of each group.
template <class Backend>
std::vector<GroupBackward> backward(Backend& backend, std::span<const HeadGroup> groups,
                                    std::span<const GroupForward> forwards, const RoundingPlan& plan) {
    const Heads<Backend> heads(backend, groups, plan, true);
    const Schedule& schedule = plan.schedule;
    const HeadProblem& first = heads.problems.front();
    const std::ptrdiff_t n_q = first.n_q(), n_k = first.n_k(), d = first.q.cols, d_v = first.v.cols;
    const auto per_group = static_cast<int>(groups.front().q.size());
    const auto n = static_cast<std::size_t>(n_q);
    std::vector<BackwardRows> rows;
    std::vector<View<double>> dq, dk, dv;
    const bool projected = schedule.zero_sum == ZeroSum::uniform || schedule.zero_sum == ZeroSum::weighted;
    for (std::size_t at = 0; at < heads.problems.size(); ++at) {
        const HeadForward& fwd =
            forwards[at / static_cast<std::size_t>(per_group)].heads.at(at % static_cast<std::size_t>(per_group));
        BackwardRows r;
        r.lse = backend.zeros(n);
        backend.write(r.lse, fwd.lse.data(), n);
        const Matrix& o = schedule.delta_from == DeltaFrom::o_unrounded ? fwd.o_unrounded : fwd.o;
        r.o = {backend.upload(o.values.data(), o.values.size()), n_q, d_v, d_v};
        if (schedule.p_saved) r.p = {backend.upload(fwd.p.values.data(), fwd.p.values.size()), n_q, n_k, n_k};
        for (double** array : {&r.reference, &r.delta, &r.row_sum, &r.p_sum, &r.largest, &r.largest_key, &r.open})
            *array = backend.zeros(n);
        r.dq = zero_matrix(backend, n_q, d);
        r.dk = zero_matrix(backend, n_k, d);
        r.dv = zero_matrix(backend, n_k, d_v);
        if (projected) {
            r.dq_part = zero_matrix(backend, n_q, d);
            r.dk_part = zero_matrix(backend, n_k, d);
        }
        rows.push_back(r);
        dq.push_back(r.dq);
        dk.push_back(r.dk);
        dv.push_back(r.dv);
    }
    Arena needed(nullptr);
    (void)BackwardMemory(needed, schedule, n_q, n_k);
    const std::vector<FlatPlan> flat_plan{flat(plan)};
    BackwardJob job{sent_all(backend, flat_plan), sent_all(backend, heads.problems),
                    sent_all(backend, rows),      groups.front().seed,
                    groups.front().layer,         TileAxis(n_q, schedule.bwd_block_q).count(),
                    BackwardPart::prepare};
    const auto run = [&](BackwardPart part) {
        job.part = part;
        job.tiles = part == BackwardPart::key ? TileAxis(n_k, schedule.bwd_block_k).count()
                                              : TileAxis(n_q, schedule.bwd_block_q).count();
        backend.run(job, static_cast<std::ptrdiff_t>(rows.size()) * job.tiles, needed.used());
    };
    if (n_q > 0) {
        run(BackwardPart::prepare);
        if (needs_dp(schedule.delta_from)) run(BackwardPart::delta);
        if (schedule.zero_sum != ZeroSum::none) run(BackwardPart::collect);
        run(BackwardPart::query);
        if (n_k > 0) run(BackwardPart::key);
    }
    // With scaled inputs the chain rule leaves sqrt(scale) for dq and dk; where ds was scaled before its cast, nothing.
    const double factor = schedule.scale_at == ScaleAt::inputs
                              ? heads.scales().inputs
                              : (schedule.ds_scale == DsScale::after ? heads.scales().natural : 1.0);
    std::vector<View<double>> dk_sums, dv_sums;
    std::vector<int> names;
    for (const HeadGroup& group : groups) {
        dk_sums.push_back(zero_matrix(backend, n_k, d));
        dv_sums.push_back(zero_matrix(backend, n_k, d_v));
        names.push_back(group.first_head);
    }
    FinishJob finish{job.plan, sent_all(backend, dq), nullptr, sent_all(backend, names), job.seed, job.layer, per_group,
                     factor,   Site::dq_cast};
    const auto count = static_cast<std::ptrdiff_t>(groups.size());
    backend.run(finish, count, 0);
    finish.parts = sent_all(backend, dk);
    finish.sums = sent_all(backend, dk_sums);
    finish.cast = Site::dk_cast;
    backend.run(finish, count, 0);
    finish.parts = sent_all(backend, dv);
    finish.sums = sent_all(backend, dv_sums);
    finish.cast = Site::dv_cast;
    finish.factor = 1.0;
    backend.run(finish, count, 0);
    std::vector<GroupBackward> out(groups.size());
    for (std::size_t g = 0; g < groups.size(); ++g) {
        for (int h = 0; h < per_group; ++h)
            out[g].dq.push_back(
                fetched(backend, dq[g * static_cast<std::size_t>(per_group) + static_cast<std::size_t>(h)]));
        out[g].dk = fetched(backend, dk_sums[g]);
        out[g].dv = fetched(backend, dv_sums[g]);
    }
    return out;
}

}  // namespace faultline::emulated
