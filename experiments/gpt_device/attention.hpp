// SPDX-License-Identifier: Apache-2.0
// Attention of fast_attention.hpp on CUDA cores: whole rows in fp32, exact row maximum, p recomputed from lse, casts as there;
// and where every attention kernel of the device's trainer leaves what it saw (monitors.hpp adds it up). Functions launch on the
// stream and do not wait; WorkError where a launch fails. Every sum has a fixed order.
#pragma once

#include <cstddef>

#include <faultline/gpt_device/stream.hpp>

namespace faultline::gpt::on_device {

struct AttentionShape {
    int batch, length, heads, head_dim;  ///< head_dim a multiple of 8, at most 128
    float scale;                         ///< of q k^T, where AttentionInputs::scales is null
    float softcap = 0;                   ///< s <- c tanh(s/c) where c > 0
    bool output_gate = false;            ///< rows of dqkv have room for the gate's gradient behind them
    /// Elements from row to row of dqkv.
    [[nodiscard]] constexpr int gradient_row() const { return (output_gate ? 4 : 3) * heads * head_dim; }
};

/// q, k, v: rows are tokens, `stride` elements apart; a head has head_dim columns.
template <class E>
struct AttentionInputs {
    const E *q, *k, *v;
    std::size_t qk_stride, v_stride;
    const float* scales = nullptr;  ///< null, or the scale of each head
};

/// What a layer's heads saw in a pass, in parts for the parts of the sequence that a block or a warp took:
/// [batch, heads, parts], or [heads, batch, parts] where each head was a launch of its own. Null: not asked for.
struct HeadParts {
    float* largest = nullptr;     ///< the largest scaled score
    double* rms = nullptr;        ///< two: sums over tokens of rms(q), rms(k), before any norm
    double* zero_sums = nullptr;  ///< two: sums of ds as HeadStatistics::zero_sum, and of its magnitudes
    double* rows = nullptr;       ///< two: saturated rows, and the rows' entropies (HeadStatistics)
};
/// How many parts a head of a sequence has in each of them.
struct PartCounts {
    int largest = 0, rms = 0, zero_sums = 0, rows = 0;
};

/// Parts of the kernels below.
[[nodiscard]] constexpr PartCounts fast_parts(int length) {
    const int tiles = (length + 63) / 64;
    return {tiles, tiles, tiles, tiles};
}

struct KernelFaults;  // fault_kernels.hpp

/// o [tokens, width]; lse [batch, heads, length]. Fills seen.largest, rms, rows. faults: null, or those inside the kernel.
template <class E>
void fast_forward(const AttentionInputs<E>& inputs, const AttentionShape& shape, E* o, float* lse,
                  const HeadParts& seen, const KernelFaults* faults, Stream stream);
/// delta [batch, heads, length] of dout and o.
template <class E>
void fast_delta(const E* o, const E* dout, const AttentionShape& shape, float* delta, Stream stream);
/// dqkv [tokens, gradient_row()], of its first 3 width columns, from delta. Fills seen.zero_sums.
template <class E>
void fast_backward(const AttentionInputs<E>& inputs, const float* lse, const E* dout, const AttentionShape& shape,
                   const float* delta, E* dqkv, const HeadParts& seen, const KernelFaults* faults, Stream stream);

}  // namespace faultline::gpt::on_device
