// SPDX-License-Identifier: Apache-2.0
#include <faultline/identification/evaluate.hpp>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include <faultline/base/parallel.hpp>

namespace faultline::identification {
namespace {

using attribution::RunOutputs;

/// Backward where the unit has a gradient; the outputs moved out of both passes, but o, which the forward keeps.
RunOutputs outputs_of(const Unit& unit, const GroupForward& forward, const RoundingPlan& plan,
                      const AttentionBackend& backend) {
    RunOutputs out;
    if (!unit.group.inputs.dout.empty())
        attribution::keep_gradients(backend.backward(unit.group.inputs, forward, plan, nullptr), out);
    for (const HeadForward& head : forward.heads) out.outputs[static_cast<std::size_t>(Output::o)].push_back(head.o);
    return out;
}

}  // namespace

const ObservedKernel& observed(const Unit& unit, const std::string& kernel) {
    for (const ObservedKernel& k : unit.layer->observed)
        if (k.name == kernel) return k;
    throw std::logic_error("a unit without the kernel that it is compared with");
}

Baseline Evaluator::baseline(const RoundingPlan& plan) const {
    Baseline base;
    base.forward.resize(units_.size());
    base.equal.resize(units_.size());
    base.matches.resize(units_.size());
    work_.expect(units_.size());
    parallel_for(units_.size(), threads_, [&](std::size_t u) {
        work_.step(kernel_ + ": nearest plan");
        base.forward[u] = backend_.forward(units_[u].group.inputs, plan, nullptr);
        base.matches[u] = compare(units_[u], outputs_of(units_[u], base.forward[u], plan, backend_),
                                  observed(units_[u], kernel_), &base.equal[u]);
    });
    return base;
}

std::vector<Evaluated> Evaluator::evaluate(const std::vector<Neighbour>& neighbours, const Baseline& base) const {
    const std::size_t tasks = neighbours.size() * units_.size();
    std::vector<Evaluated> parts(tasks);
    work_.expect(tasks);
    parallel_for(tasks, threads_, [&](std::size_t task) {
        const Neighbour& neighbour = neighbours[task / units_.size()];
        const std::size_t u = task % units_.size();
        const Unit& unit = units_[u];
        work_.step(kernel_ + ": " + neighbour.field);
        GroupForward own;
        EqualFlags equal;
        try {
            if (!neighbour.backward_only) own = backend_.forward(unit.group.inputs, neighbour.plan, nullptr);
            const GroupForward& forward = neighbour.backward_only ? base.forward[u] : own;
            parts[task].match =
                compare(unit, outputs_of(unit, forward, neighbour.plan, backend_), observed(unit, kernel_), &equal);
        } catch (const NoRoom&) {
            return;
        }
        parts[task].flips = flips(base.equal[u], equal);
    });
    std::vector<Evaluated> sums(neighbours.size());
    for (std::size_t task = 0; task < tasks; ++task) {
        Evaluated& sum = sums[task / units_.size()];
        sum.match.add(parts[task].match);
        sum.flips.add(parts[task].flips);
    }
    return sums;
}

}  // namespace faultline::identification
