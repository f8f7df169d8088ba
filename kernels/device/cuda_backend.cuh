// SPDX-License-Identifier: Apache-2.0
// The back end of the emulated kernel that has a CUDA device: one block a team, one call a stream. Without fmt, whose format
// strings nvcc 13.0 does not take for constant expressions.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <cuda_runtime.h>

#include <faultline/base/cuda_status.cuh>
#include <faultline/base/error.hpp>
#include <faultline/base/host_device.hpp>
#include <faultline/device/mirror.cuh>
#include <faultline/device/parts.hpp>
#include <faultline/device/staging.cuh>

namespace faultline::device {

constexpr int threads_per_team = 256;
constexpr std::size_t alignment = 256;    ///< of what a call takes, in bytes
extern __shared__ double2 team_memory[];  // 16 bytes: what threads read at once
/// Teams that keep a card of some hundred multiprocessors busy, and the least rows of a tile that a team may have: with
/// fewer, most of its threads would have no row to sum.
constexpr int wanted_teams = 264;
constexpr std::ptrdiff_t least_rows = 16;

/// The threads of one block.
struct BlockTeam {
    static constexpr int lanes = threads_per_team;
    __device__ void* shared() const { return team_memory; }
    __device__ std::ptrdiff_t rank() const { return threadIdx.x; }
    __device__ std::ptrdiff_t size() const { return blockDim.x; }
    __device__ void sync() const { __syncthreads(); }
};

/// What a job's teams are.
template <class Job>
struct TeamOf {
    using Type = BlockTeam;
};

/// How many teams of a job stand on a multiprocessor at least: what bounds the registers of its threads.
template <class Job>
constexpr int teams_at_once() {
    if constexpr (requires { Job::teams_at_once; })
        return Job::teams_at_once;
    else
        return 1;
}

/// Bytes that a team of the job shares beside its tiles; without any, its tiles are not shared either.
template <class Job>
inline constexpr std::size_t shared_by = 0;
template <class Job>
requires requires { Job::shared_bytes; }
inline constexpr std::size_t shared_by<Job> = Job::shared_bytes;
template <class Job>
inline constexpr bool shares = shared_by<Job> != 0;

/// Bytes of shared memory that a team may have so that two stand on a multiprocessor.
inline std::size_t most_shared_bytes() {
    static const std::size_t most = [] {
        int device = 0, all = 0, reserved = 0, one = 0;
        check_cuda(cudaGetDevice(&device), "choosing a device");
        check_cuda(cudaDeviceGetAttribute(&all, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device),
                   "asking the device");
        check_cuda(cudaDeviceGetAttribute(&reserved, cudaDevAttrReservedSharedMemoryPerBlock, device),
                   "asking the device");
        check_cuda(cudaDeviceGetAttribute(&one, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), "asking the device");
        return static_cast<std::size_t>(std::min(one, all / 2 - reserved)) / 16 * 16;
    }();
    return most;
}

/// `memory`: the teams' tiles; nullptr where each has its own behind what it shares.
template <class Job>
__global__ void __launch_bounds__(threads_per_team, teams_at_once<Job>())
    run_job(Job job, std::ptrdiff_t first, double* memory, std::ptrdiff_t doubles) {
    const std::ptrdiff_t team = blockIdx.x;
    double* own = memory + team * doubles;
    if constexpr (shares<Job>)
        if (memory == nullptr) own = reinterpret_cast<double*>(team_memory) + shared_by<Job> / sizeof(double);
    job(typename TeamOf<Job>::Type{}, first + team, own);
}

/// What time_parts() was given.
inline thread_local Parts* timed_parts = nullptr;

/// Adds the seconds of its life to a part of a call, all work of the stream before and of its own awaited; where nobody asks,
/// it does nothing.
class Timed {
  public:
    Timed(cudaStream_t stream, double* seconds) : stream_(stream), seconds_(seconds) {
        if (seconds_ == nullptr) return;
        (void)cudaStreamSynchronize(stream_);
        start_ = std::chrono::steady_clock::now();
    }
    Timed(const Timed&) = delete;
    Timed& operator=(const Timed&) = delete;
    ~Timed() {
        if (seconds_ == nullptr) return;
        (void)cudaStreamSynchronize(stream_);
        *seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
    }
    /// Where a part's seconds are.
    static double* part(double Parts::*member) { return timed_parts == nullptr ? nullptr : &(timed_parts->*member); }
    static double* job(const char* name) { return timed_parts == nullptr ? nullptr : &timed_parts->computing[name]; }

