// SPDX-License-Identifier: Apache-2.0
#include <faultline/attribution/counterfactuals.hpp>

#include <cmath>

namespace faultline::attribution {

void OrderedSum::add(std::size_t number, std::array<std::vector<double>, 4> errors) {
    const std::lock_guard lock(mutex_);
    waiting_.emplace(number, std::move(errors));
    for (auto it = waiting_.begin(); it != waiting_.end() && it->first == next_; it = waiting_.erase(it), ++next_)
        for (std::size_t o = 0; o < total_.size(); ++o) {
            const std::vector<double>& e = it->second[o];
            if (total_[o].size() < e.size()) total_[o].resize(e.size(), 0.0);
            for (std::size_t i = 0; i < e.size(); ++i) total_[o][i] += e[i];
        }
}

std::array<SiteSums, 4> site_counterfactuals(const Group& group, const GroupBase& base, const RoundingPlan& plan,
                                             const Faults& faults, Site site, const std::vector<Output>& outputs,
                                             std::size_t number, OrderedSum& sum) {
    std::array<SiteSums, 4> found;
    std::array<std::vector<double>, 4> alone_errors;
    const RunOutputs alone = run_plan(group, plan.exact_except(site), faults.only(site));
    const RunOutputs repaired = run_plan(group, plan.repaired(site), faults.without(site));
    for (const Output output : outputs) {
        const auto o = static_cast<std::size_t>(output);
        found[o].alone = errors_of(alone[output], base.truth, output, base.direction);
        found[o].repaired = errors_of(repaired[output], base.truth, output, base.direction);
        alone_errors[o] = error_vector(alone[output], base.truth, output);
        const std::vector<double>& e = base.plan_error[o];
        std::size_t i = 0;
        for (std::size_t m = 0; m < base.plan[output].size(); ++m) {
            const std::vector<double>& with = base.plan[output][m].values;
            const std::vector<double>& without = repaired[output][m].values;
            for (std::size_t a = 0; a < with.size(); ++a, ++i) {
                const long double removed = static_cast<long double>(with[a]) - without[a];
                const long double beyond = removed - alone_errors[o][i];
                if (!std::isfinite(removed * e[i]) || !std::isfinite(beyond)) continue;
                found[o].share.removed_dot_plan += removed * e[i];
                found[o].share.interaction_squared += beyond * beyond;
            }
        }
    }
    sum.add(number, std::move(alone_errors));
    return found;
}

long double unexplained_squared(const std::vector<double>& plan_error, const std::vector<double>& total) {
    long double squares = 0;
    for (std::size_t i = 0; i < plan_error.size(); ++i) {
        const long double rest = static_cast<long double>(plan_error[i]) - (total.empty() ? 0.0 : total[i]);
        if (std::isfinite(rest)) squares += rest * rest;
    }
    return squares;
}

}  // namespace faultline::attribution
