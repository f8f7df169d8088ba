// SPDX-License-Identifier: Apache-2.0
// What can be told of a capture cheaply: shapes, ranges, the largest logit, how far the keys lie from their mean.
#pragma once

#include <string>
#include <vector>

#include <faultline/attribution/capture.hpp>
#include <faultline/tensor/tensor.hpp>

namespace faultline::cli {

struct TensorSummary {
    std::string name, dtype, shape;
    std::vector<std::int64_t> extents;
    double least = 0, largest = 0, rms = 0;  ///< of the finite elements; NaN without any
    std::size_t nonfinite = 0;
};

struct LayerSummary {
    std::string name;
    std::string problem;  ///< why the layer cannot be attributed; then only `tensors` is filled
    std::ptrdiff_t heads = 0, kv_heads = 0, seq_q = 0, seq_k = 0, head_dim = 0, head_dim_v = 0;
    std::size_t sequences = 1;  ///< of different length (docs/captures.md): seq_q and seq_k are the longest then
    std::ptrdiff_t least_q = 0, least_k = 0;  ///< and these the shortest
    bool causal = true, has_mask = false, has_sink = false, has_dropout = false;
    double scale = 0, softcap = 0;
    double max_logit =
        0;  ///< largest |scale q k^T + bias| (the product through the softcap) that a query sees, all heads
    double key_mean_over_spread =
        0;  ///< |mean key| / rms |key - mean key|, the largest of the heads: what a broken zero sum meets
    std::vector<std::string> kernels;  ///< "flash (o, dq, dk, dv, lse)"
    std::vector<TensorSummary> tensors;
};

/// Every layer that has an input, sound or not.
[[nodiscard]] std::vector<LayerSummary> summarize_layers(const TensorSet& file);
/// The tensors that belong to none of these layers, by name and shape alone.
[[nodiscard]] std::vector<TensorSummary> other_tensors(const TensorSet& file, const std::vector<LayerSummary>& layers);

}  // namespace faultline::cli
