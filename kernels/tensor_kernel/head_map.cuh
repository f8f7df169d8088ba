// SPDX-License-Identifier: Apache-2.0
// Tensor maps of [batch, heads, n, d] as the kernels read and write it.
#pragma once

#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <faultline/tensor_kernel/forward.hpp>
#include <faultline/tensor_kernel/tensor_map.cuh>

namespace faultline::tensor_kernel {

template <class T>
constexpr CUtensorMapDataType map_type =
    std::is_same_v<T, __half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;

/// [batch, heads, n, d] as panels of 64 columns: 64 columns, row, panel, head, batch. One copy moves `rows` rows, all
/// panels.
template <class T>
CUtensorMap head_map(const void* base, const Strides& strides, int batch, int heads, int n, int d, int rows) {
    const auto bytes = [](std::int64_t elements) { return static_cast<std::uint64_t>(elements) * sizeof(T); };
    const std::uint64_t sizes[] = {64, static_cast<std::uint64_t>(n), static_cast<std::uint64_t>(d / 64),
                                   static_cast<std::uint64_t>(heads), static_cast<std::uint64_t>(batch)};
    const std::uint64_t steps[] = {bytes(strides.row), 128, bytes(strides.head), bytes(strides.batch)};
    const std::uint32_t box[] = {64, static_cast<std::uint32_t>(rows), static_cast<std::uint32_t>(d / 64), 1, 1};
    return tensor_map(map_type<T>, base, sizes, steps, box);
}

inline int multiprocessors() {
    int device = 0, count = 0;
    check(cudaGetDevice(&device), "choosing a device");
    check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "asking the device");
    return count;
}

}  // namespace faultline::tensor_kernel
