// SPDX-License-Identifier: Apache-2.0
// The settings of every command that works on a capture under a plan.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include <faultline/attribution/capture.hpp>
#include <faultline/cli/command.hpp>
#include <faultline/plan/plan.hpp>

namespace faultline::cli {

/// Which capture, which of its layers, and how it is to be read.
struct CaptureRequest {
    std::string capture;
    std::vector<std::string> layers, allow;
    std::vector<int> heads;
    std::optional<bool> causal;
    std::optional<double> scale, softcap;

    /// Declares the positional argument and --layers, --heads, --causal, --scale, --softcap, --allow.
    void declare(Settings& settings);
    /// RequestError where the argument is missing or a value is none: what is wrong before the capture is read.
    void expect_valid(const Settings& settings) const;
    /// RequestError where the argument is missing, a name is unknown, or the capture is refused. Says on standard error
    /// which tensors are not used, unless the call is to be quiet.
    [[nodiscard]] Capture read(const Invocation& call) const;
};

/// RequestError where `kernels`, the value of --kernel, names one that left nothing in the capture to compare with.
void expect_kernels(const Capture& capture, const std::vector<std::string>& kernels, const Settings& settings);

/// What --allow names. RequestError where it names something else.
[[nodiscard]] Allowances allowances(const std::vector<std::string>& allow, const Settings& settings);

/// The preset or file that the setting `key` names; errors begin with where the name came from.
[[nodiscard]] RoundingPlan plan_named(const std::string& name, const Settings& settings, std::string_view key);

}  // namespace faultline::cli
