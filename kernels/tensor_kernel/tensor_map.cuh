// SPDX-License-Identifier: Apache-2.0
// Tensor maps (CUtensorMap) for bulk tensor copies, through the driver's entry point: nothing links against libcuda.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include <cuda.h>
#include <cuda_runtime.h>

#include <faultline/base/error.hpp>

namespace faultline::tensor_kernel {

/// WorkError, one sentence, where a CUDA call failed: "device cuda: <doing>: <what CUDA says>".
inline void check(cudaError_t status, const char* doing) {
    if (status != cudaSuccess)
        throw WorkError(std::string("device cuda: ") + doing + ": " + cudaGetErrorString(status));
}

/// Map of a tensor of up to five dimensions, innermost first. `sizes` in elements; `strides` in bytes of every dimension but
/// the innermost (which is contiguous), multiples of 16; `box` in elements: what one copy moves, in the same order. With
/// swizzle the innermost of the box is 128 bytes and shared memory holds it as wgmma.cuh expects. Base 16-byte aligned.
/// WorkError where the driver refuses.
inline CUtensorMap tensor_map(CUtensorMapDataType type, const void* base, std::span<const std::uint64_t> sizes,
                              std::span<const std::uint64_t> strides, std::span<const std::uint32_t> box,
                              CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B) {
    static const auto encode = [] {
        void* entry = nullptr;
        cudaDriverEntryPointQueryResult found{};
        check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found),
              "looking for cuTensorMapEncodeTiled");
        if (found != cudaDriverEntryPointSuccess || entry == nullptr)
            throw WorkError("device cuda: the driver has no tensor maps: expected one for CUDA 12.0 or later");
        return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(entry);
    }();
    const std::uint32_t steps[5] = {1, 1, 1, 1, 1};
    CUtensorMap map;
    const CUresult status = encode(&map, type, static_cast<std::uint32_t>(sizes.size()), const_cast<void*>(base),
                                   sizes.data(), strides.data(), box.data(), steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                   swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (status != CUDA_SUCCESS)
        throw WorkError("device cuda: the driver refuses a tensor map (error " +
                        std::to_string(static_cast<int>(status)) +
                        "): expected a base and strides that are multiples of 16 bytes");
    return map;
}

}  // namespace faultline::tensor_kernel
