// SPDX-License-Identifier: Apache-2.0
// FAULTLINE_HD marks what compiles for host and device, so that rounding, formats, random numbers and the tile schedule
// exist once for both.
#pragma once

#if defined(__CUDACC__)
#define FAULTLINE_HD __host__ __device__
#else
#define FAULTLINE_HD
#endif

// FAULTLINE_HD_CALLED is FAULTLINE_HD for a large function that is called in many places: not copied into each of them on the
// device, where the compiler otherwise inlines everything.
#if defined(__CUDACC__)
#define FAULTLINE_HD_CALLED __host__ __device__ __noinline__
#else
#define FAULTLINE_HD_CALLED
#endif

// FAULTLINE_HD_INLINE for a small function of a loop's body: always inlined, so that it becomes part of the loop's clones
// (base/clones.hpp) and is vectorised there.
#if defined(__CUDACC__)
#define FAULTLINE_HD_INLINE __host__ __device__ __forceinline__
#else
#define FAULTLINE_HD_INLINE [[gnu::always_inline]] inline
#endif

// Before a loop on the device: FAULTLINE_HD_UNROLL where its arrays are to stay in a thread's registers, since the compiler
// leaves a loop with a call in it as it is, and an array that is indexed by a variable stands in memory;
// FAULTLINE_HD_UNROLL_BY(n) for n steps at once.
#if defined(__CUDA_ARCH__)
#define FAULTLINE_HD_PRAGMA(text) _Pragma(#text)
#define FAULTLINE_HD_UNROLL _Pragma("unroll")
#define FAULTLINE_HD_UNROLL_BY(n) FAULTLINE_HD_PRAGMA(unroll n)
#else
#define FAULTLINE_HD_UNROLL
#define FAULTLINE_HD_UNROLL_BY(n)
#endif
