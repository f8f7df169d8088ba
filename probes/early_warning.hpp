// SPDX-License-Identifier: Apache-2.0
// Early warning: how many steps before a run diverges each monitor leaves the range of healthy runs, and how often it does
// so in a healthy run. The comparison by lead time is that of arXiv 2606.28116.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace faultline {

/// A run has diverged at the first step where its loss is not finite, or from which on the median of the loss over the
/// last `window` steps stays above its lowest value so far by more than `rise`, to the end of the record.
struct DivergenceRule {
    std::size_t window = 25;  ///< recorded steps, at least 1; the noise of single batches is not to count
    double rise = 0.3;        ///< nat
};
/// Index into `loss`, or nothing. Of a run shorter than the window only losses that are not finite count.
[[nodiscard]] std::optional<std::size_t> divergence(std::span<const double> loss, const DivergenceRule& rule = {});

/// The largest or smallest value of a monitor in a run, of `persist` recorded values in a row: the level that it held. NaNs
/// (not recorded in that step) are passed over; infinities count. Nothing where there are fewer values.
[[nodiscard]] std::optional<double> held_level(std::span<const double> values, bool falling, std::size_t persist);
/// First index at which the last `persist` recorded values lie beyond `threshold` (above it, or below where falling).
[[nodiscard]] std::optional<std::size_t> alarm(std::span<const double> values, bool falling, double threshold,
                                               std::size_t persist);

/// One number a step, largest over layers and heads (smallest where falling), NaN where not recorded.
struct MonitorSeries {
    std::string name;
    bool falling = false;  ///< a low value is the warning (entropy)
    std::vector<double> values;
};
struct RunSeries {
    std::string name;
    std::vector<std::int64_t> steps;
    std::vector<double> loss;
    std::vector<MonitorSeries> monitors;  ///< every run has the same, in the same order
};

struct WarningRule {
    DivergenceRule divergence;
    double margin = 2;        ///< the threshold is the healthy runs' largest held level times this (smallest over this)
    std::size_t persist = 3;  ///< recorded values in a row
};

/// What a monitor says of each run. Thresholds are set by the runs that did not diverge; each of these is itself judged by
/// the threshold of the others, since a run cannot raise an alarm against its own range.
struct MonitorVerdict {
    std::string name;
    std::optional<double> threshold;  ///< nothing: no healthy run recorded the monitor, or it is 0 there
                                      ///< (a rising one), which has no multiple
    std::vector<std::optional<std::int64_t>> alarms;  ///< [run] step of the alarm
    std::vector<std::optional<std::int64_t>> leads;   ///< [run] steps from alarm to divergence; negative: too late
    std::size_t detected = 0;                         ///< diverged runs with an alarm before divergence
    std::size_t false_alarms = 0;                     ///< healthy runs with an alarm
    std::size_t judged = 0;  ///< healthy runs that could be judged: none where there is one healthy run alone
};
struct EarlyWarning {
    std::vector<std::optional<std::int64_t>> divergence;  ///< [run] step
    std::vector<MonitorVerdict> monitors;
};
/// std::invalid_argument where a run's monitors are not the first's.
[[nodiscard]] EarlyWarning early_warning(std::span<const RunSeries> runs, const WarningRule& rule = {});

}  // namespace faultline
