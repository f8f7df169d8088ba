// SPDX-License-Identifier: Apache-2.0
// Forward and backward of head groups of one shape on a back end that has teams: the host (one thread a team) or a CUDA
// device (one block a team). What is done once a call or once a row the host does, by the functions of kernels/cpu.
//
// A Backend has
//   double* zeros(n), void write(to, from, n), const double* upload(from, n), void download(from, n, to)
//                                                            memory of the side that computes
//   const T* upload_values(values, n)                        structures, the same
//   void run(job, teams, doubles)                            job(team, index, memory) for index < teams, each with so many
//                                                            doubles of memory
//   Limits limits()                                          how many teams keep it busy, and what one may be
//   std::size_t tape_doubles()                               how much tape teams may have together; one has what it needs
#pragma once

#include <algorithm>
#include <span>
#include <vector>

#include <faultline/cpu/attention.hpp>
#include <faultline/cpu/backward_rows.hpp>
#include <faultline/emulated/heads.hpp>
#include <faultline/emulated/jobs.hpp>
#include <faultline/emulated/needs.hpp>
#include <faultline/emulated/tape.hpp>

namespace faultline::emulated {

template <class Backend, class T>
const T* sent_all(Backend& backend, const std::vector<T>& values) {
    return backend.upload_values(values.data(), values.size());
}

namespace detail {

template <class I, class Backend>
std::vector<GroupForward> forward(Backend& backend, std::span<const HeadGroup> groups, const RoundingPlan& plan,
                                  I& instrument, const Instrument* watched) {
    const Schedule& schedule = plan.schedule;
    const HeadGroup& g0 = groups.front();
    Heads<Backend> heads(backend, groups, plan);
    for (const HeadGroup& group : groups) {
        cpu::check_call(group, plan, false);
        cpu::Stage<I> stage(plan, &instrument, group.seed, group.layer);
        cpu::show_scale(stage, group, heads.scales, schedule);
        heads.add(group, stage, nullptr);
    }
    const HeadProblem& first = heads.problems.front();
    const std::ptrdiff_t n_q = first.n_q(), n_k = first.n_k(), d_v = first.v.cols;
    const std::size_t count = heads.problems.size();
    std::vector<ForwardOutputs> outputs;
    for (std::size_t h = 0; h < count; ++h) {
        ForwardOutputs out;
        out.o = zero_matrix(backend, n_q, d_v);
        out.o_unrounded = zero_matrix(backend, n_q, d_v);
        out.lse = backend.zeros(static_cast<std::size_t>(n_q));
        if (schedule.p_saved) {
            out.p = zero_matrix(backend, n_q, n_k);
            if (heads.scales.cap > 0) out.capped = zero_matrix(backend, n_q, n_k);
            if (first.has_sink) out.sink_p = backend.zeros(static_cast<std::size_t>(n_q));
        }
        outputs.push_back(out);
    }
    const CallWatch watch(watched, g0.layer, g0.first_head, count);
    const std::vector<FlatPlan> flat_plan{flat(plan)};
    ForwardJob job;
    job.plan = sent_all(backend, flat_plan);
    job.problems = sent_all(backend, heads.problems);
    job.seed = g0.seed;
    job.layer = g0.layer;
    job.watch = watch.sent(backend);
    job.watched = watch.active();
    job.outputs = sent_all(backend, outputs);
    std::ptrdiff_t doubles = 0;
    job.slabs = forward_slabs(schedule, n_q, n_k, d_v, count, backend.limits(), watch.active(), doubles);
    const std::ptrdiff_t teams = n_q > 0 ? job.slabs.teams(static_cast<std::ptrdiff_t>(count)) : 0;
    if (job.watch.taped == 0) {
        job.last_first = true;
        backend.run(job, teams, doubles);
    } else {
        const TileAxis keys(n_k, schedule.block_k);
        const std::ptrdiff_t capacity =
            tape_capacity(job.watch.taped, Pass::forward, keys.count(), schedule.key_splits + 3,
                          TileAxis(n_q, schedule.block_q).block(), keys.block(), d_v);
        run_taped(backend, job, teams, doubles, capacity, [&](std::ptrdiff_t, std::vector<double>& tape) {
            for (const TapedTile& t : tiles_of(tape, g0.layer)) show(instrument, t);
        });
    }
    std::vector<GroupForward> out;
    std::size_t at = 0;
    for (const HeadGroup& group : groups) {
        GroupForward& result = out.emplace_back();
        for (std::size_t h = 0; h < group.q.size(); ++h, ++at) {
            HeadForward& head = result.heads.emplace_back();
            head.o = fetched(backend, outputs[at].o);
            head.o_unrounded = fetched(backend, outputs[at].o_unrounded);
            head.lse = fetched(backend, outputs[at].lse, n_q);
            if (outputs[at].p.data != nullptr) head.p = fetched(backend, outputs[at].p);
            if (outputs[at].capped.data != nullptr) head.capped = fetched(backend, outputs[at].capped);
            if (outputs[at].sink_p != nullptr) head.sink_p = fetched(backend, outputs[at].sink_p, n_q);
        }
    }
    return out;
}

/// One call's backward, step by step.
template <class I, class Backend>
class Backward {
  public:
    Backward(Backend& backend, std::span<const HeadGroup> groups, std::span<const GroupForward> forwards,
             const RoundingPlan& plan, I& instrument, const Instrument* watched)
        : backend_(backend),
          groups_(groups),
          forwards_(forwards),
          schedule_(plan.schedule),
          instrument_(instrument),
          stage_(plan, &instrument, groups.front().seed, groups.front().layer),
          heads_(backend, groups, plan),
          plan_(plan),
          per_group_(groups.front().q.size()),
          watch_(watched, groups.front().layer, groups.front().first_head, groups.size() * per_group_) {}

