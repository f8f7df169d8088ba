// SPDX-License-Identifier: Apache-2.0
// What the tensor-core kernels expect of the machine and of head groups.
#pragma once

#include <span>
#include <stdexcept>
#include <string>

#include <faultline/base/cuda_device.cuh>
#include <faultline/base/error.hpp>
#include <faultline/cpu/attention.hpp>
#include <faultline/tensor_kernel/forward_kernel.hpp>
#include <faultline/tensor_kernel/tensor_map.cuh>

namespace faultline::tensor_kernel {

/// Compute capability of the device in use: 90 for 9.0. WorkError where the program cannot use one, as expect_cuda_device().
inline int capability() {
    expect_cuda_device();
    int device = 0;
    check(cudaGetDevice(&device), "choosing a device");
    int major = 0, minor = 0;
    check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "asking the device");
    check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "asking the device");
    return 10 * major + minor;
}

/// WorkError where there is no device that has the unit.
inline void expect_device(Unit unit) {
    const int found = capability(), major = found / 10;
    if (unit == Unit::wgmma ? major != 9 : major < 8)
        throw WorkError("device cuda: the device has compute capability " + std::to_string(major) + "." +
                        std::to_string(found % 10) + ": the tensor-core kernel by " +
                        (unit == Unit::wgmma ? "wgmma expects 9.0" : "mma expects 8.0 or later"));
}

/// std::invalid_argument unless all groups have one shape, scale and mask; RequestError for what the kernels have not.
inline void expect_alike(std::span<const HeadGroup> groups) {
    if (groups.empty()) throw std::invalid_argument("tensor_kernel: no head group");
    const HeadGroup& first = groups.front();
    for (const HeadGroup& g : groups) {
        const bool same = !g.q.empty() && g.q.size() == first.q.size() && g.q.front().rows == first.q.front().rows &&
                          g.q.front().cols == g.k.cols && g.k.rows == first.k.rows && g.k.cols == first.k.cols &&
                          g.v.rows == g.k.rows && g.v.cols == g.k.cols && g.causal == first.causal &&
                          g.scale == first.scale;
        if (!same) throw std::invalid_argument("tensor_kernel: groups of one shape, with q, k and v of one head_dim");
        const Extras extras = extras_of(g);
        if (!g.bias.empty() || extras.softcap || extras.sink || extras.dropout)
            throw RequestError(
                "device cuda: the tensor-core kernel has no bias, softcap, sink or dropout: expected none");
    }
}

}  // namespace faultline::tensor_kernel
