// SPDX-License-Identifier: Apache-2.0
// The back end of the emulated kernel that has a CUDA device: one block a team, one call a stream. Without fmt, whose format
// strings nvcc 13.0 does not take for constant expressions.
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
/// Teams that keep a card of some hundred multiprocessors busy, and the least rows of a tile that a team may have: with
/// fewer, most of its threads would have no row to sum.
constexpr int wanted_teams = 264;
constexpr std::ptrdiff_t least_rows = 16;

/// The threads of one block.
struct BlockTeam {
    __device__ std::ptrdiff_t rank() const { return threadIdx.x; }
    __device__ std::ptrdiff_t size() const { return blockDim.x; }
    __device__ void sync() const { __syncthreads(); }
};

/// How many teams of a job stand on a multiprocessor at least: what bounds the registers of its threads.
template <class Job>
constexpr int teams_at_once() {
    if constexpr (requires { Job::teams_at_once; })
        return Job::teams_at_once;
    else
        return 1;
}

template <class Job>
__global__ void __launch_bounds__(threads_per_team, teams_at_once<Job>())
    run_job(Job job, std::ptrdiff_t first, double* memory, std::ptrdiff_t doubles) {
    const std::ptrdiff_t team = blockIdx.x;
    job(BlockTeam{}, first + team, memory + team * doubles);
}

/// What one call of one host thread does, in the order of that thread's stream; calls of several threads run beside each
/// other. Its memory is given back when it ends, however it ends.
class CudaBackend {
  public:
    /// What the teams of a wave may have together for their tiles, and for their tapes; one team has what it needs in any
    /// case.
    explicit CudaBackend(std::size_t tile_bytes, std::size_t tape_bytes = 0)
        : tile_bytes_(tile_bytes), tape_bytes_(tape_bytes) {}
    CudaBackend(const CudaBackend&) = delete;
    CudaBackend& operator=(const CudaBackend&) = delete;
    ~CudaBackend() {
        for (void* part : parts_) (void)cudaFreeAsync(part, stream());
        if (memory_ != nullptr) (void)cudaFreeAsync(memory_, stream());
        (void)cudaStreamSynchronize(stream());
    }

    [[nodiscard]] int wanted_teams() const { return device::wanted_teams; }
    [[nodiscard]] std::ptrdiff_t least_rows() const { return device::least_rows; }

    [[nodiscard]] std::size_t tape_doubles() const { return tape_bytes_ / sizeof(double); }

    double* zeros(std::size_t n) {
        auto* to = static_cast<double*>(allocated(n * sizeof(double)));
        if (n > 0) check(cudaMemsetAsync(to, 0, n * sizeof(double), stream()), "clearing memory");
        return to;
    }
    void write(double* to, const double* from, std::size_t n) { copy(to, from, n * sizeof(double)); }
    const double* upload(const double* from, std::size_t n) { return upload_values(from, n); }
    void download(const double* from, std::size_t n, double* to) {
        if (n == 0) return;
        check(cudaMemcpyAsync(to, from, n * sizeof(double), cudaMemcpyDeviceToHost, stream()), "reading results");
        check(cudaStreamSynchronize(stream()), "running the kernel");
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
        const auto fit = static_cast<std::ptrdiff_t>(each == 0 ? 1 : std::max<std::size_t>(tile_bytes_ / each, 1));
        const std::ptrdiff_t wave = each == 0 ? teams : std::min(teams, fit);
        const std::size_t bytes = static_cast<std::size_t>(wave) * each;
        if (bytes > memory_size_) {
            if (memory_ != nullptr) check(cudaFreeAsync(memory_, stream()), "freeing memory");
            memory_ = nullptr;
            check(cudaMallocAsync(&memory_, bytes, stream()), "allocating tiles");
            memory_size_ = bytes;
        }
        for (std::ptrdiff_t first = 0; first < teams; first += wave) {
            run_job<<<static_cast<unsigned>(std::min(wave, teams - first)), threads_per_team, 0, stream()>>>(
                job, first, static_cast<double*>(memory_), doubles);
            check(cudaGetLastError(), "starting the kernel");
        }
    }

  protected:
    static cudaStream_t stream() { return cudaStreamPerThread; }

    void* allocated(std::size_t bytes) {
        void* part = nullptr;
        check(cudaMallocAsync(&part, std::max<std::size_t>(bytes, 1), stream()), "allocating memory");
        parts_.push_back(part);
        return part;
    }

  private:
    void copy(void* to, const void* from, std::size_t bytes) {
        if (bytes > 0) check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream()), "writing operands");
    }

    std::size_t tile_bytes_, tape_bytes_;
    std::vector<void*> parts_;
    void* memory_ = nullptr;
    std::size_t memory_size_ = 0;
};

}  // namespace faultline::device
