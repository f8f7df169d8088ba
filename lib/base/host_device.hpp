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
