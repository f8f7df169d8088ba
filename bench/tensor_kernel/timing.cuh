// SPDX-License-Identifier: Apache-2.0
// What the tensor-core kernels' benchmarks share: inputs, shapes, and the time of a call.
#pragma once

#include <algorithm>
#include <vector>

#include <faultline/random/random_stream.hpp>
#include <faultline/tensor_kernel/device_memory.cuh>

namespace faultline::tensor_kernel {

constexpr int warm_ups = 5, samples = 25, calls_a_sample = 10;

struct Shape {
    int batch, heads, kv_heads, n, d;
    bool causal;
};

/// Standard normal numbers, rounded.
template <class T>
__global__ void fill(T* x, std::size_t count, RandomStream stream) {
    for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
        x[i] = static_cast<T>(static_cast<float>(stream.normal(i)));
}

/// Median over samples of the milliseconds of one call.
template <class Launch>
double median_ms(Launch&& launch) {
    cudaEvent_t begin, end;
    check(cudaEventCreate(&begin), "making an event");
    check(cudaEventCreate(&end), "making an event");
    std::vector<float> times;
    for (int sample = -warm_ups; sample < samples; ++sample) {
        check(cudaEventRecord(begin), "timing");
        for (int i = 0; i < calls_a_sample; ++i) launch();
        check(cudaEventRecord(end), "timing");
        check(cudaEventSynchronize(end), "running");
        float ms = 0;
        check(cudaEventElapsedTime(&ms, begin, end), "timing");
        if (sample >= 0) times.push_back(ms / calls_a_sample);
    }
    check(cudaEventDestroy(begin), "timing");
    check(cudaEventDestroy(end), "timing");
    std::nth_element(times.begin(), times.begin() + samples / 2, times.end());
    return times[samples / 2];
}

}  // namespace faultline::tensor_kernel
