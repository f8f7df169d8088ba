// SPDX-License-Identifier: Apache-2.0
// Which plans the tensor-core backward runs, and as which of its kernels.
#pragma once

#include <string>

#include <faultline/plan/plan.hpp>
#include <faultline/tensor_kernel/backward_variant.hpp>
#include <faultline/tensor_kernel/forward_kernel.hpp>

namespace faultline::tensor_kernel {

/// A backward as the device runs it: what is compiled in, and the choices that are not.
struct BackwardKernel {
    std::string
        name;  ///< "fused", "unfused", "unfused_bf16_scores", "scaled_before_cast", "correctly_rounded", "cudnn_like", "projected"
    Unit unit = Unit::wgmma;
    Element element = Element::bf16;
    BackwardVariant variant;
    DeltaFrom delta_from = DeltaFrom::o;  ///< of P and dP: with variants fused and projected
    ZeroSum zero_sum = ZeroSum::none;     ///< with variant projected
};

struct BackwardSupport {
    BackwardKernel kernel;  ///< where why is empty
    std::string why;        ///< a sentence: the first field that the kernels do not have, and what they have
    [[nodiscard]] explicit operator bool() const { return why.empty(); }
};

/// Whether the kernels run this plan's backward for heads of this size (64 or 128; q, k and v alike). The kernels are, in bf16
/// or fp16 with key tiles of 128,
///   by wgmma preset fa3's backward, and all variants, also of q, k and v in e4m3 (fa3-fp8: everything else is bf16); bwd_block_q is free where it is a multiple of 16 (0 is the whole
///   sequence): dk and dv are summed over 16 queries at a time in ascending order whatever the tile;
///   by mma preset fa2's backward, fused and unfused, and in bf16 unfused with q k^T held in bf16 (bwd_s_cast).
/// What they return is then what kernels/cpu returns for the plan, but for what backward.hpp says.
[[nodiscard]] BackwardSupport supported_backward(const RoundingPlan& plan, int head_dim, bool causal);

/// Preset fa3 (wgmma; of e4m3 fa3-fp8) or fa2 (mma) as the backward kernels run it, dq summed over key tiles in the order of
/// BackwardCall::deterministic.
[[nodiscard]] RoundingPlan backward_plan(int head_dim, Element element = Element::bf16, Unit unit = Unit::wgmma);

}  // namespace faultline::tensor_kernel
