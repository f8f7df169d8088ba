// SPDX-License-Identifier: Apache-2.0
// The recorder of the tensor-core forward: local errors of its sites, tile by tile, against the same operation in higher
// precision on the device. What it looks at is a sample, fixed by seed and place, so that its price can be chosen.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <faultline/base/host_device.hpp>
#include <faultline/plan/site.hpp>
#include <faultline/tensor_kernel/forward.hpp>

namespace faultline::tensor_kernel {

/// The sites that are recorded, in the order of the cells. The error is (value after the site) - (exact result of the site's
/// operation on the operands it really got), as in kernels/cpu/recorder.hpp, in the site's unit; shadows:
///   s_accumulate, pv_accumulate   sum in binary64 of the exact products (pv: and of the output before them), by
///                                 mma.m8n8k4; a q or p that is 0 counts as 2^-127
///   exp_argument, exp, o_rescale  fp32 pairs, within 2^-33 of the exact result
///   p_cast, o_cast                the difference is a float
inline constexpr std::array recorded_sites{Site::s_accumulate, Site::exp_argument,  Site::exp,   Site::p_cast,
                                           Site::o_rescale,    Site::pv_accumulate, Site::o_cast};

inline constexpr int site_cells = recorded_sites.size();

/// What a warp saw at one site in one tile of 16 rows and 128 keys (o_cast: 16 rows, at key tile 0).
struct RecordedCell {
    float sum = 0, sum_squared = 0, max_abs = 0, count = 0;  ///< of the errors; count: elements looked at
};

struct ForwardRecorder {
    double fraction = 1;     ///< of the query tiles of 128 rows that are looked at
    std::uint32_t seed = 1;  ///< which
    RecordedCell* cells =
        nullptr;  ///< device memory of RecordedShape(call).cells(); those not looked at stay as they are
};

/// The sample: of whole query tiles, with all their key tiles. Elements that the mask hides and rows beyond the last do not
/// count.
namespace sample {

FAULTLINE_HD inline std::uint32_t mixed(std::uint32_t x) {  // the finaliser of MurmurHash3, public domain
    x = (x ^ x >> 16) * 0x85EBCA6Bu;
    x = (x ^ x >> 13) * 0xC2B2AE35u;
    return x ^ x >> 16;
}
/// 32 uniform bits of a query tile of 128 rows of a head (of batch x heads). It is looked at where they are below the
/// threshold of the fraction.
FAULTLINE_HD inline std::uint32_t tile_bits(std::uint32_t seed, int head, int q_tile) {
    return mixed(mixed(seed ^ 0x9E3779B9u * (1u + head)) ^ 0x7FEB352Du * (1u + q_tile));
}
[[nodiscard]] inline std::uint64_t threshold(double fraction) {
    return static_cast<std::uint64_t>((fraction < 0 ? 0 : fraction > 1 ? 1 : fraction) * 0x1p32);
}

/// exp_argument, exp, p_cast (of keys), o_rescale, o_cast (of head_dim): the first eight columns of every 128.
FAULTLINE_HD constexpr bool has_column(int column) { return column / 8 % 16 == 0; }
/// The products take turns: of four tiles in a row or a column s_accumulate has one, pv_accumulate the one two further on;
FAULTLINE_HD constexpr bool has_scores(int q_tile, int k_tile) { return (q_tile + k_tile) % 4 == 0; }
FAULTLINE_HD constexpr bool has_output(int q_tile, int k_tile) { return (q_tile + k_tile) % 4 == 2; }
/// of each 16 rows eight and of their columns eight, by bits of the row group:
FAULTLINE_HD inline std::uint32_t product_bits(std::uint32_t seed, int head, int row_group) {
    return mixed(seed + 0x632BE5ABu * (1u + head) + row_group);
}
/// the upper or the lower half of its rows, the same for all key tiles of a query tile;
FAULTLINE_HD constexpr int product_half(std::uint32_t bits) { return static_cast<int>(bits & 1u); }
/// of keys the first eight of either 64, of the output's columns any eight; both in turn with the key tile.
FAULTLINE_HD constexpr int first_score_column(std::uint32_t bits, int k_tile) {
    return static_cast<int>((bits / 2 + k_tile / 4) % 2) * 64;
}
FAULTLINE_HD constexpr int first_output_column(std::uint32_t bits, int k_tile, int head_dim) {
    return static_cast<int>((bits / 2 + k_tile / 4) % (head_dim / 8)) * 8;
}

}  // namespace sample

/// Cells of a call: [batch x heads, groups of 16 rows, key tiles of 128, recorded site].
struct RecordedShape {
    int heads = 0, row_groups = 0, k_tiles = 0;
    explicit RecordedShape(const ForwardCall& call)
        : heads(call.batch * call.heads), row_groups((call.n_q + 15) / 16), k_tiles((call.n_k + 127) / 128) {}
    [[nodiscard]] std::size_t cells() const {
        return std::size_t{1} * heads * row_groups * k_tiles * recorded_sites.size();
    }
    [[nodiscard]] std::size_t index(int head, int row_group, int k_tile, std::size_t site) const {
        return ((std::size_t{1} * head * row_groups + row_group) * k_tiles + k_tile) * recorded_sites.size() + site;
    }
};

/// Local error of one site by tiles of 128 rows and 128 keys: [head, q_tile, k_tile], row-major; 0 where count is 0.
struct RecordedStatistics {
    Site site = Site::s_accumulate;
    int heads = 0, q_tiles = 0, k_tiles = 0;
    std::vector<double> signed_mean, rms, max_abs, count;
};

/// The cells of a call, copied to the host, joined: a recorded site each.
[[nodiscard]] std::vector<RecordedStatistics> recorded_statistics(const ForwardCall& call,
                                                                  const ForwardRecorder& recorder,
                                                                  std::span<const RecordedCell> cells);

/// Whether a kernel is compiled with a recorder: of those by wgmma in bf16 fused, subtract_then_scale and stable_max.
[[nodiscard]] bool has_recorder(const ForwardKernel& kernel);
/// launch_forward with a recorder, which changes nothing of what it returns. RequestError for a kernel that has none.
void launch_recorded_forward(const ForwardCall& call, const ForwardKernel& kernel, const ForwardRecorder& recorder,
                             void* stream = nullptr);

/// attention_forward with a recorder; the heads of the statistics are the query heads of all groups in order.
struct RecordedForward {
    std::vector<GroupForward> groups;
    std::vector<RecordedStatistics> statistics;
    std::vector<RecordedCell> cells;
};
/// Other than that as attention_forward; RequestError for a plan whose kernel has no recorder.
[[nodiscard]] RecordedForward recorded_forward(std::span<const HeadGroup> groups, const RoundingPlan& plan,
                                               double fraction = 1, std::uint32_t seed = 1);

}  // namespace faultline::tensor_kernel
