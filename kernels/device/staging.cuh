// SPDX-License-Identifier: Apache-2.0
// Large copies between ordinary memory of the host and the card, by way of page-locked memory: each thread copies its pieces
// itself while the card fetches others. The driver's own copies of ordinary memory go one after the other, whichever threads
// ask for them (docs/results/emulated-device.md).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>

#include <cuda_runtime.h>

#include <faultline/device/mirror.cuh>

namespace faultline::device {

/// By one thread, in the order of its stream. Whoever destroys it has waited for that.
class Staging {
  public:
    static constexpr std::size_t least = std::size_t{1} << 18;  ///< bytes from which on it pays
    Staging() = default;
    Staging(const Staging&) = delete;
    Staging& operator=(const Staging&) = delete;
    ~Staging() {
        for (cudaEvent_t& event : done_)
            if (event != nullptr) (void)cudaEventDestroy(event);
        if (memory_ != nullptr) LockedMemory::give_back(memory_);
    }
    /// Takes its memory, 4 MiB; false where the system has none to give.
    bool is_there() {
        if (memory_ == nullptr) memory_ = static_cast<unsigned char*>(LockedMemory::take());
        return memory_ != nullptr;
    }

    /// On return `from` may change.
    cudaError_t write(void* to, const void* from, std::size_t bytes, cudaStream_t stream) {
        auto* const target = static_cast<unsigned char*>(to);
        const auto* const source = static_cast<const unsigned char*>(from);
        cudaError_t status = cudaSuccess;
        for (std::size_t at = 0; at < bytes && status == cudaSuccess; at += slot_bytes) {
            const std::size_t n = std::min(slot_bytes, bytes - at), slot = next_++ % slots;
            status = wait(slot);
            if (status != cudaSuccess) break;
            std::memcpy(memory_ + slot * slot_bytes, source + at, n);
            status = cudaMemcpyAsync(target + at, memory_ + slot * slot_bytes, n, cudaMemcpyHostToDevice, stream);
            if (status == cudaSuccess) status = mark(slot, stream);
        }
        return status;
    }
    cudaError_t read(void* to, const void* from, std::size_t bytes, cudaStream_t stream) {
        // What computes it may take long: wait for that without keeping a processor busy.
        cudaError_t status = cudaStreamSynchronize(stream);
        auto* const target = static_cast<unsigned char*>(to);
        const auto* const source = static_cast<const unsigned char*>(from);
        const std::size_t count = (bytes + slot_bytes - 1) / slot_bytes;
        const auto size = [&](std::size_t i) { return std::min(slot_bytes, bytes - i * slot_bytes); };
        for (std::size_t i = 0; i < count + slots && status == cudaSuccess; ++i) {
            if (i >= slots) {  // the slot's former piece has come
                const std::size_t before = i - slots;
                if (before < count) {
                    status = wait(before % slots);
                    if (status == cudaSuccess)
                        std::memcpy(target + before * slot_bytes, memory_ + before % slots * slot_bytes, size(before));
                }
            }
            if (i >= count || status != cudaSuccess) continue;
            status = cudaMemcpyAsync(memory_ + i % slots * slot_bytes, source + i * slot_bytes, size(i),
                                     cudaMemcpyDeviceToHost, stream);
            if (status == cudaSuccess) status = mark(i % slots, stream);
        }
        return status;
    }

  private:
    static constexpr std::size_t slots = 4, slot_bytes = LockedMemory::bytes / slots;

    cudaError_t mark(std::size_t slot, cudaStream_t stream) {
        if (done_[slot] == nullptr)
            if (const cudaError_t status = cudaEventCreateWithFlags(&done_[slot], cudaEventDisableTiming);
                status != cudaSuccess)
                return status;
        return cudaEventRecord(done_[slot], stream);
    }
    cudaError_t wait(std::size_t slot) {
        return done_[slot] == nullptr ? cudaSuccess : cudaEventSynchronize(done_[slot]);
    }

    unsigned char* memory_ = nullptr;
    cudaEvent_t done_[slots] = {};
    std::size_t next_ = 0;
};

}  // namespace faultline::device
