// SPDX-License-Identifier: Apache-2.0
#include <bit>
#include <cmath>

#include <nlohmann/json.hpp>

#include <faultline/bisection/report.hpp>
#include <faultline/plan/plan_toml.hpp>

namespace faultline {
namespace {

using nlohmann::ordered_json;
using namespace bisection;

/// A number where a double holds it, else text in scientific notation.
ordered_json number(const WideReal& x) {
    const double value = x.to_double();
    if (std::isfinite(value) && (value != 0 || x.mantissa == 0)) return value;
    return x.to_string(17);
}

ordered_json names(const std::vector<Site>& sites) {
    ordered_json list = ordered_json::array();
    for (const Site site : sites) list.push_back(std::string(name(site)));
    return list;
}

ordered_json values(const BisectionAnswer& a, SiteMask set) {
    ordered_json list = ordered_json::array();
    for (const WideReal& value : a.values.at(set)) list.push_back(number(value));
    return list;
}

const char* relation(Target::Relation r) {
    switch (r) {
        case Target::Relation::less:
            return "<";
        case Target::Relation::less_equal:
            return "<=";
        case Target::Relation::greater:
            return ">";
        case Target::Relation::greater_equal:
            return ">=";
        case Target::Relation::near_plan:
            return "near_plan";
    }
    return "";
}

ordered_json target_json(const Target& t) {
    ordered_json out{{"text", t.text},
                     {"layer", t.layer},
                     {"output", std::string(name(t.output))},
                     {"measure", std::string(name(t.metric))},
                     {"absolute", t.absolute},
                     {"relation", relation(t.relation)},
                     {"bound", number(t.bound)}};
    if (t.relation == Target::Relation::near_plan) out["tolerance"] = t.tolerance;
    return out;
}

ordered_json answer_json(const BisectionAnswer& a) {
    ordered_json targets = ordered_json::array(), sizes = ordered_json::array(), sets = ordered_json::array(),
                 singles = ordered_json::object(), untried = ordered_json::array();
    for (const Target& target : a.targets) targets.push_back(target_json(target));
    for (const SizeTried& s : a.search.sizes)
        sizes.push_back(
            {{"size", s.size}, {"possible", s.possible}, {"tried", s.tried}, {"among", s.among}, {"met", s.met}});
    for (const SizeUntried& s : a.search.untried) untried.push_back({{"size", s.size}, {"sets", s.sets}});
    for (const FoundSet& found : a.search.found) {
        ordered_json without = ordered_json::object();
        const std::vector<Site> sites = a.sites_of(found.set);
        for (std::size_t i = 0; i < found.removals.size(); ++i)
            without[std::string(name(sites[i]))] = values(a, found.removals[i]);
        sets.push_back({{"sites", names(sites)},
                        {"values", values(a, found.set)},
                        {"minimal", found.minimal},
                        {"without", std::move(without)}});
    }
    const SiteMask all = a.sites.size() == 64 ? ~SiteMask{0} : (SiteMask{1} << a.sites.size()) - 1;
    for (std::size_t i = 0; i < a.sites.size(); ++i)
        if (a.values.count(SiteMask{1} << i) != 0) singles[std::string(name(a.sites[i]))] = values(a, SiteMask{1} << i);
    return {{"kind", a.kind == BisectionKind::repair ? "until" : "reproduce"},
            {"targets", std::move(targets)},
            {"met", !a.search.found.empty()},
            {"smallest", a.search.smallest},
            {"all_found", a.search.all_found},
            {"untried", std::move(untried)},
            {"method", a.search.method},
            {"sets", std::move(sets)},
            {"empty_set", values(a, 0)},
            {"all_sites", values(a, all)},
            {"singles", std::move(singles)},
            {"sites", names(a.sites)},
            {"untouched", names(a.untouched)},
            {"out_of_reach", a.out_of_reach},
            {"tried", {{"sets", a.search.tried.size()}, {"sizes", std::move(sizes)}}}};
}

}  // namespace

std::string to_json(const Bisection& bisection) {
    ordered_json answers = ordered_json::array();
    for (const BisectionAnswer& a : bisection.answers) answers.push_back(answer_json(a));
    ordered_json out{{"schema", "faultline.bisection/1"},
                     {"input", bisection.input},
                     {"plan", bisection.plan.name},
                     {"complete", bisection.complete}};
    out.update(ordered_json::parse(to_json(bisection.origin)));
    out["answers"] = std::move(answers);
    return out.dump(1, ' ', false, ordered_json::error_handler_t::replace) + "\n";
}

void write(const Bisection& bisection, RecordFile& file) {
    file.attribute("", "input", bisection.input);
    file.attribute("", "plan", bisection.plan.name);
    file.attribute("", "plan_toml", to_toml(bisection.plan));
    file.attribute("", "complete", std::int64_t{bisection.complete ? 1 : 0});
    for (const BisectionAnswer& a : bisection.answers) {
        const std::string group = a.kind == BisectionKind::repair ? "until/" : "reproduce/";
        std::vector<std::string> sites, targets;
        for (const Site site : a.sites) sites.emplace_back(name(site));
        for (const Target& target : a.targets) targets.push_back(target.text);
        file.coordinate(group + "site", sites, {"site of the plan", "1"});
        file.coordinate(group + "target", targets, {"what is to be met", "1"});
        std::vector<std::uint8_t> in_set, met, found;
        std::vector<double> mantissa;
        std::vector<std::int64_t> exponent;
        for (const auto& [set, trial] : a.search.tried) {
            for (std::size_t i = 0; i < a.sites.size(); ++i) in_set.push_back(set >> i & 1);
            met.push_back(trial.met ? 1 : 0);
            bool among = false;
            for (const FoundSet& f : a.search.found) among = among || f.set == set;
            found.push_back(among ? 1 : 0);
            for (const WideReal& value : a.values.at(set)) {
                mantissa.push_back(value.mantissa);
                exponent.push_back(value.exponent);
            }
        }
        const Axis trial{"trial", static_cast<std::int64_t>(a.search.tried.size())};
        const Axis site{"site", static_cast<std::int64_t>(sites.size())};
        const Axis target{"target", static_cast<std::int64_t>(targets.size())};
        file.write(group + "in_set", in_set, {trial, site},
                   {a.kind == BisectionKind::repair ? "1: the site is exact" : "1: the site alone rounds", "1"});
        file.write(group + "met", met, {trial}, {"1: the targets are met", "1"});
        file.write(group + "found", found, {trial}, {"1: one of the sets that answer", "1"});
        const std::vector<Axis> axes{trial, target};
        file.write_wide(group + "value", mantissa, exponent, axes, {"the target's measure for the set", "1"});
    }
}

}  // namespace faultline
