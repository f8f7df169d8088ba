// SPDX-License-Identifier: Apache-2.0
// Faults in the registers of the kernels of attention_forward.cu and attention_backward.cu. A block has a tile of 64 queries,
// thread (y, x) its rows 4 y … 4 y + 3 and, of 64 keys, the columns x, x + 16, x + 32, x + 48; a fault's tile is the whole of
// the queries' rows, as in fast_attention.cpp, so where its law asks for the rms there is a sweep over the keys for that first.
#pragma once

#include <type_traits>

#include <faultline/gpt_device/altered_tiles.cuh>

namespace faultline::gpt::on_device {

/// In place of KernelFaults in a kernel without.
struct NoFaults {
    static constexpr bool any = false;
};

/// What a block's threads share of the faults.
struct SharedFaults {
    Alteration change[most_kernel_faults];
    TileDraw draw[most_kernel_faults];
    int touched[most_kernel_faults];
    double row_squares[64], row_counts[64], rows[64];
    BlockSums sums;
};

template <class F>
using SharedOf = std::conditional_t<F::any, Uninitialised<SharedFaults>, char>;

/// Faults of a block as one thread handles them.
class BlockFaults {
  public:
    __device__ BlockFaults(const KernelFaults& faults, SharedFaults& shared, int head, int sequence, int sequences,
                           int tiles, int length)
        : faults_(faults),
          s_(shared),
          head_(head),
          sequence_(sequence),
          sequences_(sequences),
          tiles_(tiles),
          length_(length) {}

    /// Faults and streams of query tile `tile`. The caller synchronises.
    __device__ void begin(int tile) {
        for (int f = 0; f < faults_.count; ++f) {
            const HeadFault& from = faults_.one[f].heads[head_];
            Alteration a = from.change;
            a.batch += sequence_;
            if (threadIdx.x == 0) {
                s_.touched[f] = from.touched;
                s_.change[f] = a;
            }
            if (from.touched) draw(a, static_cast<std::uint64_t>(tile * 64) << 32, s_.draw[f]);
        }
    }
    /// What begin() and the sweeps found, for another kernel, and there again. The caller synchronises.
    __device__ void leave(int tile) const {
        if (const int f = threadIdx.x; f < faults_.count) *at(f, tile) = s_.draw[f];
    }
    __device__ void take(int tile) {
        const int f = threadIdx.x;
        if (f >= faults_.count) return;
        const HeadFault& from = faults_.one[f].heads[head_];
        s_.touched[f] = from.touched;
        s_.change[f] = from.change;
        s_.draw[f] = *at(f, tile);
    }

    [[nodiscard]] __device__ int count() const { return faults_.count; }
    /// Whether fault f's tile has to be swept for its rms.
    [[nodiscard]] __device__ bool sweeps(int f) const {
        return faults_.one[f].of_rms && faults_.one[f].site != KernelSite::row_max &&
               faults_.one[f].site != KernelSite::row_sum && faults_.one[f].site != KernelSite::pv_accumulate &&
               s_.touched[f] && s_.change[f].size == Alteration::Size::of_rms;
    }

