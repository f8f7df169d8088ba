// SPDX-License-Identifier: Apache-2.0
#include <faultline/attribution/rows.hpp>

#include <algorithm>
#include <cmath>
#include <limits>

#include <faultline/cpu/tiles.hpp>
#include <faultline/probes/saturation.hpp>

namespace faultline::attribution {

void append_rows(const Group& group, const GroupTruth& truth, const std::vector<RecordedRows>& recorded,
                 RowStatistics& rows) {
    const HeadGroup& in = group.inputs;
    const std::ptrdiff_t n_k = in.k.rows;
    const KeyMoments keys = key_moments(in.k);
    for (std::size_t h = 0; h < in.q.size(); ++h) {
        rows.key_mean_norm.push_back(keys.mean_norm);
        rows.key_spread.push_back(keys.spread);
        const std::ptrdiff_t n_q = in.q[h].rows;
        std::vector<double> s(static_cast<std::size_t>(n_k));
        for (std::ptrdiff_t i = 0; i < n_q; ++i) {
            // Scores in binary64: enough for counting; the truth keeps no score matrix.
            const std::ptrdiff_t visible = visible_keys(i, n_q, n_k, in.causal);
            for (std::ptrdiff_t j = 0; j < visible; ++j) {
                double dot = 0;
                for (std::ptrdiff_t c = 0; c < in.k.cols; ++c) dot += in.q[h](i, c) * in.k(j, c);
                double score = dot * in.scale;
                if (in.softcap > 0) score = in.softcap * std::tanh(score / in.softcap);
                s[static_cast<std::size_t>(j)] = score + (in.bias.empty() ? 0.0 : in.bias[h](i, j));
            }
            const RowSaturation row_state = row_saturation({s.data(), static_cast<std::size_t>(visible)});
            double keys_share = 1;  // of the row's weight, beside the sink: p_max is e^max over the keys' sum
            if (!in.sink.empty() && row_state.p_max > 0)
                keys_share = 1 / (1 + std::exp(in.sink[h] - row_state.max_logit) * row_state.p_max);
            rows.p_max.push_back(row_state.p_max * keys_share);
            rows.rounded_to_one.push_back(row_state.rounded_to_one);
            rows.repeated_max.push_back(recorded[h].score_max_keys[static_cast<std::size_t>(i)]);
            rows.keys.push_back(static_cast<double>(std::count_if(s.begin(), s.begin() + visible, [](double x) {
                return x > -std::numeric_limits<double>::infinity();
            })));
            if (in.dout.empty()) continue;
            const auto row = static_cast<std::size_t>(i);
            const RecordedRows& r = recorded[h];
            rows.zero_sum.push_back(r.ds_sum[row]);
            rows.zero_sum_relative.push_back(r.ds_abs_sum[row] == 0 ? 0.0 : r.ds_sum[row] / r.ds_abs_sum[row]);
            rows.delta_error.push_back(r.delta[row] - truth.heads[h].delta(i, 0));
        }
    }
}

void summarize(RowStatistics& rows) {
    const auto n = static_cast<double>(rows.p_max.size());
    double saturated = 0, repeated = 0, to_one = 0, squares = 0, sum = 0, abs_sum = 0;
    for (const double p : rows.p_max) saturated += p > rounds_to_one;
    for (const double r : rows.repeated_max) repeated += r >= 2;
    for (const double r : rows.rounded_to_one) to_one += r >= 2;
    std::size_t of_two_keys = 0;
    for (std::size_t i = 0; i < rows.zero_sum_relative.size(); ++i) {
        if (rows.keys[i] < 2) continue;
        squares += rows.zero_sum_relative[i] * rows.zero_sum_relative[i];
        ++of_two_keys;
    }
    for (const double z : rows.zero_sum) {
        sum += z;
        abs_sum += std::abs(z);
    }
    if (n > 0) {
        rows.saturated_fraction = saturated / n;
        rows.repeated_max_fraction = repeated / n;
        rows.rounded_to_one_fraction = to_one / n;
        rows.zero_sum_rms = std::sqrt(squares / static_cast<double>(of_two_keys));  // NaN: 0/0
    }
    rows.zero_sum_coherence = abs_sum == 0 ? 0 : sum / abs_sum;  // NaN where ds is not finite
}

TransformedGroup::TransformedGroup(const Group& original, const Correction& correction, const Format& q_format,
                                   const Format& k_format)
    : k(original.inputs.k), group(original) {
    const Matrix untouched = k;
    for (const auto& head : original.inputs.q) {
        Matrix& changed = q.emplace_back(head);
        k = untouched;  // each call transforms a q and a k: k must not be transformed twice
        transform_inputs(correction, changed, k, q_format, k_format);
    }
    group.inputs.q.clear();
    for (const Matrix& head : q) group.inputs.q.push_back(head.view());
    group.inputs.k = k.view();
    group.problem.q = group.inputs.q;
    group.problem.k = group.inputs.k;
}

}  // namespace faultline::attribution
