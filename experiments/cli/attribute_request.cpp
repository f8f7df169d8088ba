// SPDX-License-Identifier: Apache-2.0
#include <faultline/cli/attribute_request.hpp>

#include <algorithm>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <faultline/base/error.hpp>
#include <faultline/bisection/bisect.hpp>
#include <faultline/cli/terminal.hpp>
#include <faultline/injectors/attention_injector.hpp>
#include <faultline/plan/nearest_name.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline::cli {
namespace {

/// Names given for a setting, turned into what they stand for, each once.
template <class T, class Find>
std::vector<T> found(const std::vector<std::string>& given, const std::string& where,
                     const std::vector<std::string_view>& known, Find&& find) {
    std::vector<T> items;
    for (const std::string& name : given) {
        const auto item = find(name);
        if (!item) throw RequestError(fmt::format("{}: {}: {}", where, in_quotes(name), expected_one_of(name, known)));
        if (std::find(items.begin(), items.end(), *item) == items.end()) items.push_back(*item);
    }
    return items;
}

}  // namespace

void choose_outputs(const AttributeSettings& own, const Settings& settings, AttributionOptions& options) {
    if (own.outputs.empty()) return;
    std::vector<std::string> outputs = own.outputs;
    options.lse = std::erase(outputs, "lse") > 0;
    options.outputs = found<Output>(outputs, settings.where("outputs"), {"o", "dq", "dk", "dv", "lse"},
                                    [](const std::string& n) { return find_output(n); });
    std::sort(options.outputs.begin(), options.outputs.end());
}

std::vector<Site> chosen_sites(const AttributeSettings& own, const Settings& settings) {
    std::vector<std::string_view> known;
    for (const SiteInfo& site : sites()) known.push_back(site.name);
    std::vector<Site> chosen =
        found<Site>(own.sites, settings.where("sites"), known, [](const std::string& n) { return find_site(n); });
    std::sort(chosen.begin(), chosen.end());
    return chosen;
}

std::vector<Fault> chosen_faults(const AttributeSettings& own, const RoundingPlan& plan, const Settings& settings) {
    std::vector<Fault> faults;
    for (const std::string& word : own.injections) {
        try {
            const Fault fault = parse_fault(word);
            (void)AttentionInjector(fault, plan, 1);  // says now what cannot stand in this plan
            if (!fault.layers.empty() || !fault.active(0, 0))
                throw RequestError(
                    fmt::format("fault {}: a capture is one step: expected neither layers (--layers "
                                "chooses them), from nor until",
                                in_quotes(word)));
            faults.push_back(fault);
        } catch (const RequestError& error) {
            throw RequestError(fmt::format("{}: {}", settings.where("inject"), error.what()));
        }
    }
    return faults;
}

std::vector<Correction> chosen_corrections(const AttributeSettings& own, const RoundingPlan& plan,
                                           const Settings& settings) {
    std::vector<Correction> chosen;
    const auto add = [&](Correction correction) {
        const auto same = [&](const Correction& other) { return other.name == correction.name; };
        if (std::none_of(chosen.begin(), chosen.end(), same)) chosen.push_back(std::move(correction));
    };
    for (const std::string& name : own.corrections) {
        if (name == "none" && own.corrections.size() == 1) break;
        if (name == "none")
            throw RequestError(
                fmt::format("{}: \"none\": expected no other correction beside it", settings.where("correction")));
        if (name == "all") {
            for (Correction& correction : standard_corrections(plan)) add(std::move(correction));
            for (const CorrectionInfo& info : corrections())
                if (info.changes_function && info.arguments != Arguments::sites) add(parse_correction(info.name));
            continue;
        }
        try {
            Correction correction = parse_correction(name);
            (void)apply(correction, plan);  // says now what it cannot be applied to
            add(std::move(correction));
        } catch (const RequestError& error) {
            throw RequestError(fmt::format("{}: {}", settings.where("correction"), error.what()));
        }
    }
    return chosen;
}

void expect_layers(const Capture& capture, const std::vector<Correction>& chosen, const Settings& settings) {
    std::vector<std::string_view> there;
    for (const LayerCapture& layer : capture.layers) there.push_back(layer.name);
    for (const Correction& correction : chosen)
        for (const std::string& layer : correction.layers())
            if (std::find(there.begin(), there.end(), layer) == there.end())
                throw RequestError(fmt::format("{}: {}: layer {}: {}", settings.where("correction"),
                                               in_quotes(correction.name), in_quotes(layer),
                                               expected_one_of(layer, there)));
}

void expect_gradients(const Capture& capture, const AttributionOptions& options) {
    const auto gradient =
        std::find_if(options.outputs.begin(), options.outputs.end(), [](Output o) { return o != Output::o; });
    if (gradient == options.outputs.end()) return;
    for (const LayerCapture& layer : capture.layers) {
        if (!layer.dout.empty()) continue;
        throw RequestError(fmt::format(
            "{}: tensor {} is missing: expected the gradient of the loss with respect to the attention output, for dq, dk and dv "
            "(--outputs o,lse attributes the forward alone)",
            escaped(capture.path, capture.path.size()), in_quotes(layer.name + ".do")));
    }
}

bool draws_anything(const RoundingPlan& plan, const AttributionOptions& options) {
    return options.verify_truth > 0 || draws(plan) ||
           std::any_of(options.corrections.begin(), options.corrections.end(), [&](const Correction& correction) {
               const std::vector<std::string> layers = correction.layers();
               return draws(apply(correction, plan)) ||
                      std::any_of(layers.begin(), layers.end(),
                                  [&](const std::string& layer) { return draws(apply(correction, plan, layer)); });
           });
}

void remark_unreached(const AttributeSettings& own, const RoundingPlan& plan, const AttributionOptions& options) {
    if (own.outputs.empty() || options.lse) return;
    const auto reached = [&](Site site) {
        return std::any_of(options.outputs.begin(), options.outputs.end(),
                           [&](Output output) { return can_touch(plan, site, output); });
    };
    std::vector<std::string_view> outputs;
    for (const Output output : options.outputs) outputs.push_back(name(output));
    const std::string to = fmt::format("{}", fmt::join(outputs, ", "));
    for (const Site site : options.sites)
        if (!reached(site))
            remark(fmt::format("faultline attribute: --sites: no data flows from {} to {}", name(site), to));
    for (const std::string& given : own.corrections) {
        if (given == "all" || given == "none") continue;
        const Correction correction = parse_correction(given);
        if (correction.changes_function() || !correction.layers().empty() || !changes_plan(correction, plan)) continue;
        RoundingPlan corrected = apply(correction, plan);
        for (const SiteInfo& site : sites())
            if (!reached(site.site)) corrected.set(site.site, plan[site.site]);
        if (!reached(Site::delta)) {  // delta and the projection enter what ds does
            corrected.schedule.delta_from = plan.schedule.delta_from;
            corrected.schedule.zero_sum = plan.schedule.zero_sum;
        }
        if (corrected.same_numerics(plan))
            remark(fmt::format("faultline attribute: --correction: no data flows from what {} changes to {}",
                               correction.name, to));
    }
}

}  // namespace faultline::cli
