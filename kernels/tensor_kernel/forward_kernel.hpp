// SPDX-License-Identifier: Apache-2.0
// Which plans the tensor-core forward runs, and as which of its kernels.
#pragma once

#include <optional>
#include <string>

#include <faultline/plan/plan.hpp>
#include <faultline/tensor_kernel/forward_variant.hpp>

namespace faultline::tensor_kernel {

/// Element type of q, k, v, p and o; with e4m3 o is bf16.
enum class Element : unsigned char { bf16, fp16, e4m3 };

/// Which matrix instruction: mma.sync of compute capability 8.0 and later, or wgmma of 9.0.
enum class Unit : unsigned char { mma, wgmma };

/// A forward as the device runs it: what is compiled in, and the numbers that are not.
struct ForwardKernel {
    std::string name;  ///< "fused", "unfused", "subtract_then_scale", "polynomial", "stable_max", "rounded_row_sum",
                       ///< "streaming_state"
    Unit unit = Unit::wgmma;
    Element element = Element::bf16;
    ForwardVariant variant;
    int block_k = 128;                                ///< keys of a key tile
    StreamingState state;                             ///< where the variant has it
    double stable_beta = 7, stable_tolerance = 1e-3;  ///< as in Schedule, where the variant is stable
};

struct ForwardSupport {
    ForwardKernel kernel;  ///< where why is empty
    std::string why;       ///< a sentence: the first field that the kernels do not have, and what they have
    [[nodiscard]] explicit operator bool() const { return why.empty(); }
};

/// Whether the kernels run this plan's forward for heads of this size (64 or 128; q, k and v alike). The kernels are
///   by wgmma preset fa3 with key tiles of 128, and all variants;
///   by mma preset fa2 (key tiles of 128 for heads of 64, of 64 for heads of 128), fused, unfused, subtract_then_scale and
///   stable_max,
/// in bf16 or fp16;
///   by wgmma in e4m3 preset fa3-fp8 with key tiles of 128;
///   by both in bf16 preset fa2-unfused with s_cast, row_max, row_sum, o_rescale, pv_accumulate and lse each in fp32, bf16 or
///   fp16, in key tiles of 64 for heads of 64 by wgmma, of 32, 64 or 128 for heads of 64 and of 32 or 64 for heads of 128 by
///   mma.
/// block_q is free, because the rows of a query tile do not depend on each other. What they return is what
/// kernels/cpu returns for the plan, bit for bit, but for subnormal p (forward.hpp says how far).
/// Where both units do (their rule for 16-bit products is one on Hopper, so that fa2 and fa3 differ in key tiles alone), wgmma,
/// unless one is asked for.
[[nodiscard]] ForwardSupport supported(const RoundingPlan& plan, int head_dim, bool causal,
                                       std::optional<Unit> unit = std::nullopt);

/// Preset fa3 (wgmma; of e4m3 fa3-fp8) or fa2 (mma) as the kernels run it for heads of this size.
[[nodiscard]] RoundingPlan forward_plan(Element element = Element::bf16, Unit unit = Unit::wgmma, int head_dim = 128);

}  // namespace faultline::tensor_kernel
