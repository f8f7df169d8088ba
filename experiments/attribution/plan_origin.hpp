// SPDX-License-Identifier: Apache-2.0
// Where the plan of a command on a capture comes from, and whether the kernels there are that plan: what is said of a plan's
// roundings is said of a kernel only as far as the two agree. identification/nearer_plans.hpp finds it out.
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace faultline {

/// A preset that reproduces a kernel better than the plan that the command works under.
struct NearerPlan {
    std::string kernel, plan;
    double bit_equal = 0;           ///< share of the kernel's elements that this plan has, all outputs
    double bit_equal_to_asked = 0;  ///< … that the plan asked for has
    std::vector<int> heads;  ///< query heads that they were compared on, with those that share their keys; empty: all
    std::vector<std::string> layers;  ///< … and in which layers
};

/// The preset that a command took because nobody named one.
struct ChosenPlan {
    std::string kernel, plan;
    double bit_equal = 0;  ///< share of the kernel's elements that it has, all outputs, heads and layers asked for
    std::vector<std::string> as_near;  ///< presets that have as many, also of the lse, and are listed behind it
    double exact_bit_equal =
        0;  ///< of `exact`, which is never chosen since it has no rounding to speak of, where it has more
    bool is_kernel = true;  ///< it has as many as a plan of the kernel has (found_share of identification)
};

/// A preset that was not compared with the kernels, since the back end has not the memory to run it.
struct LeftOutPlan {
    std::string plan, reason;  ///< the reason names a layer, and what is needed and free
};

struct PlanOrigin {
    bool automatic = false;            ///< nobody named the plan
    std::string kernel;                ///< automatic: the kernel that it was to be nearest to; empty: there is none
    std::optional<ChosenPlan> chosen;  ///< automatic; nothing: no kernel, or no preset with a tenth of its elements
    std::vector<NearerPlan> nearer;    ///< empty: none known
    std::vector<LeftOutPlan> left_out{};
    std::string storage;  ///< where the file's formats are not the plan's, or not those of the preset: a sentence
};

/// What is to be known of the plan before its roundings are read as a kernel's, a sentence each: which kernel it was chosen
/// for, or why it was not, and which preset is nearer to a kernel, compared on what. `plan`: the name of the plan.
[[nodiscard]] std::vector<std::string> plan_remarks(const PlanOrigin& origin, const std::string& plan);

/// "math is left out: …", a sentence each.
[[nodiscard]] std::vector<std::string> left_out_remarks(const std::vector<LeftOutPlan>& plans);

/// One JSON object: "nearer_plans", "chosen_plan" where one was chosen, and "left_out" where a preset was.
[[nodiscard]] std::string to_json(const PlanOrigin& origin);

}  // namespace faultline
