// SPDX-License-Identifier: Apache-2.0
#include <faultline/attribution/plan_origin.hpp>

#include <algorithm>
#include <iterator>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include <faultline/attribution/finding.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline {
namespace {

using attribution::share_text;
using nlohmann::ordered_json;

/// The elements that plans were compared on.
std::string compared_on(const NearerPlan& n) {
    constexpr std::size_t most = 3;
    const std::string heads = n.heads.empty()       ? "all heads"
                              : n.heads.size() == 1 ? fmt::format("head {}", n.heads.front())
                                                    : fmt::format("heads {}", fmt::join(n.heads, ", "));
    if (n.layers.size() > most) return fmt::format("{} of {} layers", heads, n.layers.size());
    std::vector<std::string> layers;
    for (const std::string& layer : n.layers) layers.push_back(escaped(layer));
    return fmt::format("{} of {}", heads, fmt::join(layers, ", "));
}

std::string chosen_text(const PlanOrigin& origin, const std::string& plan) {
    if (!origin.chosen)
        return origin.kernel.empty()
                   ? fmt::format("{}, since there is no output of a kernel to choose the plan by (--plan)", plan)
                   : fmt::format("{}, since no preset has a tenth of the elements of {} (--plan)", plan,
                                 escaped(origin.kernel));
    const ChosenPlan& chosen = *origin.chosen;
    std::string text = fmt::format("{} is the preset nearest to {}: it has {} of its elements", chosen.plan,
                                   escaped(chosen.kernel), share_text(chosen.bit_equal));
    if (chosen.exact_bit_equal > 0)
        text += fmt::format(" (of those that round; exact, which has no rounding to speak of, has {})",
                            share_text(chosen.exact_bit_equal));
    if (!chosen.is_kernel) text += ", too few to be that kernel: what follows is said of the plan";
    if (!chosen.as_near.empty())
        text += fmt::format("; {} {} as many", fmt::join(chosen.as_near, ", "),
                            chosen.as_near.size() == 1 ? "has" : "have");
    return text;
}

}  // namespace

std::vector<std::string> plan_remarks(const PlanOrigin& origin, const std::string& plan) {
    std::vector<std::string> remarks;
    if (origin.automatic) remarks.push_back(chosen_text(origin, plan));
    if (!origin.storage.empty()) remarks.push_back(origin.storage);
    std::ranges::copy(left_out_remarks(origin.left_out), std::back_inserter(remarks));
    for (const NearerPlan& n : origin.nearer)
        remarks.push_back(
            fmt::format("{} is nearer to --plan {}, which has {} of its elements, than to plan {}, which has {} ({})",
                        escaped(n.kernel), n.plan, share_text(n.bit_equal), plan, share_text(n.bit_equal_to_asked),
                        compared_on(n)));
    return remarks;
}

std::vector<std::string> left_out_remarks(const std::vector<LeftOutPlan>& plans) {
    std::vector<std::string> remarks;
    for (const LeftOutPlan& p : plans)
        remarks.push_back(fmt::format("{} is left out, for want of memory: {}", p.plan, p.reason));
    return remarks;
}

std::string to_json(const PlanOrigin& origin) {
    ordered_json nearer = ordered_json::array();
    for (const NearerPlan& n : origin.nearer)
        nearer.push_back({{"kernel", n.kernel},
                          {"plan", n.plan},
                          {"bit_equal", n.bit_equal},
                          {"bit_equal_to_asked", n.bit_equal_to_asked},
                          {"heads", n.heads.empty() ? ordered_json(nullptr) : ordered_json(n.heads)},
                          {"layers", n.layers}});
    ordered_json object{{"nearer_plans", std::move(nearer)}};
    if (const auto& chosen = origin.chosen)
        object["chosen_plan"] = {{"kernel", chosen->kernel},
                                 {"plan", chosen->plan},
                                 {"bit_equal", chosen->bit_equal},
                                 {"as_near", chosen->as_near}};
    for (const LeftOutPlan& p : origin.left_out) object["left_out"].push_back({{"plan", p.plan}, {"reason", p.reason}});
    if (!origin.storage.empty()) object["storage"] = origin.storage;
    return object.dump(-1, ' ', false, ordered_json::error_handler_t::replace);
}

}  // namespace faultline
