// SPDX-License-Identifier: Apache-2.0
// Batches whose sequences differ in length, as kernels take them: packed one behind the other, padded, or with keys and values
// in the pages of a cache. Each sequence is a problem of its own, so it becomes a layer of its own, LAYER[i]; what no sequence
// uses is never read, whatever stands in it.
//   LAYER.cu_seqlens, or .cu_seqlens_q and .cu_seqlens_k   [n + 1]: packed; q, do, KERNEL.o, .dq are [total, heads, head_dim],
//                                                          k, v, .dk, .dv likewise, KERNEL.lse is [heads, total]
//                                                          (flash_attn_varlen_func)
//   LAYER.seqused_q, .seqused_k                            [batch]: the first so many rows, or keys, of each padded sequence
//   LAYER.block_table with .seqused_k                      [batch, pages of a sequence]: k, v (and .dk, .dv) are
//                                                          [pages, page size, heads, head_dim] (flash_attn_with_kvcache)
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include <faultline/tensor/tensor.hpp>

namespace faultline::detail {

/// The set with such layers apart; nothing where it has none. RequestError: lengths that are no integers, do not rise or do
/// not fit the tensors, pages that are not there, a sequence with queries and no key, a mask of a packed batch.
[[nodiscard]] std::optional<TensorSet> sequences_apart(const TensorSet& file);

/// "layer1" of "layer1[3]"; the name itself where it is no sequence's.
[[nodiscard]] std::string_view batch_of_sequence(std::string_view layer);

}  // namespace faultline::detail
