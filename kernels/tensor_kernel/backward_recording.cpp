// SPDX-License-Identifier: Apache-2.0
#include <faultline/tensor_kernel/backward_recording.hpp>

#include <algorithm>
#include <cmath>

#include <faultline/cpu/tiles.hpp>

namespace faultline::tensor_kernel {
namespace {

/// That a query sees.
int keys_of(const BackwardCall& call, int query) {
    return static_cast<int>(visible_keys(query, call.n_q, call.n_k, call.causal));
}

}  // namespace

std::vector<RecordedStatistics> recorded_statistics(const BackwardCall& call, const BackwardRecorder& recorder,
                                                    std::span<const RecordedCell> cells) {
    constexpr int block_k = 128, group = 16, step = 64;
    const int block_q = call.head_dim == 64 ? 128 : 64;
    const RecordedBackwardShape shape(call);
    const std::uint64_t threshold = sample::threshold(recorder.fraction);
    const int q_tiles = (call.n_q + block_q - 1) / block_q, k_tiles = (call.n_k + block_k - 1) / block_k;
    std::vector<RecordedStatistics> all;
    for (std::size_t site = 0; site < recorded_backward_sites.size(); ++site) {
        RecordedStatistics& s = all.emplace_back();
        s.site = recorded_backward_sites[site];
        s.heads = shape.heads;
        s.q_tiles = q_tiles;
        s.k_tiles = k_tiles;
        const std::size_t count = static_cast<std::size_t>(shape.heads) * static_cast<std::size_t>(q_tiles) *
                                  static_cast<std::size_t>(k_tiles);
        for (auto* column : {&s.signed_mean, &s.rms, &s.max_abs, &s.count}) column->assign(count, 0.0);
        std::size_t at = 0;
        for (int head = 0; head < shape.heads; ++head)
            for (int q_tile = 0; q_tile < q_tiles; ++q_tile)
                for (int k_tile = 0; k_tile < k_tiles; ++k_tile, ++at) {
                    const bool visited =
                        k_tile * block_k < keys_of(call, std::min(call.n_q, (q_tile + 1) * block_q) - 1);
                    const std::uint32_t bits =
                        sample::key_tile_bits(recorder.seed, head / (call.heads / call.kv_heads), k_tile);
                    if (!visited || bits >= threshold) continue;
                    double sum = 0, sum_squared = 0;
                    const int end_step = std::min(shape.q_steps, (q_tile + 1) * (block_q / step));
                    const int end_group = std::min(shape.key_groups, (k_tile + 1) * (block_k / group));
                    for (int q = q_tile * (block_q / step); q < end_step; ++q)
                        for (int k = k_tile * (block_k / group); k < end_group; ++k) {
                            const RecordedCell& cell = cells[shape.index(head, q, k, site)];
                            sum += static_cast<double>(cell.sum);
                            sum_squared += static_cast<double>(cell.sum_squared);
                            s.max_abs[at] = std::max(s.max_abs[at], static_cast<double>(cell.max_abs));
                            s.count[at] += static_cast<double>(cell.count);
                        }
                    if (s.count[at] == 0) continue;
                    s.signed_mean[at] = sum / s.count[at];
                    s.rms[at] = std::sqrt(sum_squared / s.count[at]);
                }
    }
    return all;
}

}  // namespace faultline::tensor_kernel
