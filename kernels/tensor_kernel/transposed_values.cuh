// SPDX-License-Identifier: Apache-2.0
// V of e4m3 as wgmma takes it, which has no transposed read of bytes: [batch * kv_heads, d, keys], keys padded with zeros to
// whole tiles, in the order of key_at(). (FlashAttention-3 transposes each tile in shared memory, by its producing warps.)
#pragma once

#include <cstdint>

#include <faultline/base/host_device.hpp>

namespace faultline::tensor_kernel {

/// Which key of 16 stands at a position: where the operand in registers wants 4t to 4t+3 of thread t of the quad (wgmma.cuh),
/// the keys whose p that thread has in its accumulator, two of every eight. The order within 32 has no part in their sum.
[[nodiscard]] FAULTLINE_HD constexpr int key_at(int position) {
    return position % 4 / 2 * 8 + position / 4 * 2 + position % 2;
}
/// Byte b of word w of pack_p_e4m3() in thread t: the key of 32 that it is of, and the position that the operand has it for.
constexpr bool keys_meet() {
    for (int t = 0; t < 4; ++t)
        for (int w = 0; w < 4; ++w)
            for (int b = 0; b < 4; ++b) {
                const int key = (w / 2 * 2 + b / 2) * 8 + 2 * t + b % 2, position = w / 2 * 16 + 4 * t + b;
                if (position / 16 * 16 + key_at(position % 16) != key) return false;
            }
    return true;
}
static_assert(keys_meet());

/// Strides in bytes, multiples of 16. A block takes 128 keys and 64 columns: gridDim (tiles of n_padded, d / 64, batch * heads).
static __global__ void __launch_bounds__(256)
    transpose_values(const std::uint8_t* __restrict__ v, std::int64_t row, std::int64_t head, std::int64_t batch,
                     int heads, int n_k, int d, int n_padded, std::uint8_t* __restrict__ to) {
    constexpr int pitch = 68;  // the columns of 16 keys meet in as many banks
    __shared__ alignas(16) std::uint8_t tile[128 * pitch];
    const int key0 = blockIdx.x * 128, column0 = blockIdx.y * 64, at = blockIdx.z;
    const std::uint8_t* const from = v + at % heads * head + at / heads * batch + column0;
#pragma unroll
    for (int i = threadIdx.x; i < 128 * 4; i += 256) {
        const int key = i / 4, part = i % 4;
        uint4 words{};
        if (key0 + key < n_k) words = *reinterpret_cast<const uint4*>(from + (key0 + key) * row + 16 * part);
        auto* const four = reinterpret_cast<std::uint32_t*>(tile + key * pitch + 16 * part);
        four[0] = words.x;
        four[1] = words.y;
        four[2] = words.z;
        four[3] = words.w;
    }
    __syncthreads();
#pragma unroll
    for (int i = threadIdx.x; i < 64 * 8; i += 256) {
        const int column = i / 8, sixteen = i % 8 * 16;
        std::uint32_t words[4];
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            const auto byte = [&](int i) -> std::uint32_t {
                return std::uint32_t{tile[(sixteen + key_at(4 * t + i)) * pitch + column]} << 8 * i;
            };
            words[t] = byte(0) | byte(1) | byte(2) | byte(3);
        }
        *reinterpret_cast<uint4*>(to + (static_cast<std::int64_t>(at) * d + column0 + column) * n_padded + key0 +
                                  sixteen) = {words[0], words[1], words[2], words[3]};
    }
}

}  // namespace faultline::tensor_kernel
