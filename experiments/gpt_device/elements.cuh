// SPDX-License-Identifier: Apache-2.0
// Eight elements at a time, as floats, whatever they are in memory.
#pragma once

#include <string>

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <faultline/base/error.hpp>
#include <faultline/gpt_device/kernels.hpp>

namespace faultline::gpt::on_device {

inline void check_launch(const char* what) {
    const cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess) throw WorkError(std::string("device cuda: ") + what + ": " + cudaGetErrorString(error));
}

struct Octet {
    float x[8];
};

__device__ inline Octet load8(const float* p) {
    const float4 a = reinterpret_cast<const float4*>(p)[0], b = reinterpret_cast<const float4*>(p)[1];
    return {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
}
__device__ inline Octet load8(const Bf16* p) {
    const uint4 w = *reinterpret_cast<const uint4*>(p);
    const unsigned words[4] = {w.x, w.y, w.z, w.w};
    Octet out;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        out.x[2 * i] = __uint_as_float(words[i] << 16);
        out.x[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
    return out;
}
__device__ inline void store8(float* p, const Octet& v) {
    reinterpret_cast<float4*>(p)[0] = {v.x[0], v.x[1], v.x[2], v.x[3]};
    reinterpret_cast<float4*>(p)[1] = {v.x[4], v.x[5], v.x[6], v.x[7]};
}
__device__ inline void store8(Bf16* p, const Octet& v) {
    unsigned words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(v.x[2 * i], v.x[2 * i + 1]);
        words[i] = *reinterpret_cast<const unsigned*>(&pair);
    }
    *reinterpret_cast<uint4*>(p) = {words[0], words[1], words[2], words[3]};
}

__device__ inline float value_of(float x) { return x; }
__device__ inline float value_of(Bf16 x) { return __uint_as_float(static_cast<unsigned>(x.bits) << 16); }
__device__ inline float rounded_bf16(float x) { return __bfloat162float(__float2bfloat16_rn(x)); }
/// As the type holds it.
template <class E>
__device__ inline float rounded_to(float x) {
    if constexpr (sizeof(E) == 2) return rounded_bf16(x);
    return x;
}
__device__ inline void store1(float* p, float x) { *p = x; }
__device__ inline void store1(Bf16* p, float x) { p->bits = __bfloat16_as_ushort(__float2bfloat16_rn(x)); }

/// e^x for a value that is going to be cast to E: to within an ulp or two of fp32, or, where bf16 hides it, by one ex2.approx.
template <class E>
__device__ inline float exp_for(float x) {
    if constexpr (sizeof(E) == 2) return __expf(x);
    return expf(x);
}
/// 1 / (1 + e^-x), likewise.
template <class E>
__device__ inline float sigmoid_for(float x) {
    if constexpr (sizeof(E) == 2) return __fdividef(1.0f, 1.0f + __expf(-x));
    return 1.0f / (1.0f + expf(-x));
}

/// Sum over the warp, the same bits in every lane (each step adds the same two numbers in both).
__device__ inline float warp_sum(float x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}
__device__ inline float warp_max(float x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
    return x;
}
__device__ inline double warp_sum(double x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}

}  // namespace faultline::gpt::on_device
