// SPDX-License-Identifier: Apache-2.0
#include <faultline/probes/early_warning.hpp>

#include <algorithm>
#include <cmath>
#include <deque>
#include <limits>
#include <stdexcept>

namespace faultline {
namespace {

double median(std::vector<double> x) {
    const auto middle = x.begin() + static_cast<std::ptrdiff_t>(x.size() / 2);
    std::nth_element(x.begin(), middle, x.end());
    return *middle;
}

/// Calls visit(index, the last `persist` recorded values) wherever there are so many; visit says whether to go on.
template <class Visit>
void over_windows(std::span<const double> values, std::size_t persist, Visit&& visit) {
    std::deque<double> last;
    for (std::size_t i = 0; i < values.size(); ++i) {
        if (std::isnan(values[i])) continue;
        last.push_back(values[i]);
        if (last.size() > persist) last.pop_front();
        if (last.size() == persist && !visit(i, last)) return;
    }
}

/// The threshold of the healthy runs, without run `except`.
std::optional<double> threshold_of(std::span<const RunSeries> runs, const EarlyWarning& all, std::size_t monitor,
                                   std::size_t except, const WarningRule& rule) {
    std::optional<double> extreme;
    const bool falling = runs.front().monitors[monitor].falling;
    for (std::size_t r = 0; r < runs.size(); ++r) {
        if (r == except || all.divergence[r]) continue;
        const auto level = held_level(runs[r].monitors[monitor].values, falling, rule.persist);
        if (level) extreme = !extreme ? *level : falling ? std::min(*extreme, *level) : std::max(*extreme, *level);
    }
    // A multiple of 0 is 0: one saturated row in a healthy run would be an alarm. There is no range to go beyond.
    if (!extreme || (!falling && *extreme == 0)) return std::nullopt;
    return falling ? *extreme / rule.margin : *extreme * rule.margin;
}

}  // namespace

std::optional<std::size_t> divergence(std::span<const double> loss, const DivergenceRule& rule) {
    std::optional<std::size_t> since;
    double lowest = std::numeric_limits<double>::infinity();
    for (std::size_t i = 0; i < loss.size(); ++i) {
        if (!std::isfinite(loss[i])) return since.value_or(i);
        if (i + 1 < rule.window) continue;
        const auto window = loss.subspan(i + 1 - rule.window, rule.window);
        const double level = median({window.begin(), window.end()});
        lowest = std::min(lowest, level);
        if (level <= lowest + rule.rise)
            since.reset();
        else if (!since)
            since = i;
    }
    return since;
}

std::optional<double> held_level(std::span<const double> values, bool falling, std::size_t persist) {
    std::optional<double> held;
    over_windows(values, persist, [&](std::size_t, const std::deque<double>& last) {
        const double level = falling ? *std::ranges::max_element(last) : *std::ranges::min_element(last);
        held = !held ? level : falling ? std::min(*held, level) : std::max(*held, level);
        return true;
    });
    return held;
}

std::optional<std::size_t> alarm(std::span<const double> values, bool falling, double threshold, std::size_t persist) {
    std::optional<std::size_t> at;
    over_windows(values, persist, [&](std::size_t i, const std::deque<double>& last) {
        if (std::ranges::all_of(last, [&](double v) { return falling ? v < threshold : v > threshold; })) at = i;
        return !at;
    });
    return at;
}

EarlyWarning early_warning(std::span<const RunSeries> runs, const WarningRule& rule) {
    EarlyWarning all;
    if (runs.empty()) return all;
    for (const RunSeries& run : runs) {
        if (!std::ranges::equal(run.monitors, runs.front().monitors, {}, &MonitorSeries::name, &MonitorSeries::name))
            throw std::invalid_argument("early_warning: runs with different monitors");
        const auto at = divergence(run.loss, rule.divergence);
        all.divergence.push_back(at ? std::optional(run.steps[*at]) : std::nullopt);
    }
    for (std::size_t m = 0; m < runs.front().monitors.size(); ++m) {
        MonitorVerdict verdict;
        verdict.name = runs.front().monitors[m].name;
        verdict.threshold = threshold_of(runs, all, m, runs.size(), rule);
        for (std::size_t r = 0; r < runs.size(); ++r) {
            const bool healthy = !all.divergence[r];
            const std::optional<double> threshold = healthy ? threshold_of(runs, all, m, r, rule) : verdict.threshold;
            std::optional<std::int64_t> step, lead;
            const MonitorSeries& series = runs[r].monitors[m];
            if (threshold)
                if (const auto at = alarm(series.values, series.falling, *threshold, rule.persist))
                    step = runs[r].steps[*at];
            if (step && !healthy) lead = *all.divergence[r] - *step;
            verdict.judged += healthy && threshold.has_value();
            verdict.false_alarms += healthy && step.has_value();
            verdict.detected += lead && *lead > 0;
            verdict.alarms.push_back(step);
            verdict.leads.push_back(lead);
        }
        all.monitors.push_back(std::move(verdict));
    }
    return all;
}

}  // namespace faultline
