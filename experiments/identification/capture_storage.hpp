// SPDX-License-Identifier: Apache-2.0
// Which formats a kernel of a capture takes and returns, so that presets, which are written for bf16, can stand in them.
#pragma once

#include <string>
#include <vector>

#include <array>
#include <string>

#include <faultline/attribution/capture.hpp>
#include <faultline/plan/plan.hpp>
#include <faultline/plan/storage.hpp>

namespace faultline {

/// Of all layers that have an output of `kernel` (of all layers where no one has). A tensor is what its type says; of float32
/// and float64 its values do: bf16 or fp16 where that holds every one of them, else fp32. fp16: some of q, k, v is and none is
/// bf16; where they are neither (fp8, fp32), the outputs decide. An output is stored as the tensors are where it is in that type,
/// in none of the three, in different ones in different layers, or in fp32 with values that both 16-bit types hold, which says nothing. Where all
/// outputs that say something are fp32 and the others are 0, so are the others.
[[nodiscard]] StorageFormats storage_of(const Capture& capture, const std::string& kernel);

/// What the file itself calls those tensors: "float16"; "float64 with the values of float16", where the type is wider than what
/// its values are judged to be.
struct FileTypes {
    std::string tensors;                 ///< of q
    std::array<std::string, 4> outputs;  ///< of o, dq, dk, dv; empty where the kernel has none
};
[[nodiscard]] FileTypes file_types(const Capture& capture, const std::string& kernel, const StorageFormats& storage);

/// "its tensors are float16, its outputs float64", "its dq is float32", or nothing: described() of kernels/plan/storage.hpp in
/// the file's words.
[[nodiscard]] std::string described_in_file(const StorageFormats& storage, const FileTypes& types);

/// What is to be known where a plan rounds to formats that the kernel's tensors are not in, a sentence without its end, or
/// nothing: "the tensors of flash are float16 and fa2 rounds to bfloat16"; "the dq of flash is float64 and fa2 rounds it to less".
[[nodiscard]] std::string storage_remark(const StorageFormats& storage, const FileTypes& types,
                                         const std::string& kernel, const RoundingPlan& plan);

/// The same of inputs of two 16-bit types, of which a plan has one: "q, k are bfloat16 and v is float16, which fa2 rounds to
/// bfloat16 (v_cast)"; nothing where the plan holds each.
[[nodiscard]] std::string mixed_inputs_remark(const Capture& capture, const RoundingPlan& plan);

}  // namespace faultline
