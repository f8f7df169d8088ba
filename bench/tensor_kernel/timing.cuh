// SPDX-License-Identifier: Apache-2.0
// What the tensor-core kernels' benchmarks share: shapes and the time of a call.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <vector>

#include <faultline/tensor_kernel/device_memory.cuh>

namespace faultline::tensor_kernel {

constexpr int warm_ups = 5, samples = 25, calls_a_sample = 10;

struct Shape {
    int batch, heads, kv_heads, n, d;
    bool causal;
};

/// Milliseconds of launches, by the device's events.
class Clock {
  public:
    Clock() {
        check(cudaEventCreate(&begin_), "making an event");
        check(cudaEventCreate(&end_), "making an event");
    }
    Clock(const Clock&) = delete;
    Clock& operator=(const Clock&) = delete;
    ~Clock() {
        (void)cudaEventDestroy(begin_);
        (void)cudaEventDestroy(end_);
    }
    /// Of one call, the mean of calls_a_sample one after the other.
    template <class Launch>
    [[nodiscard]] double ms(Launch&& launch) const {
        check(cudaEventRecord(begin_), "timing");
        for (int i = 0; i < calls_a_sample; ++i) launch();
        check(cudaEventRecord(end_), "timing");
        check(cudaEventSynchronize(end_), "running");
        float all = 0;
        check(cudaEventElapsedTime(&all, begin_, end_), "timing");
        return all / calls_a_sample;
    }

  private:
    cudaEvent_t begin_{}, end_{};
};

/// Median over samples of the milliseconds of one call.
template <class Launch>
[[nodiscard]] double median_ms(Launch&& launch) {
    const Clock clock;
    std::vector<double> times;
    for (int sample = -warm_ups; sample < samples; ++sample) {
        const double ms = clock.ms(launch);
        if (sample >= 0) times.push_back(ms);
    }
    std::nth_element(times.begin(), times.begin() + samples / 2, times.end());
    return times[samples / 2];
}

/// A program's main: time_shape(shape) for the shape that the arguments give, or for the two of the tables. Its exit status.
template <class TimeShape>
[[nodiscard]] int run_benchmark(const char* program, int argc, char** argv, TimeShape&& time_shape) {
    std::vector<Shape> shapes = {{8, 16, 16, 4096, 128, true}, {32, 12, 12, 1024, 64, true}};
    if (argc == 7) {
        const auto number = [&](int i) { return std::atoi(argv[i]); };
        shapes = {{number(1), number(2), number(3), number(4), number(5), number(6) != 0}};
    } else if (argc != 1) {
        std::fprintf(stderr, "%s: expected no argument, or batch heads kv_heads n head_dim causal\n", program);
        return 2;
    }
    try {
        cudaDeviceProp device{};
        check(cudaGetDeviceProperties(&device, 0), "asking the device");
        std::printf("%s\n", device.name);
        for (const Shape& shape : shapes) time_shape(shape);
    } catch (const std::exception& e) {
        std::fprintf(stderr, "%s: %s\n", program, e.what());
        return 1;
    }
    return 0;
}

}  // namespace faultline::tensor_kernel
