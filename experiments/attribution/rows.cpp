// SPDX-License-Identifier: Apache-2.0
#include <faultline/attribution/rows.hpp>

#include <algorithm>
#include <cmath>
#include <optional>

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
            const RowSaturation row_state =
                row_saturation({s.data(), static_cast<std::size_t>(visible)}, repeated_within,
                               in.sink.empty() ? std::nullopt : std::optional<double>(in.sink[h]));
            rows.p_max.push_back(row_state.p_max);
            rows.rounded_to_one.push_back(row_state.rounded_to_one);
            rows.repeated_max.push_back(recorded[h].score_max_keys[static_cast<std::size_t>(i)]);
            rows.keys.push_back(row_state.keys);
            if (in.dout.empty()) continue;
            const auto row = static_cast<std::size_t>(i);
            const RecordedRows& r = recorded[h];
            rows.zero_sum.push_back(r.ds.sum[row]);
            rows.zero_sum_relative.push_back(relative_row_sum(r.ds.sum[row], r.ds.magnitude[row]));
            rows.delta_error.push_back(r.delta[row] - truth.heads[h].delta(i, 0));
        }
    }
}

void summarize(RowStatistics& rows) {
    double n = 0, saturated = 0, repeated = 0, to_one = 0, sum = 0, abs_sum = 0;
    for (std::size_t i = 0; i < rows.p_max.size(); ++i) {
        if (rows.keys[i] < 2) continue;
        n += 1;
        saturated += rows.p_max[i] > rounds_to_one;
        repeated += rows.repeated_max[i] >= 2;
        to_one += rows.rounded_to_one[i] >= 2;
    }
    for (const double z : rows.zero_sum) {
        sum += z;
        abs_sum += std::abs(z);
    }
    if (n > 0) {
        rows.saturated_fraction = saturated / n;
        rows.repeated_max_fraction = repeated / n;
        rows.rounded_to_one_fraction = to_one / n;
    }
    if (!rows.p_max.empty()) rows.zero_sum_rms = relative_row_sum_rms(rows.zero_sum_relative, rows.keys);
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
