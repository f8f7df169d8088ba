// SPDX-License-Identifier: Apache-2.0
// What a Hopper kernel is made of, one instruction each (PTX ISA 8.7, target sm_90a): mbarriers, bulk tensor copies, named
// barriers, register counts, ex2. wgmma and its descriptors are in wgmma.cuh, tensor maps in tensor_map.cuh.
#pragma once

#include <cstdint>

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

namespace faultline::tensor_kernel {

__device__ __forceinline__ std::uint32_t shared_address(const void* p) {
    return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}

// ---- mbarrier -------------------------------------------------------------------------------------------------------
/// A barrier in shared memory that counts arrivals and bytes of bulk copies. A phase completes when `arrivals` threads have
/// arrived and all bytes that were announced are there. Waiting takes the parity of the phase, 0 for the first; on a fresh
/// barrier a wait for parity 1 returns at once, so that a producer that begins with parity 1 finds every slot free.
struct Barrier {
    std::uint64_t word;

    /// By one thread, followed by fence_barrier_init() and a block barrier.
    __device__ __forceinline__ void init(int arrivals) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&word)), "r"(arrivals) : "memory");
    }
    __device__ __forceinline__ void arrive() {
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&word)) : "memory");
    }
    /// Arrives and announces bytes that copies will bring in this phase.
    __device__ __forceinline__ void arrive_expect(std::uint32_t bytes) {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&word)), "r"(bytes)
                     : "memory");
    }
    [[nodiscard]] __device__ __forceinline__ bool test(std::uint32_t parity) const {
        std::uint32_t done;
        asm volatile(
            "{\n.reg .pred p;\n"
            "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
            "selp.u32 %0, 1, 0, p;\n}\n"
            : "=r"(done)
            : "r"(shared_address(&word)), "r"(parity)
            : "memory");
        return done != 0;
    }
    __device__ __forceinline__ void wait(std::uint32_t parity) const {
        while (!test(parity)) {
        }
    }
};

/// Makes initialised mbarriers visible to the copy engine.
__device__ __forceinline__ void fence_barrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
/// Makes what this thread wrote to shared memory visible to wgmma and bulk copies (the asynchronous proxy).
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- bulk tensor copies ---------------------------------------------------------------------------------------------
/// By one thread, before the first copy.
__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/// Box of the map at these coordinates (innermost first) -> shared memory; its bytes count on the barrier. What lies outside
/// the tensor arrives as zeros, and counts. By one thread. A destination of a map with 128-byte swizzle is 1024-byte aligned.
__device__ __forceinline__ void load_tile(void* to, const CUtensorMap* map, Barrier& barrier, int x, int y) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
            shared_address(to)),
        "l"(map), "r"(shared_address(&barrier.word)), "r"(x), "r"(y)
        : "memory");
}
__device__ __forceinline__ void load_tile(void* to, const CUtensorMap* map, Barrier& barrier, int x, int y, int z) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::
            "r"(shared_address(to)),
        "l"(map), "r"(shared_address(&barrier.word)), "r"(x), "r"(y), "r"(z)
        : "memory");
}
__device__ __forceinline__ void load_tile(void* to, const CUtensorMap* map, Barrier& barrier, int x, int y, int z,
                                          int w) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
        "[%2];" ::"r"(shared_address(to)),
        "l"(map), "r"(shared_address(&barrier.word)), "r"(x), "r"(y), "r"(z), "r"(w)
        : "memory");
}
__device__ __forceinline__ void load_tile(void* to, const CUtensorMap* map, Barrier& barrier, int x, int y, int z,
                                          int w, int v) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], "
        "[%2];" ::"r"(shared_address(to)),
        "l"(map), "r"(shared_address(&barrier.word)), "r"(x), "r"(y), "r"(z), "r"(w), "r"(v)
        : "memory");
}
/// `bytes` (a multiple of 16) of contiguous memory -> shared memory, both 16-byte aligned; counts on the barrier.
__device__ __forceinline__ void load_bytes(void* to, const void* from, std::uint32_t bytes, Barrier& barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)),
                 "l"(from), "r"(bytes), "r"(shared_address(&barrier.word))
                 : "memory");
}

