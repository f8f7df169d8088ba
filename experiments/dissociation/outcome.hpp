// SPDX-License-Identifier: Apache-2.0
// What became of a run, and the rule by which it is judged against the run that is its like but for the fault.
#pragma once

#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace faultline {

/// One run of the matrix, as its record leaves it.
struct RunResult {
    std::string source, intervention;
    std::uint64_t seed = 0;
    std::string file;  ///< of the run's record, relative to the matrix' file; empty: none
    bool finished = false;
    bool not_finite = false;       ///< stopped at a value that was no number; what follows is of the steps before
    std::string not_finite_where;  ///< and which
    std::int64_t steps = 0;        ///< done
    double seconds = 0;

    /// Over the monitored steps (the last of each window of monitor_every): largest over layers and heads.
    std::vector<std::int64_t> monitor_step;
    std::vector<double> sigma_q, sigma_k;  ///< after the step
    std::vector<double> max_logit;         ///< since the step monitored before
    std::vector<double> loss;              ///< mean since then

    double train_loss = 0;       ///< mean of the last 50 steps, nats per token
    double validation_loss = 0;  ///< at the end
    // Means over the steps in which there was something, and over layers (and heads).
    double injected_rms = 0, injected_asked_rms = 0;  ///< relative to the values' rms
    double step_coherence = 0;  ///< |mean, over the steps with an error, of the sign of a head's mean error|, mean over
                                ///< the heads that had one; 0 where none had
    double removed_fraction = 0;  ///< of the energy of W_Q's and W_K's updates
    double leading_fraction = 0;
    double missing_fraction = 0;     ///< what was to be removed and was not found, over the same steps and layers
    std::int64_t triggered_at = -1;  ///< guard

    /// Of a run that ended in its first step there is none: NaN.
    [[nodiscard]] double last_sigma_q() const { return sigma_q.empty() ? std::nan("") : sigma_q.back(); }
    [[nodiscard]] double largest_sigma_q() const;
    [[nodiscard]] double largest_logit() const;
};

/// Thresholds on ratios to the matched control: same intervention, same seed, same data in the same order, no fault. Where
/// the matrix has no such control, the one without intervention.
struct JudgingRule {
    double sigma_ratio = 2;    ///< of sigma_max(W_Q), at a monitored step
    double loss_ratio = 1.05;  ///< of the mean train loss of the last 50 steps
};

struct RunVerdict {
    bool runaway = false;  ///< sigma_max(W_Q) passed sigma_ratio times the control's, and stayed above to the end
    bool loss = false;     ///< the final train loss is above loss_ratio times the control's, or no number
    std::int64_t first_step = -1;  ///< since which sigma stayed above; -1: not at the end
    double sigma_ratio = 0;        ///< at the last step
    double logit_ratio = 0;        ///< of the largest logits
    double loss_ratio = 0;
    [[nodiscard]] bool healthy() const { return !runaway && !loss; }
    /// "healthy", "runaway", "loss", "runaway, loss".
    [[nodiscard]] std::string_view text() const;
};

[[nodiscard]] RunVerdict judge(const RunResult& run, const RunResult& control, const JudgingRule& rule);
/// The run that a run is judged against, or nothing; a run is not its own control.
[[nodiscard]] const RunResult* control_of(const RunResult& run, const std::vector<RunResult>& all);

/// Least, median and greatest of some numbers; NaN for none.
struct Spread {
    double least = 0, median = 0, greatest = 0;
};
[[nodiscard]] Spread spread(std::vector<double> values);

}  // namespace faultline
