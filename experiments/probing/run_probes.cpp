// SPDX-License-Identifier: Apache-2.0
// Probes of runs of `faultline train`: series over steps.
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <set>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <faultline/base/error.hpp>
#include <faultline/probes/coherence.hpp>
#include <faultline/probes/conservation.hpp>
#include <faultline/probes/early_warning.hpp>
#include <faultline/probing/probing.hpp>
#include <faultline/record/record_reader.hpp>
#include <faultline/record/rehearsal.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline::probing {
namespace {

/// A dataset over (step, …), of the layers and heads that are asked for: values[step * per_step + i].
struct Series {
    std::vector<double> values;
    std::size_t per_step = 1;
    std::vector<Axis> axes;                                                ///< after the step
    std::vector<std::pair<std::string, std::vector<std::string>>> labels;  ///< of these axes: "layer", {"0", "2"}
    [[nodiscard]] std::vector<double> of(std::size_t i) const {
        std::vector<double> one;
        for (std::size_t at = i; at < values.size(); at += per_step) one.push_back(values[at]);
        return one;
    }
};

class Run {
  public:
    Run(const std::string& path, const ProbeOptions& options)
        : reader_((rehearse_reading(path, Rehearsal::values), path)), options_(options) {
        name = std::filesystem::path(path).stem().string();
        for (const char* needed : {"steps/step", "steps/loss"})
            if (!reader_.contains(needed))
                throw RequestError(fmt::format("{}: dataset {}: is missing: expected a run of faultline train",
                                               reader_.name(), needed));
        const std::vector<Axis> axes = reader_.axes("steps/step");
        if (axes.size() != 1)
            throw RequestError(
                fmt::format("{}: dataset steps/step: {} dimensions: expected one", source(), axes.size()));
        for (const double s : reader_.read("steps/step").to_double()) {
            if (!steps.empty() && !(s > static_cast<double>(steps.back())))
                throw RequestError(fmt::format("{}: dataset steps/step: {:g} after {}: expected numbers that rise",
                                               source(), s, steps.back()));
            steps.push_back(static_cast<std::int64_t>(s));
        }
        if (steps.empty())
            throw RequestError(
                fmt::format("{}: steps/step: has no step: expected a run that made one", reader_.name()));
    }
    [[nodiscard]] bool has(const std::string& series) const {
        return reader_.contains(fmt::format("steps/{}", series));
    }
    /// `over`: the names of its axes after the step.
    [[nodiscard]] Series series(const std::string& which, const std::vector<std::string>& over) const {
        const std::string path = fmt::format("steps/{}", which);
        std::vector<Axis> axes = reader_.axes(path);
        bool fits = axes.size() == over.size() + 1 && axes[0].name == "step" &&
                    axes[0].size >= static_cast<std::int64_t>(steps.size());
        for (std::size_t d = 0; fits && d < over.size(); ++d) fits = axes[d + 1].name == over[d];
        if (!fits) {
            std::vector<std::string> found, expected{fmt::format("step {}", steps.size())};
            for (const Axis& axis : axes)
                found.push_back(fmt::format("{} {}", axis.name.empty() ? "(no name)" : axis.name, axis.size));
            expected.insert(expected.end(), over.begin(), over.end());
            throw RequestError(fmt::format("{}: dataset {}: is over ({}): expected ({})", source(), path,
                                           fmt::join(found, ", "), fmt::join(expected, ", ")));
        }
        // steps/step is written last: a run that was killed, or is going on, may have more of another series than of it.
        const std::vector<double> all = reader_.read(path).to_double();
        axes.erase(axes.begin());
        std::vector<std::vector<std::size_t>> kept;
        std::vector<std::size_t> sizes;
        std::size_t whole = 1;
        Series s;
        for (Axis& axis : axes) {
            kept.push_back(chosen(axis));
            sizes.push_back(static_cast<std::size_t>(axis.size));
            whole *= sizes.back();
            axis.size = static_cast<std::int64_t>(kept.back().size());
            s.per_step *= kept.back().size();
            auto& [name, labels] = s.labels.emplace_back();
            name = axis.name;
            for (const std::size_t i : kept.back()) labels.push_back(std::to_string(i));
        }
        s.axes = axes;
        for (std::size_t t = 0; t < steps.size(); ++t)
            for (std::size_t i = 0; i < s.per_step; ++i) {
                std::size_t rest = i, at = 0, stride = 1;
                for (std::size_t d = axes.size(); d-- > 0;) {
                    at += kept[d][rest % kept[d].size()] * stride;
                    rest /= kept[d].size();
                    stride *= sizes[d];
                }
                s.values.push_back(all[t * whole + at]);
            }
        return s;
    }
    [[nodiscard]] const std::string& source() const { return reader_.name(); }
    /// Hashes of what was trained on; "" where the file does not say.
    [[nodiscard]] std::string data() const {
        std::vector<std::string> hashes;
        for (const InputHash& input : reader_.manifest().inputs) hashes.push_back(input.hash);
        return fmt::format("{}", fmt::join(hashes, " "));
    }
    std::string name;
    std::vector<std::int64_t> steps;