  private:
    cudaStream_t stream_;
    double* seconds_;
    std::chrono::steady_clock::time_point start_{};
};
template <class Job>
const char* name_of(const Job& job) {
    if constexpr (requires { job.name(); })
        return job.name();
    else
        return "truth";
}

/// Memory of the stream of a host's thread: given back in the stream's order, and awaited, when it ends.
class StreamMemory {
  public:
    explicit StreamMemory(cudaStream_t stream) : stream_(stream) {}
    StreamMemory(const StreamMemory&) = delete;
    StreamMemory& operator=(const StreamMemory&) = delete;
    ~StreamMemory() {
        for (void* part : parts_) (void)cudaFreeAsync(part, stream_);
        (void)cudaStreamSynchronize(stream_);
    }
    void* allocate(std::size_t bytes, const char* what) {
        parts_.reserve(parts_.size() + 1);  // what is allocated has its place
        void* part = nullptr;
        check_cuda(cudaMallocAsync(&part, std::max<std::size_t>(bytes, 1), stream_), what);
        parts_.push_back(part);
        return part;
    }
    void free(void* part) {
        check_cuda(cudaFreeAsync(part, stream_), "freeing memory");
        std::erase(parts_, part);
    }

  private:
    cudaStream_t stream_;
    std::vector<void*> parts_;
};

/// A point in a stream, made when it is first recorded.
class StreamEvent {
  public:
    StreamEvent() = default;
    StreamEvent(const StreamEvent&) = delete;
    StreamEvent& operator=(const StreamEvent&) = delete;
    ~StreamEvent() {
        if (event_ != nullptr) (void)cudaEventDestroy(event_);
    }
    void record(cudaStream_t stream, const char* what) {
        constexpr unsigned flags = cudaEventDisableTiming | cudaEventBlockingSync;
        if (event_ == nullptr) check_cuda(cudaEventCreateWithFlags(&event_, flags), what);
        check_cuda(cudaEventRecord(event_, stream), what);
    }
    [[nodiscard]] cudaEvent_t get() const { return event_; }

  private:
    cudaEvent_t event_ = nullptr;
};

/// What one call of one host thread does, in the order of that thread's stream; calls of several threads run beside each
/// other. Its memory is given back when it ends, however it ends.
class CudaBackend {
  public:
    /// What the teams of a wave may have together for their tiles, and for their tapes; one team has what it needs in any
    /// case. operand_bytes: allocated at once for what the call takes piece by piece; more is allocated where it ends.
    explicit CudaBackend(std::size_t tile_bytes, std::size_t tape_bytes = 0, std::size_t operand_bytes = 0)
        : tile_bytes_(tile_bytes), tape_bytes_(tape_bytes) {
        if (operand_bytes == 0) return;
        left_ = static_cast<unsigned char*>(allocated(operand_bytes));
        left_bytes_ = operand_bytes;
        mirror_.emplace(left_, operand_bytes);
        if (!mirror_->is_there()) check_cuda(cudaMemsetAsync(left_, 0, operand_bytes, stream()), "clearing memory");
        made_.record(stream(), "clearing memory");
    }
    CudaBackend(const CudaBackend&) = delete;
    CudaBackend& operator=(const CudaBackend&) = delete;

    [[nodiscard]] std::size_t tape_doubles() const { return tape_bytes_ / sizeof(double); }

    double* zeros(std::size_t n) {
        if (void* part = piece(n * sizeof(double))) return static_cast<double*>(part);
        auto* to = static_cast<double*>(allocated(n * sizeof(double)));
        if (n > 0) check_cuda(cudaMemsetAsync(to, 0, n * sizeof(double), stream()), "clearing memory");
        return to;
    }
    double* tape(std::size_t n) { return static_cast<double*>(allocated(n * sizeof(double))); }
    void write(double* to, const double* from, std::size_t n) { copy(to, from, n, nullptr); }
    const double* upload(const double* from, std::size_t n) { return upload_values(from, n); }
    void download(const double* from, std::size_t n, double* to) { download_after(now_, true, from, n, to); }
    void mark() { mark_.record(stream(), "running the kernel"); }
    void download_marked(const double* from, std::size_t n, double* to) { download_after(mark_, false, from, n, to); }
    template <class T>
    const T* upload_values(const T* values, std::size_t n) {
        void* part = piece(n * sizeof(T));
        auto* to = static_cast<T*>(part != nullptr ? part : allocated(n * sizeof(T)));
        // A piece is nobody's before, unless the mirror's copy of all pieces is under way.
        copy(to, values, n, part != nullptr && !mirror_->is_there() ? made_.get() : nullptr);
        return to;
    }

