// SPDX-License-Identifier: Apache-2.0
// The back end of the emulated kernel that has a CUDA device: one block a team. Without fmt, whose format strings nvcc 13.0
// does not take for constant expressions.
#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

#include <cuda_runtime.h>

#include <faultline/base/error.hpp>
#include <faultline/base/host_device.hpp>

namespace faultline::device {

/// WorkError where a call of the runtime failed: what was done and what the driver says.
inline void check(cudaError_t status, const char* what) {
    if (status == cudaSuccess) return;
    (void)cudaGetLastError();  // the next call starts clean
    throw WorkError(std::string("device cuda: ") + what + " failed (" + cudaGetErrorString(status) +
                    "): expected a device that works and has the memory");
}

constexpr int threads_per_team = 256;

/// The threads of one block.
struct BlockTeam {
    __device__ std::ptrdiff_t rank() const { return threadIdx.x; }
    __device__ std::ptrdiff_t size() const { return blockDim.x; }
    __device__ void sync() const { __syncthreads(); }
};

template <class Job>
__global__ void __launch_bounds__(threads_per_team)
    run_job(Job job, std::ptrdiff_t first, double* memory, std::ptrdiff_t doubles) {
    const std::ptrdiff_t team = blockIdx.x;
    job(BlockTeam{}, first + team, memory + team * doubles);
}

/// Device memory that is freed when the call ends, however it ends.
class CudaBackend {
  public:
    CudaBackend() = default;
    CudaBackend(const CudaBackend&) = delete;
    CudaBackend& operator=(const CudaBackend&) = delete;
    ~CudaBackend() {
        for (void* part : parts_) (void)cudaFree(part);
        (void)cudaFree(memory_);
    }

    double* zeros(std::size_t n) {
        auto* to = static_cast<double*>(allocated(n * sizeof(double)));
        check(cudaMemset(to, 0, n * sizeof(double)), "clearing memory");
        return to;
    }
    void write(double* to, const double* from, std::size_t n) { copy(to, from, n * sizeof(double)); }
    const double* upload(const double* from, std::size_t n) { return upload_values(from, n); }
    void download(const double* from, std::size_t n, double* to) {
        check(cudaMemcpy(to, from, n * sizeof(double), cudaMemcpyDeviceToHost), "reading results");
    }
    template <class T>
    const T* upload_values(const T* values, std::size_t n) {
        auto* to = static_cast<T*>(allocated(n * sizeof(T)));
        copy(to, values, n * sizeof(T));
        return to;
    }

    /// In waves of as many teams as there is memory for.
    template <class Job>
    void run(const Job& job, std::ptrdiff_t teams, std::ptrdiff_t doubles) {
        if (teams == 0) return;
        const std::size_t each = static_cast<std::size_t>(doubles) * sizeof(double);
        std::size_t free_memory = 0, all = 0;
        check(cudaMemGetInfo(&free_memory, &all), "asking for memory");
        const std::size_t room = free_memory / 10 * 9;  // the runtime takes some for itself
        if (each > room)
            throw WorkError("device cuda: one tile of the schedule needs " + std::to_string(each >> 20) + " MiB and " +
                            std::to_string(room >> 20) +
                            " are free: expected smaller tiles (block_q, block_k) or a shorter sequence");
        const std::ptrdiff_t wave = each == 0 ? teams : std::min(teams, static_cast<std::ptrdiff_t>(room / each));
        if (static_cast<std::size_t>(wave) * each > memory_size_) {
            if (memory_ != nullptr) check(cudaFree(memory_), "freeing memory");
            memory_ = nullptr;
            check(cudaMalloc(&memory_, static_cast<std::size_t>(wave) * each), "allocating tiles");
            memory_size_ = static_cast<std::size_t>(wave) * each;
        }
        for (std::ptrdiff_t first = 0; first < teams; first += wave) {
            run_job<<<static_cast<unsigned>(std::min(wave, teams - first)), threads_per_team>>>(
                job, first, static_cast<double*>(memory_), doubles);
            check(cudaGetLastError(), "starting the kernel");
        }
        check(cudaDeviceSynchronize(), "running the kernel");
    }

  private:
    void* allocated(std::size_t bytes) {
        void* part = nullptr;
        check(cudaMalloc(&part, std::max<std::size_t>(bytes, 1)), "allocating memory");
        parts_.push_back(part);
        return part;
    }
    void copy(void* to, const void* from, std::size_t bytes) {
        if (bytes > 0) check(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice), "writing operands");
    }

    std::vector<void*> parts_;
    void* memory_ = nullptr;
    std::size_t memory_size_ = 0;
};

}  // namespace faultline::device
