// SPDX-License-Identifier: Apache-2.0
// The emulated kernel on a CUDA device: the same plans, the same bits as kernels/cpu. In a build without the device back end
// the functions are there and say so.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <faultline/cpu/attention.hpp>
#include <faultline/cpu/backend.hpp>
#include <faultline/plan/plan.hpp>

namespace faultline::device {

struct Info {
    std::string name;             ///< as the driver says it
    int major = 0, minor = 0;     ///< compute capability
    std::size_t memory = 0;       ///< bytes, all of it
    std::size_t free_memory = 0;  ///< bytes, now
};

/// Whether this build has the device back end.
[[nodiscard]] bool is_built();
/// The device that is used (the first one that CUDA_VISIBLE_DEVICES leaves). WorkError, one sentence: no back end in this
/// build, no device, a driver that is too old, a compute capability below 8.0.
[[nodiscard]] Info info();

/// The back end that runs plans there: calls of several threads run beside each other, and each waits until there is memory
/// for it. WorkError as info(), and where a call needs more than there is. An instrument changes values by its alterations()
/// alone, and sees the tiles of each site in the CPU's order.
[[nodiscard]] const AttentionBackend& backend();
/// Bytes that backend() may use, all calls together: most of what is free when it is first asked for, and no more than the
/// environment variable FAULTLINE_DEVICE_MIB says (RequestError where that is no number of MiB).
[[nodiscard]] std::size_t room();

/// attention_forward of every group; all have the shapes, seed, layer, scale and kind of mask of the first
/// (std::invalid_argument). WorkError where the device fails or has not the memory for one tile of the schedule.
[[nodiscard]] std::vector<GroupForward> attention_forward(std::span<const HeadGroup> groups, const RoundingPlan& plan);
/// attention_backward of every group from what its forward left, on either side.
[[nodiscard]] std::vector<GroupBackward> attention_backward(std::span<const HeadGroup> groups,
                                                            std::span<const GroupForward> forwards,
                                                            const RoundingPlan& plan);
/// Both of every group, which has gradients of its output; the backward of one begins when its own forward is there, beside
/// the forwards of others. p and capped, which a plan saves for the backward alone, stay on the device.
struct Attention {
    std::vector<GroupForward> forward;
    std::vector<GroupBackward> backward;
};
[[nodiscard]] Attention attention(std::span<const HeadGroup> groups, const RoundingPlan& plan);

}  // namespace faultline::device
