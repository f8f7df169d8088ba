// SPDX-License-Identifier: Apache-2.0
#include <faultline/attribution/json.hpp>

#include <cmath>
#include <limits>

#include <nlohmann/json.hpp>

#include <faultline/attribution/level.hpp>
#include <faultline/format/names.hpp>

namespace faultline {
namespace {

using nlohmann::ordered_json;

constexpr int wide_digits = 17;  // as many as a double carries

ordered_json number(double x) {
    if (std::isfinite(x)) return x;
    return std::isnan(x) ? "nan" : (x > 0 ? "inf" : "-inf");
}

/// A statistic that may be undefined.
ordered_json number_or_null(double x) { return std::isnan(x) ? ordered_json(nullptr) : number(x); }

/// A statistic that is undefined where the plan's own values are not finite.
ordered_json finite_or_null(double x) { return std::isfinite(x) ? ordered_json(x) : ordered_json(nullptr); }

ordered_json number(const WideReal& x) {
    const double near = x.to_double();
    const bool held = near == 0 ? x.mantissa == 0 : std::isnormal(near);
    if (held) return near;
    return x.to_string(wide_digits);
}

ordered_json error_json(const ErrorMeasure& e) {
    ordered_json out{{"rel_error", number(e.rel_error)},
                     {"error_norm", number(e.error_norm)},
                     {"signed_bias", number(e.signed_bias)},
                     {"t", number_or_null(e.t_statistic)},
                     {"gain", number(e.gain)},
                     {"row_coherence", number_or_null(e.row_coherence)},
                     {"head_coherence", number_or_null(e.head_coherence)}};
    if (!std::isnan(e.mean_key_share)) {
        out["mean_key_share"] = e.mean_key_share;
        out["mean_key_sign"] = number(e.mean_key_sign);
    }
    if (e.nonfinite > 0) out["nonfinite"] = e.nonfinite;
    return out;
}

/// alone and repaired are the relative errors; the sign is that of the error which the site makes alone.
ordered_json site_json(const SiteEffect& effect, const TileStatistics& local) {
    ordered_json out{{"share", number(effect.share)},
                     {"moved_squared", number(effect.moved_squared)},
                     {"alone", number(effect.alone.rel_error)},
                     {"repaired", number(effect.repaired.rel_error)},
                     {"signed_bias", number(effect.alone.signed_bias)},
                     {"t", number_or_null(effect.alone.t_statistic)},
                     {"row_coherence", number_or_null(effect.alone.row_coherence)},
                     {"interaction", number(effect.interaction)}};
    if (!std::isnan(effect.alone.mean_key_share)) {
        out["mean_key_share"] = effect.alone.mean_key_share;
        out["mean_key_sign"] = number(effect.alone.mean_key_sign);
    }
    if (effect.alone_below_floor) out["alone_below_floor"] = true;
    if (effect.alone.nonfinite > 0) out["alone_nonfinite"] = effect.alone.nonfinite;
    if (effect.repaired.nonfinite > 0) out["repaired_nonfinite"] = effect.repaired.nonfinite;
    out["local"] = {{"rms", number(local.total_rms())},
                    {"signed_bias", number(local.signed_bias())},
                    {"t", number_or_null(local.t_statistic())},
                    {"unit", info(local.site).unit}};
    return out;
}

ordered_json output_json(const OutputAttribution& a, const LayerAttribution& layer, const RoundingPlan& plan) {
    ordered_json out{{"truth_norm", number(a.truth_norm)},
                     {"truth_bound", number(a.truth_bound)},
                     {"truth_resolved", truth_is_resolved(a)}};
    if (const auto format = stored_format(plan, a)) {
        out["format"] = name(*format);
        if (a.level) out["format_level"] = number(*a.level);
        out["below_range"] = below_range(a.truth_norm, *format);
    }
    if (a.lse) out["rows"] = a.elements;
    out["plan"] = error_json(a.plan);
    out["floor"] = number(a.floor.rel_error);
    out["unexplained"] = a.unexplained ? number(*a.unexplained) : ordered_json(nullptr);
    out["redundant"] = ordered_json::array();
    for (const RedundantSites& set : a.redundant) {
        ordered_json together{{"sites", ordered_json::array()},
                              {"share", number(set.share)},
                              {"repaired", number(set.repaired.rel_error)}};
        for (const Site site : set.sites) together["sites"].push_back(name(site));
        out["redundant"].push_back(std::move(together));
    }
    ordered_json observed = ordered_json::object(), sites = ordered_json::object(),
                 corrections = ordered_json::object();
    for (const ObservedOutput& seen : a.observed) {
        ordered_json item = error_json(seen.error);
        item["bit_equal_to_plan"] = number(seen.bit_equal_to_plan);
        item["within_one_ulp_of_plan"] = number(seen.within_one_ulp_of_plan);
        if (seen.format) item["format"] = name(*seen.format);
        if (seen.level) item["format_level"] = number(*seen.level);
        if (seen.plan) item["plan_rel_error_in_format"] = number(seen.plan->rel_error);
        if (a.lse) {
            item["in_log2"] = seen.in_log2;
            item["finite_without_key"] = seen.finite_without_key;
        }
        observed[seen.kernel] = std::move(item);
    }
    for (std::size_t s = 0; s < layer.sites.size(); ++s)
        sites[std::string(name(layer.sites[s]))] = site_json(a.sites[s], layer.local[s]);
    for (const CorrectedOutput& corrected : a.corrections) {
        ordered_json item = error_json(corrected.error);
        item["changes_function"] = corrected.changes_function;
        item["at_level"] = at_level(corrected.error, corrected.level);
        corrections[corrected.correction] = std::move(item);
    }
    out["observed"] = std::move(observed);
    out["sites"] = std::move(sites);
    out["corrections"] = std::move(corrections);
    out["best_correction"] = a.best_correction.empty() ? ordered_json(nullptr) : ordered_json(a.best_correction);
    return out;
}

/// Per query head of head_indices: values by truth, plan and kernel, with their errors over all of them.
ordered_json sink_json(const SinkGradient& dsink) {
    const auto side = [&](const std::vector<double>& values) {
        ordered_json list = ordered_json::array();
        for (const double x : values) list.push_back(number(x));
        return ordered_json{{"values", std::move(list)}, {"rel_error", number(dsink.rel_error(values))}};
    };
    ordered_json truth = ordered_json::array(), bound = ordered_json::array(), observed = ordered_json::object();
    for (const WideReal& x : dsink.truth) truth.push_back(number(x));
    for (const WideReal& x : dsink.bound) bound.push_back(number(x));
    for (const SinkGradient::Observed& seen : dsink.observed) observed[seen.kernel] = side(seen.values);
    return {{"truth", std::move(truth)},
            {"truth_bound", std::move(bound)},
            {"plan", side(dsink.plan)},
            {"observed", std::move(observed)}};
}

ordered_json layer_json(const LayerAttribution& layer, const RoundingPlan& plan) {
    ordered_json outputs = ordered_json::object();
    for (const OutputAttribution& a : layer.outputs) outputs[std::string(name(a))] = output_json(a, layer, plan);
    ordered_json out{{"name", layer.name},
                     {"batch", layer.batch},
                     {"heads", layer.heads},
                     {"kv_heads", layer.kv_heads},
                     {"head_indices", layer.head_indices},
                     {"seq", layer.seq_q},
                     {"seq_k", layer.seq_k},
                     {"head_dim", layer.head_dim},
                     {"head_dim_v", layer.head_dim_v},
                     {"causal", layer.causal},
                     {"softcap", layer.softcap},
                     {"sinks", layer.has_sinks},
                     {"keep", layer.keep ? ordered_json(*layer.keep) : ordered_json(nullptr)},
                     {"outputs", std::move(outputs)}};
    out["rows"] = {{"count", layer.rows.p_max.size()},
                   {"saturated_fraction", number(layer.rows.saturated_fraction)},
                   {"zero_sum_rms", finite_or_null(layer.rows.zero_sum_rms)},
                   {"zero_sum_coherence", finite_or_null(layer.rows.zero_sum_coherence)},
                   {"repeated_max_fraction", number(layer.rows.repeated_max_fraction)},
                   {"rounded_to_one_fraction", number(layer.rows.rounded_to_one_fraction)}};
    if (layer.dsink) out["dsink"] = sink_json(*layer.dsink);
    if (!layer.faults.empty()) {
        out["faults"] = ordered_json::array();
        for (const Realised& fault : layer.faults)
            out["faults"].push_back({{"count", fault.count},
                                     {"rms", number(fault.rms())},
                                     {"asked_rms", number(fault.asked_rms())},
                                     {"relative_rms", number(fault.relative_rms())},
                                     {"mean", number(fault.mean())},
                                     {"asked_mean", number(fault.asked_mean())},
                                     {"sign_coherence", number(fault.sign_coherence())}});
    }
    out["truth_slow_elements"] = layer.truth_slow_elements;
    if (layer.verified) {
        out["truth_verified"] = {{"checked", layer.verified->checked},
                                 {"outside", layer.verified->outside},
                                 {"worst_ratio", number(layer.verified->worst_ratio)},
                                 {"worst", layer.verified->worst}};
    }
    return out;
}

}  // namespace

std::string to_json(const Attribution& attribution) {
    ordered_json layers = ordered_json::array();
    for (const LayerAttribution& layer : attribution.layers) layers.push_back(layer_json(layer, attribution.plan));
    ordered_json object{{"schema", "faultline.attribution/1"},
                        {"input", attribution.input},
                        {"plan", attribution.plan.name},
                        {"complete", attribution.complete}};
    object.update(ordered_json::parse(to_json(attribution.origin)));
    object["layers"] = std::move(layers);
    for (const Fault& fault : attribution.faults) object["faults"].push_back(to_string(fault));
    // Names come out of files and need not be UTF-8.
    return object.dump(1, ' ', false, ordered_json::error_handler_t::replace) + "\n";
}

}  // namespace faultline
