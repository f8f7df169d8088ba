// SPDX-License-Identifier: Apache-2.0
// The back end of kernels/truth_teams that has a CUDA device.
#pragma once

#include <cstddef>
#include <stdexcept>

#include <faultline/device/cuda_backend.cuh>
#include <faultline/truth_teams/sizes.hpp>

namespace faultline::device {

class TruthBackend : public CudaBackend {
  public:
    /// `bytes`: what it may use, in all, at least truth_teams::TruthNeed's least; `tile_bytes` of them for the teams of a wave.
    TruthBackend(std::size_t bytes, std::size_t tile_bytes) : CudaBackend(tile_bytes), left_(bytes - tile_bytes) {}

    template <class T>
    T* allocate(std::size_t n) {
        const std::size_t bytes = n * sizeof(T), granule = truth_teams::piece_bytes;
        const std::size_t whole = (bytes + granule - 1) / granule * granule;
        if (whole > left_) throw std::logic_error("device: truth takes more memory than TruthNeed says");
        left_ -= whole;
        return static_cast<T*>(allocated(bytes));
    }
    template <class T>
    T* upload(const T* values, std::size_t n) {
        T* to = allocate<T>(n);
        if (n > 0)
            check_cuda(cudaMemcpyAsync(to, values, n * sizeof(T), cudaMemcpyHostToDevice, stream()),
                       "writing operands");
        return to;
    }
    template <class T>
    void download(const T* from, std::size_t n, T* to) {
        if (n == 0) return;
        check_cuda(cudaMemcpyAsync(to, from, n * sizeof(T), cudaMemcpyDeviceToHost, stream()), "reading results");
        check_cuda(cudaStreamSynchronize(stream()), "running the kernel");
    }
    [[nodiscard]] std::size_t room() const { return left_; }
    [[nodiscard]] static int team_size() { return threads_per_team; }

  private:
    std::size_t left_;
};

}  // namespace faultline::device
