// SPDX-License-Identifier: Apache-2.0
#include <faultline/attribution/write_h5.hpp>

#include <algorithm>
#include <functional>
#include <limits>

#include <faultline/attribution/level.hpp>
#include <faultline/plan/plan_toml.hpp>

namespace faultline {
namespace {

/// One number of every ErrorMeasure.
struct Measure {
    const char* name;
    const char* long_name;
    std::function<double(const ErrorMeasure&)> of;
};

const std::vector<Measure>& measures() {
    static const std::vector<Measure> list{
        {"signed_bias", "mean of the error over its rms", [](const ErrorMeasure& e) { return e.signed_bias; }},
        {"t", "t-statistic of the mean error, rows as samples; NaN: undefined, and for dk and dv, whose rows are keys",
         [](const ErrorMeasure& e) { return e.t_statistic; }},
        {"gain", "inner product of error and truth over the squared norm of the truth",
         [](const ErrorMeasure& e) { return e.gain; }},
        {"row_coherence",
         "magnitude of the sum of the rows' mean errors over the sum of their magnitudes: some 1/sqrt(rows) without bias; NaN for dk and dv",
         [](const ErrorMeasure& e) { return e.row_coherence; }},
        {"head_coherence",
         "magnitude of the sum of the heads' mean errors over the sum of their magnitudes; NaN: one head",
         [](const ErrorMeasure& e) { return e.head_coherence; }},
        {"mean_key_share", "share of the error's energy along the mean key (dq only)",
         [](const ErrorMeasure& e) { return e.mean_key_share; }},
        {"mean_key_sign", "coherence with sign of the rows' errors along the mean key (dq only)",
         [](const ErrorMeasure& e) { return e.mean_key_sign; }},
        {"nonfinite", "elements that are NaN or infinite, left out of the rest",
         [](const ErrorMeasure& e) { return static_cast<double>(e.nonfinite); }},
    };
    return list;
}

/// Values whose exponent may lie beyond double, collected for write_wide.
struct Wide {
    std::vector<double> mantissa;
    std::vector<std::int64_t> exponent;
    void add(const WideReal& x) {
        mantissa.push_back(x.mantissa);
        exponent.push_back(x.exponent);
    }
};

const About head_about{"query head: batch element times the layer's heads, plus head", "1"};

/// Writes the datasets of one layer below its group.
class LayerWriter {
  public:
    LayerWriter(const LayerAttribution& layer, const RoundingPlan& plan, RecordFile& file)
        : layer_(layer), plan_(plan), file_(file), group_(layer.name + "/") {
        for (const Site site : layer.sites) site_names_.emplace_back(name(site));
        for (const OutputAttribution& output : layer.outputs) output_names_.emplace_back(name(output));
        if (layer.outputs.empty()) return;
        for (const CorrectedOutput& corrected : layer.outputs.front().corrections)
            correction_names_.push_back(corrected.correction);
    }

    void write() {
        // In the group of the rows once more, since xarray reads one group at a time; the tiles' groups have it from here.
        for (const std::string& group : {group_, below("rows")}) file_.coordinate(group + "head", heads(), head_about);
        tiles();
        rows();
        for (const OutputAttribution& output : layer_.outputs) errors_of(output);
        if (!layer_.sites.empty()) counterfactuals();
        if (!correction_names_.empty()) corrections();
        if (!layer_.faults.empty()) faults();
        if (layer_.dsink) sinks();
        attributes();  // of the group, which the datasets have made
    }

  private:
    /// Names stand in the group that uses them, once more in each: xarray reads one group at a time.
    Axis coordinate(const std::string& group, const std::string& axis, const std::vector<std::string>& labels,
                    const std::string& long_name) {
        file_.coordinate(group + axis, labels, {long_name, "1"});
        return {axis, static_cast<std::int64_t>(labels.size())};
    }

    /// Of each head of the file its number among all: batch element times heads, plus head.
    [[nodiscard]] std::vector<std::int64_t> heads() const {
        std::vector<std::int64_t> numbers;
        for (std::ptrdiff_t b = 0; b < layer_.batch; ++b)
            for (const std::ptrdiff_t head : layer_.head_indices) numbers.push_back(b * layer_.heads + head);
        return numbers;
    }

