// SPDX-License-Identifier: Apache-2.0
// Memory on the card that owns itself.
#pragma once

#include <cstddef>
#include <string>

#include <cuda_runtime.h>

#include <faultline/base/error.hpp>

namespace faultline::agreement {

/// WorkError where a call of the runtime failed.
inline void expect(cudaError_t status, const char* what) {
    if (status == cudaSuccess) return;
    (void)cudaGetLastError();  // the next call starts clean
    throw WorkError(std::string("device cuda: ") + what + " failed (" + cudaGetErrorString(status) +
                    "): expected a device that works");
}

/// Memory on the card, cleared.
template <class T>
class Cleared {
  public:
    explicit Cleared(std::size_t count) : bytes_(count * sizeof(T)) {
        expect(cudaMalloc(&data_, bytes_), "allocating memory");
        if (const cudaError_t status = cudaMemset(data_, 0, bytes_); status != cudaSuccess) {
            (void)cudaFree(data_);
            expect(status, "clearing memory");
        }
    }
    Cleared(const Cleared&) = delete;
    Cleared& operator=(const Cleared&) = delete;
    ~Cleared() { (void)cudaFree(data_); }
    [[nodiscard]] T* data() const { return static_cast<T*>(data_); }
    void fetch(T* to) const { expect(cudaMemcpy(to, data_, bytes_, cudaMemcpyDeviceToHost), "reading results"); }

  private:
    std::size_t bytes_;
    void* data_ = nullptr;
};

}  // namespace faultline::agreement
