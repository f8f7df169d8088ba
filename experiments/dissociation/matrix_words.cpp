// SPDX-License-Identifier: Apache-2.0
#include <faultline/dissociation/matrix_words.hpp>

#include <algorithm>
#include <functional>
#include <map>
#include <set>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <faultline/base/error.hpp>
#include <faultline/dissociation/intervention.hpp>
#include <faultline/dissociation/passed_faults.hpp>
#include <faultline/dissociation/source.hpp>
#include <faultline/gpt/without_effect.hpp>
#include <faultline/plan/plan_toml.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline {
namespace {

bool apart(const std::vector<int>& a, const std::vector<int>& b) {
    return !a.empty() && !b.empty() &&
           std::ranges::none_of(a, [&](int x) { return std::ranges::find(b, x) != b.end(); });
}

/// Whether one of them meets no value that the other changes.
bool commute(const Fault& a, const Fault& b) {
    return a.site != b.site || apart(a.layers, b.layers) || apart(a.heads, b.heads);
}

/// The faults of a source in an order that is the same for all words for it.
std::string faults_of(const Source& source, const gpt::TrainConfig& config) {
    std::vector<Fault> faults;
    for (const Fault& fault : source.faults) faults.push_back(in_fewest_words(fault, config.model, config.steps));
    const auto behind = [](const Fault& a, const Fault& b) { return commute(a, b) && to_string(a) > to_string(b); };
    for (bool swapped = true; swapped;) {
        swapped = false;
        for (std::size_t i = 1; i < faults.size(); ++i)
            if (behind(faults[i - 1], faults[i])) {
                std::swap(faults[i - 1], faults[i]);
                swapped = true;
            }
    }
    std::string all;
    for (const Fault& fault : faults) all += to_string(fault) + "\n";
    return all;
}

/// The numerics that each head runs under a source: "" where the source has no plan.
std::string plans_of(const Source& source, const gpt::TrainConfig& config) {
    gpt::ModelConfig model = config.model;
    const std::size_t own = model.attention.size();
    model.attention.insert(model.attention.end(), source.attention.begin(), source.attention.end());
    std::map<const RoundingPlan*, std::string> printed{{nullptr, "fast\n"}};
    std::string all;
    for (int layer = 0; layer < model.layers && model.attention.size() > own; ++layer)
        for (int head = 0; head < model.heads; ++head) {
            const RoundingPlan* plan = model.plan(layer, head);
            const auto [at, is_new] = printed.try_emplace(plan);
            if (is_new) {
                RoundingPlan nameless = for_head_dim(*plan, model.head_dim());
                nameless.name = nameless.description = nameless.source = "";
                at->second = to_toml(nameless);
            }
            all += at->second;
        }
    return all;
}

/// All that a source is made of in a run of this configuration, however it is written: "ds:fixed:0.3" and "ds:fixed:0.30" are one,
/// and so are "a+b" and "b+a", and a list of all layers and none. Words that a run refuses are themselves.
std::string made_of(const Source& source, const gpt::TrainConfig& config) {
    gpt::ModelConfig model = config.model;
    const std::size_t own = model.attention.size();
    model.attention.insert(model.attention.end(), source.attention.begin(), source.attention.end());
    try {
        gpt::check(model);
    } catch (const RequestError&) {
        return source.text;
    }
    if (gpt::choice_without_effect(model, own)) return source.text;
    return faults_of(source, config) + plans_of(source, config);
}

/// The same with every magnitude 0, in one unit.
std::string made_of_nothing(Source source, const gpt::TrainConfig& config) {
    for (Fault& fault : source.faults) {
        fault.magnitude = 0;
        fault.unit = Fault::Unit::relative;
    }
    return made_of(source, config);
}

bool has_zero(const Source& source) {
    return std::ranges::any_of(source.faults, [](const Fault& fault) { return fault.magnitude == 0; });
}

/// The word of an intervention that is the same for all that are one.
std::string plain(const std::string& intervention) { return to_string(parse_intervention(intervention)); }

/// Whether it ends the faults of the source.
bool repairs(const Intervention& intervention) {
    using Kind = Intervention::Kind;
    return intervention.kind == Kind::repair ||
           (intervention.kind == Kind::guard && intervention.action == GuardAction::repair);
}

/// Whether it ends this fault while the fault is at work. A guard acts in the second step at the earliest, and may in any later.
bool ends(const Intervention& repair, const Fault& fault) {
    if (repair.kind == Intervention::Kind::guard) return fault.until > 1;
    return fault.from < repair.from && repair.from < fault.until;
}

void expect_different(const std::vector<std::string>& words, const char* each,
                      const std::function<std::string(const std::string&)>& meaning) {
    std::map<std::string, std::string> seen;
    for (const std::string& word : words) {
        const auto [other, is_new] = seen.try_emplace(meaning(word), word);
        if (!is_new)
            throw RequestError(fmt::format("{}: is there twice{}: expected each {} once", in_quotes(word),
                                           other->second == word ? "" : ", as " + in_quotes(other->second) + " too",
                                           each));
    }
}

}  // namespace

