// SPDX-License-Identifier: Apache-2.0
// The presets in the formats of a file: their kernels take fp16 tensors as they take bf16 ones (FlashAttention's templates
// have both as elem_type, csrc/flash_attn/src/kernel_traits.h), with the same schedule and the matrix instruction of that type.
#pragma once

#include <string>
#include <string_view>

#include <faultline/plan/plan.hpp>

namespace faultline {

/// What a file stores where the presets, which are written for bf16, have that.
struct StorageFormats {
    bool fp16 = false;          ///< tensors and casts are fp16
    bool fp32_outputs = false;  ///< o, dq, dk and dv are not rounded below fp32
    friend bool operator==(const StorageFormats&, const StorageFormats&) = default;
};

/// What follows a plan's name when it stands in such formats: "-fp16", "-fp32-out", both, or nothing.
[[nodiscard]] std::string suffix(const StorageFormats& storage);

/// The plan so stored. fp16: every cast to bf16 is one to fp16, and every matrix product of bf16 inputs one of fp16 inputs.
/// fp32_outputs: o_cast, dq_cast, dk_cast, dv_cast and kv_group_reduce have fp32 where they had less. Name (suffix()) and
/// description say so; a plan that has nothing to change returns as it is, under its own name.
[[nodiscard]] RoundingPlan stored_as(const RoundingPlan& plan, const StorageFormats& storage);

}  // namespace faultline
