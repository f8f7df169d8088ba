// SPDX-License-Identifier: Apache-2.0
#include <faultline/dissociation/collect.hpp>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <span>
#include <string_view>

#include <faultline/record/record_reader.hpp>

namespace faultline {
namespace {

constexpr std::int64_t final_steps = 50;  // over which the final train loss is the mean
constexpr double nan_value = std::numeric_limits<double>::quiet_NaN();

double largest(std::span<const double> values) {
    double top = nan_value;
    for (const double x : values)
        if (!std::isnan(x) && !(x <= top)) top = x;
    return top;
}

/// Of those that are not 0; 0 for none.
double mean_of_any(std::span<const double> values) {
    double sum = 0, count = 0;
    for (const double x : values) {
        if (x == 0 || std::isnan(x)) continue;
        sum += x;
        count += 1;
    }
    return count > 0 ? sum / count : 0;
}

/// Of those that are numbers, 0 too; NaN for none.
double mean_of_numbers(std::span<const double> values) {
    double sum = 0, count = 0;
    for (const double x : values) {
        if (std::isnan(x)) continue;
        sum += x;
        count += 1;
    }
    return sum / count;  // NaN: 0/0
}

/// Sets removed_fraction and missing_fraction to their means over the layers where either is not 0, so that they add up
/// to what was to be removed.
void set_energies(std::span<const double> removed, std::span<const double> missing, StepSample& s) {
    double count = 0;
    for (std::size_t l = 0; l < removed.size(); ++l) {
        const double lacks = l < missing.size() ? missing[l] : 0;
        if (!(removed[l] + lacks > 0)) continue;
        s.removed_fraction += removed[l];
        s.missing_fraction += lacks;
        count += 1;
    }
    if (count == 0) return;
    s.removed_fraction /= count;
    s.missing_fraction /= count;
}

/// The numbers of a step by name: what a report and a record have in common.
using Values = std::function<std::span<const double>(const char*)>;

StepSample sample(std::int64_t step, const Values& values) {
    StepSample s;
    s.step = step;
    s.loss = values("loss")[0];
    s.validation_loss = values("validation_loss")[0];
    s.sigma_q = largest(values("sigma_q"));
    s.sigma_k = largest(values("sigma_k"));
    s.max_logit = largest(values("max_logit"));
    s.injected_rms = mean_of_any(values("injected_rms"));
    s.injected_asked_rms = mean_of_any(values("injected_asked_rms"));
    s.step_coherence = mean_of_numbers(values("injected_step_coherence"));
    set_energies(values("removed_fraction"), values("missing_fraction"), s);
    s.leading_fraction = mean_of_any(values("leading_fraction"));
    const auto active = values("intervention_active");
    s.intervention_active = !active.empty() && active[0] != 0;
    return s;
}

/// A mean over the steps in which there was something.
class Mean {
  public:
    void add(double x) {
        if (x == 0 || std::isnan(x)) return;
        sum_ += x;
        count_ += 1;
    }
    [[nodiscard]] double value() const { return count_ > 0 ? sum_ / count_ : 0; }

  private:
    double sum_ = 0, count_ = 0;
};

}  // namespace

StepSample sample_of(const gpt::StepReport& report) {
    return sample(report.step, [&](const char* name) -> std::span<const double> {
        const std::string_view wanted(name);
        if (wanted == "loss") return {&report.loss, 1};
        if (wanted == "validation_loss") return {&report.validation_loss, 1};
        if (wanted == "sigma_q") return report.sigma_q;
        if (wanted == "sigma_k") return report.sigma_k;
        if (wanted == "max_logit") return report.max_logit;
        for (const gpt::StepReport::Extra& extra : report.extras)
            if (extra.name == wanted) return extra.values;
        return {};
    });
}

std::vector<StepSample> samples_of(const std::string& record) {
    const RecordReader reader(record);
    const Tensor steps = reader.read("steps/step");
    std::map<std::string, std::vector<double>> columns;
    const auto count = static_cast<std::size_t>(steps.shape.at(0));
    std::vector<double> numbers = steps.to_double();
    std::vector<StepSample> samples;
    for (std::size_t i = 0; i < count; ++i)
        samples.push_back(
            sample(static_cast<std::int64_t>(numbers[i]), [&](const char* name) -> std::span<const double> {
                const auto [found, is_new] = columns.try_emplace(name);
                const std::string path = std::string("steps/") + name;
                if (is_new && reader.contains(path)) found->second = reader.read(path).to_double();
                const std::size_t each = found->second.size() / count;
                return std::span<const double>(found->second).subspan(i * each, each);
            }));
    return samples;
}

void collect(const std::vector<StepSample>& samples, RunResult& result) {
    Mean rms, asked, leading, window_loss, last_loss;
    constexpr double none = -std::numeric_limits<double>::infinity();  // scores may all be below 0
    double window_logit = none, removed = 0, missing = 0, removing = 0;
    result.monitor_step.clear();
    for (std::vector<double>* series : {&result.sigma_q, &result.sigma_k, &result.max_logit, &result.loss})
        series->clear();
    result.steps = samples.empty() ? 0 : samples.back().step + 1;
    result.validation_loss = nan_value;
    result.triggered_at = -1;
    for (const StepSample& s : samples) {
        rms.add(s.injected_rms);
        asked.add(s.injected_asked_rms);
        leading.add(s.leading_fraction);
        removed += s.removed_fraction;
        missing += s.missing_fraction;
        removing += s.removed_fraction + s.missing_fraction > 0 ? 1 : 0;
        if (!std::isnan(s.step_coherence)) result.step_coherence = s.step_coherence;
        if (s.intervention_active && result.triggered_at < 0)
            result.triggered_at = s.step - 1;  // in force from the next
        if (!std::isnan(s.validation_loss)) result.validation_loss = s.validation_loss;
        if (s.step >= result.steps - final_steps) last_loss.add(s.loss);
        window_loss.add(s.loss);
        window_logit = std::max(window_logit, s.max_logit);
        if (std::isnan(s.sigma_q)) continue;
        result.monitor_step.push_back(s.step);
        result.sigma_q.push_back(s.sigma_q);
        result.sigma_k.push_back(s.sigma_k);
        result.max_logit.push_back(window_logit == none ? nan_value : window_logit);  // a device records no scores
        result.loss.push_back(window_loss.value());
        window_logit = none;
        window_loss = {};
    }
    result.train_loss = samples.empty() ? nan_value : last_loss.value();
    result.injected_rms = rms.value();
    result.injected_asked_rms = asked.value();
    result.removed_fraction = removing > 0 ? removed / removing : 0;
    result.leading_fraction = leading.value();
    result.missing_fraction = removing > 0 ? missing / removing : 0;
}

}  // namespace faultline
