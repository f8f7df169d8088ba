// SPDX-License-Identifier: Apache-2.0
// What `faultline attribute` was asked for: its settings, turned into the options of an attribution, and refused where they mean
// nothing. RequestError names the setting.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <faultline/attribution/attribution.hpp>
#include <faultline/cli/capture_request.hpp>
#include <faultline/cli/plan_choice.hpp>
#include <faultline/cli/settings.hpp>
#include <faultline/corrections/correction.hpp>
#include <faultline/injectors/fault.hpp>

namespace faultline::cli {

struct AttributeSettings {
    CaptureRequest request;
    std::string plan{automatic_plan}, report;
    std::vector<std::string> outputs, sites, kernels;
    std::vector<std::string> corrections{"all"};
    std::vector<std::string> injections;
    std::int64_t verify_truth = 0, seed = 0;
    bool full = false;
};

/// Outputs, and whether the lse is one of them; all where none was named.
void choose_outputs(const AttributeSettings& own, const Settings& settings, AttributionOptions& options);
/// In the order of sites(), each once.
[[nodiscard]] std::vector<Site> chosen_sites(const AttributeSettings& own, const Settings& settings);
/// Those that can stand in this plan.
[[nodiscard]] std::vector<Fault> chosen_faults(const AttributeSettings& own, const RoundingPlan& plan,
                                               const Settings& settings);
/// `all`: what suits the plan, and what changes the function, each by itself.
[[nodiscard]] std::vector<Correction> chosen_corrections(const AttributeSettings& own, const RoundingPlan& plan,
                                                         const Settings& settings);
/// Corrections name layers of the capture.
void expect_layers(const Capture& capture, const std::vector<Correction>& chosen, const Settings& settings);
/// Where outputs of the backward are asked for, every layer has a gradient at its output.
void expect_gradients(const Capture& capture, const AttributionOptions& options);
/// Whether anything of it depends on the seed.
[[nodiscard]] bool draws_anything(const RoundingPlan& plan, const AttributionOptions& options);
/// What was asked for by its name and cannot change an output that was asked for has a share of 0, which alone would look as
/// if it had been found. The lse is one of the forward, and nothing is said of it.
void remark_unreached(const AttributeSettings& own, const RoundingPlan& plan, const AttributionOptions& options);

}  // namespace faultline::cli
