// SPDX-License-Identifier: Apache-2.0
// Where the error of a run comes from, as data: faults, and plans of the attention kernel, joined by +.
//
//   none                                                   nothing: the control
//   delta:multiplicative:0.2                               a fault (docs/injectors.md)
//   plan:repo-2510.04212                                   every layer runs that plan in the emulated kernel
//   plan:exact+plan:repo-2510.04212:layers=1:untiled       layer 1 runs it in one tile, the rest exactly
//   plan:repo-2510.04212:correction=delta_p_dp             with a correction (faultline attribute lists them)
//   plan:repo-2510.04212:exact=pv_accumulate               without the roundings of these sites
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <faultline/gpt/model_config.hpp>
#include <faultline/injectors/fault.hpp>

namespace faultline {

/// What exact=SITE of a plan asks for.
struct RepairedSite {
    std::string word;
    Site site;
    std::shared_ptr<const RoundingPlan> plan;  ///< as it is with the whole word
};

struct Source {
    std::string text;  ///< as given
    std::vector<Fault> faults;
    std::vector<gpt::AttentionChoice> attention;  ///< later ones win
    std::vector<RepairedSite> repaired;           ///< of its plans
    [[nodiscard]] bool is_none() const { return faults.empty() && attention.empty(); }
};

/// RequestError says what was expected, also of a correction, an exact site or `untiled` that leaves its plan as it is. `head_dim`: of the model, which decides a plan's tiles. `folder`: where a plan's file
/// is that has no absolute path; empty: the current one.
[[nodiscard]] Source parse_source(std::string_view text, int head_dim, const std::string& folder = "");

}  // namespace faultline