void expect_different_sources(const std::vector<std::string>& sources, const gpt::TrainConfig& config,
                              const std::string& folder) {
    expect_different(sources, "source", [&](const std::string& word) {
        return made_of(parse_source(word, config.model.head_dim(), folder), config);
    });
}

void expect_magnitudes_met(const std::vector<std::string>& sources, const gpt::TrainConfig& config,
                           const std::string& folder) {
    std::vector<Source> parsed;
    for (const std::string& word : sources) parsed.push_back(parse_source(word, config.model.head_dim(), folder));
    std::set<std::string> series;  // of those that act
    for (const Source& source : parsed)
        if (!has_zero(source)) series.insert(made_of_nothing(source, config));
    for (const Source& source : parsed)
        if (has_zero(source) && !series.contains(made_of_nothing(source, config)))
            throw RequestError(fmt::format(
                "{}: magnitude 0: changes nothing: expected another, or the same source with others beside it",
                in_quotes(source.text)));
}

void expect_different_interventions(const std::vector<std::string>& interventions) {
    expect_different(interventions, "intervention", plain);
}

void expect_controls_met(const std::vector<std::string>& controls) {
    for (const std::string& word : controls)
        if (repairs(parse_intervention(word)))
            throw RequestError(
                fmt::format("{}: does nothing: a control has no fault, which it would end: expected another control",
                            in_quotes(word)));
}

void expect_interventions_met(const std::vector<std::string>& sources, const std::vector<std::string>& interventions,
                              const std::vector<std::string>& controls, int head_dim, const std::string& folder) {
    bool any_source = false;
    std::vector<Fault> faults;
    for (const std::string& word : sources) {
        const Source source = parse_source(word, head_dim, folder);
        any_source = any_source || !source.is_none();
        faults.insert(faults.end(), source.faults.begin(), source.faults.end());
    }
    for (const std::string& word : interventions) {
        const Intervention intervention = parse_intervention(word);
        if (!any_source || !repairs(intervention)) continue;
        if (faults.empty())
            throw RequestError(fmt::format(
                "{}: meets no source with a fault, which it would end (a plan is none): expected such a source, or another intervention",
                in_quotes(word)));
        if (std::ranges::none_of(faults, [&](const Fault& fault) { return ends(intervention, fault); }))
            throw RequestError(fmt::format(
                "{}: ends no fault of the sources: each begins with it or later, or is over: expected a step between, or another "
                "intervention",
                in_quotes(word)));
    }
    if (any_source) return;
    for (const std::string& word : interventions)
        if (plain(word) != "none" && std::ranges::find(controls, plain(word), plain) == controls.end())
            throw RequestError(fmt::format(
                "{}: meets no source but none: expected a source with an error, or it as a control", in_quotes(word)));
}

}  // namespace faultline
