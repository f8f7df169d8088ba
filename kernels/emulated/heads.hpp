// SPDX-License-Identifier: Apache-2.0
// The operands of a call on the side that computes, cast on the host as kernels/cpu casts them.
#pragma once

#include <span>
#include <utility>
#include <vector>

#include <faultline/cpu/group_parts.hpp>
#include <faultline/emulated/problem.hpp>

namespace faultline::emulated {

inline FlatPlan flat(const RoundingPlan& plan) {
    FlatPlan out;
    out.schedule = plan.schedule;
    for (std::size_t s = 0; s < site_count; ++s) out.rules[s] = plan[static_cast<Site>(s)];
    return out;
}

template <class Backend>
View<double> zero_matrix(Backend& backend, std::ptrdiff_t rows, std::ptrdiff_t cols) {
    return {backend.zeros(static_cast<std::size_t>(rows * cols)), rows, cols, cols};
}
template <class Backend>
View<const double> sent(Backend& backend, const Matrix& x) {
    return {backend.upload(x.values.data(), x.values.size()), x.rows, x.cols, x.cols};
}
inline View<const double> read_only(const View<double>& x) { return {x.data, x.rows, x.cols, x.stride}; }
template <class Backend>
Matrix fetched(Backend& backend, const View<double>& from) {
    Matrix to(from.rows, from.cols);
    backend.download(from.data, to.values.size(), to.values.data());
    return to;
}
template <class Backend>
Matrix fetched_marked(Backend& backend, const View<double>& from) {
    Matrix to(from.rows, from.cols);
    backend.download_marked(from.data, to.values.size(), to.values.data());
    return to;
}
template <class Backend>
std::vector<double> fetched(Backend& backend, const double* from, std::ptrdiff_t count) {
    std::vector<double> to(static_cast<std::size_t>(count));
    backend.download(from, to.size(), to.data());
    return to;
}
template <class Backend>
double* sent(Backend& backend, const std::vector<double>& x) {
    double* to = backend.zeros(x.size());
    backend.write(to, x.data(), x.size());
    return to;
}

/// All groups have the shapes of the first.
template <class Backend>
class Heads {
  public:
    Heads(Backend& backend, std::span<const HeadGroup> groups, const RoundingPlan& plan)
        : scales(plan, groups.front()), backend_(backend), plan_(plan) {}

    /// The operands of a forward of the group; `stage` shows the casts of q, k and v.
    template <class I>
    void add(const HeadGroup& group, cpu::Stage<I>& stage) {
        Matrix k = cpu::cast_input(stage, Site::k_cast, group.first_head, group.k, scales.inputs);
        HeadProblem x;
        x.k = sent(backend_, k);
        x.v = sent(backend_, cpu::cast_input(stage, Site::v_cast, group.first_head, group.v, 1.0));
        if (plan_.schedule.key_centering) keys_.push_back(std::move(k));
        x.scales = {scales.exponent,     scales.bwd_exponent, scales.natural,
                    scales.gradient,     scales.cap,          scales.into_cap,
                    scales.inverse_keep, scales.log2e,        scales.logit_per_score(plan_.schedule)};
        x.causal = group.causal;
        for (std::size_t h = 0; h < group.q.size(); ++h) {
            x.head = group.first_head + static_cast<int>(h);
            x.q = sent(backend_, cpu::cast_input(stage, Site::q_cast, x.head, group.q[h], scales.inputs));
            if (!group.bias.empty()) x.bias = sent(backend_, Matrix(group.bias[h]));
            if (!group.dropout.empty()) x.kept = sent(backend_, Matrix(group.dropout[h]));
            x.has_sink = !group.sink.empty();
            if (x.has_sink) x.sink = group.sink[h];
            problems.push_back(x);
        }
    }

    /// What a backward of all groups takes beside them, once; `stage` shows the cast of dout.
    template <class I>
    void add_gradients(std::span<const HeadGroup> groups, cpu::Stage<I>& stage) {
        if (!douts.empty()) return;
        for (std::size_t g = 0; g < groups.size(); ++g) {
            const std::size_t per_group = groups[g].q.size();
            View<const double> centered;
            if (plan_.schedule.key_centering) centered = sent(backend_, cpu::centered_keys(plan_, groups[g], keys_[g]));
            for (std::size_t h = 0; h < per_group; ++h) {
                HeadProblem& x = problems[g * per_group + h];
                douts.push_back(cpu::cast_input(stage, Site::do_cast, x.head, groups[g].dout[h], 1.0));
                x.dout = sent(backend_, douts.back());
                x.k_for_dq = plan_.schedule.key_centering ? centered : x.k;
            }
        }
    }

    cpu::Scales scales;
    std::vector<HeadProblem> problems;  ///< [group][head]
    std::vector<Matrix> douts;          ///< the same, of a backward

  private:
    Backend& backend_;
    const RoundingPlan& plan_;
    std::vector<Matrix> keys_;  ///< of each group, after their cast; with key centering alone
};

}  // namespace faultline::emulated
