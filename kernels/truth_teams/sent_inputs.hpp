// SPDX-License-Identifier: Apache-2.0
// FastInputs to the side that computes.
#pragma once

#include <cmath>
#include <vector>

#include <faultline/truth/elementary.hpp>
#include <faultline/truth/fast_inputs.hpp>
#include <faultline/truth_teams/flat.hpp>

namespace faultline::truth_teams {

/// One matrix after the other.
template <class Backend, class Matrices, class Take>
const double* sent_all(Backend& backend, const Matrices& matrices, const Take& take) {
    std::vector<double> all;
    for (const auto& m : matrices) {
        const auto& values = take(m);
        all.insert(all.end(), values.begin(), values.end());
    }
    return backend.upload(all.data(), all.size());
}
template <class Backend>
const double* sent_masks(Backend& backend, const std::vector<MatrixView<const double>>& masks) {
    if (masks.empty()) return nullptr;
    std::vector<double> all;
    for (const auto& m : masks)
        for (std::ptrdiff_t i = 0; i < m.rows; ++i) all.insert(all.end(), m.row(i), m.row(i) + m.cols);
    return backend.upload(all.data(), all.size());
}

/// Everything of x that a device needs.
template <class Backend>
FlatInputs sent_inputs(Backend& backend, const detail::FastInputs& x) {
    const auto sent = [&](const auto& v) { return backend.upload(v.data(), v.size()); };
    const auto values = [](const detail::AlignedMatrix& m) -> const detail::AlignedVector& { return m.values; };
    // A head's powers are padded: its rows are not.
    const auto powers = [&](const std::vector<detail::DotSide>& sides) {
        std::vector<double> all;
        for (const detail::DotSide& s : sides) all.insert(all.end(), s.power.begin(), s.power.begin() + x.n_q);
        return sent(all);
    };
    const auto widths = [&](const std::vector<detail::DotSide>& sides) {
        return sent_all(backend, sides, [](const detail::DotSide& s) -> const std::vector<double>& { return s.width; });
    };
    FlatInputs in{};
    in.n_q = x.n_q;
    in.n_k = x.n_k;
    in.d = x.d;
    in.d_v = x.d_v;
    in.heads = static_cast<std::ptrdiff_t>(x.q.size());
    in.causal = x.problem.causal;
    in.q = sent_all(backend, x.q, values);
    in.dout = sent_all(backend, x.dout, values);
    in.k = sent(x.k.values);
    in.v = sent(x.v.values);
    in.k_transposed = sent(x.k_transposed.values);
    in.v_transposed = sent(x.v_transposed.values);
    in.q_power = powers(x.q_dot);
    in.q_width = widths(x.q_dot);
    in.dout_power = powers(x.dout_dot);
    in.dout_width = widths(x.dout_dot);
    in.k_power = sent(x.k_dot.power);
    in.v_power = sent(x.v_dot.power);
    in.k_largest = x.k_dot.largest_power;
    in.k_widest = x.k_dot.widest;
    in.v_largest = x.v_dot.largest_power;
    in.v_widest = x.v_dot.widest;
    in.log2_d = std::log2(static_cast<double>(x.d));
    in.log2_d_v = std::log2(static_cast<double>(x.d_v));
    in.k_columns = sent(x.k_columns.power);
    in.v_columns = sent(x.v_columns.power);
    in.q_columns = sent(x.q_columns.power);
    in.dout_columns = sent(x.dout_columns.power);
    in.k_running = sent(x.k_columns.running.values);
    in.v_running = sent(x.v_columns.running.values);
    in.q_running = sent(x.q_columns.running.values);
    in.dout_running = sent(x.dout_columns.running.values);
    in.constant_keys = sent(x.constant_keys);
    in.bias = sent_masks(backend, x.problem.bias);
    in.bias_heads = static_cast<std::ptrdiff_t>(x.problem.bias.size());
    in.kept = sent_masks(backend, x.problem.dropout);
    in.kept_heads = static_cast<std::ptrdiff_t>(x.problem.dropout.size());
    in.scale = x.scale;
    in.scale_error = x.scale_error;
    in.scale_size = x.scale_size;
    in.keep = x.problem.keep;
    in.inverse_keep = x.inverse_keep;
    in.inverse_keep_error = x.inverse_keep_error;
    in.softcap = x.softcap;
    in.exp = backend.upload(&detail::exp_constants(), 1);
    return in;
}

}  // namespace faultline::truth_teams
