// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <bit>
#include <cmath>

#include <fmt/format.h>

#include <faultline/attribution/table.hpp>
#include <faultline/bisection/report.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline {
namespace {

using namespace bisection;

constexpr std::size_t line_width = 110;
constexpr std::size_t sets_shown = 8;
constexpr std::size_t singles_shown = 6;  // each way
constexpr double worth_a_mention = 0.01;  // change of the distance, in powers of two for sizes: under 1% of the value

std::string value_text(const Target& target, const WideReal& value) {
    if (target.metric == Metric::rel_error || target.metric == Metric::plan_distance) return error_text(value);
    if (target.metric == Metric::nonfinite) return fmt::format("{:.0f}", value.to_double());
    return value.to_string(3);
}

std::string relation_text(const Target& target) {
    if (target.relation != Target::Relation::near_plan) return target.text;
    return fmt::format("{} within {:.3g}% of the plan's {}", target.text, 100 * target.tolerance,
                       value_text(target, target.bound));
}

std::string joined(const std::vector<std::string>& parts, const char* between) {
    std::string all;
    for (const std::string& part : parts) {
        if (!all.empty()) all += between;
        all += part;
    }
    return all;
}

/// Broken at spaces: the first line after `label`, the others below its end.
std::string flow(const std::string& label, const std::string& text) {
    std::string out, line = label;
    for (std::size_t begin = 0; begin < text.size();) {
        const std::size_t end = std::min(text.find(' ', begin), text.size());
        if (line.size() + 1 + end - begin > line_width && line.size() > label.size()) {
            out += line + "\n";
            line = std::string(label.size(), ' ');
        }
        if (line.size() > label.size() || !label.empty()) line += ' ';
        line += text.substr(begin, end - begin);
        begin = end + 1;
    }
    return out + line + "\n";
}

std::string values_text(const BisectionAnswer& a, SiteMask set) {
    std::vector<std::string> parts;
    for (std::size_t t = 0; t < a.targets.size(); ++t) parts.push_back(value_text(a.targets[t], a.values.at(set)[t]));
    return joined(parts, " and ");
}

std::string names_text(const BisectionAnswer& a, SiteMask set) {
    std::vector<std::string> parts;
    for (const Site site : a.sites_of(set)) parts.emplace_back(name(site));
    return parts.empty() ? "no site" : joined(parts, ", ");
}

std::string sets_text(int size) { return size == 1 ? "single sites" : fmt::format("sets of {}", size); }

std::string tried_text(const BisectionAnswer& a) {
    const auto sizes = [&](bool behind) {
        std::vector<std::string> parts;
        for (const SizeTried& size : a.search.sizes) {
            if (size.behind != behind) continue;
            parts.push_back(size.complete() ? fmt::format("all {} {}", size.tried, sets_text(size.size))
                                            : fmt::format("{} of {} {} (those among the {} sites that change it most)",
                                                          size.tried, size.possible, sets_text(size.size), size.among));
        }
        return joined(parts, ", ");
    };
    std::string text = "tried: " + sizes(false);
    const std::string behind = sizes(true);
    if (a.search.method == "ddmin" || a.search.method == "climb" || !behind.empty())
        text += ", then delta debugging and a greedy climb";
    if (!behind.empty()) text += ", then " + behind;
    // Beside the sets by size: none and all of the sites, each set that was found without one of its sites, and all of the
    // sites without one.
    return text + fmt::format("; {} sets in all", a.search.tried.size());
}

/// What is known of other sets of the size that was found, and of smaller ones.
std::string others_text(const SearchResult& s) {
    std::vector<std::string> known, left;
    if (s.all_found) known.emplace_back("no other of that size does");
    if (s.smallest) known.emplace_back("no smaller set does");
    for (const SizeUntried& size : s.untried) left.push_back(fmt::format("{} {}", size.sets, sets_text(size.size)));
    std::string text = joined(known, ", ");
    if (!left.empty())
        text += fmt::format("{}not tried, so that others may: {}", text.empty() ? "" : "; ", joined(left, ", "));
    return text;
}

std::string heading(const BisectionAnswer& a) {
    std::vector<std::string> targets;
    for (const Target& target : a.targets) targets.push_back(relation_text(target));
    const SiteMask all = a.sites.size() == 64 ? ~SiteMask{0} : (SiteMask{1} << a.sites.size()) - 1;
    if (a.kind == BisectionKind::repair)
        return fmt::format("until {}: {} as the plan is, {} with all {} sites exact", joined(targets, " and "),
                           values_text(a, 0), values_text(a, all), a.sites.size());
    return fmt::format("reproduce {}: {} with every site exact", joined(targets, " and "), values_text(a, 0));
}

std::string found_text(const BisectionAnswer& a) {
    const SearchResult& s = a.search;
    const std::string what =
        a.kind == BisectionKind::repair ? "whose repair meets the target" : "enough to reproduce it";
    if (s.none_met)
        return flow(" ", a.kind == BisectionKind::repair ? "met as the plan is: nothing to repair"
                                                         : "met with every site exact: no site is needed");
    if (a.out_of_reach) return flow(" ", "not even every site exact meets it: nothing was searched");
    if (s.found.empty()) return flow(" ", "no set of sites that was tried meets it; " + tried_text(a));
    const int size = std::popcount(s.found.front().set);
    const std::string sets = size == 1 ? (s.found.size() == 1 ? "site" : "single sites")
                                       : fmt::format("{} of {} sites", s.found.size() == 1 ? "set" : "sets", size);
    std::string out =
        flow(" ", fmt::format("{} {} {}; {}; {}", s.found.size(), sets, what, others_text(s), tried_text(a)));
    for (std::size_t i = 0; i < std::min(s.found.size(), sets_shown); ++i) {
        const FoundSet& found = s.found[i];
        std::string text = fmt::format("{}: {}", names_text(a, found.set), values_text(a, found.set));
        if (size > 1 && !found.removals.empty()) {
            const std::vector<Site> sites = a.sites_of(found.set);
            std::vector<std::string> parts;
            for (std::size_t r = 0; r < found.removals.size(); ++r)
                parts.push_back(fmt::format("without {} {}", name(sites[r]), values_text(a, found.removals[r])));
            text += fmt::format("; {}{}", joined(parts, ", "), found.minimal ? " (each is needed)" : "");
        }
        out += flow("   ", text);
    }
    if (s.found.size() > sets_shown) out += fmt::format("    and {} more (--json)\n", s.found.size() - sets_shown);
    return out;
}

/// What single sites do, nearest to the target first, then those that lead away from it.
std::string singles_text(const BisectionAnswer& a) {
    const SearchResult& s = a.search;
    if (s.sizes.empty()) return {};
    const double without = s.tried.at(0).distance;
    std::vector<SiteMask> nearer, farther;
    for (std::size_t i = 0; i < a.sites.size(); ++i) {
        const SiteMask set = SiteMask{1} << i;
        const double distance = s.tried.at(set).distance;
        if (distance < without - worth_a_mention) nearer.push_back(set);
        if (distance > without + worth_a_mention) farther.push_back(set);
    }
    const auto by_distance = [&](SiteMask x, SiteMask y) { return s.tried.at(x).distance < s.tried.at(y).distance; };
    std::stable_sort(nearer.begin(), nearer.end(), by_distance);
    std::stable_sort(farther.begin(), farther.end(), [&](SiteMask x, SiteMask y) { return by_distance(y, x); });
    const auto list = [&](std::vector<SiteMask> sets, const char* label) -> std::string {
        if (sets.empty()) return {};
        sets.resize(std::min(sets.size(), singles_shown));
        std::vector<std::string> parts;
        for (const SiteMask set : sets) parts.push_back(fmt::format("{} {}", names_text(a, set), values_text(a, set)));
        return flow(label, joined(parts, ", "));
    };
    const bool repair = a.kind == BisectionKind::repair;
    return list(nearer, repair ? "  one repaired, nearest: " : "  one alone, nearest:    ") +
           list(farther, repair ? "  one repaired, worse:   " : "  one alone, worse:      ");
}

}  // namespace

