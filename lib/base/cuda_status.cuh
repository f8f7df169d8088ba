// SPDX-License-Identifier: Apache-2.0
// What a call of CUDA's runtime says, as an error. For code that is built with CUDA; without fmt, whose format strings nvcc 13.0
// does not take for constant expressions.
#pragma once

#include <string>

#include <cuda_runtime_api.h>

#include <faultline/base/error.hpp>

namespace faultline {

/// WorkError where a call of the runtime failed: what was done and what the driver says.
inline void check_cuda(cudaError_t status, const char* what) {
    if (status == cudaSuccess) return;
    (void)cudaGetLastError();  // the next call starts clean
    throw WorkError(std::string("device cuda: ") + what + " failed (" + cudaGetErrorString(status) +
                    "): expected a device that works and has the memory");
}

}  // namespace faultline
