// SPDX-License-Identifier: Apache-2.0
// What each block of a cluster tells all of them: bytes that the sender writes into the memory of the others, whose barrier counts
// them. Nobody fences memory, and nobody but who reads the bytes waits for them; the cluster's own barrier, whose arrival would fence,
// is for the start alone. PTX ISA 8.x, st.async and mbarrier.
#pragma once

#include <cooperative_groups.h>

#include <cstdint>

namespace faultline::gpt::on_device {

/// Of the clusters along x.
__device__ __forceinline__ unsigned cluster_number() {
    unsigned x;
    asm("mov.u32 %0, %%clusterid.x;" : "=r"(x));
    return x;
}
__device__ __forceinline__ unsigned cluster_count() {
    unsigned x;
    asm("mov.u32 %0, %%nclusterid.x;" : "=r"(x));
    return x;
}

/// One exchange of a T from each block; a T is a multiple of 16 bytes. In shared memory, not initialised.
template <class T, int most_blocks>
struct alignas(16) ClusterExchange {
    static_assert(sizeof(T) % 16 == 0);
    T of[most_blocks];
    std::uint64_t barrier;

    /// By all threads, before anything else: the exchange is of `blocks`.
    __device__ __forceinline__ void begin(int blocks) {
        if (threadIdx.x == 0) {
            const unsigned at = address(&barrier);
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(at) : "memory");
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at),
                         "r"(blocks * static_cast<int>(sizeof(T)))
                         : "memory");
        }
        asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    }
    /// By all threads: from this block, `part`, to each.
    __device__ __forceinline__ void send(const T& mine, int part, int blocks) {
        asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");  // all have begun
        constexpr int words = sizeof(T) / 16;
        const auto* from = reinterpret_cast<const longlong2*>(&mine);
        const unsigned to = address(&of[part]), counter = address(&barrier);
        for (int i = static_cast<int>(threadIdx.x); i < words * blocks; i += static_cast<int>(blockDim.x)) {
            const longlong2 word = from[i % words];
            unsigned there, counter_there;
            asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(to + i % words * 16), "r"(i / words));
            asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(counter_there) : "r"(counter), "r"(i / words));
            asm volatile(
                "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b64 [%0], {%1, %2}, [%3];" ::"r"(there),
                "l"(word.x), "l"(word.y), "r"(counter_there)
                : "memory");
        }
    }
    /// By who reads: all of it is there. One thread at least does this before the block ends.
    __device__ __forceinline__ void wait() {
        unsigned done = 0;
        while (done == 0)
            asm volatile(
                "{\n\t.reg .pred p;\n\t"
                "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], 0;\n\t"
                "selp.u32 %0, 1, 0, p;\n\t}"
                : "=r"(done)
                : "r"(address(&barrier))
                : "memory");
    }

  private:
    __device__ __forceinline__ static unsigned address(const void* in_shared) {
        return static_cast<unsigned>(__cvta_generic_to_shared(in_shared));
    }
};

}  // namespace faultline::gpt::on_device