    void attributes() {
        const std::string object = layer_.name;
        const auto set = [&](const char* key, std::int64_t value) { file_.attribute(object, key, value); };
        set("batch", layer_.batch), set("heads", layer_.heads), set("kv_heads", layer_.kv_heads),
            set("seq_q", layer_.seq_q), set("seq_k", layer_.seq_k);
        set("head_dim", layer_.head_dim), set("head_dim_v", layer_.head_dim_v), set("causal", layer_.causal ? 1 : 0);
        set("sinks", layer_.has_sinks ? 1 : 0);
        file_.attribute(object, "softcap", layer_.softcap);
        file_.attribute(object, "keep", layer_.keep.value_or(1));
        set("truth_slow_elements", static_cast<std::int64_t>(layer_.truth_slow_elements));
        file_.attribute(object, "saturated_fraction", layer_.rows.saturated_fraction);
        file_.attribute(object, "zero_sum_rms", layer_.rows.zero_sum_rms);
        file_.attribute(object, "zero_sum_coherence", layer_.rows.zero_sum_coherence);
        file_.attribute(object, "repeated_max_fraction", layer_.rows.repeated_max_fraction);
        file_.attribute(object, "rounded_to_one_fraction", layer_.rows.rounded_to_one_fraction);
    }

    void sinks() {
        const SinkGradient& dsink = *layer_.dsink;
        const std::string group = below("dsink");
        const std::vector<std::int64_t> heads(layer_.head_indices.begin(), layer_.head_indices.end());
        file_.coordinate(group + "sink", heads, {"query head whose sink it is"});
        std::vector<std::string> sources{"plan"};
        std::vector<double> values = dsink.plan;
        Wide errors;
        errors.add(dsink.rel_error(dsink.plan));
        for (const SinkGradient::Observed& seen : dsink.observed) {
            sources.push_back(seen.kernel);
            values.insert(values.end(), seen.values.begin(), seen.values.end());
            errors.add(dsink.rel_error(seen.values));
        }
        const Axis source = coordinate(group, "source", sources, "the plan, then observed kernels");
        const Axis sink{"sink", static_cast<std::int64_t>(heads.size())};
        const std::vector<Axis> over_sinks{sink}, over_sources{source};
        Wide truth, bound;
        for (const WideReal& x : dsink.truth) truth.add(x);
        for (const WideReal& x : dsink.bound) bound.add(x);
        file_.write_wide(group + "truth", truth.mantissa, truth.exponent, over_sinks,
                         {"gradient of the sink's logit, over batch and rows", "nat/logit"});
        file_.write_wide(group + "truth_bound", bound.mantissa, bound.exponent, over_sinks,
                         {"bound of the truth's error", "nat/logit"});
        file_.write(group + "value", values, std::vector<Axis>{source, sink},
                    {"gradient of the sink's logit", "nat/logit"});
        file_.write_wide(group + "rel_error", errors.mantissa, errors.exponent, over_sources,
                         {"norm of the error over that of the truth, over the heads", "1"});
    }

    void faults() {
        std::vector<double> rms, asked, mean, coherence;
        for (const Realised& fault : layer_.faults) {
            rms.push_back(fault.rms());
            asked.push_back(fault.asked_rms());
            mean.push_back(fault.mean());
            coherence.push_back(fault.sign_coherence());
        }
        const std::vector<Axis> axes{{"fault", static_cast<std::int64_t>(rms.size())}};
        file_.write(below("faults") + "rms", rms, axes,
                    {"rms of what the fault changed, in the unit of its site", "1"});
        file_.write(below("faults") + "asked_rms", asked, axes, {"rms of what was asked for", "1"});
        file_.write(below("faults") + "mean", mean, axes, {"mean of what the fault changed", "1"});
        file_.write(below("faults") + "sign_coherence", coherence, axes,
                    {"size of the sum over sum of the sizes", "1"});
    }

