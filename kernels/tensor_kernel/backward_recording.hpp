// SPDX-License-Identifier: Apache-2.0
// The recorder of the tensor-core backward: local errors of its score sites, tile by tile, against the same operation in higher
// precision on the device. What it looks at is a sample, fixed by seed and place.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <faultline/base/host_device.hpp>
#include <faultline/plan/site.hpp>
#include <faultline/tensor_kernel/backward.hpp>
#include <faultline/tensor_kernel/recording.hpp>

namespace faultline::tensor_kernel {

/// The sites that are recorded, in the order of the cells. The error is (value after the site) - (exact result of the site's
/// operation on the operands it really got), as in kernels/cpu/recorder.hpp, in the site's unit; shadows:
///   bwd_s_accumulate, dp_accumulate   the products, summed in pairs of fp32, within 2^-38 of their sizes' sum and 2^-150 of each
///   bwd_exp_argument, ds              pairs of fp32, within 2^-44 of the largest term, and 2^-149 (shadow.hpp)
///   bwd_exp                           binary64, within 2^-36 of the result
///   bwd_p_cast, ds_cast               the difference is a float
inline constexpr std::array recorded_backward_sites{Site::bwd_exp_argument, Site::bwd_exp,       Site::bwd_p_cast,
                                                    Site::bwd_s_accumulate, Site::dp_accumulate, Site::ds,
                                                    Site::ds_cast};

inline constexpr int backward_site_cells = 8;  ///< two groups of four, the last of which is nobody's

struct BackwardRecorder {
    double fraction = 1;     ///< of the blocks' work, 128 keys and all queries, that is looked at
    std::uint32_t seed = 1;  ///< which
    RecordedCell* cells =
        nullptr;  ///< device memory of RecordedBackwardShape(call).cells(); those not looked at stay as they are
};

/// The sample: of whole key tiles, with all their query tiles. Elements that the mask hides, and rows and keys beyond the last,
/// do not count.
namespace sample {

/// 32 uniform bits of a key tile of a key head (of batch x kv_heads). It is looked at where they are below the threshold of the
/// fraction.
FAULTLINE_HD inline std::uint32_t key_tile_bits(std::uint32_t seed, int kv_head, int k_tile) {
    return tile_bits(seed + 0x51ED270Bu, kv_head, k_tile);
}

/// Elementwise sites: the first eight of every 64 queries, with all keys.
FAULTLINE_HD constexpr bool has_query(std::ptrdiff_t query) { return query % 64 < 8; }
/// Products: q k^T where the group of 16 keys and the step of 64 queries are both even or both odd, dO v^T where not;
FAULTLINE_HD constexpr bool has_score_product(int key_group, int q_step) { return (key_group + q_step) % 2 == 0; }
/// of the 16 keys one, the same for all query tiles of a head,
FAULTLINE_HD inline int product_key(std::uint32_t seed, int head, int key_group) {
    return static_cast<int>(
        mixed(seed + 0x632BE5ABu * (1u + static_cast<std::uint32_t>(head)) + static_cast<std::uint32_t>(key_group)) &
        15u);
}
/// with eight of every 64 queries, from this one on, in turn with the key tile.
FAULTLINE_HD constexpr int first_product_query(int k_tile) { return k_tile % 8 * 8; }

}  // namespace sample

/// Cells of a call: [batch x heads, steps of 64 queries, groups of 16 keys, backward_site_cells].
struct RecordedBackwardShape {
    int heads = 0, q_steps = 0, key_groups = 0;
    explicit RecordedBackwardShape(const BackwardCall& call)
        : heads(call.batch * call.heads), q_steps((call.n_q + 63) / 64), key_groups((call.n_k + 15) / 16) {}
    [[nodiscard]] std::size_t cells() const {
        return std::size_t{1} * static_cast<std::size_t>(heads) * static_cast<std::size_t>(q_steps) *
               static_cast<std::size_t>(key_groups) * backward_site_cells;
    }
    [[nodiscard]] std::size_t index(int head, int q_step, int key_group, std::size_t site) const {
        const std::size_t step =
            static_cast<std::size_t>(head) * static_cast<std::size_t>(q_steps) + static_cast<std::size_t>(q_step);
        return (step * static_cast<std::size_t>(key_groups) + static_cast<std::size_t>(key_group)) *
                   backward_site_cells +
               site;
    }
};

/// The cells of a call, copied to the host, joined to tiles of the kernel: 64 queries (head size 64: 128) and 128 keys.
[[nodiscard]] std::vector<RecordedStatistics> recorded_statistics(const BackwardCall& call,
                                                                  const BackwardRecorder& recorder,
                                                                  std::span<const RecordedCell> cells);

/// launch_backward with a recorder, which changes nothing of what it returns. bf16, variants fused and projected (std::invalid_argument else).
void launch_recorded_backward(const BackwardCall& call, const BackwardKernel& kernel, const BackwardRecorder& recorder,
                              void* stream = nullptr);

/// attention_backward with a recorder, which changes nothing of what it returns; the heads of the statistics are the query
/// heads of all groups in order.
struct RecordedBackward {
    std::vector<GroupBackward> groups;
    std::vector<RecordedStatistics> statistics;
};
[[nodiscard]] RecordedBackward recorded_backward(std::span<const HeadGroup> groups,
                                                 std::span<const GroupForward> forwards, const RoundingPlan& plan,
                                                 double fraction = 1, std::uint32_t seed = 1);

}  // namespace faultline::tensor_kernel
