// SPDX-License-Identifier: Apache-2.0
#include <faultline/injectors/realised.hpp>

#include <cmath>
#include <stdexcept>

namespace faultline {

void Realised::join(const Realised& next) {
    count += next.count;
    sum += next.sum;
    sum_squared += next.sum_squared;
    sum_abs += next.sum_abs;
    asked_sum += next.asked_sum;
    asked_squared += next.asked_squared;
    value_squared += next.value_squared;
}

double Realised::rms() const { return count > 0 ? std::sqrt(sum_squared / count) : 0; }
double Realised::mean() const { return count > 0 ? sum / count : 0; }
double Realised::asked_rms() const { return count > 0 ? std::sqrt(asked_squared / count) : 0; }
double Realised::asked_mean() const { return count > 0 ? asked_sum / count : 0; }
double Realised::relative_rms() const { return value_squared > 0 ? std::sqrt(sum_squared / value_squared) : 0; }
double Realised::relative_mean() const { return value_squared > 0 ? mean() / std::sqrt(value_squared / count) : 0; }
double Realised::sign_coherence() const { return sum_abs > 0 ? std::abs(sum) / sum_abs : 0; }

StepCoherence::StepCoherence(int heads)
    : signs_(static_cast<std::size_t>(heads), 0.0), sums_(signs_.size(), 0.0), magnitudes_(signs_.size(), 0.0) {}

void StepCoherence::add(const std::vector<double>& means) {
    if (means.size() != signs_.size()) throw std::invalid_argument("StepCoherence: one mean per head is expected");
    ++steps_;
    for (std::size_t h = 0; h < means.size(); ++h) {
        signs_[h] += (means[h] > 0) - (means[h] < 0);
        sums_[h] += means[h];
        magnitudes_[h] += std::abs(means[h]);
    }
}

double StepCoherence::of_signs(int head) const {
    return steps_ > 0 ? std::abs(signs_.at(static_cast<std::size_t>(head))) / static_cast<double>(steps_) : 0;
}

double StepCoherence::of_sizes(int head) const {
    const auto h = static_cast<std::size_t>(head);
    return magnitudes_.at(h) > 0 ? std::abs(sums_[h]) / magnitudes_[h] : 0;
}

}  // namespace faultline
