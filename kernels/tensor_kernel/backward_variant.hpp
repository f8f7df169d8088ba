// SPDX-License-Identifier: Apache-2.0
// What of a plan the tensor-core backward compiles in: one kernel for each variant.
#pragma once

#include <faultline/plan/schedule.hpp>

namespace faultline::tensor_kernel {

/// Everything else is as in preset fa3: S, dP, dV, dK and dQ by wgmma with fp32 accumulators, p and ds cast to nearest even,
/// dq summed over key tiles in fp32, dk and dv over the query heads of a group before their cast.
struct BackwardVariant {
    ArgumentForm argument =
        ArgumentForm::fused;                  ///< not subtract_then_scale: the backward subtracts lse, in log2 units
    Functions functions = Functions::hopper;  ///< ex2.approx.ftz, or a binary64 exponential rounded once
    ExpBase base = ExpBase::two;              ///< e only with functions correctly_rounded
    DsScale ds_scale = DsScale::after;        ///< not after_cast
    DeltaOrder delta_order = DeltaOrder::octets;  ///< octets or octet_pairs, by head_dim/8 threads
    bool bf16_scores = false;                     ///< bwd_s_cast: q k^T recomputed is held in bf16
    bool projected = false;                       ///< with a zero-sum projection; which one is an argument of the call

    friend constexpr bool operator==(const BackwardVariant&, const BackwardVariant&) = default;
};

// The variants that are compiled.
struct Fused {
    static constexpr BackwardVariant value{};
};
struct Unfused {
    static constexpr BackwardVariant value{.argument = ArgumentForm::unfused};
};
/// By mma, bf16.
struct UnfusedBf16Scores {
    static constexpr BackwardVariant value{.argument = ArgumentForm::unfused, .bf16_scores = true};
};
struct ScaledBeforeCast {
    static constexpr BackwardVariant value{.ds_scale = DsScale::before};
};
struct Projected {
    static constexpr BackwardVariant value{.projected = true};
};
struct CorrectlyRounded {
    static constexpr BackwardVariant value{.functions = Functions::correctly_rounded};
};
/// The backward of preset cudnn-like.
struct CudnnLike {
    static constexpr BackwardVariant value{.functions = Functions::correctly_rounded,
                                           .base = ExpBase::e,
                                           .ds_scale = DsScale::before,
                                           .delta_order = DeltaOrder::octet_pairs};
};

}  // namespace faultline::tensor_kernel
