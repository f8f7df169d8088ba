// SPDX-License-Identifier: Apache-2.0
#include <faultline/device/staging.cuh>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <type_traits>
#include <vector>

#include <faultline/format/narrow.hpp>

namespace faultline::device {

/// Kept for the next thread, since it takes longer to make than a copy.
struct Lane {
    static constexpr std::size_t slots = 4, slot_bytes = std::size_t{1} << 20;
    unsigned char* memory = nullptr;   ///< page-locked, slot by slot, and behind it for each slot:
    std::uint32_t* inexact = nullptr;  ///< a value of the piece is no float
    cudaStream_t stream = nullptr;     ///< of the highest priority
    cudaEvent_t order = nullptr, done[slots] = {};

    [[nodiscard]] unsigned char* slot(std::size_t i) const { return memory + i * slot_bytes; }
};

namespace {

class Lanes {
  public:
    /// nullptr where the system has none to give.
    static Lane* take() {
        Lanes& all = instance();
        {
            const std::lock_guard lock(all.mutex_);
            if (!all.free_.empty()) {
                Lane* one = all.free_.back();
                all.free_.pop_back();
                return one;
            }
        }
        auto* const one = new Lane;
        if (made(*one)) return one;
        (void)cudaGetLastError();
        unmake(*one);
        delete one;
        return nullptr;
    }
    static void give_back(Lane* one) {
        Lanes& all = instance();
        const std::lock_guard lock(all.mutex_);
        all.free_.push_back(one);
    }

