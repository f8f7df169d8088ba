// SPDX-License-Identifier: Apache-2.0
#include <faultline/attribution/sink_gradient.hpp>

#include <cmath>
#include <limits>

namespace faultline {

WideReal SinkGradient::rel_error(const std::vector<double>& values) const {
    WideReal error, size;
    for (std::size_t h = 0; h < truth.size(); ++h) {
        if (!std::isfinite(values[h])) return std::numeric_limits<double>::infinity();
        const WideReal difference = WideReal(values[h]) - truth[h];
        error = error + difference * difference;
        size = size + truth[h] * truth[h];
    }
    if (error == WideReal(0)) return 0;
    if (size == WideReal(0)) return std::numeric_limits<double>::infinity();
    return sqrt(error / size);
}

std::size_t SinkGradient::worst(const std::vector<double>& values) const {
    std::size_t at = 0;
    WideReal most = -1;
    for (std::size_t h = 0; h < truth.size(); ++h) {
        if (!std::isfinite(values[h])) return h;
        const WideReal difference = abs(WideReal(values[h]) - truth[h]);
        if (difference > most) most = difference, at = h;
    }
    return at;
}

void attribution::add_sink_gradient(const GroupTruth& truth, const std::vector<double>& plan, std::size_t first,
                                    SinkGradient& all) {
    for (std::size_t h = 0; h < plan.size(); ++h) {
        const std::size_t at = first + h;
        if (all.plan.size() <= at) {
            all.plan.resize(at + 1);
            all.truth.resize(at + 1);
            all.bound.resize(at + 1);
        }
        const CertifiedMatrix& exact = truth.heads[h].dsink;
        all.plan[at] += plan[h];
        const WideReal sum = all.truth[at] + exact.at(0, 0);
        // A sum of WideReals is rounded to 53 bits once.
        all.bound[at] = all.bound[at] + exact.bound_at(0, 0) + WideReal(0x1p-53) * abs(sum);
        all.truth[at] = sum;
    }
}

}  // namespace faultline