    void tiles() {
        for (const TileStatistics& local : layer_.local) {
            if (local.count.empty()) continue;  // a site that the schedule does not reach
            const std::string group = below("tiles/" + std::string(name(local.site)));
            const std::string unit(info(local.site).unit);
            const std::vector<Axis> axes{{"head", local.heads}, {"q_tile", local.q_tiles}, {"k_tile", local.k_tiles}};
            file_.write(group + "signed_mean", local.signed_mean, axes, {"mean local error of the tile", unit});
            file_.write(group + "rms", local.rms, axes, {"rms local error of the tile", unit});
            file_.write(group + "value_rms", local.value_rms, axes, {"rms of the exact values of the tile", unit});
            file_.write(group + "max_abs", local.max_abs, axes, {"largest magnitude of the local error", unit});
            file_.write(group + "count", local.count, axes, {"elements summed up; 0: the tile was not visited", "1"});
            file_.write(group + "nonfinite", local.nonfinite, axes, {"elements that became NaN or infinite here", "1"});
        }
    }

    void rows() {
        const RowStatistics& rows = layer_.rows;
        if (layer_.seq_q == 0 || rows.p_max.empty()) return;
        const Axis head{"head", static_cast<std::int64_t>(rows.p_max.size()) / layer_.seq_q};
        const std::vector<Axis> axes{head, {"row", layer_.seq_q}};
        file_.write(below("rows") + "key_mean_norm", rows.key_mean_norm, {head},
                    {"norm of the mean of all keys of the head, masked ones too", "key"});
        file_.write(below("rows") + "key_spread", rows.key_spread, {head},
                    {"rms distance of the keys from their mean", "key"});
        const auto put = [&](const char* what, const std::vector<double>& values, const char* long_name,
                             const char* unit) {
            if (values.size() == rows.p_max.size()) file_.write(below("rows") + what, values, axes, {long_name, unit});
        };
        put("p_max", rows.p_max, "largest true probability of the row; saturated above 1 - 2^-9", "1");
        put("keys", rows.keys, "keys that the row sees", "1");
        put("repeated_max", rows.repeated_max,
            "keys whose score, as the plan's softmax receives it, is the row's largest exactly; 1: not repeated", "1");
        put("rounded_to_one", rows.rounded_to_one,
            "keys whose true probability is above 1 - 2^-9 of the row's largest: 1 in bf16 before it is normalised",
            "1");
        put("zero_sum", rows.zero_sum, "sum over keys of the score gradient after its cast; 0 in exact arithmetic",
            "nat/logit");
        put("zero_sum_relative", rows.zero_sum_relative, "the same over the sum of magnitudes; +-1 in a row of one key",
            "1");
        put("delta_error", rows.delta_error, "delta of the plan minus true delta", "nat/logit");
    }

    /// Every measure of a set of errors over `axes`.
    void measures_of(const std::string& group, const std::vector<const ErrorMeasure*>& errors,
                     const std::vector<Axis>& axes) {
        Wide relative, norm;
        for (const ErrorMeasure* e : errors) relative.add(e->rel_error), norm.add(e->error_norm);
        file_.write_wide(group + "rel_error", relative.mantissa, relative.exponent, axes,
                         {"Frobenius norm of the error over that of the truth", "1"});
        file_.write_wide(group + "error_norm", norm.mantissa, norm.exponent, axes,
                         {"Frobenius norm of the error", "1"});
        for (const Measure& measure : measures()) {
            std::vector<double> values;
            for (const ErrorMeasure* e : errors) values.push_back(measure.of(*e));
            file_.write(group + measure.name, values, axes, {measure.long_name, "1"});
        }
    }

    void errors_of(const OutputAttribution& a) {
        const std::string group = below("outputs/" + std::string(name(a)));
        std::vector<std::string> sources{"plan", "floor"};
        std::vector<const ErrorMeasure*> errors{&a.plan, &a.floor};
        std::vector<double> equal{1, std::numeric_limits<double>::quiet_NaN()}, near = equal;
        for (const ObservedOutput& seen : a.observed) {
            sources.push_back(seen.kernel);
            errors.push_back(&seen.error);
            equal.push_back(seen.bit_equal_to_plan);
            near.push_back(seen.within_one_ulp_of_plan);
        }
        file_.coordinate(group + "source", sources,
                         {"the plan, the plan without rounding in binary64 (floor), then observed kernels", "1"});
        const std::vector<Axis> axes{{"source", static_cast<std::int64_t>(sources.size())}};
        measures_of(group, errors, axes);
        file_.write(group + "bit_equal_to_plan", equal, axes, {"share of elements that equal the plan's", "1"});
        file_.write(group + "within_one_ulp_of_plan", near, axes,
                    {"share of elements within one ulp of the plan's", "1"});
        types_of(group, a, axes);
        if (a.lse) {
            std::vector<std::uint8_t> log2{0, 0};
            for (const ObservedOutput& seen : a.observed) log2.push_back(seen.in_log2 ? 1 : 0);
            file_.write(group + "in_log2", log2, axes, {"1: it is the truth's times log2(e)", "1"});
        }
        scalar(group + "truth_norm", a.truth_norm, "Frobenius norm of the exact output");
        scalar(group + "truth_bound", a.truth_bound, "bound on the error of the truth, Frobenius");
        file_.write(
            group + "unexplained",
            std::vector<double>{a.unexplained.value_or(std::numeric_limits<double>::quiet_NaN())}, {},
            {"1 less the sum of the sites' squared errors alone, over the plan's squared error; NaN: not all sites ran",
             "1"});
        if (a.level) scalar(group + "level", *a.level, "relative error of the truth stored in the output's format");
    }

