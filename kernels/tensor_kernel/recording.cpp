// SPDX-License-Identifier: Apache-2.0
#include <faultline/tensor_kernel/recording.hpp>

#include <algorithm>
#include <cmath>

#include <faultline/cpu/tiles.hpp>

namespace faultline::tensor_kernel {
namespace {

constexpr int tile = 128, group = 16;

/// Key tiles that the rows before `end` reach: those that the kernel visits.
int visited_tiles(const ForwardCall& call, int end) {
    const std::ptrdiff_t last = std::min(end, call.n_q) - 1;
    const auto keys = static_cast<int>(visible_keys(last, call.n_q, call.n_k, call.causal));
    return std::max(1, (keys + tile - 1) / tile);
}

}  // namespace

bool has_recorder(const ForwardKernel& kernel) {
    constexpr ForwardVariant subtract{.argument = ArgumentForm::subtract_then_scale}, stable{.stable = true};
    const ForwardVariant& v = kernel.variant;
    return kernel.unit == Unit::wgmma && kernel.element == Element::bf16 &&
           (v == ForwardVariant{} || v == subtract || v == stable);
}

std::vector<RecordedStatistics> recorded_statistics(const ForwardCall& call, const ForwardRecorder& recorder,
                                                    std::span<const RecordedCell> cells) {
    const RecordedShape shape(call);
    const std::uint64_t threshold = sample::threshold(recorder.fraction);
    const int q_tiles = (call.n_q + tile - 1) / tile;
    const auto is_written = [&](Site site, int head, int q_tile, int k_tile) {
        if (sample::tile_bits(recorder.seed, head, q_tile) >= threshold) return false;
        if (k_tile >= visited_tiles(call, (q_tile + 1) * tile)) return false;
        if (site == Site::s_accumulate) return sample::has_scores(q_tile, k_tile);
        if (site == Site::pv_accumulate) return !sample::has_scores(q_tile, k_tile);
        return site != Site::o_cast || k_tile == 0;
    };
    std::vector<RecordedStatistics> all;
    for (std::size_t site = 0; site < recorded_sites.size(); ++site) {
        RecordedStatistics& s = all.emplace_back();
        s.site = recorded_sites[site];
        s.heads = shape.heads;
        s.q_tiles = q_tiles;
        s.k_tiles = shape.k_tiles;
        const std::size_t count = std::size_t{1} * shape.heads * q_tiles * shape.k_tiles;
        for (auto* column : {&s.signed_mean, &s.rms, &s.max_abs, &s.count}) column->assign(count, 0.0);
        std::size_t at = 0;
        for (int head = 0; head < shape.heads; ++head)
            for (int q_tile = 0; q_tile < q_tiles; ++q_tile)
                for (int k_tile = 0; k_tile < shape.k_tiles; ++k_tile, ++at) {
                    if (!is_written(s.site, head, q_tile, k_tile)) continue;
                    double sum = 0, sum_squared = 0;
                    const int first = q_tile * (tile / group);
                    for (int g = first; g < std::min(first + tile / group, shape.row_groups); ++g) {
                        const RecordedCell& cell = cells[shape.index(head, g, k_tile, site)];
                        sum += cell.sum;
                        sum_squared += cell.sum_squared;
                        s.max_abs[at] = std::max(s.max_abs[at], static_cast<double>(cell.max_abs));
                        s.count[at] += cell.count;
                    }
                    if (s.count[at] == 0) continue;
                    s.signed_mean[at] = sum / s.count[at];
                    s.rms[at] = std::sqrt(sum_squared / s.count[at]);
                }
    }
    return all;
}

}  // namespace faultline::tensor_kernel
