// SPDX-License-Identifier: Apache-2.0
#include <faultline/gpt/run_record.hpp>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>

#include <fmt/format.h>

#include <faultline/base/error.hpp>
#include <faultline/record/record_reader.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline::gpt {
namespace {

enum class Shape { scalar, layer, layer_head, layer_singular, layer_head_singular };

struct Column {
    const char* name;
    const char* long_name;
    const char* units;
    Shape shape;
    std::vector<double> (*values)(const StepReport&);
};

const std::vector<Column>& columns() {
    using R = const StepReport&;
    static const std::vector<Column> all{
        {"loss", "mean cross-entropy of the step's tokens", "nat", Shape::scalar,
         [](R r) { return std::vector{r.loss}; }},
        {"validation_loss", "mean cross-entropy of the validation windows, NaN where not due", "nat", Shape::scalar,
         [](R r) { return std::vector{r.validation_loss}; }},
        {"grad_norm", "norm of the gradient before clipping", "nat", Shape::scalar,
         [](R r) { return std::vector{r.grad_norm}; }},
        {"learning_rate", "learning rate as applied", "1", Shape::scalar,
         [](R r) { return std::vector{r.learning_rate}; }},
        {"max_logit", "largest scaled score", "logit", Shape::layer_head, [](R r) { return r.max_logit; }},
        {"qk_rms", "mean rms of q times mean rms of k, before any norm", "1", Shape::layer_head,
         [](R r) { return r.qk_rms; }},
        {"zero_sum", "sum over rows of the row sums of the score gradient, 0 in exact arithmetic", "nat/logit",
         Shape::layer_head, [](R r) { return r.zero_sum; }},
        {"zero_sum_abs", "sum of the magnitudes of the score gradient", "nat/logit", Shape::layer_head,
         [](R r) { return r.zero_sum_abs; }},
        {"zero_sum_total", "zero_sum added up over the steps", "nat/logit", Shape::layer_head,
         [](R r) { return r.zero_sum_total; }},
        {"saturated_fraction", "rows with p_max > 1 - 2^-9, NaN where not due", "1", Shape::layer_head,
         [](R r) { return r.saturated; }},
        {"entropy", "mean entropy of a row of p, NaN where not due", "nat", Shape::layer_head,
         [](R r) { return r.entropy; }},
        {"sigma_q", "largest singular values of W_Q, NaN where not due", "1", Shape::layer_singular,
         [](R r) { return r.singular_q; }},
        {"sigma_k", "largest singular values of W_K, NaN where not due", "1", Shape::layer_singular,
         [](R r) { return r.singular_k; }},
        {"sigma_qk", "largest singular values of W_Q W_K^T, NaN where not due", "1", Shape::layer_head_singular,
         [](R r) { return r.singular_qk; }},
        {"guard_active", "whether QK norm is on", "1", Shape::layer,
         [](R r) { return std::vector<double>(r.qk_normed.begin(), r.qk_normed.end()); }},
    };
    return all;
}

std::vector<Axis> axes(Shape shape, const StepReport& r) {
    switch (shape) {
        case Shape::scalar:
            return {};
        case Shape::layer:
            return {{"layer", r.layers}};
        case Shape::layer_head:
            return {{"layer", r.layers}, {"head", r.heads}};
        case Shape::layer_singular:
            return {{"layer", r.layers}, {"singular_value", 3}};
        default:
            return {{"layer", r.layers}, {"head", r.heads}, {"singular_value", 3}};
    }
}

/// What a hook's numbers are over: one, a layer's, a head's.
Shape shape_of(const StepReport::Extra& extra, const StepReport& r) {
    const auto size = static_cast<int>(extra.values.size());
    if (size == 1) return Shape::scalar;
    if (size == r.layers * r.heads) return Shape::layer_head;
    if (size == r.layers) return Shape::layer;
    throw std::logic_error(
        fmt::format("{}: {} values: expected one, one per layer, or one per layer and head", extra.name, size));
}

/// The line "steps = N" of a configuration.
void set_steps(std::string& config, std::int64_t steps) {
    const std::string key = "\nsteps = ";
    const std::size_t at = config.find(key);
    if (at == std::string::npos) return;
    const std::size_t begin = at + key.size(), end = std::min(config.find('\n', begin), config.size());
    config.replace(begin, end - begin, std::to_string(steps));
}

/// The lines "key = value" of a configuration.
std::map<std::string, std::string> settings_in(const std::string& config) {
    std::map<std::string, std::string> all;
    for (std::size_t begin = 0; begin < config.size();) {
        const std::size_t end = std::min(config.find('\n', begin), config.size()), equals = config.find(" = ", begin);
        if (equals < end)
            all.emplace(config.substr(begin, equals - begin), config.substr(equals + 3, end - equals - 3));
        begin = end + 1;
    }
    return all;
}

[[noreturn]] void fail_without_step(const std::string& name, std::int64_t step) {
    throw RequestError(fmt::format(
        "{}: ends before step {} of its checkpoint: expected the file that was written with it", name, step));
}

void expect_same_settings(const std::string& name, const std::string& recorded, const std::string& asked,
                          const std::set<std::string, std::less<>>& may_differ) {
    if (recorded == asked) return;
    const std::map<std::string, std::string> was = settings_in(recorded);
    for (const auto& [key, value] : settings_in(asked)) {
        const auto found = was.find(key);
        if (found == was.end() || found->second == value || may_differ.contains(key)) continue;
        throw RequestError(
            fmt::format("{}: {}: is the record of a run with {}: expected {}, as its checkpoint has it and this "
                        "command asks for",
                        name, key, escaped(found->second), value));
    }
}

}  // namespace

