// SPDX-License-Identifier: Apache-2.0
// What an injector really did, next to what was asked of it. A fault that is rounded away, clipped or cancelled is a fault
// of another size than the one in the configuration; every table that names a magnitude shows these numbers beside it.
#pragma once

#include <cstdint>
#include <vector>

namespace faultline {

/// Sums over the elements that a fault touched; e is the change of a value, a the change that was asked for, x the value
/// before. All in the site's unit.
struct Realised {
    double count = 0;          ///< elements touched
    double sum = 0;            ///< of e
    double sum_squared = 0;    ///< of e^2
    double sum_abs = 0;        ///< of |e|
    double asked_sum = 0;      ///< of a
    double asked_squared = 0;  ///< of a^2
    double value_squared = 0;  ///< of x^2

    void join(const Realised& next);

    [[nodiscard]] double rms() const;
    [[nodiscard]] double mean() const;
    [[nodiscard]] double asked_rms() const;
    [[nodiscard]] double asked_mean() const;
    [[nodiscard]] double relative_rms() const;   ///< rms of e over rms of x
    [[nodiscard]] double relative_mean() const;  ///< mean of e over rms of x
    /// |sum e| / sum |e|: 1 where all changes have one sign, about 1/sqrt(count) where signs are random; 0 without a change.
    [[nodiscard]] double sign_coherence() const;
    friend bool operator==(const Realised&, const Realised&) = default;
};

/// Whether a head's error keeps its sign from step to step: the entry condition of a collapse by arXiv 2608.02091. Fed with
/// one mean error per head and step; the definitions are ours (the paper's are not known).
class StepCoherence {
  public:
    explicit StepCoherence(int heads);
    /// `means`: mean error of each head in this step, [heads].
    void add(const std::vector<double>& means);
    [[nodiscard]] std::int64_t steps() const { return steps_; }
    /// |mean over steps of sign(e)|, 0 to 1. A random sign gives about 0.8/sqrt(steps).
    [[nodiscard]] double of_signs(int head) const;
    /// |sum over steps of e| / sum |e|, 0 to 1.
    [[nodiscard]] double of_sizes(int head) const;

  private:
    std::int64_t steps_ = 0;
    std::vector<double> signs_, sums_, magnitudes_;
};

}  // namespace faultline