/// Shared memory -> box of the map; what lies outside the tensor is not written. After fence_proxy_async() by the writers
/// and a barrier; by one thread, which then calls store_commit().
__device__ __forceinline__ void store_tile(const CUtensorMap* map, const void* from, int x, int y, int z, int w) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
                 "r"(shared_address(from)), "r"(x), "r"(y), "r"(z), "r"(w)
                 : "memory");
}
/// The same, added to memory element by element (fp32: round to nearest even, in whatever order the copies arrive).
__device__ __forceinline__ void add_tile(const CUtensorMap* map, const void* from, int x, int y, int z, int w) {
    asm volatile(
        "cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
        "r"(shared_address(from)), "r"(x), "r"(y), "r"(z), "r"(w)
        : "memory");
}
/// `bytes` (a multiple of 16) of fp32 in shared memory added to contiguous memory, both 16-byte aligned.
__device__ __forceinline__ void add_floats(float* to, const float* from, std::uint32_t bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
                 "r"(shared_address(from)), "r"(bytes)
                 : "memory");
}
/// Four floats added to global memory, 16-byte aligned, in whatever order they arrive.
__device__ __forceinline__ void add_four(float* to, float4 x) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x.x), "f"(x.y), "f"(x.z),
                 "f"(x.w)
                 : "memory");
}
__device__ __forceinline__ void store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
/// Waits until all but the last `pending` groups of this thread have read their shared memory, which may then be reused.
template <int pending = 0>
__device__ __forceinline__ void store_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory");
}
/// Waits until all but the last `pending` groups of this thread are complete.
template <int pending = 0>
__device__ __forceinline__ void store_wait() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(pending) : "memory");
}

// ---- named barriers, registers --------------------------------------------------------------------------------------
/// Waits on named barrier `id` (1 to 15; 0 is __syncthreads) until `threads` threads, whole warps, have come or arrived.
__device__ __forceinline__ void named_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
/// Registers of each thread of this warpgroup from now on, a multiple of 8; all its warps call it. Together at most what the
/// launch was given.
template <int count>
__device__ __forceinline__ void more_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
}
template <int count>
__device__ __forceinline__ void fewer_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}

/// x, which all threads of the warp have alike, as the compiler may keep it in a uniform register.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(~0u, x, 0); }

// ---- matrices -------------------------------------------------------------------------------------------------------
/// Four 8x8 matrices of 16-bit elements from a warp's registers, as an accumulator's packed pairs lie: word i of a thread is
/// row lane/4, columns 2 (lane%4) of matrix i. Lane l gives the address of row l%8 of matrix l/8, 16 bytes.
__device__ __forceinline__ void store_matrices(std::uint32_t to, const std::uint32_t (&words)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(words[0]),
                 "r"(words[1]), "r"(words[2]), "r"(words[3])
                 : "memory");
}

// ---- arithmetic -----------------------------------------------------------------------------------------------------
/// ex2.approx.ftz.f32: MUFU.EX2 alone, a subnormal result is 0 (special/ex2_approx.hpp, ex2_approx_ftz, is the same on the
/// host).
__device__ __forceinline__ float ex2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/// Two floats rounded to nearest even, the first in the lower half: as wgmma takes neighbours in k.
template <class T>
__device__ __forceinline__ std::uint32_t pack(float low, float high);
template <>
__device__ __forceinline__ std::uint32_t pack<__nv_bfloat16>(float low, float high) {
    std::uint32_t r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
template <>
__device__ __forceinline__ std::uint32_t pack<__half>(float low, float high) {
    std::uint32_t r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}

/// The two of a pack, which floats hold exactly.
template <class T>
__device__ __forceinline__ float2 unpack(std::uint32_t pair);
template <>
__device__ __forceinline__ float2 unpack<__nv_bfloat16>(std::uint32_t pair) {
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000u)};
}
template <>
__device__ __forceinline__ float2 unpack<__half>(std::uint32_t pair) {
    __half2 halves;
    *reinterpret_cast<std::uint32_t*>(&halves) = pair;
    return __half22float2(halves);
}

/// The kernel that was launched as this one's dependent may begin, as soon as every block of this one has said so
/// (cudaLaunchAttributeProgrammaticStreamSerialization).
__device__ __forceinline__ void let_dependents_begin() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
/// Waits until the kernel that this one depends on has ended: who comes after this kernel then finds that one's results too.
__device__ __forceinline__ void wait_for_dependency() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

}  // namespace faultline::tensor_kernel