    /// In waves of as many teams as there is memory for.
    template <class Job>
    void run(const Job& job, std::ptrdiff_t teams, std::ptrdiff_t doubles) {
        if (teams == 0) return;
        send();
        const Timed timed(stream(), Timed::job(name_of(job)));
        const std::size_t shared = shared_by<Job> + static_cast<std::size_t>(doubles) * sizeof(double);
        if constexpr (shares<Job>) {
            static const bool allowed = [] {
                check_cuda(cudaFuncSetAttribute(run_job<Job>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                static_cast<int>(most_shared_bytes())),
                           "setting the kernel up");
                return true;
            }();
            if (allowed && shared <= most_shared_bytes()) return start(job, 0, teams, nullptr, doubles, shared);
        }
        const std::size_t each = static_cast<std::size_t>(doubles) * sizeof(double);
        const auto fit = static_cast<std::ptrdiff_t>(each == 0 ? 1 : std::max<std::size_t>(tile_bytes_ / each, 1));
        const std::ptrdiff_t wave = each == 0 ? teams : std::min(teams, fit);
        const std::size_t bytes = static_cast<std::size_t>(wave) * each;
        if (bytes > tiles_size_) {
            void* const before = std::exchange(tiles_, nullptr);
            tiles_size_ = 0;
            if (before != nullptr) memory_.free(before);
            tiles_ = memory_.allocate(bytes, "allocating tiles");
            tiles_size_ = bytes;
        }
        for (std::ptrdiff_t first = 0; first < teams; first += wave) {
            start(job, first, std::min(wave, teams - first), static_cast<double*>(tiles_), doubles, shared_by<Job>);
        }
    }

  protected:
    static cudaStream_t stream() { return cudaStreamPerThread; }
    /// What the mirror holds, before a kernel reads it.
    void send() {
        if (!mirror_) return;
        const Timed timed(stream(), Timed::part(&Parts::sending));
        check_cuda(mirror_->send(stream()), "writing operands");
    }

    void* allocated(std::size_t bytes) {
        const Timed timed(stream(), Timed::part(&Parts::allocating));
        return memory_.allocate(bytes, "allocating memory");
    }

  private:
    /// What is there when the event is reached, which is now where `record` says so.
    void download_after(StreamEvent& event, bool record, const double* from, std::size_t n, double* to) {
        if (n == 0) return;
        const Timed timed(stream(), Timed::part(&Parts::fetching));
        cudaError_t status = cudaSuccess;
        if (mirror_ && mirror_->read(from, n * sizeof(double), to, stream(), status))
            return check_cuda(status, "reading results");
        if (n * sizeof(double) >= Staging::least && staging_.is_there()) {
            if (record) event.record(stream(), "running the kernel");
            return check_cuda(staging_.read(to, from, n, event.get()), "running the kernel");
        }
        check_cuda(cudaMemcpyAsync(to, from, n * sizeof(double), cudaMemcpyDeviceToHost, stream()), "reading results");
        check_cuda(cudaStreamSynchronize(stream()), "running the kernel");
    }
    /// Of what was allocated at once, zeros; nullptr where not so much is left.
    void* piece(std::size_t bytes) {
        const std::size_t whole = (bytes + alignment - 1) / alignment * alignment;
        if (whole == 0 || whole > left_bytes_) return nullptr;
        void* part = left_;
        left_ += whole;
        left_bytes_ -= whole;
        return part;
    }
    template <class Job>
    static void start(const Job& job, std::ptrdiff_t first, std::ptrdiff_t teams, double* memory,
                      std::ptrdiff_t doubles, std::size_t shared) {
        run_job<<<static_cast<unsigned>(teams), threads_per_team, shared, stream()>>>(job, first, memory, doubles);
        check_cuda(cudaGetLastError(), "starting the kernel");
    }
    /// Large copies of doubles; false where it is none.
    template <class T>
    bool staged(T* to, const T* from, std::size_t n, cudaEvent_t free) {
        if constexpr (std::is_same_v<T, double>) {
            if (n * sizeof(T) < Staging::least || !staging_.is_there()) return false;
            check_cuda(staging_.write(to, from, n, stream(), free), "writing operands");
            return true;
        }
        return false;
    }
    /// free: `to` may be written from then on; nullptr: when all is done that the stream has been told.
    template <class T>
    void copy(T* to, const T* from, std::size_t n, cudaEvent_t free) {
        const Timed timed(stream(), Timed::part(&Parts::sending));
        const std::size_t bytes = n * sizeof(T);
        if (bytes == 0 || (mirror_ && mirror_->write(to, from, bytes))) return;
        if (!staged(to, from, n, free))
            check_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream()), "writing operands");
        if (mirror_) mirror_->changed();
    }

    std::size_t tile_bytes_, tape_bytes_;
    unsigned char* left_ = nullptr;
    std::size_t left_bytes_ = 0;
    void* tiles_ = nullptr;
    std::size_t tiles_size_ = 0;
    // Whatever of them a constructor that fails has made is given back, in the order: copies end, then the memory, and what the
    // stream copies from, when the stream has ended.
    StreamEvent made_, mark_, now_;
    std::optional<Mirror> mirror_;  ///< of what was allocated at once, where that is little
    StreamMemory memory_{stream()};
    Staging staging_;
};

}  // namespace faultline::device