    /// What each source is stored in, and what a mark in the table says of it.
    void types_of(const std::string& group, const OutputAttribution& a, const std::vector<Axis>& axes) {
        const std::optional<Format> of_plan = stored_format(plan_, a);
        std::vector<std::string> types{of_plan ? type_name(*of_plan) : "exact", "exact"};
        Wide levels;
        std::vector<std::uint8_t> marks;
        const auto add = [&](const ErrorMeasure& error, const std::optional<WideReal>& level) {
            levels.add(level.value_or(WideReal{}));
            marks.push_back(at_level(error, level) ? 1 : 0);
        };
        add(a.plan, a.level);
        add(a.floor, std::nullopt);
        for (const ObservedOutput& seen : a.observed) {
            types.push_back(seen.format ? type_name(*seen.format) : types.front());
            add(seen.error, level_of(seen, a));
        }
        file_.write_strings(group + "type", types, axes, {"what the source stores the output in", "1"});
        file_.write_wide(group + "source_level", levels.mantissa, levels.exponent, axes,
                         {"relative error of the truth stored in the source's type; 0 where that is exact", "1"});
        file_.write(group + "at_level", marks, axes, {"1: the error is at that level", "1"});
    }

    void scalar(const std::string& path, const WideReal& value, const char* long_name) {
        const double mantissa = value.mantissa;
        const std::int64_t exponent = value.exponent;
        file_.write_wide(path, {&mantissa, 1}, {&exponent, 1}, {}, {long_name, "1"});
    }

    /// A number of every (site, output).
    void by_site(const std::string& path, const std::vector<Axis>& axes, const char* long_name,
                 const std::function<double(const SiteEffect&)>& of) {
        std::vector<double> values;
        for (std::size_t s = 0; s < layer_.sites.size(); ++s)
            for (const OutputAttribution& output : layer_.outputs) values.push_back(of(output.sites[s]));
        file_.write(path, values, axes, {long_name, "1"});
    }

    void counterfactuals() {
        const std::string group = below("counterfactual");
        Wide alone, repaired;
        for (std::size_t s = 0; s < layer_.sites.size(); ++s)
            for (const OutputAttribution& output : layer_.outputs) {
                alone.add(output.sites[s].alone.rel_error);
                repaired.add(output.sites[s].repaired.rel_error);
            }
        const std::vector<Axis> axes{coordinate(group, "site", site_names_, "site of the plan"),
                                     coordinate(group, "output", output_names_, "output of attention")};
        file_.write_wide(group + "alone", alone.mantissa, alone.exponent, axes,
                         {"relative error with every other site exact", "1"});
        file_.write_wide(group + "repaired", repaired.mantissa, repaired.exponent, axes,
                         {"relative error with this site exact", "1"});
        by_site(group + "share", axes,
                "fall of the squared error when the site is repaired, over the plan's squared error; below 0: it grows",
                [](const SiteEffect& e) { return e.share; });
        by_site(group + "moved_squared", axes,
                "squared distance by which the repair of the site moves the output, over the plan's squared error",
                [](const SiteEffect& e) { return e.moved_squared; });
        by_site(group + "interaction", axes,
                "share less the squared error of the site alone, over the plan's squared error",
                [](const SiteEffect& e) { return e.interaction; });
        by_site(group + "alone_below_floor", axes, "1: alone is not told from binary64 arithmetic",
                [](const SiteEffect& e) { return e.alone_below_floor ? 1.0 : 0.0; });
        std::vector<double> set_number, together;
        for (const Site site : layer_.sites)
            for (const OutputAttribution& a : layer_.outputs) {
                const auto set = std::find_if(a.redundant.begin(), a.redundant.end(), [&](const RedundantSites& r) {
                    return std::count(r.sites.begin(), r.sites.end(), site) > 0;
                });
                const bool none = set == a.redundant.end();
                set_number.push_back(none ? 0 : static_cast<double>(set - a.redundant.begin() + 1));
                together.push_back(none ? std::numeric_limits<double>::quiet_NaN() : set->share);
            }
        file_.write(
            group + "redundant", set_number, axes,
            {"number of the set of redundant sites that this one belongs to: much alone, and its repair changes "
             "next to nothing as another does the same; 0: none",
             "1"});
        file_.write(group + "redundant_share", together, axes,
                    {"share of the redundant sites of the set repaired together; NaN: none", "1"});
        for (const Measure& measure : measures())
            by_site(group + measure.name, axes, measure.long_name,
                    [&](const SiteEffect& e) { return measure.of(e.alone); });
    }

