// SPDX-License-Identifier: Apache-2.0
// Forward and backward of head groups of one shape on a back end that has teams: the host (one thread a team) or a CUDA
// device (one block a team). What is done once a call or once a row the host does, by the functions of kernels/cpu.
//
// A Backend has
//   double* zeros(n), void write(to, from, n), const double* upload(from, n), void download(from, n, to)
//                                                            memory of the side that computes
//   double* tape(n)                                          the same, of any content
//   void mark(), void download_marked(from, n, to)           download() of what the jobs before mark() have left, beside
//                                                            those that were started since
//   const T* upload_values(values, n)                        structures, the same
//   void run(job, teams, doubles)                            job(team, index, memory) for index < teams, each with so many
//                                                            doubles of memory
//   const int* begin(job, plan, problems)                    optional: starts what it has for some gradients by itself; [head]:
//                                                            0 where the job has nothing left to do, nullptr: it has all
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

/// One call's forward, step by step.
template <class I, class Backend>
class Forward {
  public:
    Forward(Backend& backend, std::span<const HeadGroup> groups, const RoundingPlan& plan, I& instrument,
            const Instrument* watched, Heads<Backend>& heads)
        : backend_(backend),
          groups_(groups),
          schedule_(plan.schedule),
          plan_(plan),
          instrument_(instrument),
          heads_(heads),
          watch_(watched, groups.front().layer, groups.front().first_head, groups.size() * groups.front().q.size()) {}

    /// Sends the operands and starts the teams; with a tape, plays it.
    void start() {
        for (const HeadGroup& group : groups_) {
            cpu::check_call(group, plan_, false);
            cpu::Stage<I> stage(plan_, &instrument_, group.seed, group.layer);
            cpu::show_scale(stage, group, heads_.scales, schedule_);
            heads_.add(group, stage);
        }
        const HeadProblem& first = heads_.problems.front();
        n_q_ = first.n_q(), n_k_ = first.n_k(), d_v_ = first.v.cols;
        make_outputs(first.has_sink);
        run();
    }
    /// What the heads left, once they have ended; with_saved: what the plan saves for a backward, too (p, capped).
    std::vector<GroupForward> fetch(bool with_saved = true) {
        std::vector<GroupForward> out;
        std::size_t at = 0;
        for (const HeadGroup& group : groups_) {
            GroupForward& result = out.emplace_back();
            for (std::size_t h = 0; h < group.q.size(); ++h, ++at) {
                HeadForward& head = result.heads.emplace_back();
                head.o = fetched(backend_, outputs_[at].o);
                head.o_unrounded = fetched(backend_, outputs_[at].o_unrounded);
                head.lse = fetched(backend_, outputs_[at].lse, n_q_);
                if (outputs_[at].p.data != nullptr && with_saved) head.p = fetched(backend_, outputs_[at].p);
                if (outputs_[at].capped.data != nullptr && with_saved)
                    head.capped = fetched(backend_, outputs_[at].capped);
                if (outputs_[at].sink_p != nullptr) head.sink_p = fetched(backend_, outputs_[at].sink_p, n_q_);
            }
        }
        return out;
    }
    /// By head, on the side that computes.
    [[nodiscard]] const std::vector<ForwardOutputs>& outputs() const { return outputs_; }

  private:
    void make_outputs(bool has_sink) {
        for (std::size_t h = 0; h < heads_.problems.size(); ++h) {
            ForwardOutputs out;
            out.o = zero_matrix(backend_, n_q_, d_v_);
            out.o_unrounded = zero_matrix(backend_, n_q_, d_v_);
            out.lse = backend_.zeros(static_cast<std::size_t>(n_q_));
            if (schedule_.p_saved) {
                out.p = zero_matrix(backend_, n_q_, n_k_);
                if (heads_.scales.cap > 0) out.capped = zero_matrix(backend_, n_q_, n_k_);
                if (has_sink) out.sink_p = backend_.zeros(static_cast<std::size_t>(n_q_));
            }
            outputs_.push_back(out);
        }
    }
    void run() {
        const std::size_t count = heads_.problems.size();
        const HeadGroup& g0 = groups_.front();
        flat_plan_.push_back(flat(plan_));
        problems_ = heads_.problems;  // as they were sent: a back end may read them where they stand
        ForwardJob job;
        job.plan = sent_all(backend_, flat_plan_);
        job.problems = sent_all(backend_, problems_);
        job.seed = g0.seed;
        job.layer = g0.layer;
        job.watch = watch_.sent(backend_);
        job.watched = watch_.active();
        job.outputs = sent_all(backend_, outputs_);
        std::ptrdiff_t doubles = 0;
        job.slabs = forward_slabs(schedule_, n_q_, n_k_, d_v_, count, backend_.limits(), watch_.active(), doubles);
        const std::ptrdiff_t teams = n_q_ > 0 ? job.slabs.teams(static_cast<std::ptrdiff_t>(count)) : 0;
        if (job.watch.taped == 0) {
            job.last_first = true;
            backend_.run(job, teams, doubles);
            return;
        }
        run_taped(backend_, job, teams, doubles, forward_tape(schedule_, job.watch.taped, n_q_, n_k_, d_v_),
                  [&](std::ptrdiff_t, std::vector<double>& tape) {
                      for (const TapedTile& t : tiles_of(tape, g0.layer)) show(instrument_, t);
                  });
    }

