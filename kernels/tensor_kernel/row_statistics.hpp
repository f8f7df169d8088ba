// SPDX-License-Identifier: Apache-2.0
// How sure the rows of an attention are: their entropy, and which are saturated, from q, k and what a forward left as lse. S by
// wgmma with fp32 accumulators, as preset fa3 has it, whatever else the plan of the forward rounds; without the output, so that
// it costs a fraction of a forward.
#pragma once

#include <faultline/tensor_kernel/forward.hpp>

namespace faultline::tensor_kernel {

/// Shapes as in ForwardCall; bf16.
struct RowStatisticsCall {
    int batch = 1, heads = 1, kv_heads = 1, n_q = 0, n_k = 0, head_dim = 0;
    bool causal = true;
    double scale = 0;
    const void* q = nullptr;
    const void* k = nullptr;
    const float* lse =
        nullptr;  ///< [batch, heads, n_q], natural units; off by some 2^-10 it still serves: p is normalised anew
    /// [batch, heads, row_groups(n_q), 2]: of 16 rows, over those that see two keys or more, how many have a weight above
    /// 1 - 2^-9 (probes/saturation.hpp), and the sum of their entropies in nats.
    double* out = nullptr;
    Strides q_strides, k_strides;
};

/// Launches on a stream and does not wait. As launch_forward; needs compute capability 9.0.
void launch_row_statistics(const RowStatisticsCall& call, void* stream = nullptr);

}  // namespace faultline::tensor_kernel
