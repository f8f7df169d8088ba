// SPDX-License-Identifier: Apache-2.0
#include <faultline/device/device.hpp>

#include <stdexcept>

#include <faultline/device/cuda_backend.cuh>
#include <faultline/emulated/driver.hpp>

namespace faultline::device {
namespace {

void expect_same_shapes(std::span<const HeadGroup> groups) {
    if (groups.empty()) throw std::invalid_argument("device: no head group");
    const HeadGroup& first = groups.front();
    for (const HeadGroup& g : groups) {
        const bool same = g.q.size() == first.q.size() && g.q.front().rows == first.q.front().rows &&
                          g.k.rows == first.k.rows && g.k.cols == first.k.cols && g.v.cols == first.v.cols &&
                          g.causal == first.causal && g.scale == first.scale && g.seed == first.seed &&
                          g.layer == first.layer;
        if (!same) throw std::invalid_argument("device: head groups of one call must have one shape, scale and seed");
    }
}

}  // namespace

bool is_built() { return true; }

Info info() {
    int count = 0, device = 0;
    check(cudaGetDeviceCount(&count), "looking for a device");
    if (count == 0) throw WorkError("device cuda: there is no device: expected one that CUDA_VISIBLE_DEVICES leaves");
    check(cudaGetDevice(&device), "choosing a device");
    cudaDeviceProp properties{};
    check(cudaGetDeviceProperties(&properties, device), "asking the device");
    if (properties.major < 8)
        throw WorkError(std::string("device cuda: ") + properties.name + " has compute capability " +
                        std::to_string(properties.major) + "." + std::to_string(properties.minor) +
                        ": expected 8.0 or later");
    Info found{properties.name, properties.major, properties.minor, properties.totalGlobalMem, 0};
    std::size_t all = 0;
    check(cudaMemGetInfo(&found.free_memory, &all), "asking for memory");
    return found;
}

std::vector<GroupForward> attention_forward(std::span<const HeadGroup> groups, const RoundingPlan& plan) {
    expect_same_shapes(groups);
    (void)info();
    CudaBackend backend;
    return emulated::forward(backend, groups, plan);
}

std::vector<GroupBackward> attention_backward(std::span<const HeadGroup> groups, std::span<const GroupForward> forwards,
                                              const RoundingPlan& plan) {
    expect_same_shapes(groups);
    if (forwards.size() != groups.size()) throw std::invalid_argument("device: one forward for each head group");
    (void)info();
    CudaBackend backend;
    return emulated::backward(backend, groups, forwards, plan);
}

}  // namespace faultline::device
