// SPDX-License-Identifier: Apache-2.0
#include <faultline/cpu/attention.hpp>

#include <stdexcept>

#include <faultline/base/error.hpp>
#include <faultline/cpu/backward.hpp>
#include <faultline/cpu/forward.hpp>
#include <faultline/cpu/group_parts.hpp>

namespace faultline {
namespace {

using namespace cpu;

void require(bool condition, const char* what) {
    if (!condition) throw std::invalid_argument(what);
}

}  // namespace

void cpu::check_call(const HeadGroup& in, const RoundingPlan& plan, bool backward) {
    if (const std::string problem = problem_with(plan, extras_of(in)); !problem.empty()) throw RequestError(problem);
    require(!in.q.empty(), "attention: a head group needs at least one query head");
    require(in.k.rows == in.v.rows, "attention: k and v must have the same number of keys");
    for (const auto& q : in.q)
        require(q.cols == in.k.cols && q.rows == in.q[0].rows, "attention: q must be [n_q, head_dim of k]");
    require(in.bias.empty() || in.bias.size() == in.q.size(),
            "attention: bias must be given for every query head or none");
    for (const auto& b : in.bias)
        require(b.rows == in.q[0].rows && b.cols == in.k.rows, "attention: bias must be [n_q, n_k]");
    require(in.softcap >= 0 && std::isfinite(in.softcap), "attention: softcap must be a finite number, 0 or more");
    require(in.sink.empty() || in.sink.size() == in.q.size(),
            "attention: a sink must be given for every query head or none");
    require(in.dropout.empty() || in.dropout.size() == in.q.size(),
            "attention: a dropout mask must be given for every query head or none");
    for (const auto& m : in.dropout)
        require(m.rows == in.q[0].rows && m.cols == in.k.rows, "attention: a dropout mask must be [n_q, n_k]");
    require(in.keep > 0 && in.keep <= 1, "attention: keep must be above 0 and at most 1");
    if (!backward) return;
    require(in.dout.size() == in.q.size(), "attention: dout must be given for every query head");
    for (const auto& d : in.dout)
        require(d.rows == in.q[0].rows && d.cols == in.v.cols, "attention: dout must be [n_q, head_dim of v]");
}

namespace {

template <class I>
GroupForward forward_group(const HeadGroup& in, const RoundingPlan& plan, I* instrument) {
    check_call(in, plan, false);
    Stage<I> stage(plan, instrument, in.seed, in.layer);
    const Scales scales(plan, in);
    show_scale(stage, in, scales, plan.schedule);
    const Matrix k_t = transposed(cast_input(stage, Site::k_cast, in.first_head, in.k, scales.inputs).view());
    const Matrix v = cast_input(stage, Site::v_cast, in.first_head, in.v, 1.0);
    GroupForward out;
    for (std::size_t h = 0; h < in.q.size(); ++h) {
        const int head = in.first_head + static_cast<int>(h);
        const Matrix q = cast_input(stage, Site::q_cast, head, in.q[h], scales.inputs);
        const Mask mask = mask_of(in, h);
        out.heads.push_back(ForwardHead<I>(stage, plan, scales, mask, head, q.view(), k_t.view(), v.view()).run());
    }
    return out;
}

template <class I>
GroupBackward backward_group(const HeadGroup& in, const GroupForward& fwd, const RoundingPlan& plan, I* instrument) {
    check_call(in, plan, true);
    Stage<I> stage(plan, instrument, in.seed, in.layer);
    const Scales scales(plan, in);
    // The casts of q, k, v were shown in the forward.
    Unseen<I> repeated(instrument);
    Stage<I> unseen(plan, repeated.get(), in.seed, in.layer);
    const Matrix k = cast_input(unseen, Site::k_cast, in.first_head, in.k, scales.inputs);
    const Matrix k_t = transposed(k.view());
    const Matrix k_for_dq = centered_keys(plan, in, k);
    const Matrix v_t = transposed(cast_input(unseen, Site::v_cast, in.first_head, in.v, 1.0).view());
    const Schedule& schedule = plan.schedule;
    const GradientFactors factors(stage, schedule, scales);
    GroupBackward out;
    std::vector<Matrix> dk, dv;
    for (std::size_t h = 0; h < in.q.size(); ++h) {
        const int head = in.first_head + static_cast<int>(h);
        const Matrix q = cast_input(unseen, Site::q_cast, head, in.q[h], scales.inputs);
        const Matrix dout = cast_input(stage, Site::do_cast, head, in.dout[h], 1.0);
        const Mask mask = mask_of(in, h);
        BackwardHead<I> backward(stage, plan, scales, mask, head,
                                 {q.view(), dout.view(), k_t.view(), v_t.view(), k_for_dq.view()}, fwd.heads.at(h));
        backward.run(out.dq.emplace_back(), dk.emplace_back(), dv.emplace_back());
        if (mask.sink != nullptr) out.dsink.push_back(backward.sink_gradient());
        finish_gradient(stage, Site::dq_cast, head, factors.scores, out.dq.back());
    }
    out.dk = reduce_group(stage, Site::dk_cast, in.first_head, factors.scores, schedule.group_reduce, std::move(dk));
    out.dv = reduce_group(stage, Site::dv_cast, in.first_head, factors.values, schedule.group_reduce, std::move(dv));
    return out;
}

}  // namespace

Extras extras_of(const HeadGroup& in) { return {in.softcap > 0, !in.sink.empty(), !in.dropout.empty()}; }

bool is_visible(const HeadGroup& in, std::size_t head, std::ptrdiff_t query, std::ptrdiff_t key) {
    if (key >= visible_keys(query, in.q[head].rows, in.k.rows, in.causal)) return false;
    return in.bias.empty() || in.bias[head](query, key) != -infinity;
}

std::vector<double> mean_visible_key(const HeadGroup& in, MatrixView<const double> k) {
    std::vector<double> mean(static_cast<std::size_t>(k.cols), 0.0);
    std::ptrdiff_t seen = 0;
    for (std::ptrdiff_t j = 0; j < k.rows; ++j) {
        bool visible = false;
        for (std::size_t h = 0; h < in.q.size() && !visible; ++h)
            for (std::ptrdiff_t i = in.q[h].rows - 1; i >= 0 && !visible; --i) visible = is_visible(in, h, i, j);
        if (!visible) continue;
        ++seen;
        for (std::ptrdiff_t c = 0; c < k.cols; ++c) mean[static_cast<std::size_t>(c)] += k(j, c);
    }
    if (seen > 0)
        for (double& x : mean) x /= static_cast<double>(seen);
    return mean;
}

GroupForward attention_forward(const HeadGroup& in, const RoundingPlan& plan, Instrument* instrument) {
    if (instrument != nullptr) return forward_group(in, plan, instrument);
    NoInstrument none;
    return forward_group(in, plan, &none);
}

GroupBackward attention_backward(const HeadGroup& in, const GroupForward& fwd, const RoundingPlan& plan,
                                 Instrument* instrument) {
    if (instrument != nullptr) return backward_group(in, fwd, plan, instrument);
    NoInstrument none;
    return backward_group(in, fwd, plan, &none);
}

}  // namespace faultline
