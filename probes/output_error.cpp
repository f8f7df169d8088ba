// SPDX-License-Identifier: Apache-2.0
#include <faultline/probes/output_error.hpp>

#include <algorithm>
#include <cmath>
#include <limits>

namespace faultline {

std::vector<FeatureError> ulp_error_by_feature(MatrixView<const double> value, MatrixView<const double> truth,
                                               const Format& format) {
    constexpr double nan = std::numeric_limits<double>::quiet_NaN();
    std::vector<FeatureError> features;
    for (std::ptrdiff_t c = 0; c < truth.cols; ++c) {
        FeatureError f;
        double mean = 0, scatter = 0, squares = 0, size = 0, rows = 0;
        for (std::ptrdiff_t i = 0; i < truth.rows; ++i) {
            if (!std::isfinite(truth(i, c))) continue;
            size += truth(i, c) * truth(i, c);
            rows += 1;
        }
        const double least = std::max(rows > 0 ? std::sqrt(size / rows) : 0, min_normal(format));
        for (std::ptrdiff_t i = 0; i < truth.rows; ++i) {
            const double unit = ulp(std::max(std::abs(truth(i, c)), least), format);
            const double error = (value(i, c) - truth(i, c)) / unit;
            if (!std::isfinite(error)) continue;
            f.count += 1;
            const double away = error - mean;  // Welford 1962
            mean += away / f.count;
            scatter += away * (error - mean);
            squares += error * error;
        }
        f.mean_ulp = f.count > 0 ? mean : nan;
        f.rms_ulp = f.count > 0 ? std::sqrt(squares / f.count) : nan;
        f.t = f.count > 1 && scatter > 0 ? mean / std::sqrt(scatter / (f.count - 1) / f.count) : nan;
        features.push_back(f);
    }
    return features;
}

RunningOutput running_output(std::span<const double> pbar, std::span<const double> v, const Format& weights,
                             const Format& stored) {
    RunningOutput out;
    double sum = 0;
    for (std::size_t t = 0; t < pbar.size(); ++t) {
        const double p = round(pbar[t], weights);
        if (p != 0) sum += p * v[t];
        out.sum.push_back(sum);
        out.error.push_back(round(sum, stored) - sum);
        out.event.push_back(p == 1 ? 1 : 0);
    }
    return out;
}

}  // namespace faultline
