// SPDX-License-Identifier: Apache-2.0
#include <faultline/identification/known_runs.hpp>

#include <utility>

#include <faultline/plan/plan_toml.hpp>

namespace faultline::identification {
namespace {

constexpr std::size_t most_bytes = std::size_t{256} << 20;

std::size_t bytes_of(const EqualFlags& flags) {
    std::size_t sum = 0;
    for (const auto& output : flags) sum += output.size() * sizeof output[0];
    return sum;
}

}  // namespace

EqualFlags ComparedRun::equal_in(Rows rows) const {
    if (rows != Rows::all) return rows == Rows::even ? even.equal : odd.equal;
    EqualFlags both = even.equal;
    for (std::size_t o = 0; o < both.size(); ++o)
        both[o].insert(both[o].end(), odd.equal[o].begin(), odd.equal[o].end());
    return both;
}

OutputMatches ComparedRun::matches_in(Rows rows) const {
    if (rows != Rows::all) return rows == Rows::even ? even.matches : odd.matches;
    OutputMatches both = even.matches;
    both.add(odd.matches);
    return both;
}

std::shared_ptr<const ComparedRun> compared(const Unit& unit, const attribution::RunOutputs& run,
                                            const ObservedKernel& kernel) {
    auto result = std::make_shared<ComparedRun>();
    Unit half = unit;
    half.rows = Rows::even;
    result->even.matches = compare(half, run, kernel, &result->even.equal);
    half.rows = Rows::odd;
    result->odd.matches = compare(half, run, kernel, &result->odd.equal);
    return result;
}

std::string key_of(const RoundingPlan& plan) {
    RoundingPlan unnamed = plan;
    unnamed.name = "plan";
    unnamed.description.clear();
    unnamed.source.clear();
    return to_toml(unnamed);
}

KnownRuns::Key KnownRuns::key(const Unit& unit, const std::string& plan) {
    return {unit.layer, unit.group.batch, unit.group.kv_head, plan};
}

std::shared_ptr<const ComparedRun> KnownRuns::find(const Unit& unit, const std::string& plan) const {
    const std::lock_guard lock(mutex_);
    const auto at = runs_.find(key(unit, plan));
    return at == runs_.end() ? nullptr : at->second;
}

void KnownRuns::keep(const Unit& unit, const std::string& plan, std::shared_ptr<const ComparedRun> run) {
    const std::size_t bytes = bytes_of(run->even.equal) + bytes_of(run->odd.equal) + plan.size();
    const std::lock_guard lock(mutex_);
    if (bytes_ + bytes > most_bytes) return;
    if (runs_.emplace(key(unit, plan), std::move(run)).second) bytes_ += bytes;
}

}  // namespace faultline::identification