  private:
    static bool made(Lane& one) {
        void* memory = nullptr;
        const std::size_t values = Lane::slots * Lane::slot_bytes;
        if (cudaMallocHost(&memory, values + Lane::slots * sizeof *one.inexact) != cudaSuccess) return false;
        one.memory = static_cast<unsigned char*>(memory);
        one.inexact = reinterpret_cast<std::uint32_t*>(one.memory + values);
        int least = 0, greatest = 0;
        if (cudaDeviceGetStreamPriorityRange(&least, &greatest) != cudaSuccess) return false;
        if (cudaStreamCreateWithPriority(&one.stream, cudaStreamNonBlocking, greatest) != cudaSuccess) return false;
        if (cudaEventCreateWithFlags(&one.order, cudaEventDisableTiming) != cudaSuccess) return false;
        for (cudaEvent_t& event : one.done)
            if (cudaEventCreateWithFlags(&event, cudaEventDisableTiming) != cudaSuccess) return false;
        return true;
    }
    static void unmake(Lane& one) {
        for (cudaEvent_t event : {one.order, one.done[0], one.done[1], one.done[2], one.done[3]})
            if (event != nullptr) (void)cudaEventDestroy(event);
        if (one.stream != nullptr) (void)cudaStreamDestroy(one.stream);
        if (one.memory != nullptr) (void)cudaFreeHost(one.memory);
    }
    static Lanes& instance() {
        static Lanes* const all = new Lanes;  // outlives the threads of a program that ends
        return *all;
    }
    std::mutex mutex_;
    std::vector<Lane*> free_;
};

/// The double that was stored as a float of these bits. A NaN's are what the host's conversion left of the double's; the card's
/// own conversion would make another NaN of it.
__device__ __forceinline__ double widened(std::uint32_t bits) {
    if ((bits & 0x7FFFFFFFu) <= 0x7F800000u) return static_cast<double>(__uint_as_float(bits));
    const std::uint64_t wide =
        std::uint64_t{bits & 0x80000000u} << 32 | 0x7FF0000000000000u | std::uint64_t{bits & 0x007FFFFFu} << 29;
    return __longlong_as_double(static_cast<long long>(wide));
}

/// to[i] = from[i] of bf16 (its bits) or float, bit for bit. 16 bytes at once of `from`, which lies across the bus, and which has
/// room for as many behind its end; both begin at a multiple of 16 bytes.
template <class T>
__global__ void widen_values(const T* from, double* to, std::size_t count) {
    constexpr std::size_t each = 16 / sizeof(T);
    for (std::size_t i = (std::size_t{blockIdx.x} * blockDim.x + threadIdx.x) * each; i < count;
         i += std::size_t{gridDim.x} * blockDim.x * each) {
        const uint4 words = *reinterpret_cast<const uint4*>(from + i);
        const std::uint32_t word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
        for (std::size_t k = 0; k < each; ++k) {
            const std::uint32_t bits = each == 4 ? word[k] : k % 2 == 0 ? word[k / 2] << 16 : word[k / 2] & 0xFFFF0000u;
            if (i + k < count) to[i + k] = widened(bits);
        }
    }
}

/// to[i] = from[i], 16 bytes at once, with room behind the end; *inexact = 1 where a float does not hold one of them bit for bit
/// (a NaN is taken for one of these).
__global__ void narrow_values(const double* from, float* to, std::size_t count, std::uint32_t* inexact) {
    bool differs = false;
    for (std::size_t i = (std::size_t{blockIdx.x} * blockDim.x + threadIdx.x) * 4; i < count;
         i += std::size_t{gridDim.x} * blockDim.x * 4) {
        float x[4];
#pragma unroll
        for (std::size_t k = 0; k < 4; ++k) {
            const double value = i + k < count ? from[i + k] : 0.0;
            x[k] = __double2float_rn(value);
            differs |= __double_as_longlong(static_cast<double>(x[k])) != __double_as_longlong(value);
        }
        *reinterpret_cast<float4*>(to + i) = make_float4(x[0], x[1], x[2], x[3]);
    }
    if (differs) *reinterpret_cast<volatile std::uint32_t*>(inexact) = 1;
}

constexpr unsigned blocks = 64, threads = 128;

}  // namespace

Staging::~Staging() {
    if (lane_ == nullptr) return;
    wait();
    Lanes::give_back(lane_);
}
void Staging::wait() const {
    if (lane_ != nullptr) (void)cudaStreamSynchronize(lane_->stream);
}
bool Staging::is_there() {
    if (lane_ == nullptr) lane_ = Lanes::take();
    return lane_ != nullptr;
}

cudaError_t Staging::write(double* to, const double* from, std::size_t count, cudaStream_t stream, cudaEvent_t free) {
    cudaError_t status = free == nullptr ? before(lane_->stream, stream) : cudaStreamWaitEvent(lane_->stream, free, 0);
    PieceType kind = PieceType::bf16;
    for (std::size_t at = 0; at < count && status == cudaSuccess;) {
        const std::size_t slot = next_++ % Lane::slots;
        status = cudaEventSynchronize(lane_->done[slot]);
        if (status != cudaSuccess) break;
        const std::size_t n = store_piece(kind, from + at, count - at, lane_->slot(slot), Lane::slot_bytes);
        status = sent(kind, lane_->slot(slot), to + at, n);
        if (status == cudaSuccess) status = cudaEventRecord(lane_->done[slot], lane_->stream);
        at += n;
    }
    return finished(status == cudaSuccess ? before(stream, lane_->stream) : status);
}
cudaError_t Staging::read(double* to, const double* from, std::size_t count, cudaEvent_t ready) {
    // What computes it may take long: wait for that without keeping a processor busy.
    cudaError_t status = cudaEventSynchronize(ready);
    std::size_t done = 0;
    if (status == cudaSuccess) status = read_as<float>(to, from, count, done);
    if (status == cudaSuccess && done < count) {  // from there on they are no floats
        std::size_t wide = 0;
        status = read_as<double>(to + done, from + done, count - done, wide);
    }
    return finished(status);
}

/// Where a copy failed partway its stream knows nothing of the pieces that are under way: they end before the caller, who may free
/// the memory, hears of it.
cudaError_t Staging::finished(cudaError_t status) const {
    if (status != cudaSuccess) (void)cudaStreamSynchronize(lane_->stream);
    return status;
}

/// What `first` does from now on comes after what `second` has been told to do so far.
cudaError_t Staging::before(cudaStream_t first, cudaStream_t second) const {
    const cudaError_t status = cudaEventRecord(lane_->order, second);
    return status == cudaSuccess ? cudaStreamWaitEvent(first, lane_->order, 0) : status;
}
cudaError_t Staging::sent(PieceType kind, const unsigned char* slot, double* to, std::size_t n) const {
    if (kind == PieceType::fp64)
        return cudaMemcpyAsync(to, slot, n * sizeof(double), cudaMemcpyHostToDevice, lane_->stream);
    if (kind == PieceType::bf16)
        widen_values<<<blocks, threads, 0, lane_->stream>>>(reinterpret_cast<const std::uint16_t*>(slot), to, n);
    else
        widen_values<<<blocks, threads, 0, lane_->stream>>>(reinterpret_cast<const float*>(slot), to, n);
    return cudaGetLastError();
}

/// In pieces of a slot as T. done: values that came; as float it ends before the first piece that has a value which is none.
template <class T>
cudaError_t Staging::read_as(double* to, const double* from, std::size_t count, std::size_t& done) const {
    constexpr bool narrow = std::is_same_v<T, float>;
    constexpr std::size_t each = Lane::slot_bytes / sizeof(T), slots = Lane::slots;
    const std::size_t pieces = (count + each - 1) / each;
    const auto size = [&](std::size_t i) { return std::min(each, count - i * each); };
    cudaError_t status = cudaSuccess;
    for (std::size_t i = 0; i < pieces + slots && status == cudaSuccess; ++i) {
        if (i >= slots && i - slots < pieces) {  // the slot's former piece has come
            const std::size_t before = i - slots, slot = before % slots;
            status = cudaEventSynchronize(lane_->done[slot]);
            if (status != cudaSuccess) return status;
            if constexpr (narrow) {
                if (lane_->inexact[slot] != 0) return cudaStreamSynchronize(lane_->stream);
                widen(reinterpret_cast<const float*>(lane_->slot(slot)), size(before), to + before * each);
            } else {
                std::memcpy(to + before * each, lane_->slot(slot), size(before) * sizeof(double));
            }
            done = before * each + size(before);
        }
        if (i >= pieces) continue;
        const std::size_t slot = i % slots;
        unsigned char* const piece = lane_->slot(slot);
        if constexpr (narrow) {
            lane_->inexact[slot] = 0;
            narrow_values<<<blocks, threads, 0, lane_->stream>>>(from + i * each, reinterpret_cast<float*>(piece),
                                                                 size(i), lane_->inexact + slot);
            status = cudaGetLastError();
        } else {
            status = cudaMemcpyAsync(piece, from + i * each, size(i) * sizeof(double), cudaMemcpyDeviceToHost,
                                     lane_->stream);
        }
        if (status == cudaSuccess) status = cudaEventRecord(lane_->done[slot], lane_->stream);
    }
    return status;
}

}  // namespace faultline::device
