// SPDX-License-Identifier: Apache-2.0
// The operands of a call on the side that computes, cast on the host as kernels/cpu casts them.
#pragma once

#include <span>
#include <type_traits>
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
template <class Backend>
Matrix fetched(Backend& backend, const View<double>& from) {
    Matrix to(from.rows, from.cols);
    backend.download(from.data, to.values.size(), to.values.data());
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

    /// `stage` shows the casts of q, k and v; `of_gradient`, where the call is a backward, that of dout.
    template <class I>
    void add(const HeadGroup& group, cpu::Stage<I>& stage, std::type_identity_t<cpu::Stage<I>>* of_gradient) {
        const Matrix k = cpu::cast_input(stage, Site::k_cast, group.first_head, group.k, scales.inputs);
        const Matrix v = cpu::cast_input(stage, Site::v_cast, group.first_head, group.v, 1.0);
        HeadProblem x;
        x.k = sent(backend_, k);
        x.v = sent(backend_, v);
        if (of_gradient != nullptr)
            x.k_for_dq = plan_.schedule.key_centering ? sent(backend_, cpu::centered_keys(plan_, group, k)) : x.k;
        x.scales = {scales.exponent,     scales.bwd_exponent, scales.natural,
                    scales.gradient,     scales.cap,          scales.into_cap,
                    scales.inverse_keep, scales.log2e,        scales.logit_per_score(plan_.schedule)};
        x.causal = group.causal;
        for (std::size_t h = 0; h < group.q.size(); ++h) {
            x.head = group.first_head + static_cast<int>(h);
            x.q = sent(backend_, cpu::cast_input(stage, Site::q_cast, x.head, group.q[h], scales.inputs));
            if (of_gradient != nullptr) {
                douts.push_back(cpu::cast_input(*of_gradient, Site::do_cast, x.head, group.dout[h], 1.0));
                x.dout = sent(backend_, douts.back());
            }
            if (!group.bias.empty()) x.bias = sent(backend_, Matrix(group.bias[h]));
            if (!group.dropout.empty()) x.kept = sent(backend_, Matrix(group.dropout[h]));
            x.has_sink = !group.sink.empty();
            if (x.has_sink) x.sink = group.sink[h];
            problems.push_back(x);
        }
    }

    cpu::Scales scales;
    std::vector<HeadProblem> problems;  ///< [group][head]
    std::vector<Matrix> douts;          ///< the same, of a backward

  private:
    Backend& backend_;
    const RoundingPlan& plan_;
};

}  // namespace faultline::emulated