    std::vector<GroupBackward> run() {
        cpu::Unseen<I> repeated(&instrument_);  // the casts of q, k, v were shown in the forward
        cpu::Stage<I> unseen(plan_, repeated.get(), groups_.front().seed, groups_.front().layer);
        for (const HeadGroup& group : groups_) {
            cpu::check_call(group, plan_, true);
            heads_.add(group, unseen, &stage_);
        }
        const HeadProblem& first = heads_.problems.front();
        n_q_ = first.n_q(), n_k_ = first.n_k(), d_ = first.q.cols, d_v_ = first.v.cols;
        prepare_rows();
        prepare_job();
        if (needs_dp(schedule_.delta_from)) delta_of_probabilities();
        if (n_q_ > 0) {
            if (schedule_.zero_sum != ZeroSum::none) run_part(BackwardPart::collect);
            if (n_k_ > 0) key_part();
            query_part();
        }
        return gradients();
    }

  private:
    [[nodiscard]] std::size_t count() const { return heads_.problems.size(); }

    void prepare_rows() {
        const auto n = static_cast<std::size_t>(n_q_);
        for (const HeadGroup& group : groups_)
            for (std::size_t h = 0; h < per_group_; ++h) masks_.push_back(cpu::mask_of(group, h));
        sink_p_.resize(count());
        delta_.resize(count());
        for (std::size_t h = 0; h < count(); ++h) {
            const HeadForward& fwd = forwards_[h / per_group_].heads.at(h % per_group_);
            quantities_.emplace_back(stage_, plan_, heads_.scales, masks_[h], heads_.problems[h].head, fwd);
            const std::vector<double> reference = quantities_[h].scaled_lse();
            if (masks_[h].sink != nullptr) sink_p_[h] = quantities_[h].sink_probabilities(reference);
            BackwardRows& r = rows_.emplace_back();
            r.reference = sent(backend_, reference);
            if (needs_dp(schedule_.delta_from)) {
                const cpu::ProbabilitySums zero(n, masks_[h].sink == nullptr ? nullptr : &sink_p_[h]);
                r.p_dp = sent(backend_, zero.p_dp);
                r.exact_p_dp = sent(backend_, zero.exact_p_dp);
                r.p_sum = sent(backend_, zero.p);
                r.exact_p_sum = sent(backend_, zero.exact_p);
                r.delta = backend_.zeros(n);
            } else {
                delta_[h] = quantities_[h].delta_from_output(heads_.douts[h].view());
                r.delta = sent(backend_, delta_[h]);
            }
            if (schedule_.p_saved) {
                r.p = sent(backend_, fwd.p);
                if (heads_.scales.cap > 0) r.capped = sent(backend_, fwd.capped);
            }
            if (schedule_.zero_sum != ZeroSum::none)
                for (double** array : {&r.row_sum, &r.weight_sum, &r.largest, &r.largest_key, &r.open})
                    *array = backend_.zeros(n);
            r.dq = zero_matrix(backend_, n_q_, d_);
            r.dk = zero_matrix(backend_, n_k_, d_);
            r.dv = zero_matrix(backend_, n_k_, d_v_);
            if (!BackwardMemory::projects(schedule_)) continue;
            r.dq_part = zero_matrix(backend_, n_q_, d_);
            r.dk_part = zero_matrix(backend_, n_k_, d_);
        }
    }

