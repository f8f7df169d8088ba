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

double weight(const LayerAttribution& layer, const OutputAttribution& output, std::size_t s) {
    const SiteEffect& e = output.sites[s];
    double most = std::max(std::abs(e.share), e.moved_squared);
    for (const RedundantSites& set : output.redundant)
        if (std::count(set.sites.begin(), set.sites.end(), layer.sites[s]) > 0)
            most = std::max({most, std::abs(set.share), set.moved_squared});
    return most;
}

std::vector<std::size_t> by_weight(const LayerAttribution& layer, const OutputAttribution& output) {
    std::vector<std::pair<double, double>> keys;
    for (std::size_t s = 0; s < output.sites.size(); ++s) {
        const double own = weight(layer, output, s), alone = output.sites[s].alone_squared;
        keys.emplace_back(own >= worth_a_line ? own : 0, std::isfinite(alone) ? alone : 0);
    }
    std::vector<std::size_t> order(output.sites.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return keys[a] > keys[b]; });
    return order;
}

bool is_worth_a_line(const LayerAttribution& layer, const OutputAttribution& output, std::size_t s) {
    const double alone = output.sites[s].alone_squared;
    return weight(layer, output, s) >= worth_a_line || (std::isfinite(alone) && alone >= worth_a_line);
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

/// An error as it can be read: relative, or where the truth is 0 its Frobenius norm.
std::string amount_text(const OutputAttribution& output, const WideReal& norm, const WideReal& relative) {
    return output.truth_norm == WideReal(0.0) ? norm.to_string(3) : error_text(relative);
}
std::string amount_text(const OutputAttribution& output, const ErrorMeasure& error) {
    return amount_text(output, error.error_norm, error.rel_error);
}

/// What errors are compared by.
const WideReal& size_of(const OutputAttribution& output, const ErrorMeasure& error) {
    return output.truth_norm == WideReal(0.0) ? error.error_norm : error.rel_error;
}

/// How much larger an error has to be before it is another one.
constexpr double alike = 1.1;

/// Of a kernel that is further off than the plan: nothing that is said of the plan's roundings explains that. Empty where the
/// kernel's error is the plan's or smaller.
std::string unexplained_text(const OutputAttribution& output) {
    const ObservedOutput* kernel = nearest_kernel(output);
    if (kernel == nullptr) return "";
    const ErrorMeasure& its = kernel->error;
    // As the file holds it: a plan that rounds less has no error of storing, and that one is no mistake of the kernel.
    const ErrorMeasure& own = plan_in_type_of(*kernel, output);
    const bool larger = its.nonfinite > 0 || size_of(output, its) > WideReal(alike) * size_of(output, own);
    if (!larger) return "";
    std::string text = fmt::format(
        "; the error of {}, nearest to it, is {}, which this plan does not explain ({} of its "
        "elements are the same",
        escaped(kernel->kernel), amount_text(output, its), share_text(kernel->bit_equal_to_plan));
    if (its.nonfinite > 0) text += fmt::format(", {} not finite", its.nonfinite);
    text += ")";
    if (kernel->in_log2) return text + ": it is in log2 units";
    // Most of the error is a factor: e = gain truth has the relative error |gain|.
    constexpr double most_of_the_norm = 0.7;  // the root of half of the square
    if (std::abs(its.gain) > most_of_the_norm * its.rel_error.to_double())
        text += fmt::format(": it is {} too {}", error_text(WideReal(std::abs(its.gain))),
                            its.gain > 0 ? "large" : "small");
    return text;
}

/// `plan`: its name. Kernels are often called as the preset that was made for them.
std::string against_kernels(const OutputAttribution& output, const std::string& plan) {
    constexpr double most = 0.9;
    const ObservedOutput* kernel = nearest_kernel(output);
    if (kernel == nullptr || !unexplained_text(output).empty()) return "";
    const std::string its_name = (kernel->kernel == plan ? "the kernel " : "") + escaped(kernel->kernel);
    const std::string same = share_text(kernel->bit_equal_to_plan) + " of its elements are the same";
    // Nearly all elements alike, and yet the error is another one: a few elements that are far off, or not finite, make it.
    const ErrorMeasure& stored = plan_in_type_of(*kernel, output);
    const auto about = [](const WideReal& a, const WideReal& b) {
        return a == b || (a < WideReal(alike) * b && b < WideReal(alike) * a);
    };
    const WideReal &own = size_of(output, stored), &its = size_of(output, kernel->error);
    const bool as_wrong = own == its || (kernel->error.nonfinite == 0 && about(own, its));
    const std::string once_stored =
        kernel->format && !about(own, size_of(output, output.plan))
            ? fmt::format(", {} once stored in {},", amount_text(output, stored), type_name(*kernel->format))
            : "";
    if (kernel->bit_equal_to_plan >= most && as_wrong)
        return fmt::format("{} as {} is ({})", once_stored, its_name, same);
    const std::string not_finite =
        kernel->error.nonfinite > 0 ? fmt::format(", {} of them not finite", kernel->error.nonfinite) : "";
    return fmt::format("{} where {}, nearest to it, is {} ({}{})", once_stored, its_name,
                       amount_text(output, kernel->error), same, not_finite);
}

/// A site and what it did, with the part of the squared error that decides its place in the sentence.
struct Culprit {
    double part = 0;
    std::vector<Site> sites;
    std::string text;
};

/// Of a site whose repair does not make the error smaller, and yet moves the output more than that of any other.
std::string moved_text(const OutputAttribution& output, std::size_t s) {
    const SiteEffect& e = output.sites[s];
    if (!std::isfinite(e.moved_squared))
        return fmt::format("its repair leaves {} elements not finite, of {}", e.repaired.nonfinite,
                           output.plan.nonfinite);
    return fmt::format("its repair moves it by {}, to {}",
                       amount_text(output, WideReal(std::sqrt(e.moved_squared)) * output.plan.error_norm,
                                   WideReal(std::sqrt(e.moved_squared)) * output.plan.rel_error),
                       amount_text(output, e.repaired));
}

/// Who did it, the largest part of the squared error first: sites whose repair takes it away, sites that do the same thing, of
/// which repairing one takes nothing away, and a site that hides what others do, so that its repair moves the output more
/// than that of any other and makes the error no smaller. Where there is none, the site that is worst alone.
std::vector<Culprit> culprits_of(const LayerAttribution& layer, const OutputAttribution& output) {
    constexpr std::size_t most = 3;
    std::vector<Culprit> found;
    for (const RedundantSites& set : output.redundant) {
        if (set.share < worth_naming) continue;
        std::vector<std::string_view> names;
        for (const Site site : set.sites) names.push_back(name(site));
        found.push_back({set.share, set.sites,
                         fmt::format("{} together ({}; redundant: repairing one of them alone changes nothing)",
                                     fmt::join(names, " and "), share_text(set.share))});
    }
    for (std::size_t s = 0; s < output.sites.size(); ++s)
        if (output.sites[s].share >= worth_naming)
            found.push_back({output.sites[s].share,
                             {layer.sites[s]},
                             fmt::format("{} ({})", name(layer.sites[s]), share_text(output.sites[s].share))});
    std::stable_sort(found.begin(), found.end(), [](const Culprit& a, const Culprit& b) { return a.part > b.part; });
    if (found.size() > most) found.resize(most);
    if (output.sites.empty()) return found;
    const std::size_t first = by_weight(layer, output).front();
    const SiteEffect& e = output.sites[first];
    if (e.share < worth_naming && std::max(-e.share, e.moved_squared) >= worth_naming) {
        // Behind a site whose repair alone takes all of it away: nothing is hidden then.
        constexpr double all_of_it = 0.99;
        const auto at = found.begin() + (!found.empty() && found.front().part >= all_of_it ? 1 : 0);
        found.insert(at, {e.moved_squared,
                          {layer.sites[first]},
                          fmt::format("{} ({})", name(layer.sites[first]), moved_text(output, first))});
    }
    return found;
}

/// Of each planted fault that is not among them: what its repair does, be it little.
std::string planted_text(const LayerAttribution& layer, const OutputAttribution& output,
                         const std::vector<Culprit>& named) {
    std::string text;
    std::vector<Site> said;
    for (const Culprit& culprit : named) said.insert(said.end(), culprit.sites.begin(), culprit.sites.end());
    for (const Site site : layer.fault_sites) {
        const auto at = std::find(layer.sites.begin(), layer.sites.end(), site);
        if (at == layer.sites.end() || std::count(said.begin(), said.end(), site) > 0) continue;
        said.push_back(site);
        const std::size_t s = static_cast<std::size_t>(at - layer.sites.begin());
        text += fmt::format("; planted at {}: {}", name(site),
                            output.sites[s].moved_squared == 0 ? "its repair moves nothing" : moved_text(output, s));
    }
    return text;
}

std::string culprits(const LayerAttribution& layer, const OutputAttribution& output) {
    const std::vector<Culprit> found = culprits_of(layer, output);
    std::string text;
    // Of a part of the sites, the one that did it may not be among them.
    const std::string tried = layer.all_sites           ? ""
                              : layer.sites.size() == 1 ? "of the one site tried "
                                                        : fmt::format("of the {} sites tried ", layer.sites.size());
    for (const Culprit& culprit : found) text += (text.empty() ? ", " + tried + "by " : ", ") + culprit.text;
    if (found.empty() && !output.sites.empty()) {
        const std::size_t worst = by_weight(layer, output).front();
        if (output.sites[worst].alone_squared >= worth_naming)
            text = fmt::format("; {}no site's repair takes {} of its square away, {} does most alone ({})", tried,
                               share_text(worth_naming), name(layer.sites[worst]),
                               amount_text(output, output.sites[worst].alone));
    }
    if (text.empty() && !layer.all_sites)
        text = fmt::format("; {}none does {} of its square", tried, share_text(worth_naming));
    return text + planted_text(layer, output, found);
}

}  // namespace