void RunRecord::expect_record_of(const std::string& path, const StepReport& last, const Manifest& now,
                                 const std::set<std::string, std::less<>>& may_differ) {
    const RecordReader reader(path);
    const Manifest manifest = reader.manifest();
    if (manifest.kind != "run")
        throw RequestError(fmt::format("{}: kind is {}: expected \"run\"", reader.name(), in_quotes(manifest.kind)));
    expect_same_settings(reader.name(), manifest.config_toml, now.config_toml, may_differ);
    if (last.step < 0) return;  // of a checkpoint from before the first step
    const std::vector<double> steps = reader.read("steps/step").to_double(),
                              losses = reader.read("steps/loss").to_double();
    const auto at = static_cast<std::size_t>(std::ranges::find(steps, static_cast<double>(last.step)) - steps.begin());
    if (at >= std::min(steps.size(), losses.size())) fail_without_step(reader.name(), last.step);
    // Two runs that differ in anything at all have not the same loss to the last bit.
    if (losses[at] == last.loss || (std::isnan(losses[at]) && std::isnan(last.loss))) return;
    throw RequestError(
        fmt::format("{}: step {}: has the loss {}, and its checkpoint {}: expected the file that was written with it",
                    reader.name(), last.step, losses[at], last.loss));
}

RunRecord RunRecord::create(const std::string& path, const Manifest& manifest) {
    return RunRecord(RunFile::create(path, manifest));
}

RunRecord RunRecord::resume(const std::string& path, std::int64_t last_step, std::optional<std::int64_t> steps,
                            const Manifest* now) {
    RunRecord record(RunFile::resume(path, last_step, [&](Manifest& manifest) {
        if (steps) set_steps(manifest.config_toml, *steps);
        if (now == nullptr) return;
        manifest.ranks = now->ranks;
        if (manifest.reductions.empty())
            manifest.reductions = now->reductions;
        else if (!manifest.reductions.ends_with(now->reductions))
            manifest.reductions += fmt::format("; from step {} on: {}", last_step + 1, now->reductions);
    }));
    if (record.file_.last_step().value_or(-1) != last_step) fail_without_step(escaped(path, path.size()), last_step);
    return record;
}

void RunRecord::declare(const StepReport& report) {
    std::vector<std::int64_t> layers(static_cast<std::size_t>(report.layers)),
        heads(static_cast<std::size_t>(report.heads));
    std::iota(layers.begin(), layers.end(), 0);
    std::iota(heads.begin(), heads.end(), 0);
    const std::vector<std::int64_t> order{1, 2, 3};
    file_.coordinate("steps/layer", layers, {"layer"});
    file_.coordinate("steps/head", heads, {"head of the layer"});
    file_.coordinate("steps/singular_value", order, {"rank of the singular value, the largest is 1"});
    for (const Column& column : columns())
        if (!column.values(report).empty())
            series_.push_back(
                file_.series(column.name, Dtype::f64, axes(column.shape, report), {column.long_name, column.units}));
    for (const StepReport::Extra& extra : report.extras)
        series_.push_back(file_.series(extra.name, Dtype::f64, axes(shape_of(extra, report), report),
                                       {extra.about.empty() ? extra.name : extra.about, extra.unit}));
    file_.start();
    declared_ = true;
}

void RunRecord::write(const StepReport& report) {
    if (!declared_) declare(report);
    std::size_t at = 0;
    for (const Column& column : columns()) {
        const std::vector<double> values = column.values(report);
        if (values.empty()) continue;
        file_.set(series_[at++], std::span<const double>(values));
    }
    if (series_.size() != at + report.extras.size())
        throw std::logic_error("the extras of a step are not those of the first");
    for (const StepReport::Extra& extra : report.extras)
        file_.set(series_[at++], std::span<const double>(extra.values));
    file_.end_step(report.step);
}

void RunRecord::close() {
    if (declared_) file_.close();  // else no step came, and there is no file to close
}

}  // namespace faultline::gpt
