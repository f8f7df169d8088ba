// SPDX-License-Identifier: Apache-2.0
// Large copies of doubles between ordinary memory of the host and the card, by way of page-locked memory: each thread copies
// its pieces itself while the card fetches others. (The driver's own copies of ordinary memory go one after the other,
// whichever threads ask for them.) Values that bf16 or a float holds travel as such: operands after their casts, and nearly
// all results, are (docs/results/emulated-device.md). The card itself reads and writes the page-locked memory, in a stream of
// higher priority, so that a copy does not wait for the teams of others.
#pragma once

#include <cstddef>

#include <cuda_runtime.h>

#include <faultline/device/piece.hpp>

namespace faultline::device {

/// What one thread copies with.
struct Lane;

/// By one thread, in the order of its stream. Whoever destroys it has waited for that.
class Staging {
  public:
    static constexpr std::size_t least = std::size_t{1} << 18;  ///< bytes from which on it pays
    Staging() = default;
    Staging(const Staging&) = delete;
    Staging& operator=(const Staging&) = delete;
    ~Staging();
    /// Takes its lane; false where the system has none to give.
    bool is_there();
    /// Until nothing of its copies is under way.
    void wait() const;

    /// On return `from` may change; what the stream does next finds the values there. Both in memory of the card begin at a
    /// multiple of 16 bytes. After an error nothing reads or writes either any more. free: nobody uses `to` from that event on, so
    /// that the copy goes beside what the stream has still to do; nullptr: when the stream has done what it has been told.
    cudaError_t write(double* to, const double* from, std::size_t count, cudaStream_t stream,
                      cudaEvent_t free = nullptr);
    /// Of what is there when `ready` is reached.
    cudaError_t read(double* to, const double* from, std::size_t count, cudaEvent_t ready);

  private:
    [[nodiscard]] cudaError_t finished(cudaError_t status) const;
    [[nodiscard]] cudaError_t before(cudaStream_t first, cudaStream_t second) const;
    [[nodiscard]] cudaError_t sent(PieceType kind, const unsigned char* slot, double* to, std::size_t n) const;
    template <class T>
    [[nodiscard]] cudaError_t read_as(double* to, const double* from, std::size_t count, std::size_t& done) const;

    Lane* lane_ = nullptr;
    std::size_t next_ = 0;
};

}  // namespace faultline::device
