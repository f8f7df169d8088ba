// SPDX-License-Identifier: Apache-2.0
// Runs a plan with sets of its sites exact, or exact but for them, on the layers that targets name.
#pragma once

#include <array>
#include <memory>
#include <vector>

#include <faultline/attribution/group_run.hpp>
#include <faultline/base/work_count.hpp>
#include <faultline/bisection/bisect.hpp>

namespace faultline::bisection {

class Oracle {
  public:
    Oracle(const Capture& capture, const RoundingPlan& plan, const BisectionOptions& options,
           const std::vector<Target>& targets, BisectionKind kind);

    [[nodiscard]] const std::vector<Site>& sites() const { return sites_; }
    [[nodiscard]] const std::vector<Site>& untouched() const { return untouched_; }
    /// What the plan's own run is, for each target.
    struct PlanValue {
        WideReal value;
        std::size_t nonfinite = 0;                     ///< elements of the target's output that are NaN or infinite
        WideReal error_norm, truth_norm, truth_bound;  ///< Frobenius, of the plan's run and of the target's output
    };
    [[nodiscard]] std::vector<PlanValue> plan_values() const;
    /// The targets' values for every set. The forward is run once for the sets that leave it the same.
    [[nodiscard]] std::vector<std::vector<WideReal>> values(const std::vector<SiteMask>& sets) const;

  private:
    /// One key head of a layer that a target names.
    struct Unit {
        std::size_t layer = 0;  // index into layers_
        attribution::Group group;
        GroupTruth truth;
        attribution::RunOutputs plan;
        std::array<long double, 4> plan_error_squared{};
        std::vector<double> direction;
    };
    /// What a run leaves of one unit, by output.
    struct UnitSums {
        std::array<ErrorSums, 4> errors;
        std::array<long double, 4> distance_squared{};  ///< infinite where one of two elements alone is finite
    };
    struct LayerPlan {
        const LayerCapture* layer;
        RoundingPlan plan;  // settled for the layer's head size
        std::vector<Output> outputs;
    };

    [[nodiscard]] RoundingPlan plan_of(const LayerPlan& layer, SiteMask set) const;
    [[nodiscard]] UnitSums measure(const Unit& unit, const attribution::RunOutputs& run) const;
    [[nodiscard]] std::vector<PlanValue> values_of(const std::vector<const UnitSums*>& by_unit) const;
    void choose_sites();
    void prepare_units();

    const BisectionOptions& options_;
    std::vector<Target> targets_;
    BisectionKind kind_;
    std::vector<LayerPlan> layers_;
    std::vector<Unit> units_;
    std::vector<Site> sites_, untouched_;
    SiteMask forward_sites_ = 0;
    mutable WorkCount count_;
};

}  // namespace faultline::bisection
