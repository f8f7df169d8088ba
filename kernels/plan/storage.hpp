// SPDX-License-Identifier: Apache-2.0
// The presets in the formats of a file: their kernels take fp16 tensors as they take bf16 ones (FlashAttention's templates
// have both as elem_type, csrc/flash_attn/src/kernel_traits.h), with the same schedule and the matrix instruction of that type.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <string_view>

#include <faultline/plan/plan.hpp>

namespace faultline {

/// What an output is stored in: the type of the tensors (bf16, or fp16), or another.
enum class OutputStorage : unsigned char { tensors, bf16, fp16, fp32 };

/// What a file stores where the presets, which are written for bf16, have that.
struct StorageFormats {
    bool fp16 = false;                       ///< tensors and casts are fp16
    std::array<OutputStorage, 4> outputs{};  ///< of o, dq, dk, dv
    /// All outputs in fp32.
    [[nodiscard]] static StorageFormats wide(bool fp16 = false);
    [[nodiscard]] bool fp32_outputs() const { return outputs == wide().outputs; }
    friend bool operator==(const StorageFormats&, const StorageFormats&) = default;
};

/// What follows a plan's name when it stands in such formats: "-fp16"; "-fp32-out", or for each output of its own "-fp32-dq";
/// or nothing.
[[nodiscard]] std::string suffix(const StorageFormats& storage);
/// The formats that such an ending names; nothing where it is none.
[[nodiscard]] std::optional<StorageFormats> find_storage(std::string_view suffix);
/// "its tensors are float16, its outputs float32", "its dq is float32", or nothing.
[[nodiscard]] std::string described(const StorageFormats& storage);

/// The plan so stored. fp16: every cast to bf16 is one to fp16, and every matrix product of bf16 inputs one of fp16 inputs.
/// outputs: o_cast, dq_cast, dk_cast, dv_cast have that format; in fp32 they have it where they had less, and kv_group_reduce
/// does where dk or dv has, in 16 bits where they had others of 16 bits, kv_group_reduce where both have those (a file that is narrower than the plan is what the
/// plan's output is rounded to when they are compared). Name (suffix()) and
/// description say so; a plan that has nothing to change returns as it is, under its own name.
[[nodiscard]] RoundingPlan stored_as(const RoundingPlan& plan, const StorageFormats& storage);

}  // namespace faultline
