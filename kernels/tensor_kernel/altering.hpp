// SPDX-License-Identifier: Apache-2.0
// Faults in the registers of the tensor-core kernels: variants of them that change elements as an Alteration says
// (kernels/cpu/alteration.hpp), where the emulation's instruments change them, in the emulation's tiles. By wgmma, in bf16
// and fp16, the forward with a fused argument and the backward of preset fa3; as many query heads as heads of keys. An alteration of
// size of_rms would need a pass of its own over each tile and is not there: sizes of_value and of_ulp are.
#pragma once

#include <cstddef>

#include <faultline/cpu/head_alteration.hpp>
#include <faultline/tensor_kernel/backward.hpp>
#include <faultline/tensor_kernel/forward.hpp>

namespace faultline::tensor_kernel {

/// row_max, p_cast, row_sum and pv_accumulate of the forward, the others of the backward. A changed row maximum and the changed
/// sums of pv_accumulate and dp_accumulate are held in fp32, whatever the plan has there; delta is changed where it stands in memory between the backward's steps.
enum class AlteredSite : int { p_cast, dp_accumulate, ds, bwd_p_cast, ds_cast, row_max, row_sum, pv_accumulate, delta };

/// Sums over changed elements, as Realised of injectors/realised.hpp: e the change, a what was asked, x the value before.
struct AlteredSums {
    double count, sum, sum_squared, sum_abs, asked_sum, asked_squared, value_squared;
};

/// In device memory. sums: altered_sums() of the call, [head, batch, tile, warp]; written whole by each launch.
struct AlteredAt {
    AlteredSite site;
    const HeadAlteration* heads;  ///< [heads]; batch elements count on from change.batch
    AlteredSums* sums;
};
inline constexpr int most_altered = 4;
/// In the order in which they act.
struct Alterations {
    int count = 0;
    AlteredAt at[most_altered];
};

/// AlteredSums that an alteration of a call asks for.
[[nodiscard]] std::size_t altered_sums(const ForwardCall& call);
[[nodiscard]] std::size_t altered_sums(const BackwardCall& call);

/// As launch_forward and launch_backward. std::invalid_argument where the kernel is not one of those above; WorkError.
void launch_altered_forward(const ForwardCall& call, const ForwardKernel& kernel, const Alterations& alterations,
                            void* stream);
void launch_altered_backward(const BackwardCall& call, const BackwardKernel& kernel, const Alterations& alterations,
                             void* stream);

}  // namespace faultline::tensor_kernel
