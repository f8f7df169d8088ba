// SPDX-License-Identifier: Apache-2.0
#include <faultline/dissociation/outcome.hpp>

#include <algorithm>
#include <cmath>
#include <limits>

namespace faultline {
namespace {

double largest(const std::vector<double>& values) {
    double top = std::numeric_limits<double>::quiet_NaN();
    for (const double x : values)
        if (!std::isnan(x) && !(x <= top)) top = x;
    return top;
}

double ratio(double value, double control) {
    if (control > 0) return value / control;
    return std::numeric_limits<double>::quiet_NaN();
}

}  // namespace

double RunResult::largest_sigma_q() const { return largest(sigma_q); }
double RunResult::largest_logit() const { return largest(max_logit); }

std::string_view RunVerdict::text() const {
    if (runaway) return loss ? "runaway, loss" : "runaway";
    return loss ? "loss" : "healthy";
}

RunVerdict judge(const RunResult& run, const RunResult& control, const JudgingRule& rule) {
    RunVerdict v;
    v.sigma_ratio = ratio(run.last_sigma_q(), control.last_sigma_q());
    v.logit_ratio = ratio(run.largest_logit(), control.largest_logit());
    v.loss_ratio = ratio(run.train_loss, control.train_loss);
    v.loss = run.not_finite || !(v.loss_ratio <= rule.loss_ratio);
    // From the last monitored step back to where sigma was last within the ratio.
    const std::size_t common = std::min(run.sigma_q.size(), control.sigma_q.size());
    for (std::size_t i = common; i-- > 0;) {
        if (!(ratio(run.sigma_q[i], control.sigma_q[i]) > rule.sigma_ratio)) break;
        v.first_step = run.monitor_step[i];
    }
    v.runaway = v.first_step >= 0;
    return v;
}

const RunResult* control_of(const RunResult& run, const std::vector<RunResult>& all) {
    const RunResult* plain = nullptr;
    for (const RunResult& other : all) {
        if (other.source != "none" || other.seed != run.seed || !other.finished || &other == &run) continue;
        if (run.source != "none" && other.intervention == run.intervention) return &other;
        if (other.intervention == "none") plain = &other;
    }
    return plain;
}

Spread spread(std::vector<double> values) {
    const double none = std::numeric_limits<double>::quiet_NaN();
    values.erase(std::remove_if(values.begin(), values.end(), [](double x) { return std::isnan(x); }), values.end());
    if (values.empty()) return {none, none, none};
    std::sort(values.begin(), values.end());
    const std::size_t n = values.size();
    return {values.front(), n % 2 == 1 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2, values.back()};
}

}  // namespace faultline