std::string table(const Bisection& bisection) {
    std::string out =
        fmt::format("{}   plan {}\n", escaped(bisection.input, bisection.input.size()), bisection.plan.name);
    for (const std::string& remark : plan_remarks(bisection.origin, bisection.plan.name)) out += flow("", remark);
    for (const BisectionAnswer& a : bisection.answers) {
        out += '\n';
        out += flow("", heading(a)) + found_text(a) + singles_text(a);
        if (a.untouched.empty()) continue;
        std::vector<std::string> parts;
        for (const Site site : a.untouched) parts.emplace_back(name(site));
        out += flow("  not tried, since no data flows from there to the target:", joined(parts, ", "));
    }
    return out;
}

bool all_met(const Bisection& bisection) {
    return std::all_of(bisection.answers.begin(), bisection.answers.end(),
                       [](const BisectionAnswer& a) { return !a.search.found.empty(); });
}

std::string unmet(const Bisection& bisection) {
    for (const BisectionAnswer& a : bisection.answers)
        if (a.out_of_reach)
            return fmt::format("not even every site exact meets it: {}", heading(a));
        else if (a.search.found.empty())
            return fmt::format("no set of sites that was tried meets it ({} sets): {}", a.search.tried.size(),
                               heading(a));
    return {};
}

}  // namespace faultline