    void prepare_job() {
        flat_plan_.push_back(flat(plan_));
        job_.plan = sent_all(backend_, flat_plan_);
        job_.problems = sent_all(backend_, heads_.problems);
        job_.seed = groups_.front().seed;
        job_.layer = groups_.front().layer;
        job_.watch = watch_.sent(backend_);
        job_.watched = watch_.active();
        job_.rows = sent_all(backend_, rows_);
    }
    [[nodiscard]] TileAxis queries() const { return {n_q_, schedule_.bwd_block_q}; }
    [[nodiscard]] TileAxis keys() const { return {n_k_, schedule_.bwd_block_k}; }

    /// The job of a part, its teams, and their memory.
    std::ptrdiff_t teams_of(BackwardPart part, std::ptrdiff_t& doubles) {
        job_.part = part;
        job_.slabs = backward_slabs(schedule_, part, {n_q_, n_k_, d_, d_v_, heads_.scales.cap > 0}, count(),
                                    backend_.limits(), watch_.active(), doubles);
        return job_.slabs.teams(static_cast<std::ptrdiff_t>(count()));
    }
    void run_part(BackwardPart part) {
        std::ptrdiff_t doubles = 0;
        const std::ptrdiff_t teams = teams_of(part, doubles);
        job_.last_first = true;
        backend_.run(job_, teams, doubles);
    }
    template <class Play>
    void run_taped_part(BackwardPart part, std::uint64_t taped, std::ptrdiff_t steps, Play&& play) {
        std::ptrdiff_t doubles = 0;
        const std::ptrdiff_t teams = teams_of(part, doubles);
        BackwardJob job = job_;
        job.last_first = false;  // the tape's order is that of the teams
        job.watch.taped = taped;
        const std::ptrdiff_t capacity =
            tape_capacity(taped, Pass::backward, steps, 0, queries().block(), keys().block(), std::max(d_, d_v_));
        run_taped(backend_, job, teams, doubles, capacity, play);
    }

    void delta_of_probabilities() {
        if (n_q_ > 0) run_part(BackwardPart::sum_probabilities);
        for (std::size_t h = 0; h < count(); ++h) {
            cpu::ProbabilitySums sums(static_cast<std::size_t>(n_q_));
            sums.p_dp = fetched(backend_, rows_[h].p_dp, n_q_);
            sums.exact_p_dp = fetched(backend_, rows_[h].exact_p_dp, n_q_);
            sums.p = fetched(backend_, rows_[h].p_sum, n_q_);
            sums.exact_p = fetched(backend_, rows_[h].exact_p_sum, n_q_);
            delta_[h] = quantities_[h].delta_of(std::move(sums));
            backend_.write(rows_[h].delta, delta_[h].data(), delta_[h].size());
        }
    }

    static constexpr std::uint64_t dq_bit = std::uint64_t{1} << index(Site::dq_accumulate);

