// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <functional>
#include <limits>

#include <fmt/format.h>

#include <faultline/dissociation/report.hpp>

namespace faultline {
namespace {

constexpr double nan_value = std::numeric_limits<double>::quiet_NaN();

std::vector<std::string> names_in_order(const RunMatrix& matrix, std::string RunResult::*member) {
    std::vector<std::string> names;
    for (const RunResult& run : matrix.runs)
        if (std::find(names.begin(), names.end(), run.*member) == names.end()) names.push_back(run.*member);
    return names;
}

std::size_t position(const std::vector<std::string>& names, const std::string& name) {
    return static_cast<std::size_t>(std::find(names.begin(), names.end(), name) - names.begin());
}

/// The tables over (source, intervention, seed).
class Tables {
  public:
    Tables(const RunMatrix& matrix, RecordFile& file, const std::string& prefix)
        : matrix_(matrix),
          file_(file),
          prefix_(prefix + "outcome/"),
          sources_(names_in_order(matrix, &RunResult::source)),
          interventions_(names_in_order(matrix, &RunResult::intervention)) {
        std::vector<std::int64_t> seeds(matrix.config.seeds.begin(), matrix.config.seeds.end());
        file.coordinate(prefix_ + "source", sources_, {"where the error comes from"});
        file.coordinate(prefix_ + "intervention", interventions_, {"what is done to the QK route"});
        file.coordinate(prefix_ + "seed", seeds, {"seed of weights, windows and faults"});
        axes_ = {{"source", static_cast<std::int64_t>(sources_.size())},
                 {"intervention", static_cast<std::int64_t>(interventions_.size())},
                 {"seed", static_cast<std::int64_t>(seeds.size())}};
    }

    void put(const char* name, const About& about, const std::function<double(const RunResult&)>& value) {
        std::vector<double> values(sources_.size() * interventions_.size() * matrix_.config.seeds.size(), nan_value);
        for (const RunResult& run : matrix_.runs) {
            if (!run.finished) continue;
            const auto& seeds = matrix_.config.seeds;
            const auto seed = static_cast<std::size_t>(std::find(seeds.begin(), seeds.end(), run.seed) - seeds.begin());
            const std::size_t cell =
                position(sources_, run.source) * interventions_.size() + position(interventions_, run.intervention);
            values[cell * seeds.size() + seed] = value(run);
        }
        file_.write(prefix_ + name, values, axes_, about);
    }

    void put_verdict(const char* name, const About& about, const std::function<double(const RunVerdict&)>& value) {
        put(name, about, [&](const RunResult& run) {
            const RunResult* control = control_of(run, matrix_.runs);
            return control == nullptr ? nan_value : value(judge(run, *control, matrix_.config.rule));
        });
    }