    /// Changes this thread's scores of keys key … key + 63 at a site: by faults [0, upto); and where fault `upto` stands at it,
    /// adds up its squares.
    __device__ void scores(KernelSite site, int first, int key, int y, int x, float (&v)[4][4], int upto) {
        if (!any_at(site)) return;
        float apart[4][4];  // the loops of change() are not unrolled: v would be no registers
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) apart[i][j] = v[i][j];
#pragma unroll 1
        for (int f = 0; f <= upto && f < faults_.count; ++f)
            if (faults_.one[f].site == site && s_.touched[f]) {
                if (f == upto)
                    square(first, key, y, x, apart);
                else
                    change(f, first, key, y, x, apart);
            }
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) v[i][j] = apart[i][j];
    }
    /// sweep(f) for every fault whose tile has to be swept for its rms, with those before it at work.
    template <class Sweep>
    __device__ void sweeps_for_rms(int y, int x, Sweep&& sweep) {
        for (int f = 0; f < faults_.count; ++f) {
            if (!sweeps(f)) continue;
            records = false;
            begin_sweep();
            sweep(f);
            end_sweep(f, y, x);
            records = true;
        }
    }
    /// Before a sweep for fault f, and after it: its amplitude.
    __device__ void begin_sweep() {
        for (double& s : squares_) s = 0;
        counted_ = 0;
    }
    __device__ void end_sweep(int f, int y, int x) {
        const double counted = joined16(counted_);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const double row = joined16(squares_[i]);
            if (x == 0) s_.row_squares[4 * y + i] = row;
        }
        __syncthreads();
        double lane = 0;
        for (int i = threadIdx.x / 16; i < 64; i += 16) lane += s_.row_squares[i];
        const double amplitude = joined_amplitude(s_.change[f], lane, counted, s_.sums);
        if (threadIdx.x == 0) s_.draw[f].amplitude = amplitude;
        __syncthreads();
    }

    /// Changes row quantities at a site: of the thread's four rows, the same in the 16 threads of each.
    __device__ void rows(KernelSite site, int first, int y, int x, float (&v)[4]) {
        if (!any_at(site)) return;
        __syncthreads();
        if (x == 0)
            for (int i = 0; i < 4; ++i) s_.rows[4 * y + i] = v[i];
        __syncthreads();
        tile(
            site, 1, min(64, length_ - first), [&](int, int j) { return s_.rows[j]; },
            [&](int, int j, double held) { return s_.rows[j] = held; });
        for (int i = 0; i < 4; ++i) v[i] = static_cast<float>(s_.rows[4 * y + i]);
    }
    [[nodiscard]] __device__ bool any_at(KernelSite site) const {
        for (int f = 0; f < faults_.count; ++f)
            if (faults_.one[f].site == site && s_.touched[f]) return true;
        return false;
    }
    /// Changes a tile that stands in shared memory.
    template <class Value, class Store>
    __device__ void tile(KernelSite site, int rows, int cols, Value&& value, Store&& store) {
#pragma unroll 1
        for (int f = 0; f < faults_.count; ++f) {
            if (faults_.one[f].site != site || !s_.touched[f]) continue;
            if (s_.change[f].size == Alteration::Size::of_rms) {
                const double amplitude = block_amplitude(s_.change[f], rows, cols, value, s_.sums);
                if (threadIdx.x == 0) s_.draw[f].amplitude = amplitude;
                __syncthreads();
            }
            records_[f] = change_elements(s_.change[f], s_.draw[f], rows, cols, rows == 1, threadIdx.x / 16,
                                          altering_threads / 16, value, store, [](int) { return 1.0; });
            __syncthreads();
        }
    }
    /// The block's records into memory.
    __device__ void keep(int tile) {
#pragma unroll 1
        for (int f = 0; f < faults_.count; ++f)
            keep_record(
                records_[f], s_.sums,
                faults_.one[f].records + (static_cast<std::size_t>(head_) * sequences_ + sequence_) * tiles_ + tile);
    }

    bool records = true;

  private:
    __device__ __noinline__ void square(int first, int key, int y, int x, const float (&v)[4][4]) {
        for (int i = 0; i < 4; ++i)
            for (int j = 0; j < 4; ++j)
                if (seen(first + 4 * y + i, key + x + 16 * j, v[i][j])) {
                    squares_[i] += static_cast<double>(v[i][j]) * static_cast<double>(v[i][j]);
                    counted_ += 1;
                }
    }
    __device__ __noinline__ void change(int f, int first, int key, int y, int x, float (&v)[4][4]) {
        const Alteration a = s_.change[f];
        ElementDraws draws(a, s_.draw[f]);
        const int columns = min(first + 64, length_);
        Realised mine{};
#pragma unroll 1
        for (int k = 0; k < 16; ++k) {
            const int i = k / 4, j = k % 4, column = key + x + 16 * j;
            if (!seen(first + 4 * y + i, column, v[i][j])) continue;
            const double before = v[i][j];
            double asked = 0, held = before;
            if (a.magnitude != 0) {
                const auto element = static_cast<std::uint64_t>(4 * y + i) * columns + column;
                held = draws.changed(a, 1.0, before, column, element, asked);
            }
            if (records) tensor_kernel::add_change(mine, 1, before, held - before, asked);
            v[i][j] = static_cast<float>(held);
        }
        if (records) tensor_kernel::add_sums(records_[f], mine);
    }
    [[nodiscard]] __device__ bool seen(int row, int column, float x) const {
        return row < length_ && column <= row && fabsf(x) <= 3.402823466e38f;
    }
    [[nodiscard]] __device__ TileDraw* at(int f, int tile) const {
        return faults_.one[f].draws + static_cast<std::size_t>(blockIdx.y) * tiles_ + tile;
    }
    const KernelFaults& faults_;
    SharedFaults& s_;
    int head_, sequence_, sequences_, tiles_, length_;
    double squares_[4] = {}, counted_ = 0;
    Realised records_[most_kernel_faults] = {};
};

}  // namespace faultline::gpt::on_device