    /// dk and dv, and every tile of scores on the tape.
    void key_part() {
        const std::uint64_t taped = job_.watch.taped & ~dq_bit;
        if (taped == 0) return run_part(BackwardPart::key);
        run_taped_part(BackwardPart::key, taped, queries().count(), [&](std::ptrdiff_t, std::vector<double>& tape) {
            for (const TapedTile& t : tiles_of(tape, job_.layer)) show(instrument_, t);
        });
    }
    /// dq. Its tiles go to the instrument in the order of kernels/cpu, where key tiles are the outer loop, behind those of
    /// the other sites.
    void query_part() {
        if ((job_.watch.taped & dq_bit) == 0) return run_part(BackwardPart::query);
        const std::ptrdiff_t per_head = queries().count();
        std::vector<std::vector<double>> tapes;
        run_taped_part(BackwardPart::query, dq_bit, keys().count(),
                       [&](std::ptrdiff_t team, std::vector<double>& tape) {
                           tapes.push_back(std::move(tape));
                           if ((team + 1) % per_head != 0) return;
                           std::vector<TapedTile> tiles;
                           for (std::vector<double>& one : tapes)
                               for (const TapedTile& t : tiles_of(one, job_.layer)) tiles.push_back(t);
                           const bool up = schedule_.bwd_key_order == Order::ascending;
                           std::ranges::stable_sort(
                               tiles, {}, [&](const TapedTile& t) { return up ? t.where.k_tile : -t.where.k_tile; });
                           for (const TapedTile& t : tiles) show(instrument_, t);
                           tapes.clear();
                       });
    }

    std::vector<GroupBackward> gradients() {
        const cpu::GradientFactors factors(stage_, schedule_, heads_.scales);
        std::vector<GroupBackward> out(groups_.size());
        for (std::size_t g = 0; g < groups_.size(); ++g) {
            const int first_head = groups_[g].first_head;
            std::vector<Matrix> dk, dv;
            for (std::size_t h = 0; h < per_group_; ++h) {
                const std::size_t at = g * per_group_ + h;
                out[g].dq.push_back(fetched(backend_, rows_[at].dq));
                dk.push_back(fetched(backend_, rows_[at].dk));
                dv.push_back(fetched(backend_, rows_[at].dv));
                if (masks_[at].sink != nullptr)
                    out[g].dsink.push_back(quantities_[at].sink_gradient(sink_p_[at], delta_[at]));
                cpu::finish_gradient(stage_, Site::dq_cast, first_head + static_cast<int>(h), factors.scores,
                                     out[g].dq.back());
            }
            out[g].dk = cpu::reduce_group(stage_, Site::dk_cast, first_head, factors.scores, schedule_.group_reduce,
                                          std::move(dk));
            out[g].dv = cpu::reduce_group(stage_, Site::dv_cast, first_head, factors.values, schedule_.group_reduce,
                                          std::move(dv));
        }
        return out;
    }

    Backend& backend_;
    std::span<const HeadGroup> groups_;
    std::span<const GroupForward> forwards_;
    const Schedule& schedule_;
    I& instrument_;
    cpu::Stage<I> stage_;
    Heads<Backend> heads_;
    const RoundingPlan& plan_;
    std::size_t per_group_;
    CallWatch watch_;
    std::ptrdiff_t n_q_ = 0, n_k_ = 0, d_ = 0, d_v_ = 0;
    std::vector<cpu::Mask> masks_;
    std::vector<cpu::RowQuantities<I>> quantities_;
    std::vector<std::vector<double>> sink_p_, delta_;
    std::vector<BackwardRows> rows_;
    std::vector<FlatPlan> flat_plan_;
    BackwardJob job_;
};

}  // namespace detail

/// The same as attention_forward of each group. With an instrument, of one group: its tiles come in the order of kernels/cpu.
template <class Backend>
std::vector<GroupForward> forward(Backend& backend, std::span<const HeadGroup> groups, const RoundingPlan& plan,
                                  Instrument* instrument = nullptr) {
    if (instrument != nullptr) return detail::forward(backend, groups, plan, *instrument, instrument);
    cpu::NoInstrument none;
    return detail::forward(backend, groups, plan, none, nullptr);
}

/// The same as attention_backward of each group. With an instrument, of one group: the tiles of each site come in the order
/// of kernels/cpu, those of dq_accumulate behind all others of their head.
template <class Backend>
std::vector<GroupBackward> backward(Backend& backend, std::span<const HeadGroup> groups,
                                    std::span<const GroupForward> forwards, const RoundingPlan& plan,
                                    Instrument* instrument = nullptr) {
    if (instrument != nullptr)
        return detail::Backward<Instrument, Backend>(backend, groups, forwards, plan, *instrument, instrument).run();
    cpu::NoInstrument none;
    return detail::Backward<cpu::NoInstrument, Backend>(backend, groups, forwards, plan, none, nullptr).run();
}

}  // namespace faultline::emulated
