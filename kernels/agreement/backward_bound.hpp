// SPDX-License-Identifier: Apache-2.0
// What the tensor-core backward is held to: gradients in binary64, and bounds.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include <faultline/cpu/attention.hpp>

namespace faultline::tensor_kernel {

/// The gradients of a head group in binary64 and how far the kernel may be from them: u = 2^-8 is bf16's unit roundoff,
/// w = 2^-22 bounds one fp32 operation, ex2.approx (2^-22 of its result) and an addition of wgmma (2^-23 of the largest
/// term). With S_i the largest sum of |q k| scale of a row, D_ij = sum |dO v|, V_ic = sum_j p |v|:
///   eps_i    p: the score's d/16 additions and the argument, twice, since lse has them too; lse's sum of n/8 terms a lane;
///            lse itself
///   ds_ij    p ((eps + 3 w) |dp - delta| + w d/16 D_ij + delta's error) + u |ds|, delta's error being that of the stored o,
///            2 u + eps of V, times |dO|, and its own d additions
///   dq, dk   the errors of ds times |scale k|, |scale q|; the additions, n/16 and one a tile; u of the result
///   dv       (u + eps) p |dO|, the additions, u of the result
/// 1 + 2^-5 takes up the squares; a p below 2^-126 is 0.
///
/// With a projection `apart` bounds how far the kernel may be from the emulation, whose ds is the same: the sum r_i of a row's
/// ds is at most that of its errors R_i; what the kernel takes off, r_i w_ij, is rounded to bf16 and added up in fp32, in
/// another order than the emulation, as r_i and the weights' sum are (n w of sum |ds|, of sum p).
struct Bounded {
    std::vector<Matrix> dq, dq_bound, dq_apart;
    Matrix dk, dk_bound, dk_apart, dv, dv_bound;

