// SPDX-License-Identifier: Apache-2.0
// A score becomes a probability again, from the forward's log-sum-exp.
#pragma once

#include <faultline/special/binary64.hpp>
#include <faultline/tensor_kernel/backward_variant.hpp>
#include <faultline/tensor_kernel/hopper.cuh>
#include <faultline/tensor_kernel/state_rounding.cuh>

namespace faultline::tensor_kernel {

/// The exponential's argument of a score, lse in its units.
template <class Variant>
__device__ __forceinline__ float argument(float s, float exponent, float lse) {
    return Variant::value.argument == ArgumentForm::fused ? fmaf(s, exponent, -lse) : s * exponent - lse;
}

/// p of a score.
template <class Variant>
__device__ __forceinline__ float probability(float s, float exponent, float lse) {
    constexpr BackwardVariant variant = Variant::value;
    if constexpr (variant.bf16_scores) s = held(s, StateFormat::bf16);
    const float x = argument<Variant>(s, exponent, lse);
    if constexpr (variant.functions == Functions::hopper) {
        static_assert(variant.base == ExpBase::two);
        return ex2(x);
    } else {
        return static_cast<float>(variant.base == ExpBase::two ? binary64_functions::exp2(x)
                                                               : binary64_functions::exp(x));
    }
}

}  // namespace faultline::tensor_kernel