bool is_worth_a_block(const OutputAttribution& output, const RoundingPlan& plan) {
    constexpr double wrong_from = 2;  // times its level
    const std::vector<ObservedOutput>& observed = output.observed;
    if (output.lse)
        return lse_shows(output.plan, output.elements, plan) ||
               std::any_of(observed.begin(), observed.end(),
                           [&](const ObservedOutput& o) { return lse_shows(o.error, output.elements, plan); });
    const auto beyond = [&](const ErrorMeasure& e, const WideReal& level, const Format& format) {
        // A tensor that is nearly in its format has a level near 0, and one element off is not yet worth a block.
        const WideReal limit = WideReal(wrong_from) * std::max(level, WideReal(typical_level(format)));
        return e.nonfinite > 0 || !(e.rel_error <= limit);
    };
    const std::optional<Format> own = stored_format(plan, output);
    const bool stores = own && output.level;
    if (stores && (below_range(output.truth_norm, *own) || beyond(output.plan, *output.level, *own))) return true;
    if (!stores && observed.empty()) return true;
    return std::any_of(observed.begin(), observed.end(), [&](const ObservedOutput& o) {
        const std::optional<Format>& format = o.format ? o.format : own;
        const std::optional<WideReal>& level = level_of(o, output);
        if (!format || !level) return true;
        return beyond(o.error, *level, *format) || (!stores && beyond(plan_in_type_of(o, output), *level, *format));
    });
}