    Backend& backend_;
    std::span<const HeadGroup> groups_;
    const Schedule& schedule_;
    const RoundingPlan& plan_;
    I& instrument_;
    Heads<Backend>& heads_;
    CallWatch watch_;
    std::ptrdiff_t n_q_ = 0, n_k_ = 0, d_v_ = 0;
    std::vector<FlatPlan> flat_plan_;
    std::vector<HeadProblem> problems_;
    std::vector<ForwardOutputs> outputs_;
};

/// One call's backward, step by step.
template <class I, class Backend>
class Backward {
  public:
    /// kept: what the forward left on the side that computes, where heads are those of its call; else nullptr, and P is sent.
    Backward(Backend& backend, std::span<const HeadGroup> groups, std::span<const GroupForward> forwards,
             const RoundingPlan& plan, I& instrument, const Instrument* watched, Heads<Backend>& heads,
             const std::vector<ForwardOutputs>* kept)
        : backend_(backend),
          groups_(groups),
          forwards_(forwards),
          schedule_(plan.schedule),
          instrument_(instrument),
          stage_(plan, &instrument, groups.front().seed, groups.front().layer),
          heads_(heads),
          kept_(kept),
          plan_(plan),
          per_group_(groups.front().q.size()),
          watch_(watched, groups.front().layer, groups.front().first_head, groups.size() * per_group_) {}

