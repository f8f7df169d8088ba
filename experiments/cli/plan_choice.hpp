// SPDX-License-Identifier: Apache-2.0
// Which plan a command on a capture works under: the one that --plan names, or without it, in every command alike, the preset
// that reproduces most of the kernel that the capture holds.
#pragma once

#include <string>
#include <string_view>

#include <faultline/attribution/capture.hpp>
#include <faultline/attribution/plan_origin.hpp>
#include <faultline/cli/command.hpp>
#include <faultline/cli/terminal.hpp>
#include <faultline/identification/nearer_plans.hpp>
#include <faultline/plan/plan.hpp>

namespace faultline::cli {

/// What --plan says where it is not given.
inline constexpr std::string_view automatic_plan = "auto";

/// Declares --plan. `what`: "The kernel's numerics".
void declare_plan(Settings& settings, std::string& name, const std::string& what);

/// A plan, and where it comes from.
struct PlanChoice {
    RoundingPlan plan;  ///< before choose(): the one named, else fa2
    PlanOrigin origin;
    bool preset = false;    ///< named by its name, not as a file: it follows the formats of the kernel that it is for
    Identification ranked;  ///< of the presets; empty until choose() or compare() has ranked them

    /// RequestError where the plan that is named is not there, or is wrong.
    PlanChoice(const std::string& name, const Settings& settings);

    /// A preset that was named stands in the formats of the kernel's tensors (fp16), under the name that stored_as() gives
    /// it; a file's plan stands as it is, and origin.storage says where its formats are others. Where no plan was named:
    /// takes the preset nearest to `kernel`; fa2 where the capture has no output of it, or no preset a tenth of its
    /// elements. Of `options`, heads, threads, seed, backend and cancelled are read.
    void choose(const Capture& capture, const std::string& kernel, const AttributionOptions& options,
                const Invocation& call);
    /// Ranks the presets beside the plan, on all kernels or on one, and says in `origin` which are nearer to a kernel.
    void compare(const Capture& capture, const std::string& kernel, const AttributionOptions& options,
                 const Invocation& call);
};

/// What choose() and compare() read, from the options of a command, which has heads, threads, seed and backend.
template <class Options>
[[nodiscard]] AttributionOptions ranking_of(const Options& options) {
    AttributionOptions ranking;
    ranking.heads = options.heads;
    ranking.threads = options.threads;
    ranking.seed = options.seed;
    ranking.backend = options.backend;
    ranking.cancelled = interrupted;
    return ranking;
}

/// Whether the plan rounds stochastically at some site: else no seed changes what it computes.
[[nodiscard]] bool draws(const RoundingPlan& plan);

/// The kernel that a command is about where it names none: flash, or the first by name; empty where there is none.
[[nodiscard]] std::string kernel_asked_about(const Capture& capture);

}  // namespace faultline::cli
