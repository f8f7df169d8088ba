// SPDX-License-Identifier: Apache-2.0
#include <faultline/dissociation/matrix_words.hpp>

#include <algorithm>
#include <functional>
#include <map>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <faultline/base/error.hpp>
#include <faultline/dissociation/intervention.hpp>
#include <faultline/dissociation/source.hpp>
#include <faultline/plan/plan_toml.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline {
namespace {

/// All that a source is made of, however it is written: "ds:fixed:0.3" and "ds:fixed:0.30" are one.
std::string made_of(const Source& source) {
    std::string all;
    for (const Fault& fault : source.faults) all += to_string(fault) + "\n";
    for (const gpt::AttentionChoice& choice : source.attention)
        all += fmt::format("{} {} {}\n", choice.layer, choice.heads, to_toml(*choice.plan));
    return all;
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

void expect_different_sources(const std::vector<std::string>& sources, int head_dim, const std::string& folder) {
    expect_different(sources, "source",
                     [&](const std::string& word) { return made_of(parse_source(word, head_dim, folder)); });
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