    std::vector<GroupBackward> run() {
        cpu::Unseen<I> repeated(&instrument_);  // the casts of q, k, v were shown in the forward
        cpu::Stage<I> unseen(plan_, repeated.get(), groups_.front().seed, groups_.front().layer);
        for (const HeadGroup& group : groups_) {
            cpu::check_call(group, plan_, true);
            if (kept_ == nullptr) heads_.add(group, unseen);
        }
        heads_.add_gradients(groups_, stage_);
        const HeadProblem& first = heads_.problems.front();
        n_q_ = first.n_q(), n_k_ = first.n_k(), d_ = first.q.cols, d_v_ = first.v.cols;
        prepare_rows();
        prepare_job();
        if (needs_dp(schedule_.delta_from)) delta_of_probabilities();
        if (n_q_ > 0 && schedule_.zero_sum != ZeroSum::none) run_part(BackwardPart::collect);
        if (n_q_ > 0 && n_k_ > 0) key_part();
        backend_.mark();  // without a query, too: dk and dv are zeros
        if (n_q_ > 0) query_part();
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
            if (schedule_.p_saved && kept_ != nullptr) {
                r.p = read_only((*kept_)[h].p);
                r.capped = read_only((*kept_)[h].capped);
            } else if (schedule_.p_saved) {
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
    [[nodiscard]] BackwardShape shape() const { return {n_q_, n_k_, d_, d_v_, heads_.scales.cap > 0}; }

    /// The job of a part, its teams, and their memory.
    std::ptrdiff_t teams_of(BackwardPart part, std::ptrdiff_t& doubles) {
        job_.part = part;
        job_.slabs = backward_slabs(schedule_, part, shape(), count(), backend_.limits(), watch_.active(), doubles);
        return job_.slabs.teams(static_cast<std::ptrdiff_t>(count()));
    }
    void run_part(BackwardPart part) {
        std::ptrdiff_t doubles = 0;
        const std::ptrdiff_t teams = teams_of(part, doubles);
        job_.last_first = true;
        if constexpr (requires { backend_.begin(job_, flat_plan_.front(), heads_.problems); })
            job_.open = job_.watched ? nullptr : backend_.begin(job_, flat_plan_.front(), heads_.problems);
        backend_.run(job_, teams, doubles);
    }
    template <class Play>
    void run_taped_part(BackwardPart part, std::uint64_t taped, Play&& play) {
        std::ptrdiff_t doubles = 0;
        const std::ptrdiff_t teams = teams_of(part, doubles);
        BackwardJob job = job_;
        job.last_first = false;  // the tape's order is that of the teams
        job.watch.taped = taped;
        run_taped(backend_, job, teams, doubles, backward_tape(schedule_, part, taped, shape()), play);
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

    /// dk and dv, and every tile of scores on the tape.
    void key_part() {
        const std::uint64_t taped = job_.watch.taped & ~taped_by_queries;
        if (taped == 0) return run_part(BackwardPart::key);
        run_taped_part(BackwardPart::key, taped, [&](std::ptrdiff_t, std::vector<double>& tape) {
            for (const TapedTile& t : tiles_of(tape, job_.layer)) show(instrument_, t);
        });
    }
    /// dq. Its tiles go to the instrument in the order of kernels/cpu, where key tiles are the outer loop, behind those of
    /// the other sites.
    void query_part() {
        if ((job_.watch.taped & taped_by_queries) == 0) return run_part(BackwardPart::query);
        const std::ptrdiff_t per_head = TileAxis(n_q_, schedule_.bwd_block_q).count();
        std::vector<std::vector<double>> tapes;
        run_taped_part(BackwardPart::query, taped_by_queries, [&](std::ptrdiff_t team, std::vector<double>& tape) {
            tapes.push_back(std::move(tape));
            if ((team + 1) % per_head != 0) return;
            std::vector<TapedTile> tiles;
            for (std::vector<double>& one : tapes)
                for (const TapedTile& t : tiles_of(one, job_.layer)) tiles.push_back(t);
            const bool up = schedule_.bwd_key_order == Order::ascending;
            std::ranges::stable_sort(tiles, {},
                                     [&](const TapedTile& t) { return up ? t.where.k_tile : -t.where.k_tile; });
            for (const TapedTile& t : tiles) show(instrument_, t);
            tapes.clear();
        });
    }

    /// dk and dv first, which are there while the teams of dq still work.
    std::vector<GroupBackward> gradients() {
        const cpu::GradientFactors factors(stage_, schedule_, heads_.scales);
        std::vector<GroupBackward> out(groups_.size());
        for (std::size_t g = 0; g < groups_.size(); ++g) {
            const int first_head = groups_[g].first_head;
            std::vector<Matrix> dk, dv;
            for (std::size_t at = g * per_group_; at < (g + 1) * per_group_; ++at) {
                dk.push_back(fetched_marked(backend_, rows_[at].dk));
                dv.push_back(fetched_marked(backend_, rows_[at].dv));
            }
            out[g].dk = cpu::reduce_group(stage_, Site::dk_cast, first_head, factors.scores, schedule_.group_reduce,
                                          std::move(dk));
            out[g].dv = cpu::reduce_group(stage_, Site::dv_cast, first_head, factors.values, schedule_.group_reduce,
                                          std::move(dv));
        }
        for (std::size_t at = 0; at < count(); ++at) {
            GroupBackward& of_group = out[at / per_group_];
            of_group.dq.push_back(fetched(backend_, rows_[at].dq));
            if (masks_[at].sink != nullptr)
                of_group.dsink.push_back(quantities_[at].sink_gradient(sink_p_[at], delta_[at]));
            cpu::finish_gradient(stage_, Site::dq_cast, heads_.problems[at].head, factors.scores, of_group.dq.back());
        }
        return out;
    }

    Backend& backend_;
    std::span<const HeadGroup> groups_;
    std::span<const GroupForward> forwards_;
    const Schedule& schedule_;
    I& instrument_;
    cpu::Stage<I> stage_;
    Heads<Backend>& heads_;
    const std::vector<ForwardOutputs>* kept_;
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
    Heads<Backend> heads(backend, groups, plan);
    const auto run = [&](auto& i) {
        detail::Forward call(backend, groups, plan, i, instrument, heads);
        call.start();
        return call.fetch();
    };
    if (instrument != nullptr) return run(*instrument);
    cpu::NoInstrument none;
    return run(none);
}

/// The same as attention_backward of each group. With an instrument, of one group: the tiles of each site come in the order
/// of kernels/cpu, those of dq_accumulate behind all others of their head.
template <class Backend>
std::vector<GroupBackward> backward(Backend& backend, std::span<const HeadGroup> groups,
                                    std::span<const GroupForward> forwards, const RoundingPlan& plan,
                                    Instrument* instrument = nullptr) {
    Heads<Backend> heads(backend, groups, plan);
    const auto run = [&](auto& i) {
        return detail::Backward(backend, groups, forwards, plan, i, instrument, heads, nullptr).run();
    };
    if (instrument != nullptr) return run(*instrument);
    cpu::NoInstrument none;
    return run(none);
}

/// Both passes of each group.
struct Attention {
    std::vector<GroupForward> forward;
    std::vector<GroupBackward> backward;
};
/// forward() and backward() in one call: q, k and v are cast and sent once, and what the backward reads of the forward, P where
/// the plan saves it, stays where it is, and is fetched where it is asked for.
template <class Backend>
Attention attention(Backend& backend, std::span<const HeadGroup> groups, const RoundingPlan& plan,
                    bool with_saved = true) {
    Heads<Backend> heads(backend, groups, plan);
    cpu::NoInstrument none;
    detail::Forward first(backend, groups, plan, none, nullptr, heads);
    first.start();
    cpu::Stage<cpu::NoInstrument> stage(plan, &none, groups.front().seed, groups.front().layer);
    heads.add_gradients(groups, stage);  // while the teams work
    Attention out;
    out.forward = first.fetch(with_saved);
    out.backward = detail::Backward(backend, groups, out.forward, plan, none, nullptr, heads, &first.outputs()).run();
    return out;
}

}  // namespace faultline::emulated
