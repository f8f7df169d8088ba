// SPDX-License-Identifier: Apache-2.0
// Whether there is a device to work on, in a sentence where there is none. For code that is built with CUDA.
#pragma once

#include <string>

#include <cuda_runtime_api.h>

#include <faultline/base/error.hpp>

namespace faultline {

/// WorkError where the program cannot use a device: no driver, one for an earlier CUDA than the program's, none of the devices
/// left to it by the environment, or an error that the driver reports.
inline void expect_cuda_device() {
    int count = 0, driver = 0, runtime = 0;
    const cudaError_t status = cudaGetDeviceCount(&count);
    if (status == cudaSuccess && count > 0) return;
    (void)cudaGetLastError();  // the next call starts clean
    const auto version = [](int v) { return std::to_string(v / 1000) + "." + std::to_string(v % 1000 / 10); };
    if (status == cudaErrorInsufficientDriver && cudaRuntimeGetVersion(&runtime) == cudaSuccess &&
        cudaDriverGetVersion(&driver) == cudaSuccess)
        throw WorkError("device cuda: " +
                        (driver == 0 ? "there is no NVIDIA driver" : "the driver is for CUDA " + version(driver)) +
                        ": expected one for CUDA " + version(runtime));
    if (status == cudaSuccess || status == cudaErrorNoDevice)
        throw WorkError("device cuda: there is no device: expected one that CUDA_VISIBLE_DEVICES leaves");
    throw WorkError(std::string("device cuda: looking for a device failed (") + cudaGetErrorString(status) +
                    "): expected a device that works");
}

}  // namespace faultline
