// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <cmath>

#include <nlohmann/json.hpp>

#include <faultline/dissociation/report.hpp>
#include <faultline/gpt/fingerprint.hpp>

namespace faultline {
namespace {

using nlohmann::ordered_json;

ordered_json number(double x) { return std::isfinite(x) ? ordered_json(x) : ordered_json(nullptr); }

/// A setting as text, as what it is.
ordered_json typed(const std::string& value) {
    const ordered_json parsed = ordered_json::parse(value, nullptr, false);
    return parsed.is_number() || parsed.is_boolean() ? parsed : ordered_json(value);
}

ordered_json spread_json(const Spread& s) {
    return {{"median", number(s.median)}, {"least", number(s.least)}, {"greatest", number(s.greatest)}};
}

ordered_json run_json(const RunResult& r, const RunVerdict* verdict) {
    ordered_json out{{"source", r.source},
                     {"intervention", r.intervention},
                     {"seed", r.seed},
                     {"finished", r.finished},
                     {"steps", r.steps},
                     {"sigma_q", number(r.last_sigma_q())},
                     {"largest_sigma_q", number(r.largest_sigma_q())},
                     {"max_logit", number(r.largest_logit())},
                     {"train_loss", number(r.train_loss)},
                     {"validation_loss", number(r.validation_loss)},
                     {"injected_rms", number(r.injected_rms)},
                     {"injected_asked_rms", number(r.injected_asked_rms)},
                     {"step_coherence", number(r.step_coherence)},
                     {"removed_fraction", number(r.removed_fraction)},
                     {"leading_fraction", number(r.leading_fraction)},
                     {"missing_fraction", number(r.missing_fraction)},
                     {"seconds", number(r.seconds)}};
    if (r.triggered_at >= 0) out["triggered_at"] = r.triggered_at;
    if (r.not_finite) out["not_finite"] = r.not_finite_where;
    if (!r.file.empty()) out["file"] = r.file;
    if (verdict != nullptr)
        out["verdict"] = {{"text", verdict->text()},
                          {"runaway", verdict->runaway},
                          {"loss", verdict->loss},
                          {"first_step", verdict->first_step},
                          {"sigma_ratio", number(verdict->sigma_ratio)},
                          {"logit_ratio", number(verdict->logit_ratio)},
                          {"loss_ratio", number(verdict->loss_ratio)}};
    return out;
}

}  // namespace

std::string to_json(const RunMatrix& matrix) {
    ordered_json config = ordered_json::object();
    for (const auto& [key, value] : gpt::fingerprint(matrix.config.train)) config[key] = typed(value);
    const gpt::ModelConfig& model = matrix.config.train.model;  // the fingerprint has codes for what has names
    config["qk-norm"] = std::array{"none", "parameter-free", "learned"}.at(static_cast<std::size_t>(model.qk_norm));
    config["norm-statistics"] =
        std::array{"fp32", "bf16", "bf16-forward", "bf16-backward"}.at(static_cast<std::size_t>(model.norm_statistics));
    config["optimizer"] =
        std::array{"adamw", "muon", "sgd"}.at(static_cast<std::size_t>(matrix.config.train.optimizer.kind));
    config["steps"] = matrix.config.train.steps;
    ordered_json table = ordered_json::array();
    for (const Cell& cell : cells(matrix))
        table.push_back(
            {{"source", cell.source},
             {"intervention", cell.intervention},
             {"runs", cell.runs.size()},
             {"runaways", cell.runaways()},
             {"losses", cell.losses()},
             {"sigma_q", spread_json(cell.over([](const RunResult& r) { return r.last_sigma_q(); }))},
             {"max_logit", spread_json(cell.over([](const RunResult& r) { return r.largest_logit(); }))},
             {"train_loss", spread_json(cell.over([](const RunResult& r) { return r.train_loss; }))},
             {"validation_loss", spread_json(cell.over([](const RunResult& r) { return r.validation_loss; }))}});
    ordered_json runs = ordered_json::array();
    for (const RunResult& run : matrix.runs) {
        const RunResult* control = run.finished ? control_of(run, matrix.runs) : nullptr;
        if (control == nullptr) {
            runs.push_back(run_json(run, nullptr));
            continue;
        }
        const RunVerdict verdict = judge(run, *control, matrix.config.rule);
        runs.push_back(run_json(run, &verdict));
    }
    const ordered_json object{
        {"schema", "faultline.dissociation/1"},
        {"complete", matrix.complete()},
        {"rule", {{"sigma_ratio", matrix.config.rule.sigma_ratio}, {"loss_ratio", matrix.config.rule.loss_ratio}}},
        {"training", std::move(config)},
        {"table", std::move(table)},
        {"runs", std::move(runs)}};
    return object.dump(1, ' ', false, ordered_json::error_handler_t::replace) + "\n";
}

}  // namespace faultline
