// SPDX-License-Identifier: Apache-2.0
#include <faultline/identification/identify.hpp>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <optional>
#include <span>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <faultline/attribution/layer_plan.hpp>
#include <faultline/base/error.hpp>
#include <faultline/base/parallel.hpp>
#include <faultline/identification/capture_storage.hpp>
#include <faultline/identification/evaluate.hpp>
#include <faultline/identification/observed_kernels.hpp>
#include <faultline/identification/restate.hpp>
#include <faultline/identification/search.hpp>
#include <faultline/plan/nearest_name.hpp>
#include <faultline/plan/presets.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline {
namespace {

using namespace identification;

/// One kernel and the layers on which one settled plan can be it.
struct Case {
    std::string kernel;
    std::ptrdiff_t head_dim = 0;
    bool causal = true, window = false;
    std::vector<std::string> layers;
    std::vector<Unit> units;
    Extras extras;  ///< of any of the layers
    StorageFormats storage;
    std::vector<std::optional<RoundingPlan>> plans;  ///< the candidates, settled; without those that repeat another
};

/// A plan to rank, and whether it follows the kernel's formats.
struct Candidate {
    RoundingPlan plan;
    bool follows = false;
};

std::vector<Candidate> candidates_of(const IdentifyOptions& options) {
    std::vector<Candidate> candidates;
    for (const RoundingPlan& given : options.candidates) candidates.push_back({given, false});
    for (const std::string& name : options.presets) candidates.push_back({plan(name), true});
    if (candidates.empty())
        for (const RoundingPlan& preset : presets()) candidates.push_back({preset, true});
    return candidates;
}

std::vector<Case> cases_of(const Capture& capture, const std::vector<std::string>& kernels,
                           const IdentifyOptions& options) {
    std::vector<Case> cases;
    for (const std::string& kernel : kernels)
        for (const LayerCapture& layer : capture.layers) {
            const auto found = std::find_if(layer.observed.begin(), layer.observed.end(),
                                            [&](const ObservedKernel& k) { return k.name == kernel; });
            if (found == layer.observed.end() || !has_output(*found, layer)) continue;
            const bool window = is_window(layer);
            auto at = std::find_if(cases.begin(), cases.end(), [&](const Case& c) {
                return c.kernel == kernel && c.head_dim == layer.head_dim() && c.causal == layer.causal &&
                       c.window == window;
            });
            if (at == cases.end())
                at = cases.insert(
                    cases.end(),
                    Case{kernel, layer.head_dim(), layer.causal, window, {}, {}, {}, storage_of(capture, kernel), {}});
            const Extras extras = layer.extras();
            at->extras.softcap = at->extras.softcap || extras.softcap;
            at->extras.sink = at->extras.sink || extras.sink;
            at->extras.dropout = at->extras.dropout || extras.dropout;
            for (attribution::Group& group : attribution::groups_of(layer, options.heads, options.seed))
                at->units.push_back({&layer, at->layers.size(), std::move(group)});
            at->layers.push_back(layer.name);
        }
    return cases;
}

void check_heads(const Capture& capture, const std::vector<int>& heads) {
    for (const LayerCapture& layer : capture.layers)
        for (const int head : heads)
            if (head < 0 || head >= layer.heads())
                throw RequestError(
                    fmt::format("head {} of {}: expected 0 to {}", head, escaped(layer.name), layer.heads() - 1));
}

std::vector<std::string> chosen_kernels(const Capture& capture, const IdentifyOptions& options) {
    const std::vector<std::string> known = observed_kernels(capture);
    if (known.empty()) {
        const std::string why = nothing_to_compare(capture, "");
        throw RequestError(fmt::format(
            "{}: {}", escaped(capture.path, capture.path.size()),
            why.empty()
                ? "no layer has an output of a kernel: expected tensors LAYER.KERNEL.{o,dq,dk,dv} to identify it by"
                : why));
    }
    if (options.kernels.empty()) return known;
    const std::vector<std::string_view> names(known.begin(), known.end());
    for (const std::string& kernel : options.kernels)
        if (std::find(known.begin(), known.end(), kernel) == known.end())
            throw RequestError(fmt::format("{}: {}: {}", escaped(capture.path, capture.path.size()), in_quotes(kernel),
                                           expected_one_of(kernel, names)));
    std::vector<std::string> chosen;
    for (const std::string& name : known)
        if (std::find(options.kernels.begin(), options.kernels.end(), name) != options.kernels.end())
            chosen.push_back(name);
    return chosen;
}

RoundingPlan settled(const Candidate& candidate, const Case& c) {
    return for_head_dim(candidate.follows ? stored_as(candidate.plan, c.storage) : candidate.plan,
                        static_cast<int>(c.head_dim), c.causal, c.window);
}

/// The candidates as this kernel is to be compared with them.
void settle(const std::vector<Candidate>& candidates, Case& c) {
    for (const Candidate& candidate : candidates) {
        RoundingPlan plan = settled(candidate, c);
        const bool repeats = candidate.follows && std::any_of(c.plans.begin(), c.plans.end(), [&](const auto& other) {
                                 return other && other->name == plan.name && other->same_numerics(plan);
                             });
        c.plans.push_back(repeats ? std::nullopt : std::optional(std::move(plan)));
    }
}

/// Takes the plans off that the back end has no room for on some head, of all cases: kernels of a layer share a plan's run.
void leave_out(std::vector<Case>& cases, const std::string& file, const AttentionBackend& backend,
               std::vector<LeftOutPlan>& left_out) {
    if (cases.empty()) return;
    bool some = false;
    for (std::size_t p = 0; p < cases.front().plans.size(); ++p) {
        std::string name;
        try {
            for (const Case& c : cases)
                for (const Unit& unit : c.units) {
                    if (!c.plans[p]) continue;
                    name = c.plans[p]->name;
                    attribution::expect_room(unit.layer->name, {unit.group}, *c.plans[p], backend);
                }
            some = some || !name.empty();
        } catch (const NoRoom& error) {
            left_out.push_back({name, error.what()});
            for (Case& c : cases) c.plans[p].reset();
        }
    }
    if (!some) throw NoRoom(file + ": " + left_out.front().reason);
}

/// Every candidate on every case. A plan's run serves every kernel of the layer that it is compared with.
void rank(const std::vector<Case>& cases, std::size_t candidates, const IdentifyOptions& options, WorkCount& work,
          std::vector<KernelIdentification>& results) {
    struct Key {
        const LayerCapture* layer;
        std::ptrdiff_t batch, kv_head;
        bool fp16;
        std::array<OutputStorage, 4> outputs;
        auto operator<=>(const Key&) const = default;
    };
    struct Use {
        std::size_t c, unit;
    };
    std::map<Key, std::vector<Use>> by_head;  // only its groups are used: the map's order, by address, decides nothing
    for (std::size_t c = 0; c < cases.size(); ++c)
        for (std::size_t u = 0; u < cases[c].units.size(); ++u) {
            const Unit& unit = cases[c].units[u];
            const StorageFormats& storage = cases[c].storage;
            by_head[{unit.layer, unit.group.batch, unit.group.kv_head, storage.fp16, storage.outputs}].push_back(
                {c, u});
        }
    std::vector<const std::vector<Use>*> heads;
    for (const auto& [key, uses] : by_head) heads.push_back(&uses);
    for (std::size_t c = 0; c < cases.size(); ++c)
        for (const auto& plan : cases[c].plans)
            results[c].ranking.push_back(
                {plan ? plan->name : "", {}, std::vector<OutputMatches>(cases[c].layers.size())});

    const std::size_t tasks = candidates * heads.size();
    std::vector<std::vector<OutputMatches>> parts(tasks);
    work.expect(tasks);
    parallel_for(tasks, options.backend->calls_at_once(options.threads), [&](std::size_t task) {
        const std::vector<Use>& uses = *heads[task % heads.size()];
        const std::optional<RoundingPlan>& plan = cases[uses.front().c].plans[task / heads.size()];
        work.step("plan " + (plan ? plan->name : ""));
        if (!plan) return;
        const Unit& first = cases[uses.front().c].units[uses.front().unit];
        const attribution::RunOutputs run = attribution::run_plan(first.group, *plan, nullptr, *options.backend);
        for (const Use& use : uses) {
            const Unit& unit = cases[use.c].units[use.unit];
            parts[task].push_back(compare(unit, run, observed(unit, cases[use.c].kernel)));
        }
    });
    for (std::size_t task = 0; task < tasks; ++task) {
        const std::vector<Use>& uses = *heads[task % heads.size()];
        for (std::size_t i = 0; i < parts[task].size(); ++i) {
            RankedPlan& ranked = results[uses[i].c].ranking[task / heads.size()];
            ranked.match.add(parts[task][i]);
            ranked.layers[cases[uses[i].c].units[uses[i].unit].layer_index].add(parts[task][i]);
        }
    }
}

/// What is around the plans of this kernel that its outputs can tell.
NeighbourhoodOptions neighbourhood_of(const Case& c) {
    NeighbourhoodOptions around;
    around.backward = std::any_of(c.units.begin(), c.units.end(), [&](const Unit& unit) {
        const ObservedKernel& kernel = observed(unit, c.kernel);
        return !unit.group.inputs.dout.empty() && (kernel[Output::dq] || kernel[Output::dk] || kernel[Output::dv]);
    });
    around.grouped_heads =
        std::any_of(c.units.begin(), c.units.end(), [](const Unit& unit) { return unit.group.query_heads() > 1; });
    around.extras = c.extras;
    for (const Unit& unit : c.units) {
        around.queries = std::max(around.queries, static_cast<int>(unit.group.inputs.q.front().rows));
        around.keys = std::max(around.keys, static_cast<int>(unit.group.inputs.k.rows));
    }
    return around;
}

/// The case's heads in two: those that the search sees and those held out, in turn from the one that has most elements
/// that are not the plan's (of `base`), since a head that has none shows no change; of a single head its rows.
std::pair<std::vector<Unit>, std::vector<Unit>> parts_of(const Case& c, const Baseline& base) {
    std::pair<std::vector<Unit>, std::vector<Unit>> parts;
    std::vector<std::size_t> order(c.units.size());
    for (std::size_t u = 0; u < order.size(); ++u) order[u] = u;
    std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
        return base.matches[a].all().differing() > base.matches[b].all().differing();
    });
    for (std::size_t i = 0; i < order.size(); ++i)
        (i % 2 == 0 ? parts.first : parts.second).push_back(c.units[order[i]]);
    if (c.units.size() > 1) return parts;
    parts.second = parts.first;
    parts.first.front().rows = Rows::even;
    parts.second.front().rows = Rows::odd;
    return parts;
}

