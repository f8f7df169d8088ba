// SPDX-License-Identifier: Apache-2.0
// What attribution runs on a layer, in two stages of independent units: truths and plain runs, then counterfactuals and
// corrections.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <vector>

#include <faultline/attribution/attribution.hpp>
#include <faultline/attribution/counterfactuals.hpp>
#include <faultline/base/work_count.hpp>

namespace faultline::attribution {

/// How the layer's work is cut: groups of heads, sites with counterfactuals, corrections, outputs. The layer and the
/// options outlive it.
struct Work {
    const LayerCapture& layer;
    RoundingPlan plan;
    std::vector<Group> groups;
    std::vector<std::size_t> places;  ///< the outputs asked for, then the lse where a kernel left one
    std::vector<Site> sites;
    bool all_sites = true;                ///< that round and are reached: only then do their effects add up to anything
    std::vector<Correction> corrections;  ///< those asked for that the layer's kernel can run
    Faults faults;
    const AttentionBackend& backend;  ///< where plans run

    /// Whether several query heads share a key head.
    [[nodiscard]] bool grouped() const { return layer.heads() > layer.kv_heads(); }

    /// RequestError where the options ask for what the layer or the plan does not have, and where the
    /// plan, or no correction asked for, can run what the layer has.
    Work(const LayerCapture& layer, const RoundingPlan& plan, const AttributionOptions& options);
};

/// First stage, per group: truth, the plan with its recorder, the exact plan in binary64.
struct FirstStage {
    std::vector<GroupBase> bases;
    std::vector<std::unique_ptr<TileRecorder>> recorders;
    std::vector<RunOutputs> exact;
    std::vector<TruthVerification> verified;

    FirstStage(const Work& work, const AttributionOptions& options, WorkCount& count);
};

/// Squares that a level is made of, summed over groups.
struct LevelSums {
    WideReal rounding, truth;

    void add(const GroupTruth& group, std::size_t place, const std::optional<Format>& format);
    void join(const LevelSums& next);
    [[nodiscard]] WideReal level() const;
};

/// A correction on one group.
struct CorrectedGroup {
    std::array<ErrorSums, place_count> errors;
    std::array<LevelSums, place_count> levels;  ///< of its own truth, where that is another
};

/// Second stage: counterfactuals and corrections, by (group, item).
struct SecondStage {
    std::vector<std::vector<PlaceSums>> sites;             ///< [site][group]
    std::vector<std::vector<CorrectedGroup>> corrections;  ///< [correction][group]

    SecondStage(const Work& work, const FirstStage& first, const AttributionOptions& options, WorkCount& count);
};

}  // namespace faultline::attribution
