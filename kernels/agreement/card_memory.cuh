// SPDX-License-Identifier: Apache-2.0
// Memory on the card that owns itself.
#pragma once

#include <cstddef>

#include <cuda_runtime.h>

#include <faultline/base/cuda_status.cuh>

namespace faultline::agreement {

/// Memory on the card, cleared.
template <class T>
class Cleared {
  public:
    explicit Cleared(std::size_t count) : bytes_(count * sizeof(T)) {
        check_cuda(cudaMalloc(&data_, bytes_), "allocating memory");
        if (const cudaError_t status = cudaMemset(data_, 0, bytes_); status != cudaSuccess) {
            (void)cudaFree(data_);
            check_cuda(status, "clearing memory");
        }
    }
    Cleared(const Cleared&) = delete;
    Cleared& operator=(const Cleared&) = delete;
    ~Cleared() { (void)cudaFree(data_); }
    [[nodiscard]] T* data() const { return static_cast<T*>(data_); }
    void fetch(T* to) const { check_cuda(cudaMemcpy(to, data_, bytes_, cudaMemcpyDeviceToHost), "reading results"); }

  private:
    std::size_t bytes_;
    void* data_ = nullptr;
};

}  // namespace faultline::agreement