    explicit Bounded(const HeadGroup& in, ZeroSum projection = ZeroSum::none) {
        const std::ptrdiff_t n_q = in.q[0].rows, n_k = in.k.rows, d = in.k.cols;
        constexpr double u = 0x1p-8, w = 0x1p-22, margin = 1 + 0x1p-5, flushed = 0x1p-126;
        const auto heads = static_cast<double>(in.q.size());
        const double rows = heads * static_cast<double>(n_q), n = static_cast<double>(n_k),
                     dim = static_cast<double>(d);
        dk = dk_bound = dk_apart = dv = dv_bound = Matrix(n_k, d);
        for (std::size_t h = 0; h < in.q.size(); ++h) {
            const MatrixView<const double> q = in.q[h], dout = in.dout[h];
            Matrix& out = dq.emplace_back(n_q, d);
            Matrix& bound = dq_bound.emplace_back(n_q, d);
            Matrix& apart = dq_apart.emplace_back(n_q, d);
            for (std::ptrdiff_t i = 0; i < n_q; ++i) {
                const std::ptrdiff_t seen = in.causal ? std::clamp<std::ptrdiff_t>(i + 1 + n_k - n_q, 0, n_k) : n_k;
                const auto count = static_cast<std::size_t>(seen);
                std::vector<double> p(count), dp(count), dp_size(count), o_size(static_cast<std::size_t>(d));
                double top = -INFINITY, largest = 0, sum = 0;
                for (std::ptrdiff_t j = 0; j < seen; ++j) {
                    const auto at = static_cast<std::size_t>(j);
                    double dot = 0, size = 0;
                    for (std::ptrdiff_t c = 0; c < d; ++c) {
                        dot += q(i, c) * in.k(j, c);
                        size += std::abs(q(i, c) * in.k(j, c));
                        dp[at] += dout(i, c) * in.v(j, c);
                        dp_size[at] += std::abs(dout(i, c) * in.v(j, c));
                    }
                    p[at] = dot * in.scale;
                    top = std::max(top, p[at]);
                    largest = std::max(largest, size * in.scale);
                }
                for (double& x : p) sum += x = std::exp(x - top);
                double delta = 0, delta_size = 0;
                for (std::ptrdiff_t j = 0; j < seen; ++j) {
                    const auto at = static_cast<std::size_t>(j);
                    p[at] /= sum;
                    delta += p[at] * dp[at];
                    for (std::ptrdiff_t c = 0; c < d; ++c)
                        o_size[static_cast<std::size_t>(c)] += p[at] * std::abs(in.v(j, c));
                }
                for (std::ptrdiff_t c = 0; c < d; ++c)
                    delta_size += std::abs(dout(i, c)) * o_size[static_cast<std::size_t>(c)];
                const double lse = seen > 0 ? std::abs(top) + std::log(sum) : 0;
                const double eps = w * ((dim / 16 + 2) * 4 * largest + n / 8 + 8 + 4 * lse);
                const double delta_error = (2 * u + eps + w * dim) * delta_size;
                for (std::ptrdiff_t j = 0; j < seen; ++j) {
                    const auto at = static_cast<std::size_t>(j);
                    const double ds = p[at] * (dp[at] - delta);
                    const double ds_error =
                        u * std::abs(ds) + flushed * std::abs(dp[at] - delta) +
                        p[at] * ((eps + 3 * w) * std::abs(dp[at] - delta) + w * dim / 16 * dp_size[at] + delta_error);
                    for (std::ptrdiff_t c = 0; c < d; ++c) {
                        const double k = in.scale * in.k(j, c), key = in.scale * q(i, c);
                        out(i, c) += ds * k;
                        bound(i, c) += margin * (ds_error + w * (n / 16 + n / 128 + 1) * std::abs(ds)) * std::abs(k);
                        dk(j, c) += ds * key;
                        dk_bound(j, c) += margin * (ds_error + w * (rows / 16 + 1) * std::abs(ds)) * std::abs(key);
                        dv(j, c) += p[at] * dout(i, c);
                        dv_bound(j, c) += margin * ((u + eps + w * rows / 16) * p[at] + flushed) * std::abs(dout(i, c));
                    }
                }
                for (std::ptrdiff_t c = 0; c < d; ++c) bound(i, c) += margin * u * std::abs(out(i, c));
                if (projection == ZeroSum::none) continue;
                double left = 0, ds_size = 0;  // R_i, sum |ds|
                for (std::ptrdiff_t j = 0; j < seen; ++j) {
                    const auto at = static_cast<std::size_t>(j);
                    const double away = std::abs(dp[at] - delta);
                    left +=
                        u * p[at] * away + p[at] * ((eps + 3 * w) * away + w * dim / 16 * dp_size[at] + delta_error);
                    ds_size += p[at] * away;
                }
                for (std::ptrdiff_t j = 0; j < seen; ++j) {
                    const double weight = projection == ZeroSum::weighted  ? p[static_cast<std::size_t>(j)]
                                          : projection == ZeroSum::uniform ? 1 / static_cast<double>(seen)
                                                                           : 1;  // any key may be the largest's
                    const double taken = (u + 2 * n * w) * left * weight + n * w * ds_size * weight;
                    const double added =
                        w * (rows / 16 + 2) *
                        (p[static_cast<std::size_t>(j)] * std::abs(dp[static_cast<std::size_t>(j)] - delta) +
                         left * weight);
                    for (std::ptrdiff_t c = 0; c < d; ++c) {
                        apart(i, c) += margin * (taken + added) * std::abs(in.scale * in.k(j, c));
                        dk_apart(j, c) += margin * (taken + added) * std::abs(in.scale * q(i, c));
                    }
                }
            }
        }
        for (std::size_t i = 0; i < dk.values.size(); ++i) {
            dk_bound.values[i] += margin * u * std::abs(dk.values[i]);
            dv_bound.values[i] += margin * u * std::abs(dv.values[i]);
        }
    }
};

}  // namespace faultline::tensor_kernel