    void corrections() {
        const std::string group = below("corrections");
        std::vector<const ErrorMeasure*> errors;
        std::vector<std::uint8_t> changes;
        for (std::size_t c = 0; c < correction_names_.size(); ++c) {
            for (const OutputAttribution& output : layer_.outputs) errors.push_back(&output.corrections[c].error);
            changes.push_back(layer_.outputs.front().corrections[c].changes_function ? 1 : 0);
        }
        const Axis by_name = coordinate(group, "correction", correction_names_, "correction applied to the plan");
        measures_of(group, errors, {by_name, coordinate(group, "output", output_names_, "output of attention")});
        Wide levels;
        std::vector<std::uint8_t> marks;
        for (std::size_t c = 0; c < correction_names_.size(); ++c)
            for (const OutputAttribution& output : layer_.outputs) {
                const CorrectedOutput& corrected = output.corrections[c];
                levels.add(corrected.level.value_or(WideReal{}));
                marks.push_back(at_level(corrected.error, corrected.level) ? 1 : 0);
            }
        const std::vector<Axis> axes{by_name, {"output", static_cast<std::int64_t>(output_names_.size())}};
        file_.write_wide(
            group + "level", levels.mantissa, levels.exponent, axes,
            {"relative error of the truth that it is compared with, stored in the plan's type; 0: exact", "1"});
        file_.write(group + "at_level", marks, axes, {"1: the error is at that level", "1"});
        file_.write(group + "changes_function", changes, {by_name}, {"1: the truth is that of another function", "1"});
    }

    [[nodiscard]] std::string below(const std::string& path) const { return group_ + path + "/"; }

    const LayerAttribution& layer_;
    const RoundingPlan& plan_;
    RecordFile& file_;
    std::string group_;
    std::vector<std::string> site_names_, output_names_, correction_names_;
};

}  // namespace

void write_head(const Attribution& attribution, RecordFile& file) {
    file.attribute("", "input", attribution.input);
    file.attribute("", "plan", attribution.plan.name);
    file.attribute("", "plan_toml", to_toml(attribution.plan));
    if (attribution.faults.empty()) return;
    std::vector<std::string> faults;
    for (const Fault& fault : attribution.faults) faults.push_back(to_string(fault));
    file.attribute("", "faults", std::span<const std::string>(faults));
}

void write_layer(const Attribution& attribution, std::size_t layer, RecordFile& file) {
    LayerWriter(attribution.layers.at(layer), attribution.plan, file).write();
}

void write_end(const Attribution& attribution, RecordFile& file) {
    file.attribute("", "complete", std::int64_t{attribution.complete ? 1 : 0});
}

void write(const Attribution& attribution, RecordFile& file) {
    write_head(attribution, file);
    for (std::size_t layer = 0; layer < attribution.layers.size(); ++layer) write_layer(attribution, layer, file);
    write_end(attribution, file);
}

void write(const Attribution& attribution, const std::string& path) {
    RecordFile file = RecordFile::create(path, make_manifest("attribution", "", "", 0));
    write(attribution, file);
    file.commit();
}

}  // namespace faultline
