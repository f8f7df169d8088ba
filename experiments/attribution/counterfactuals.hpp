// SPDX-License-Identifier: Apache-2.0
// The counterfactuals of one head group: what each site does alone, and what its repair removes.
#pragma once

#include <array>
#include <map>
#include <mutex>
#include <vector>

#include <faultline/attribution/group_run.hpp>

namespace faultline::attribution {

/// Inner products of error vectors, summed over groups in order.
struct ShareSums {
    long double removed_dot_plan = 0;     ///< <E - E_repaired, E>
    long double interaction_squared = 0;  ///< |(E - E_repaired) - E_alone|^2
    void join(const ShareSums& next) {
        removed_dot_plan += next.removed_dot_plan;
        interaction_squared += next.interaction_squared;
    }
};

/// One site's effect on one output of one group.
struct SiteSums {
    ErrorSums alone, repaired;
    ShareSums share;
};

/// What is known of a group before its counterfactuals run.
struct GroupBase {
    GroupTruth truth;
    RunOutputs plan;                                  ///< of the plan itself
    std::array<std::vector<double>, 4> plan_error;    ///< by Output
    std::array<long double, 4> plan_error_squared{};  ///< finite elements
    std::vector<double> direction;                    ///< mean key
    std::vector<Realised> realised;                   ///< what each fault did in the plan's run
};

/// Adds up sum over sites of E_alone in site order, whatever order the sites are computed in, so that the result does not
/// depend on the number of threads.
class OrderedSum {
  public:
    /// `count` contributions will come, numbered 0 … count-1.
    void add(std::size_t number, std::array<std::vector<double>, 4> errors);
    [[nodiscard]] const std::array<std::vector<double>, 4>& total() const { return total_; }

  private:
    std::mutex mutex_;
    std::size_t next_ = 0;
    std::map<std::size_t, std::array<std::vector<double>, 4>> waiting_;
    std::array<std::vector<double>, 4> total_;
};

/// Runs both counterfactuals of `site`; E_alone goes to `sum` under `number`.
std::array<SiteSums, 4> site_counterfactuals(const Group& group, const GroupBase& base, const RoundingPlan& plan,
                                             const Faults& faults, Site site, const std::vector<Output>& outputs,
                                             std::size_t number, OrderedSum& sum);

/// |E - total|^2 over finite elements.
long double unexplained_squared(const std::vector<double>& plan_error, const std::vector<double>& total);

}  // namespace faultline::attribution