OutputMatches sum_of(const Baseline& base) {
    OutputMatches sum;
    for (const OutputMatches& match : base.matches) sum.add(match);
    return sum;
}

/// Searches from the plans of the ranking, `plans`, settled, in its order.
void search(const Case& c, const std::vector<RoundingPlan>& plans, const IdentifyOptions& options, WorkCount& work,
            KernelIdentification& result) {
    const auto known = std::make_shared<KnownRuns>();
    const Evaluator evaluator(c.units, c.kernel, options.threads, work, *options.backend, known);
    const auto [searched_units, held_out_units] = parts_of(c, evaluator.baseline(plans.front()));
    const Evaluator searched(searched_units, c.kernel, options.threads, work, *options.backend, known),
        held_out(held_out_units, c.kernel, options.threads, work, *options.backend, known);
    std::vector<RoundingPlan> starts;
    for (const std::size_t i : starts_of(result.ranking)) {
        RoundingPlan start = plans[i];
        if (std::any_of(starts.begin(), starts.end(), [&](const RoundingPlan& s) { return s.same_numerics(start); }))
            continue;
        starts.push_back(std::move(start));
    }
    SearchedPlan found = search_from({searched, held_out}, starts, neighbourhood_of(c));
    restate({searched, held_out}, plans, starts[found.start], c.extras, found);
    result.searched = sum_of(found.base);
    result.held_out = sum_of(held_out.baseline(found.plan));
    result.rows_held_out = c.units.size() == 1;
    for (FoundChange& change : found.found)  // one that was refused may have been found again from elsewhere
        if (std::none_of(result.found.begin(), result.found.end(), [&](const FoundChange& f) {
                return f.changes == change.changes && f.carries == change.carries;
            }))
            result.found.push_back(std::move(change));
    try_neighbours(evaluator, neighbourhood_of(c), found);
    result.plan = found.plan;
    // Wherever it was found from, it is said by the preset that needs fewest changes, of equals the better one.
    for (std::size_t i = 0; i < plans.size(); ++i) {
        std::vector<Difference> changes = differences(plans[i], found.plan);
        if (i > 0 && changes.size() >= result.changes.size()) continue;
        result.nearest = result.ranking[i].plan;
        result.changes = std::move(changes);
    }
    if (!result.changes.empty()) result.changed = with_changes(evaluator, plans, found.plan, result.changes, c.extras);
    result.match = {};
    result.layer_matches.assign(c.layers.size(), {});
    for (std::size_t u = 0; u < c.units.size(); ++u) {
        result.match.add(found.base.matches[u]);
        result.layer_matches[c.units[u].layer_index].add(found.base.matches[u]);
    }
    for (std::size_t i = 0; i < found.singles.size(); ++i)
        result.trials.push_back(
            {found.singles[i].field, found.singles[i].changes, found.tried[i].match, found.tried[i].flips});
    result.sites = evidence_of(found);
}