  private:
    /// Indices along an axis: the layers and heads asked for, all of any other.
    [[nodiscard]] std::vector<std::size_t> chosen(const Axis& axis) const {
        const auto size = static_cast<std::size_t>(axis.size);
        std::vector<std::size_t> all;
        if (axis.name == "head")
            for (const int head : options_.heads) {
                if (head >= static_cast<int>(size))
                    throw RequestError(fmt::format("{}: --heads: {}: expected 0 to {}", source(), head, size - 1));
                all.push_back(static_cast<std::size_t>(head));
            }
        if (axis.name == "layer")
            for (const std::string& layer : options_.layers) {
                std::size_t i = 0;
                while (i < size && layer != fmt::format("layer{}", i)) ++i;
                if (i == size)
                    throw RequestError(fmt::format("{}: --layers: {}: expected layer0 to layer{}", source(),
                                                   in_quotes(layer), size - 1));
                all.push_back(i);
            }
        if (all.empty())
            for (std::size_t i = 0; i < size; ++i) all.push_back(i);
        std::ranges::sort(all);
        all.erase(std::unique(all.begin(), all.end()), all.end());
        return all;
    }
    RecordReader reader_;
    const ProbeOptions& options_;
};

const std::vector<std::string> layer_head{"layer", "head"};

/// "layer 0 head 1" for the elements of a series over (layer, head).
std::vector<std::string> element_names(const Series& s) {
    std::vector<std::string> names;
    for (const std::string& layer : s.labels[0].second)
        for (const std::string& head : s.labels[1].second)
            names.push_back(fmt::format("layer {} head {}", layer, head));
    return names;
}

std::vector<Axis> with(const Axis& first, const std::vector<Axis>& rest) {
    std::vector<Axis> all{first};
    all.insert(all.end(), rest.begin(), rest.end());
    return all;
}

void add_conservation(const Run& run, const std::string& place, Report& report) {
    if (!run.has("zero_sum") || !run.has("zero_sum_abs")) return;
    const Series sum = run.series("zero_sum", layer_head), magnitude = run.series("zero_sum_abs", layer_head);
    Block out{place,
              "conservation",
              "sum over a step's rows of the row sums of the score gradient, 0 in exact arithmetic",
              element_names(sum),
              {},
              {},
              {}};
    Line total{"running sum, at the end", "nat/logit", {}}, largest{"running sum, largest magnitude", "nat/logit", {}},
        ratio{"|sum| over sum of |ds|, mean over steps", "1", {}}, left_out{"steps left out, not finite", "1", {}};
    std::vector<double> running(sum.values.size());
    for (std::size_t i = 0; i < sum.per_step; ++i) {
        const std::vector<double> r = sum.of(i), a = magnitude.of(i), sums = running_sum(r);
        double most = 0, relative = 0, judged = 0;
        for (std::size_t t = 0; t < r.size(); ++t) {
            running[t * sum.per_step + i] = sums[t];
            if (!(std::abs(sums[t]) <= most)) most = std::abs(sums[t]);  // a NaN stays, as in the sum
            if (!std::isfinite(r[t]) || !std::isfinite(a[t])) continue;
            relative += std::abs(relative_row_sum(r[t], a[t]));
            judged += 1;
        }
        total.values.push_back(sums.back());
        largest.values.push_back(most);
        ratio.values.push_back(relative / judged);
        left_out.values.push_back(static_cast<double>(r.size()) - judged);
    }
    out.lines = {total, largest, ratio};
    if (std::ranges::any_of(left_out.values, [](double n) { return n > 0; })) out.lines.push_back(left_out);
    std::vector<std::string> steps;
    for (const std::int64_t step : run.steps) steps.push_back(std::to_string(step));
    out.labels.emplace_back("step", steps);
    out.labels.insert(out.labels.end(), sum.labels.begin(), sum.labels.end());
    out.quantities.push_back({"running_sum",
                              {"row sums of the score gradient added up over rows and steps", "nat/logit"},
                              with({"step", static_cast<std::int64_t>(run.steps.size())}, sum.axes),
                              running});
    report.blocks.push_back(std::move(out));
}

void add_coherence(const Run& run, const std::string& place, const ProbeOptions& options, Report& report) {
    const std::size_t steps = run.steps.size();
    const std::size_t window = options.window > 0 ? static_cast<std::size_t>(options.window) : steps;
    if (window > steps)
        throw RequestError(
            fmt::format("--window: {}: expected at most {}, the steps of {}", window, steps, run.source()));
    for (const char* name : {"zero_sum", "injected_mean"}) {
        if (!run.has(name)) continue;
        const Series s = run.series(name, layer_head);
        Block out{place,
                  std::string("coherence/") + name,
                  fmt::format("of {} over steps{}; p: two-sided, signs at random", name,
                              window < steps ? fmt::format(", last window of {}", window) : ""),
                  element_names(s),
                  {},
                  {},
                  {}};
        const char* const unit = std::string_view(name) == "zero_sum" ? "nat/logit" : "1";
        std::vector<Line> lines{{"mean sign", "1", {}},           {"sum over sum of magnitudes", "1", {}},
                                {"deviation, rms", unit, {}},     {"p of the signs", "1", {}},
                                {"p of the sum", "1", {}},        {"signs' correlation with the next", "1", {}},
                                {"left out, not finite", "1", {}}};
        const std::size_t windows = steps / window;
        std::vector<std::vector<double>> all(lines.size(), std::vector<double>(windows * s.per_step));
        for (std::size_t i = 0; i < s.per_step; ++i) {
            const std::vector<Coherence> found = windowed_coherence(s.of(i), window, window);
            for (std::size_t t = 0; t < windows; ++t) {
                const Coherence& c = found[t];
                const double values[] = {c.mean_sign,
                                         c.sum_coherence,
                                         c.rms,
                                         c.sign_p,
                                         c.sum_p,
                                         c.sign_lag1,
                                         static_cast<double>(c.nonfinite)};
                for (std::size_t q = 0; q < lines.size(); ++q) {
                    all[q][t * s.per_step + i] = values[q];
                    if (t + 1 == windows) lines[q].values.push_back(values[q]);
                }
            }
        }
        out.lines = lines;
        if (std::ranges::none_of(lines.back().values, [](double n) { return n > 0; })) out.lines.pop_back();
        out.labels = s.labels;
        const char* const keys[] = {"mean_sign", "sum_coherence", "rms", "sign_p", "sum_p", "sign_lag1", "nonfinite"};
        for (std::size_t q = 0; q < lines.size(); ++q)
            out.quantities.push_back({keys[q],
                                      {lines[q].name, lines[q].unit},
                                      with({"window", static_cast<std::int64_t>(windows)}, s.axes),
                                      all[q]});
        report.blocks.push_back(std::move(out));
    }
}

struct MonitorInfo {
    const char* name;
    bool falling, magnitude;
    std::vector<std::string> over;  ///< the axes after the step
};
const MonitorInfo monitors[] = {{"grad_norm", false, false, {}},
                                {"max_logit", false, false, layer_head},
                                {"qk_rms", false, false, layer_head},
                                {"saturated_fraction", false, false, layer_head},
                                {"entropy", true, false, layer_head},
                                {"sigma_q", false, false, {"layer", "singular_value"}},
                                {"sigma_k", false, false, {"layer", "singular_value"}},
                                {"sigma_qk", false, false, {"layer", "head", "singular_value"}},
                                {"zero_sum", false, true, layer_head},
                                {"zero_sum_total", false, true, layer_head}};

MonitorSeries monitor_of(const Run& run, const MonitorInfo& info) {
    const Series s = run.series(info.name, info.over);
    MonitorSeries out{info.name, info.falling, {}};
    for (std::size_t t = 0; t < run.steps.size(); ++t) {
        double extreme = NAN;
        for (std::size_t i = 0; i < s.per_step; ++i) {
            double x = s.values[t * s.per_step + i];
            if (info.magnitude) x = std::abs(x);
            if (!std::isnan(x))
                extreme = std::isnan(extreme) ? x : info.falling ? std::min(extreme, x) : std::max(extreme, x);
        }
        out.values.push_back(extreme);
    }
    return out;
}

/// In what runs differ that are to be measured by each other's range; "" where nothing is known to. A run that ended at a value
/// that is no number is shorter by that, which is no difference.
std::string differences(const std::vector<Run>& runs) {
    std::set<std::string> data;
    std::set<std::int64_t> lengths;
    for (const Run& run : runs) {
        if (const std::string one = run.data(); !one.empty()) data.insert(one);
        if (std::isfinite(run.series("loss", {}).values.back())) lengths.insert(run.steps.back() + 1);
    }
    std::string text;
    if (data.size() > 1) text += "; the runs are of different data";
    if (lengths.size() > 1)
        text += fmt::format("; the runs differ in length, {} to {} steps", *lengths.begin(), *lengths.rbegin());
    return text;
}

void add_early_warning(const std::vector<Run>& runs, const ProbeOptions& options, Report& report) {
    std::vector<RunSeries> series;
    std::vector<std::string> names;
    const auto in_all = [&](const MonitorInfo& info) {
        return std::ranges::all_of(runs, [&](const Run& r) { return r.has(info.name); });
    };
    for (const Run& run : runs) {
        RunSeries& one = series.emplace_back();
        one.name = run.name;
        one.steps = run.steps;
        one.loss = run.series("loss", {}).values;
        for (const MonitorInfo& info : monitors)
            if (in_all(info)) one.monitors.push_back(monitor_of(run, info));
    }
    std::vector<std::string> missing;
    for (const MonitorInfo& info : monitors)
        if (!in_all(info)) missing.emplace_back(info.name);
    WarningRule rule;
    rule.divergence.rise = options.rise;
    rule.margin = options.margin;
    const EarlyWarning w = early_warning(series, rule);
    Block out{
        "runs",
        "early-warning",
        fmt::format(
            "lead: steps from the alarm ({} recorded values beyond {:g} times the healthy runs' range) to divergence (the loss's median over {} steps stays {:g} nat above its lowest); no threshold: no healthy run, or 0 in all{}{}",
            rule.persist, rule.margin, rule.divergence.window, rule.divergence.rise,
            missing.empty() ? std::string() : fmt::format("; not in every run: {}", fmt::join(missing, ", ")),
            differences(runs)),
        {},
        {},
        {},
        {}};
    const auto number = [](const std::optional<std::int64_t>& x) { return x ? static_cast<double>(*x) : NAN; };
    Line diverged{"divergence", "step", {}};
    for (std::size_t r = 0; r < runs.size(); ++r) {
        out.columns.push_back(fmt::format("{} in {}", w.divergence[r] ? "lead" : "alarm", runs[r].name));
        diverged.values.push_back(number(w.divergence[r]));
    }
    out.lines.push_back(diverged);
    const bool columns_fit = runs.size() <= 5;
    if (columns_fit)
        for (const char* column : {"threshold", "false alarms", "of healthy"}) out.columns.emplace_back(column);
    std::vector<std::string> labels;
    std::vector<double> threshold, alarms, leads, detected, false_alarms, judged;
    for (const MonitorVerdict& v : w.monitors) {
        Line line{v.name, "step", {}};
        for (std::size_t r = 0; r < runs.size(); ++r) {
            line.values.push_back(number(w.divergence[r] ? v.leads[r] : v.alarms[r]));
            alarms.push_back(number(v.alarms[r]));
            leads.push_back(number(v.leads[r]));
        }
        labels.push_back(v.name);
        threshold.push_back(v.threshold.value_or(NAN));
        detected.push_back(static_cast<double>(v.detected));
        false_alarms.push_back(v.judged > 0 ? static_cast<double>(v.false_alarms) : NAN);
        judged.push_back(static_cast<double>(v.judged));
        if (columns_fit) line.values.insert(line.values.end(), {threshold.back(), false_alarms.back(), judged.back()});
        out.lines.push_back(std::move(line));
    }
    for (const Run& run : runs) names.push_back(run.name);
    out.labels = {{"run", names}, {"monitor", labels}};
    const Axis run_axis{"run", static_cast<std::int64_t>(names.size())},
        monitor{"monitor", static_cast<std::int64_t>(labels.size())};
    out.quantities.push_back({"divergence", {"step of divergence, NaN: none", "step"}, {run_axis}, diverged.values});
    out.quantities.push_back({"alarm", {"step of the alarm, NaN: none", "step"}, {monitor, run_axis}, alarms});
    out.quantities.push_back({"lead", {"steps from the alarm to divergence", "step"}, {monitor, run_axis}, leads});
    out.quantities.push_back(
        {"threshold",
         {"value beyond which the monitor alarms; NaN: nothing to judge by", "unit of the monitor"},
         {monitor},
         threshold});
    out.quantities.push_back({"detected", {"diverged runs with an alarm before divergence", "1"}, {monitor}, detected});
    out.quantities.push_back({"false_alarms",
                              {"healthy runs with an alarm by the others' range, NaN: none could be judged", "1"},
                              {monitor},
                              false_alarms});
    out.quantities.push_back({"judged", {"healthy runs that could be judged", "1"}, {monitor}, judged});
    report.blocks.push_back(std::move(out));
}

}  // namespace

Report probe_runs(std::span<const std::string> paths, const ProbeOptions& options) {
    Report report{"run", {}, "", {}};
    std::vector<Run> runs;
    std::set<std::string> names;
    for (const std::string& path : paths) {
        runs.emplace_back(path, options);
        report.inputs.push_back(path);
        // Runs of one name in several folders are told apart by their place in the command.
        if (!names.insert(runs.back().name).second) runs.back().name += fmt::format("#{}", runs.size());
    }
    for (const Run& run : runs) {
        expect_going_on(options);
        const std::string place = runs.size() > 1 ? fmt::format("runs/{}", run.name) : std::string("run");
        if (options.wants("conservation")) add_conservation(run, place, report);
        if (options.wants("coherence")) add_coherence(run, place, options, report);
    }
    if (options.wants("early-warning")) add_early_warning(runs, options, report);
    return report;
}

}  // namespace faultline::probing
