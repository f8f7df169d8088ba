// SPDX-License-Identifier: Apache-2.0
// A small call's memory in the host's: its operands go to the card in one copy and its results come back in one, where a copy
// of each would take the driver longer than the card takes to compute them.
#pragma once

#include <cstddef>
#include <cstring>
#include <mutex>
#include <vector>

#include <cuda_runtime.h>

namespace faultline::device {

/// Page-locked memory of one size, kept for the next call: locking it takes longer than a small call.
class LockedMemory {
  public:
    static constexpr std::size_t bytes = std::size_t{4} << 20;

    /// nullptr where the system has none to give.
    static void* take() {
        LockedMemory& all = instance();
        {
            const std::lock_guard lock(all.mutex_);
            if (!all.free_.empty()) {
                void* one = all.free_.back();
                all.free_.pop_back();
                return one;
            }
        }
        void* one = nullptr;
        if (cudaMallocHost(&one, bytes) == cudaSuccess) return one;
        (void)cudaGetLastError();
        return nullptr;
    }
    static void give_back(void* one) {
        LockedMemory& all = instance();
        const std::lock_guard lock(all.mutex_);
        all.free_.push_back(one);
    }

  private:
    static LockedMemory& instance() {
        static LockedMemory* const all = new LockedMemory;  // outlives the threads of a program that ends
        return *all;
    }
    std::mutex mutex_;
    std::vector<void*> free_;
};

/// The host's copy of `size` bytes of a call's memory at `base` on the card. By one thread, in the order of its stream.
class Mirror {
  public:
    /// Zeros. Without locked memory, or where it has not so much, it is none.
    Mirror(unsigned char* base, std::size_t size) : base_(base), size_(size) {
        if (size <= LockedMemory::bytes) copy_ = static_cast<unsigned char*>(LockedMemory::take());
        if (copy_ != nullptr) std::memset(copy_, 0, size);
    }
    Mirror(const Mirror&) = delete;
    Mirror& operator=(const Mirror&) = delete;
    ~Mirror() {
        if (copy_ != nullptr) LockedMemory::give_back(copy_);
    }
    [[nodiscard]] bool is_there() const { return copy_ != nullptr; }

    /// False where the caller has to copy it itself: it is not of this memory, or that has been sent.
    bool write(void* to, const void* from, std::size_t bytes) {
        unsigned char* const here = of(to, bytes);
        if (here == nullptr || sent_) return false;
        if (bytes > 0) std::memcpy(here, from, bytes);
        return true;
    }
    /// Before a kernel: what was written, once. The kernel's results are not here any more.
    cudaError_t send(cudaStream_t stream) {
        fetched_ = false;
        if (sent_ || !is_there()) return cudaSuccess;
        sent_ = true;
        return cudaMemcpyAsync(base_, copy_, size_, cudaMemcpyHostToDevice, stream);
    }
    /// False where it is not of this memory. The first after a kernel fetches all; before any, what was written is here alone.
    bool read(const void* from, std::size_t bytes, void* to, cudaStream_t stream, cudaError_t& status) {
        const unsigned char* const here = of(from, bytes);
        status = cudaSuccess;
        if (here == nullptr) return false;
        if (sent_ && !fetched_) {
            status = cudaMemcpyAsync(copy_, base_, size_, cudaMemcpyDeviceToHost, stream);
            if (status == cudaSuccess) status = cudaStreamSynchronize(stream);
            fetched_ = status == cudaSuccess;
        }
        if (!sent_ || fetched_) std::memcpy(to, here, bytes);
        return true;
    }
    /// After the caller has changed the card's memory itself.
    void changed() { fetched_ = false; }

  private:
    [[nodiscard]] unsigned char* of(const void* p, std::size_t bytes) const {
        const auto* const at = static_cast<const unsigned char*>(p);
        const bool inside = is_there() && at >= base_ && at + bytes <= base_ + size_;
        return inside ? copy_ + (at - base_) : nullptr;
    }
    unsigned char* base_;
    std::size_t size_;
    unsigned char* copy_ = nullptr;
    bool sent_ = false, fetched_ = false;
};

}  // namespace faultline::device