void name_plan(KernelIdentification& result) {
    RoundingPlan& plan = result.plan;
    plan.name = "identified-" + result.kernel;
    plan.description = fmt::format("the kernel that left the outputs \"{}\" at head size {}: {} of {} elements equal",
                                   result.kernel, result.head_dim, result.match.all().equal, result.match.all().total);
    if (!result.is_found())
        plan.description = fmt::format(
            "not the kernel \"{}\", of which no plan was found, but the nearest: at head size {} "
            "{} of {} elements equal",
            result.kernel, result.head_dim, result.match.all().equal, result.match.all().total);
    else if (const std::vector<std::string> others = result.near_ties(); !others.empty())
        plan.description += fmt::format("; these outputs do not tell it from {}{}", fmt::join(others, ", "),
                                        result.changes.empty() ? "" : " with the same changes");
    if (result.is_found() && result.is_far())
        plan.description +=
            fmt::format("; {} rules from the next plan and without all of the elements, so perhaps another",
                        rules_in(result.changes));
    plan.source = fmt::format("faultline identify, found from \"{}\" with {} change{}", result.nearest,
                              result.changes.size(), result.changes.size() == 1 ? "" : "s");
}

}  // namespace

std::string rule_type(const std::vector<Difference>& changes) {
    std::vector<std::string> types;
    for (const Difference& d : changes) {
        std::string type = !d.field.starts_with("sites.") ? "schedule"
                           : d.to == "exact"              ? "exact"
                                                          : d.field.substr(d.field.rfind('.') + 1);
        if (std::find(types.begin(), types.end(), type) == types.end()) types.push_back(std::move(type));
    }
    return fmt::format("{}", fmt::join(types, ", "));
}

