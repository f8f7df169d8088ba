// SPDX-License-Identifier: Apache-2.0
// Whether the tests that need a card can run.
#pragma once

#include <gtest/gtest.h>

#ifdef FAULTLINE_HAS_CUDA
#include <cuda_runtime_api.h>
#endif

namespace faultline::tensor_kernel {

inline bool has_hopper() {
#ifdef FAULTLINE_HAS_CUDA
    int count = 0, major = 0;
    return cudaGetDeviceCount(&count) == cudaSuccess && count > 0 &&
           cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0) == cudaSuccess && major == 9;
#else
    return false;
#endif
}

}  // namespace faultline::tensor_kernel

#define NEEDS_HOPPER() \
    if (!faultline::tensor_kernel::has_hopper()) GTEST_SKIP() << "no device of compute capability 9.0"
