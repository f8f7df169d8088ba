// SPDX-License-Identifier: Apache-2.0
// Saturation of a layer's rows, and the errors of its output.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <faultline/base/error.hpp>
#include <faultline/format/names.hpp>
#include <faultline/probing/layer_probes.hpp>

namespace faultline::probing {

void LayerProbes::saturation_block(Report& report) {
    Block out = block(
        "saturation",
        fmt::format(
            "of exact scores, rows that see two keys or more; saturated: p_max > 1 - 2^-9; near: within {:g} logits; "
            "ones: weights that are 1 in bf16 before they are normalised",
            options_.tolerance));
    const auto put = [&](const char* name, const char* about, const char* unit, auto&& get) {
        std::vector<double> values;
        for (const RowSaturation& row : saturation_) values.push_back(static_cast<double>(get(row)));
        out.quantities.push_back({name, {about, unit}, row_axes(false), values});
    };
    const auto rows_where = [&](auto&& holds) {
        return [this, holds](std::size_t h) {
            double count = 0, rows = 0;
            for (std::size_t i = 0; i < rows_; ++i) {
                if (!saturation_[h * rows_ + i].chooses()) continue;
                count += holds(saturation_[h * rows_ + i]);
                rows += 1;
            }
            return count / rows;  // NaN: no row has two keys
        };
    };
    const auto largest = [&](const std::vector<double>& values, std::size_t h, std::size_t count) {
        double most = -INFINITY;
        for (std::size_t i = 0; i < count; ++i) most = std::max(most, values[h * count + i]);
        return most;
    };
    out.lines.push_back(line("max logit", "logit", [&](std::size_t h) {
        double most = -INFINITY;
        for (std::size_t i = 0; i < rows_; ++i) most = std::max(most, saturation_[h * rows_ + i].max_logit);
        return most;
    }));
    out.lines.push_back(line("saturated rows", "1", rows_where([](const RowSaturation& r) { return r.saturated(); })));
    out.lines.push_back(
        line("rows with a repeated maximum", "1", rows_where([](const RowSaturation& r) { return r.repeated > 1; })));
    out.lines.push_back(
        line("rows with a near one", "1", rows_where([](const RowSaturation& r) { return r.near > 1; })));
    out.lines.push_back(line("rows with two ones and more", "1",
                             rows_where([](const RowSaturation& r) { return r.rounded_to_one > 1; })));
    out.lines.push_back(line("entropy, mean", "nat", [&](std::size_t h) {
        double sum = 0, rows = 0;
        for (std::size_t i = 0; i < rows_; ++i) {
            if (!saturation_[h * rows_ + i].chooses()) continue;
            sum += saturation_[h * rows_ + i].entropy;
            rows += 1;
        }
        return sum / rows;
    }));
    const auto sequences = static_cast<std::size_t>(layer_.q.batch);
    out.lines.push_back(
        line("mean key over spread, largest", "1", [&](std::size_t h) { return largest(key_spread_, h, sequences); }));
    out.lines.push_back(line("fused exponent of the winner, largest", "log2", [&](std::size_t h) {
        double most = NAN;  // where no row's maximum is scale q.k (a softcap, a bias)
        for (std::size_t i = 0; i < rows_; ++i) {
            const double size = std::abs(winner_fused_[h * rows_ + i]);
            if (!(size <= most) && !std::isnan(size)) most = size;
        }
        return most;
    }));
    label(out, false);
    put("keys", "keys that the row sees", "1", [](const RowSaturation& r) { return r.keys; });
    put("max_logit", "largest visible score of the row", "logit", [](const RowSaturation& r) { return r.max_logit; });
    put("p_max", "largest weight of the row", "1", [](const RowSaturation& r) { return r.p_max; });
    put("entropy", "entropy of the row's weights", "nat", [](const RowSaturation& r) { return r.entropy; });
    put("repeated_max", "keys whose score is the maximum", "1", [](const RowSaturation& r) { return r.repeated; });
    put("near_max", "keys within the tolerance of the maximum", "1", [](const RowSaturation& r) { return r.near; });
    put("rounded_to_one", "keys whose weight is 1 in bf16 before it is normalised", "1",
        [](const RowSaturation& r) { return r.rounded_to_one; });
    out.quantities.push_back({"winner_exponent_fused",
                              {"exponent of the winner by fma(m, c, -round(m c)), 0 in exact arithmetic", "log2"},
                              row_axes(false),
                              winner_fused_});
    out.quantities.push_back(
        {"winner_exponent_unfused", {"the same by round(m c) - round(m c)", "log2"}, row_axes(false), winner_unfused_});
    out.quantities.push_back({"key_mean_over_spread",
                              {"norm of the mean key over rms distance of the keys from it", "1"},
                              axes({{"sequence", layer_.q.batch}}, false),
                              key_spread_});
    report.blocks.push_back(std::move(out));
}

Format LayerProbes::output_format(const Source& source) const {
    if (source.kernel != nullptr) return attribution::format_of((*source.kernel)[Output::o]->dtype);
    const Format& rule = plan_[Site::o_cast].format;
    // A plan that stores O exactly: errors are counted in what the values are held in.
    return is_exact(rule) ? attribution::format_of(layer_.v.dtype) : rule;
}

/// The errors of O of every source but exact arithmetic, by feature over all rows, and one row in detail.
void LayerProbes::output_blocks(Report& report) {
    const std::size_t d = static_cast<std::size_t>(layer_.v.cols), per_head = rows_ * d;
    std::vector<std::string> formats;
    for (std::size_t s = 1; s < sources_.size(); ++s)
        formats.push_back(fmt::format("{} {}", sources_[s].name, name(output_format(sources_[s]))));
    Block out =
        block("output-error",
              fmt::format("(O - exact) in ulps of the format that O is stored in ({}), by feature over rows and "
                          "sequences; largest: the feature of the largest |mean|",
                          fmt::join(formats, ", ")));
    std::vector<double> mean_ulp, rms_ulp, t;
    std::vector<std::size_t> worst(heads_.size(), 0);
    std::vector<std::string> names;
    const std::size_t rows = rows_;
    for (std::size_t s = 1; s < sources_.size(); ++s) {
        names.push_back(sources_[s].name);
        Line all{sources_[s].name + ": mean over features", "ulp", {}},
            largest{sources_[s].name + ": largest mean of a feature", "ulp", {}},
            its_t{sources_[s].name + ": its t", "1", {}};
        std::vector<double> left_out(heads_.size(), 0.0);
        for (std::size_t h = 0; h < heads_.size(); ++h) {
            const auto view = [&](const Source& source) {
                return MatrixView<const double>(source.o.data() + h * per_head, static_cast<std::ptrdiff_t>(rows),
                                                static_cast<std::ptrdiff_t>(d));
            };
            const std::vector<FeatureError> features =
                ulp_error_by_feature(view(sources_[s]), view(sources_[0]), output_format(sources_[s]));
            std::size_t at = 0;
            double sum = 0, with_rows = 0;
            for (std::size_t c = 0; c < features.size(); ++c) {
                mean_ulp.push_back(features[c].mean_ulp);
                rms_ulp.push_back(features[c].rms_ulp);
                t.push_back(features[c].t);
                left_out[h] += static_cast<double>(rows) - features[c].count;
                if (features[c].count == 0) continue;
                sum += features[c].mean_ulp;
                with_rows += 1;
                if (!(std::abs(features[c].mean_ulp) <= std::abs(features[at].mean_ulp))) at = c;
            }
            if (s == 1) worst[h] = at;
            all.values.push_back(sum / with_rows);  // NaN: no feature has a finite error
            largest.values.push_back(features[at].mean_ulp);
            its_t.values.push_back(features[at].t);
        }
        for (Line* line : {&all, &largest, &its_t}) out.lines.push_back(std::move(*line));
        if (std::ranges::any_of(left_out, [](double n) { return n > 0; }))
            out.lines.push_back({sources_[s].name + ": elements left out, not finite", "1", left_out});
    }
    label(out, false);
    out.labels.emplace_back("source", names);
    const std::vector<Axis> by_feature{{"source", static_cast<std::int64_t>(names.size())},
                                       {"head", static_cast<std::int64_t>(heads_.size())},
                                       {"feature", static_cast<std::int64_t>(d)}};
    out.quantities.push_back({"mean_ulp", {"mean signed error of O over rows", "ulp"}, by_feature, mean_ulp});
    out.quantities.push_back({"rms_ulp", {"rms error of O over rows", "ulp"}, by_feature, rms_ulp});
    out.quantities.push_back({"t", {"mean error over its standard error, rows as samples", "1"}, by_feature, t});
    running_quantities(out, worst);
    report.blocks.push_back(std::move(out));
}

void LayerProbes::running_quantities(Block& out, const std::vector<std::size_t>& feature_of_head) {
    if (options_.row && *options_.row >= layer_.q.rows)
        throw RequestError(
            fmt::format("--row: {}: expected 0 to {}, the rows of {}", *options_.row, layer_.q.rows - 1, layer_.name));
    const auto n_q = static_cast<std::size_t>(layer_.q.rows), d = static_cast<std::size_t>(layer_.v.cols);
    // P and the running sum as the first source stores them; of an observed kernel's P the file says nothing.
    const Source& first = sources_[1];
    const Format stored = output_format(first);
    const Format& p_rule = plan_[Site::p_cast].format;
    const Format weights = first.is_plan && !is_exact(p_rule) ? p_rule : stored;
    std::vector<double> chosen_row, chosen_sequence, chosen_feature, sum, error, event, weight, dout, o_error, d_error;
    for (std::size_t h = 0; h < heads_.size(); ++h) {
        std::size_t at = options_.row ? static_cast<std::size_t>(*options_.row) : 0;
        // Where no weight of 1 repeats, the first rows would win the tie, which see few keys and have no error to show.
        const auto better = [&](std::size_t i, std::size_t than) {
            const bool chooses = saturation_[h * rows_ + i].chooses();
            if (chooses != saturation_[h * rows_ + than].chooses()) return chooses;  // one key has nothing to add up
            const int ones = saturation_[h * rows_ + i].rounded_to_one,
                      before = saturation_[h * rows_ + than].rounded_to_one;
            if (ones != before || !backward_ || sources_.size() < 2) return ones > before;
            const std::span<const double> off = sources_[1].delta_error.head(h);
            return std::abs(off[i]) > std::abs(off[than]);
        };
        for (std::size_t i = 0; i < rows_ && !options_.row; ++i)
            if (better(i, at)) at = i;
        const auto b = static_cast<std::ptrdiff_t>(at / n_q), row = static_cast<std::ptrdiff_t>(at % n_q);
        const HeadInputs in = inputs_of(layer_, b, heads_[h], options_);
        const ScoreGradient g = score_gradient(in);
        std::vector<double> pbar, v;
        for (std::ptrdiff_t j = 0; j < in.k.rows; ++j) {
            pbar.push_back(std::exp(g.s(row, j) - saturation_[h * rows_ + at].max_logit));
            v.push_back(in.v(j, static_cast<std::ptrdiff_t>(feature_of_head[h])));
        }
        const RunningOutput running = running_output(pbar, v, weights, stored);
        chosen_row.push_back(static_cast<double>(row));
        chosen_sequence.push_back(static_cast<double>(b));
        chosen_feature.push_back(static_cast<double>(feature_of_head[h]));
        sum.insert(sum.end(), running.sum.begin(), running.sum.end());
        error.insert(error.end(), running.error.begin(), running.error.end());
        d_error.push_back(backward_ ? sources_[1].delta_error.head(h)[at] : NAN);
        event.insert(event.end(), running.event.begin(), running.event.end());
        weight.insert(weight.end(), pbar.begin(), pbar.end());
        for (std::size_t c = 0; c < d; ++c) {
            dout.push_back(backward_ ? in.dout(row, static_cast<std::ptrdiff_t>(c)) : NAN);
            const std::size_t place = (h * rows_ + at) * d + c;
            o_error.push_back(sources_.size() > 1 ? sources_[1].o[place] - sources_[0].o[place] : NAN);
        }
    }
    const auto heads = static_cast<std::int64_t>(heads_.size());
    const std::vector<Axis> one{{"head", heads}}, keys{{"head", heads}, {"key", layer_.k.rows}},
        features{{"head", heads}, {"feature", static_cast<std::int64_t>(d)}};
    out.quantities.push_back({"running_row", {"row that the running output is of", "1"}, one, chosen_row});
    out.quantities.push_back(
        {"row_delta_error", {"delta of the first source minus exact delta, of that row", "nat/logit"}, one, d_error});
    out.quantities.push_back({"running_sequence", {"its sequence", "1"}, one, chosen_sequence});
    out.quantities.push_back({"running_feature", {"its feature", "1"}, one, chosen_feature});
    out.quantities.push_back(
        {"running_sum", {"sum of P V over the keys so far, P not normalised", "value"}, keys, sum});
    out.quantities.push_back({"running_error", {"what storing that sum would be off by", "value"}, keys, error});
    out.quantities.push_back({"running_weight", {"weight of the key, not normalised", "1"}, keys, weight});
    out.quantities.push_back({"running_event", {"1 where the weight is stored as 1", "1"}, keys, event});
    out.quantities.push_back({"row_dout", {"dO of that row", "nat/value"}, features, dout});
    out.quantities.push_back(
        {"row_o_error", {"O of the first source minus exact O of that row", "value"}, features, o_error});
}

}  // namespace faultline::probing
