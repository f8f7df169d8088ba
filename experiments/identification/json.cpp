// SPDX-License-Identifier: Apache-2.0
#include <faultline/identification/json.hpp>

#include <nlohmann/json.hpp>

#include <faultline/plan/plan_toml.hpp>

namespace faultline {
namespace {

using nlohmann::ordered_json;

ordered_json match_json(const Match& match) {
    return {{"equal", match.share()},
            {"within_one_ulp", match.near_share()},
            {"differing", match.differing()},
            {"total", match.total}};
}

/// The outputs that were compared.
ordered_json outputs_json(const OutputMatches& matches) {
    ordered_json out = ordered_json::object();
    for (const Output output : all_outputs)
        if (matches[output].total > 0) out[std::string(name(output))] = match_json(matches[output]);
    return out;
}

ordered_json with_outputs(const OutputMatches& matches) {
    ordered_json out = match_json(matches.all());
    if (matches.lse.total > 0) out["lse"] = match_json(matches.lse);
    out["outputs"] = outputs_json(matches);
    return out;
}

ordered_json layers_json(const std::vector<std::string>& names, const std::vector<OutputMatches>& matches) {
    ordered_json out = ordered_json::object();
    for (std::size_t i = 0; i < names.size(); ++i) out[names[i]] = outputs_json(matches[i]);
    return out;
}

ordered_json changes_json(const std::vector<Difference>& changes) {
    ordered_json out = ordered_json::array();
    for (const Difference& change : changes)
        out.push_back({{"field", change.field}, {"from", change.from}, {"to", change.to}});
    return out;
}

ordered_json flips_json(const identification::Flips& flips) {
    return {{"won", flips.won}, {"lost", flips.lost}, {"z", flips.z()}};
}

ordered_json kernel_json(const KernelIdentification& k) {
    ordered_json ranking = ordered_json::array(), trials = ordered_json::array(), sites = ordered_json::object();
    for (const RankedPlan& plan : k.ranking) {
        ordered_json entry{{"plan", plan.plan}};
        entry.update(with_outputs(plan.match));
        entry["layers"] = layers_json(k.layers, plan.layers);
        ranking.push_back(std::move(entry));
    }
    for (const Trial& trial : k.trials) {
        ordered_json entry{
            {"field", trial.field}, {"rule", rule_type(trial.changes)}, {"changes", changes_json(trial.changes)}};
        entry.update(flips_json(trial.flips));
        trials.push_back(std::move(entry));
    }
    for (const SiteEvidence& e : k.sites) {
        ordered_json entry{{"told", e.told}, {"could_explain", e.could_explain}};
        entry["exact"] = flips_json(e.exact);
        entry["told_from"] = ordered_json::array();
        for (const std::vector<Difference>& changes : e.told_from) entry["told_from"].push_back(changes_json(changes));
        entry["better"] = ordered_json::array();
        for (const std::vector<Difference>& changes : e.better) entry["better"].push_back(changes_json(changes));
        entry["silent"] = e.silent();
        sites[std::string(name(e.site))] = std::move(entry);
    }
    ordered_json steps = ordered_json::array();
    for (const FoundChange& f : k.found) {
        ordered_json idle = ordered_json::array();
        for (const IdleChange& i : f.idle)
            idle.push_back({{"changes", changes_json(i.changes)},
                            {"searched", flips_json(i.searched)},
                            {"held_out", flips_json(i.held_out)}});
        ordered_json step{
            {"changes", changes_json(f.changes)}, {"rule", rule_type(f.changes)},       {"level", f.pair ? 2 : 1},
            {"searched", flips_json(f.searched)}, {"held_out", flips_json(f.held_out)}, {"carries_over", f.carries},
            {"left_out", std::move(idle)}};
        if (f.spoils) step["spoils"] = name(*f.spoils);
        steps.push_back(std::move(step));
    }
    ordered_json found{{"plan", k.plan.name}, {"nearest", k.nearest}, {"changes", changes_json(k.changes)}};
    found["near"] = k.is_near();
    found["found"] = k.is_found();
    found["far"] = k.is_far();
    found["near_ties"] = k.near_ties();
    found["unlike"] = ordered_json::array();
    for (const Output output : k.unlike()) found["unlike"].push_back(name(output));
    found["lacking"] = ordered_json::array();
    for (const Output output : k.lacking()) found["lacking"].push_back(name(output));
    found["bounds"] = {{"all", found_share}};
    for (const Output output : all_outputs)
        if (k.match[output].total > 0) found["bounds"][std::string(name(output))] = found_share_of(output);
    if (const auto nearest = k.nearest_to_bound()) found["nearest_to_bound"] = name(*nearest);
    found["not_compared"] = k.not_compared;
    found["not_finite"] = k.not_finite;
    found.update(with_outputs(k.match));
    found["layers"] = layers_json(k.layers, k.layer_matches);
    if (!k.trials.empty()) {
        found["held_out_by"] = k.rows_held_out ? "rows" : "heads";
        found["searched"] = with_outputs(k.searched);
        found["held_out"] = with_outputs(k.held_out);
    }
    found["found_changes"] = std::move(steps);
    found["sites"] = std::move(sites);
    found["trials"] = std::move(trials);
    found["toml"] = to_toml(k.plan);
    found["storage"] = {
        {"fp16", k.storage.fp16}, {"fp32_outputs", k.storage.fp32_outputs()}, {"suffix", suffix(k.storage)}};
    if (!k.inputs.empty()) found["inputs"] = k.inputs;
    return {{"kernel", k.kernel}, {"head_dim", k.head_dim},        {"causal", k.causal},
            {"layers", k.layers}, {"ranking", std::move(ranking)}, {"identified", std::move(found)}};
}

}  // namespace

std::string to_json(const Identification& identification) {
    ordered_json kernels = ordered_json::array();
    for (const KernelIdentification& kernel : identification.kernels) kernels.push_back(kernel_json(kernel));
    ordered_json out{{"schema", "faultline.identification/1"},
                     {"input", identification.input},
                     {"complete", identification.complete},
                     {"kernels", std::move(kernels)}};
    for (const LeftOutPlan& p : identification.left_out)
        out["left_out"].push_back({{"plan", p.plan}, {"reason", p.reason}});
    return out.dump(1, ' ', false, ordered_json::error_handler_t::replace) + "\n";
}

}  // namespace faultline
