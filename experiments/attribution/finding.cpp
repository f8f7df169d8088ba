// SPDX-License-Identifier: Apache-2.0
#include <faultline/attribution/finding.hpp>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <faultline/attribution/level.hpp>
#include <faultline/attribution/table.hpp>
#include <faultline/format/names.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline::attribution {

std::string share_text(double share) {
    if (share == 1) return "all";
    if (share > 0.999 && share < 1) return ">99.9%";
    if (std::abs(share) >= 100) return fmt::format("{:.2e}%", 100 * share);
    if (std::abs(share) >= 1) return fmt::format("{:.0f}%", 100 * share);
    return fmt::format("{:.1f}%", 100 * share);
}

std::string signed_text(double x, int decimals) {
    return std::isfinite(x) ? fmt::format("{:+.{}f}", x, decimals) : "-";
}

double weight(const OutputAttribution& output, std::size_t s) {
    const SiteEffect& e = output.sites[s];
    return std::max(std::abs(e.share), std::isfinite(e.alone_squared) ? e.alone_squared : 0.0);
}

std::vector<std::size_t> by_weight(const OutputAttribution& output) {
    std::vector<std::size_t> order(output.sites.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::stable_sort(order.begin(), order.end(),
                     [&](std::size_t a, std::size_t b) { return weight(output, a) > weight(output, b); });
    return order;
}

std::string modified_text(const LayerAttribution& layer) {
    std::string text;
    if (layer.softcap > 0) text += fmt::format(", softcap {:g}", layer.softcap);
    if (layer.has_sinks) text += ", sinks";
    if (layer.keep) text += fmt::format(", dropout keeps {:g}", *layer.keep);
    return text;
}

namespace {

/// The kernel whose output the plan comes nearest to, or null.
const ObservedOutput* nearest_kernel(const OutputAttribution& output) {
    const auto less = [](const ObservedOutput& a, const ObservedOutput& b) {
        return a.bit_equal_to_plan < b.bit_equal_to_plan;
    };
    const auto best = std::max_element(output.observed.begin(), output.observed.end(), less);
    return best == output.observed.end() ? nullptr : &*best;
}

std::string against_kernels(const OutputAttribution& output) {
    constexpr double most = 0.9, alike = 1.1;
    const ObservedOutput* kernel = nearest_kernel(output);
    if (kernel == nullptr) return "";
    const std::string same = share_text(kernel->bit_equal_to_plan) + " of its elements are the same";
    // Nearly all elements alike, and yet the error is another one: a few elements that are far off, or not finite, make it.
    const WideReal &own = output.plan.rel_error, &its = kernel->error.rel_error;
    const bool as_wrong = kernel->error.nonfinite == 0 && its < WideReal(alike) * own && own < WideReal(alike) * its;
    if (kernel->bit_equal_to_plan >= most && (as_wrong || own == its))
        return fmt::format(" as {} is ({})", escaped(kernel->kernel), same);
    const std::string not_finite =
        kernel->error.nonfinite > 0 ? fmt::format(", {} of them not finite", kernel->error.nonfinite) : "";
    return fmt::format(" where {}, nearest to it, is {} ({}{})", escaped(kernel->kernel), error_text(its), same,
                       not_finite);
}

/// Who did it, the largest part of the squared error first: sites whose repair takes it away, and sites that do the same
/// thing, of which repairing one takes nothing away. Where no repair does, the site that is worst alone.
std::string culprits(const LayerAttribution& layer, const OutputAttribution& output) {
    constexpr std::size_t most = 3;
    std::vector<std::pair<double, std::string>> found;
    for (const RedundantSites& set : output.redundant) {
        if (set.share < worth_naming) continue;
        std::vector<std::string_view> names;
        for (const Site site : set.sites) names.push_back(name(site));
        found.emplace_back(set.share,
                           fmt::format("{} together ({}; redundant: repairing one of them alone changes nothing)",
                                       fmt::join(names, " and "), share_text(set.share)));
    }
    for (std::size_t s = 0; s < output.sites.size(); ++s)
        if (output.sites[s].share >= worth_naming)
            found.emplace_back(output.sites[s].share,
                               fmt::format("{} ({})", name(layer.sites[s]), share_text(output.sites[s].share)));
    std::stable_sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
    std::string text;
    for (std::size_t i = 0; i < std::min(most, found.size()); ++i) text += (i == 0 ? ", by " : ", ") + found[i].second;
    if (!found.empty() || output.sites.empty()) return text;
    const std::size_t worst = by_weight(output).front();
    if (output.sites[worst].alone_squared < worth_naming) return text;
    return fmt::format("; no site's repair takes {} of its square away, {} does most alone ({})",
                       share_text(worth_naming), name(layer.sites[worst]),
                       error_text(output.sites[worst].alone.rel_error));
}

}  // namespace

std::string verdict(const LayerAttribution& layer, const OutputAttribution& output, const RoundingPlan& plan) {
    const std::optional<Format> format = stored_format(plan, output.output);
    std::string text =
        fmt::format("{}: {} is {} wrong", name(output.output), plan.name, error_text(output.plan.rel_error));
    text += against_kernels(output);
    if (output.plan.nonfinite > 0) text += fmt::format(", {} elements not finite", output.plan.nonfinite);
    const auto best = std::find_if(output.corrections.begin(), output.corrections.end(),
                                   [&](const CorrectedOutput& c) { return c.correction == output.best_correction; });
    const bool repaired = best != output.corrections.end();
    if (format && below_range(output.truth_norm, *format)) {
        text += fmt::format(
            "; |truth| = {} lies below the smallest number of {}: the best that can be stored is 0, with error 100%",
            output.truth_norm.to_string(3), name(*format));
        return repaired && best->error.rel_error == WideReal(1.0)
                   ? fmt::format("{}, as {} does", text, best->correction)
                   : text;
    }
    text += culprits(layer, output);
    if (output.plan.mean_key_share > 0.5)
        text += fmt::format("; {} of the error lies along the mean key, with sign {}",
                            share_text(output.plan.mean_key_share), signed_text(output.plan.mean_key_sign, 2));
    if (output.corrections.empty()) return text;
    if (!repaired) return text + "; no correction helps";
    return text +
           fmt::format("; {} brings it to {}{}", best->correction, error_text(best->error.rel_error),
                       format && at_level(best->error, best->level) ? fmt::format(", {} level", name(*format)) : "");
}

}  // namespace faultline::attribution
