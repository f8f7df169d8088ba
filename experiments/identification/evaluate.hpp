// SPDX-License-Identifier: Apache-2.0
// Plans run on units in parallel, and compared with what kernels returned.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <faultline/base/work_count.hpp>
#include <faultline/identification/identify.hpp>
#include <faultline/identification/known_runs.hpp>

namespace faultline::identification {

/// The plan that a search stands on, run on every unit: the forward is kept for the changes that leave it alone.
struct Baseline {
    RoundingPlan plan;
    std::vector<GroupForward> forward;   ///< [unit]; without heads where the run was known, until evaluate() needs it
    std::vector<EqualFlags> equal;       ///< [unit]
    std::vector<OutputMatches> matches;  ///< [unit]
};

/// What a changed plan did.
struct Evaluated {
    OutputMatches match;
    Flips flips;
};

/// One kernel on its units. References outlive it.
class Evaluator {
  public:
    /// `known`: runs of this kernel that need not be made again, and where those that are made are kept.
    Evaluator(std::span<const Unit> units, const std::string& kernel, int threads, WorkCount& work,
              const AttentionBackend& backend, std::shared_ptr<KnownRuns> known = std::make_shared<KnownRuns>())
        : units_(units),
          kernel_(kernel),
          threads_(backend.calls_at_once(threads)),
          work_(work),
          backend_(backend),
          known_(std::move(known)) {}

    /// The same of one unit alone.
    [[nodiscard]] Evaluator of_unit(std::size_t unit) const {
        Evaluator one(*this);
        one.units_ = units_.subspan(unit, 1);
        return one;
    }
    [[nodiscard]] Baseline baseline(const RoundingPlan& plan) const;
    /// Every neighbour against the baseline that it is a neighbour of, which gets the forwards that it lacks and a change of the
    /// backward alone asks for. On a unit that the back end has not the memory for (tiles as
    /// long as the sequence, a saved P) it wins and loses nothing.
    [[nodiscard]] std::vector<Evaluated> evaluate(const std::vector<Neighbour>& neighbours, Baseline& base) const;

  private:
    /// Runs the backward, keeps what is compared.
    std::shared_ptr<const ComparedRun> run(const Unit& unit, const GroupForward& forward, const RoundingPlan& plan,
                                           const std::string& key) const;

    std::span<const Unit> units_;
    const std::string& kernel_;
    int threads_;
    WorkCount& work_;
    const AttentionBackend& backend_;
    std::shared_ptr<KnownRuns> known_;
};

/// The kernel of that name in the unit's layer.
[[nodiscard]] const ObservedKernel& observed(const Unit& unit, const std::string& kernel);

}  // namespace faultline::identification