std::string verdict(const LayerAttribution& layer, const OutputAttribution& output, const RoundingPlan& plan) {
    const std::optional<Format> format = stored_format(plan, output);
    const bool namesake = std::any_of(output.observed.begin(), output.observed.end(),
                                      [&](const ObservedOutput& seen) { return seen.kernel == plan.name; });
    const std::size_t nonfinite = output.plan.nonfinite;
    const std::string amount = nonfinite > 0
                                   ? fmt::format("not finite in {} element{}", nonfinite, nonfinite == 1 ? "" : "s")
                                   : fmt::format("{} {}", amount_text(output, output.plan),
                                                 output.truth_norm == WideReal(0.0) ? "off a truth of 0" : "wrong");
    std::string text = fmt::format("{}: {}{} is {}", name(output), namesake ? "the plan " : "", plan.name, amount) +
                       against_kernels(output, plan.name);
    const auto best = std::find_if(output.corrections.begin(), output.corrections.end(),
                                   [&](const CorrectedOutput& c) { return c.correction == output.best_correction; });
    const bool repaired = best != output.corrections.end();
    if (format && below_range(output.truth_norm, *format)) {
        text += fmt::format(
            "; |truth| = {} lies below the smallest number of {}: the best that can be stored is 0, with error 100%",
            output.truth_norm.to_string(3), name(*format));
        if (repaired && best->error.rel_error == WideReal(1.0)) text += fmt::format(", as {} does", best->correction);
        return text + unexplained_text(output);
    }
    text += culprits(layer, output);
    if (output.plan.mean_key_share > 0.5)
        text += fmt::format("; {} of the error lies along the mean key, with sign {}",
                            share_text(output.plan.mean_key_share), signed_text(output.plan.mean_key_sign, 2));
    if (!output.corrections.empty() && !repaired) text += "; no correction helps";
    if (!output.corrections.empty() && repaired)
        text +=
            fmt::format("; {} brings it to {}{}", best->correction, amount_text(output, best->error),
                        format && at_level(best->error, best->level) ? fmt::format(", {} level", name(*format)) : "");
    return text + unexplained_text(output);
}

}  // namespace faultline::attribution