Identification identify(const Capture& capture, const IdentifyOptions& options) {
    check_heads(capture, options.heads);
    const std::vector<std::string> kernels = chosen_kernels(capture, options);
    std::vector<Case> cases = cases_of(capture, kernels, options);
    std::vector<Candidate> candidates;  // those whose kernel can run the layers
    std::string left_out;
    for (const Candidate& candidate : candidates_of(options)) {
        bool runs = true;
        for (const Case& c : cases) {
            const RoundingPlan plan = settled(candidate, c);
            const std::string problem = problem_with(plan);
            if (!problem.empty()) throw RequestError(fmt::format("plan \"{}\": {}", plan.name, problem));
            const std::string cannot = problem_with(plan, c.extras);
            if (!cannot.empty()) left_out = fmt::format("{}: {}", c.layers.front(), cannot);
            runs = runs && cannot.empty();
        }
        if (runs) candidates.push_back(candidate);
    }
    for (Case& c : cases) settle(candidates, c);
    if (candidates.empty() && !cases.empty()) throw RequestError(left_out);
    Identification identification{capture.path, {}, true};
    leave_out(cases, capture.path, *options.backend, identification.left_out);
    std::vector<KernelIdentification> results;
    for (const Case& c : cases)
        results.push_back({c.kernel, c.head_dim, c.causal,
                           c.layers, c.storage,  described_in_file(c.storage, file_types(capture, c.kernel, c.storage)),
                           {},       {},         {},
                           {},       {},         {},
                           false,    {},         {},
                           {},       {},         {},
                           {},       {},         {}});
    WorkCount work(options.progress, options.cancelled);
    try {
        rank(cases, candidates.size(), options, work, results);
        for (std::size_t i = 0; i < cases.size(); ++i) {
            KernelIdentification& result = results[i];
            std::erase_if(result.ranking, [](const RankedPlan& r) { return r.plan.empty(); });
            order_ranking(result.ranking);
            std::vector<RoundingPlan> ranked;  // parallel to the ranking
            for (const RankedPlan& r : result.ranking)
                for (const auto& plan : cases[i].plans)
                    if (plan && plan->name == r.plan) {
                        ranked.push_back(*plan);
                        break;
                    }
            const RankedPlan& best = result.ranking.front();
            result.nearest = best.plan;
            result.plan = ranked.front();
            result.match = best.match;
            result.layer_matches = best.layers;
            if (options.search && result.is_near()) search(cases[i], ranked, options, work, result);
            result.not_compared = not_compared(capture, result.kernel);
            result.not_finite = not_finite(capture, result.kernel);
            result.inputs = mixed_inputs_remark(capture, result.plan);
            name_plan(result);
            identification.kernels.push_back(std::move(result));
        }
    } catch (const Cancelled&) {
        identification.complete = false;
    }
    return identification;
}

}  // namespace faultline
