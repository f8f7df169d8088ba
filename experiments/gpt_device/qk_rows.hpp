// SPDX-License-Identifier: Apache-2.0
// Rows of q and k by head: their rms, for the monitors, and QK norm as rms_norm_heads of experiments/gpt has it, with the same
// formulas and casts. Functions launch on the stream and do not wait; WorkError where a launch fails.
#pragma once

#include <faultline/gpt_device/attention.hpp>

namespace faultline::gpt::on_device {

/// q and k of a micro-batch: rows are tokens, `stride` elements apart; a head has shape.head_dim columns, a multiple of 8 up to
/// 128.
template <class E>
struct QkRows {
    const E *q, *k;
    std::size_t stride;
};
/// Gains [head_dim] of learned QK norm, or null.
struct QkGains {
    const float *q = nullptr, *k = nullptr;
};

/// Parts of a head of a sequence that qk_rows sums up.
[[nodiscard]] constexpr int rms_parts(int length) { return (length + 255) / 256; }

/// rms, if not null: HeadParts::rms, [batch, heads, rms_parts(length), 2]. q_hat and k_hat, if not null, [tokens, width] with
/// `hat_stride` elements from row to row: q/rms(q), k/rms(k) per head, rms with `epsilon` under the root, times the gains.
template <class E>
void qk_rows(const QkRows<E>& rows, const AttentionShape& shape, float epsilon, const QkGains& gains, E* q_hat,
             E* k_hat, std::size_t hat_stride, double* rms, Stream stream);

/// The rms of all layers in one launch: q and k of layer l are l layer_step elements behind `first`'s, its parts follow those of
/// the layer before.
template <class E>
void rms_of_layers(const QkRows<E>& first, std::size_t layer_step, int layers, const AttentionShape& shape, double* rms,
                   Stream stream);

/// dq and dk (of q_hat and k_hat; rows `stride` elements apart) become those of q and k. gradient, if not null: of q's gain
/// [head_dim], then of k's; partials: 512 width floats.
template <class E>
void qk_norm_backward(const QkRows<E>& rows, const AttentionShape& shape, float epsilon, const QkGains& gains, E* dq,
                      E* dk, std::size_t stride, float* gradient, float* partials, Stream stream);

}  // namespace faultline::gpt::on_device
