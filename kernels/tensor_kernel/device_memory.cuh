// SPDX-License-Identifier: Apache-2.0
// Device memory that owns itself, and values on their way there.
#pragma once

#include <vector>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <faultline/format/format.hpp>
#include <faultline/tensor_kernel/tensor_map.cuh>

namespace faultline::tensor_kernel {

/// The double as the kernel's tensor holds it: rounded once, to nearest even.
template <class T>
T rounded(double x) {
    constexpr Format format = std::is_same_v<T, __half> ? fp16 : std::is_same_v<T, __nv_fp8_e4m3> ? e4m3 : bf16;
    return static_cast<T>(static_cast<float>(round(x, format, Rounding::nearest_even)));
}

/// `count` elements on the device. WorkError where there is no memory.
template <class T>
class DeviceMemory {
  public:
    explicit DeviceMemory(std::size_t count) : count_(count) {
        check(cudaMalloc(&data_, count * sizeof(T)), "asking for memory");
    }
    explicit DeviceMemory(const std::vector<T>& from) : DeviceMemory(from.size()) {
        check(cudaMemcpy(data_, from.data(), count_ * sizeof(T), cudaMemcpyHostToDevice), "copying to the device");
    }
    DeviceMemory(const DeviceMemory&) = delete;
    DeviceMemory& operator=(const DeviceMemory&) = delete;
    ~DeviceMemory() { (void)cudaFree(data_); }

    [[nodiscard]] T* data() const { return data_; }
    [[nodiscard]] std::vector<T> host() const {
        std::vector<T> x(count_);
        check(cudaMemcpy(x.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost), "copying from the device");
        return x;
    }

  private:
    std::size_t count_;
    T* data_ = nullptr;
};

}  // namespace faultline::tensor_kernel