  private:
    const RunMatrix& matrix_;
    RecordFile& file_;
    std::string prefix_;
    std::vector<std::string> sources_, interventions_;
    std::vector<Axis> axes_;
};

/// Series of the monitored steps, run by run; runs are the index into the list.
void write_series(const RunMatrix& matrix, RecordFile& file, const std::string& group) {
    const RunResult* longest = &matrix.runs.front();
    for (const RunResult& run : matrix.runs)
        if (run.monitor_step.size() > longest->monitor_step.size()) longest = &run;
    if (longest->monitor_step.empty()) return;
    std::vector<std::string> sources, interventions;
    std::vector<std::int64_t> seeds;
    for (const RunResult& run : matrix.runs) {
        sources.push_back(run.source);
        interventions.push_back(run.intervention);
        seeds.push_back(static_cast<std::int64_t>(run.seed));
    }
    file.coordinate(group + "step", longest->monitor_step, {"monitored step"});
    const std::vector<Axis> by_run{{"run", static_cast<std::int64_t>(matrix.runs.size())}};
    const std::vector<Axis> axes{by_run.front(), {"step", static_cast<std::int64_t>(longest->monitor_step.size())}};
    file.write_strings(group + "source", sources, by_run, {"source of the run"});
    file.write_strings(group + "intervention", interventions, by_run, {"intervention of the run"});
    file.write(group + "seed", seeds, by_run, {"seed of the run"});
    const auto put = [&](const char* name, std::vector<double> RunResult::*member, const About& about) {
        std::vector<double> values;
        for (const RunResult& run : matrix.runs) {
            values.insert(values.end(), (run.*member).begin(), (run.*member).end());
            values.insert(values.end(), longest->monitor_step.size() - (run.*member).size(), nan_value);
        }
        file.write(group + name, values, axes, about);
    };
    put("sigma_q", &RunResult::sigma_q, {"largest singular value of W_Q over layers"});
    put("sigma_k", &RunResult::sigma_k, {"largest singular value of W_K over layers"});
    put("max_logit", &RunResult::max_logit, {"largest scaled score since the monitored step before", "logit"});
    put("loss", &RunResult::loss, {"mean train loss since the monitored step before", "nat"});
}

}  // namespace

void write(const RunMatrix& matrix, RecordFile& file, const std::string& folder, const std::string& prefix) {
    if (prefix.empty()) {
        file.attribute("", "complete", std::int64_t{matrix.complete() ? 1 : 0});
        file.attribute("", "sigma_ratio", matrix.config.rule.sigma_ratio);
        file.attribute("", "loss_ratio", matrix.config.rule.loss_ratio);
    }
    if (matrix.runs.empty()) return;
    Tables tables(matrix, file, prefix);
    using R = const RunResult&;
    using V = const RunVerdict&;
    tables.put("sigma_q", {"largest singular value of W_Q over layers, at the end"},
               [](R r) { return r.last_sigma_q(); });
    tables.put("max_logit", {"largest scaled score of the run", "logit"}, [](R r) { return r.largest_logit(); });
    tables.put("train_loss", {"mean of the last 50 steps", "nat"}, [](R r) { return r.train_loss; });
    tables.put("validation_loss", {"at the end", "nat"}, [](R r) { return r.validation_loss; });
    tables.put("steps", {"steps done"}, [](R r) { return static_cast<double>(r.steps); });
    tables.put("injected_rms", {"rms of the error over that of the values, mean over steps and heads"},
               [](R r) { return r.injected_rms; });
    tables.put("injected_asked_rms", {"the same as asked for"}, [](R r) { return r.injected_asked_rms; });
    tables.put("step_coherence",
               {"size of the mean, over the steps with an error, of the sign of a head's mean error; mean over heads"},
               [](R r) { return r.step_coherence; });
    tables.put("removed_fraction", {"energy removed from the updates of W_Q and W_K, over theirs"},
               [](R r) { return r.removed_fraction; });
    tables.put("leading_fraction", {"energy of these updates along the leading directions, over theirs"},
               [](R r) { return r.leading_fraction; });
    tables.put("missing_fraction", {"energy that the control did not find elsewhere, over theirs"},
               [](R r) { return r.missing_fraction; });
    tables.put("triggered_at", {"step at whose end the guard's threshold was passed; -1: never"},
               [](R r) { return static_cast<double>(r.triggered_at); });
    tables.put("not_finite", {"1: stopped at a value that was no number"},
               [](R r) { return r.not_finite ? 1.0 : 0.0; });
    tables.put_verdict("runaway", {"1: sigma_max(W_Q) ran away from the control's"},
                       [](V v) { return v.runaway ? 1.0 : 0.0; });
    tables.put_verdict("loss_failed", {"1: the train loss is above the rule's ratio to the control's"},
                       [](V v) { return v.loss ? 1.0 : 0.0; });
    tables.put_verdict("first_step", {"step since which sigma_max(W_Q) stayed above the ratio; -1: not at the end"},
                       [](V v) { return static_cast<double>(v.first_step); });
    tables.put_verdict("sigma_ratio", {"sigma_max(W_Q) over the control's, at the end"},
                       [](V v) { return v.sigma_ratio; });
    tables.put_verdict("loss_ratio", {"train loss over the control's"}, [](V v) { return v.loss_ratio; });
    write_series(matrix, file, prefix + "series/");
    if (folder.empty()) return;
    for (std::size_t i = 0; i < matrix.runs.size(); ++i)
        if (!matrix.runs[i].file.empty())
            file.link(fmt::format("{}runs/{}", prefix, i), folder + "/" + matrix.runs[i].file);
}

}  // namespace faultline
