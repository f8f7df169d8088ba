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

std::shared_ptr<const ComparedRun> Evaluator::run(const Unit& unit, const GroupForward& forward,
                                                  const RoundingPlan& plan, const std::string& key) const {
    auto result = compared(unit, outputs_of(unit, forward, plan, backend_), observed(unit, kernel_));
    known_->keep(unit, key, result);
    return result;
}

Baseline Evaluator::baseline(const RoundingPlan& plan) const {
    Baseline base;
    base.plan = plan;
    base.forward.resize(units_.size());
    base.equal.resize(units_.size());
    base.matches.resize(units_.size());
    const std::string key = key_of(plan);
    work_.expect(units_.size());
    parallel_for(units_.size(), threads_, [&](std::size_t u) {
        work_.step(kernel_ + ": nearest plan");
        std::shared_ptr<const ComparedRun> its = known_->find(units_[u], key);
        if (its == nullptr) {
            base.forward[u] = backend_.forward(units_[u].group.inputs, plan, nullptr);
            its = run(units_[u], base.forward[u], plan, key);
        }
        base.matches[u] = its->matches_in(units_[u].rows);
        base.equal[u] = its->equal_in(units_[u].rows);
    });
    return base;
}

std::vector<Evaluated> Evaluator::evaluate(const std::vector<Neighbour>& neighbours, Baseline& base) const {
    const std::size_t tasks = neighbours.size() * units_.size();
    std::vector<Evaluated> parts(tasks);
    std::vector<std::string> keys;
    std::vector<std::shared_ptr<const ComparedRun>> runs(tasks);
    std::vector<std::size_t> forwards;  // units whose forward is needed
    for (const Neighbour& neighbour : neighbours) keys.push_back(key_of(neighbour.plan));
    for (std::size_t u = 0; u < units_.size(); ++u) {
        bool asked = false;
        for (std::size_t n = 0; n < neighbours.size(); ++n) {
            runs[n * units_.size() + u] = known_->find(units_[u], keys[n]);
            asked = asked || (neighbours[n].backward_only && runs[n * units_.size() + u] == nullptr);
        }
        if (asked && base.forward[u].heads.empty()) forwards.push_back(u);
    }
    parallel_for(forwards.size(), threads_, [&](std::size_t i) {
        work_.check();
        base.forward[forwards[i]] = backend_.forward(units_[forwards[i]].group.inputs, base.plan, nullptr);
    });
    work_.expect(tasks);
    parallel_for(tasks, threads_, [&](std::size_t task) {
        const std::size_t n = task / units_.size(), u = task % units_.size();
        const Neighbour& neighbour = neighbours[n];
        const Unit& unit = units_[u];
        work_.step(kernel_ + ": " + neighbour.field);
        try {
            if (runs[task] == nullptr && neighbour.backward_only)
                runs[task] = run(unit, base.forward[u], neighbour.plan, keys[n]);
            else if (runs[task] == nullptr)
                runs[task] =
                    run(unit, backend_.forward(unit.group.inputs, neighbour.plan, nullptr), neighbour.plan, keys[n]);
        } catch (const NoRoom&) {
            return;
        }
        parts[task] = {runs[task]->matches_in(unit.rows), flips(base.equal[u], runs[task]->equal_in(unit.rows))};
        runs[task].reset();
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
