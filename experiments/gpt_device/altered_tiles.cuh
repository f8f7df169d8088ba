// SPDX-License-Identifier: Apache-2.0
// Faults in a block's tiles: the amplitude, the change of an element, what is recorded of it. The arithmetic is that of
// kernels/cpu/alteration_law.hpp; here is who does what. A block has 256 threads: 16 rows of 16 lanes, which is how squares
// are added up.
#pragma once

#include <cstdint>

#include <faultline/gpt_device/elements.cuh>
#include <faultline/gpt_device/fault_kernels.hpp>
#include <faultline/tensor_kernel/altered_sums.cuh>

namespace faultline::gpt::on_device {

constexpr int altering_threads = 256;

/// Shared memory for a T whose members have initial values: they are not set.
template <class T>
struct Uninitialised {
    alignas(16) char bytes[sizeof(T)];
    __device__ T& value() { return *reinterpret_cast<T*>(bytes); }
};

__device__ inline bool is_finite(double x) { return fabs(x) <= 1.7976931348623157e308; }

// What few elements ask for, or a tile once, is called: copies of it in every kernel would be many instructions.
__device__ __noinline__ inline std::uint64_t tile_key(const Alteration& a, std::uint64_t purpose, std::uint64_t tile) {
    return tile_stream(a, purpose, tile, 0).key;
}
__device__ __noinline__ inline double held_otherwise(const Alteration& a, double changed, const RandomStream& roundings,
                                                     std::uint64_t element) {
    return held_change_inlined(a, changed, roundings, element);
}

/// Streams of a tile, where its law has them: thread 0 and thread 32 draw one each. The caller synchronises.
__device__ inline void draw(const Alteration& a, std::uint64_t tile, TileDraw& to) {
    if (threadIdx.x == 0 && a.sign_of == Alteration::Sign::of_element)
        to.elements = tile_key(a, fault_stream::element_signs, tile);
    if (threadIdx.x == 32 && a.hold == Alteration::Hold::stochastic)
        to.roundings = tile_key(a, fault_stream::roundings, tile);
}
__device__ inline RandomStream stream_of(std::uint64_t key) {
    RandomStream stream;
    stream.key = key;
    return stream;
}

/// What a thread draws for the elements of a tile that it changes.
struct ElementDraws {
    SignDraws columns, elements;
    RoundingDraws roundings;
    double amplitude;
    bool stochastic;

    __device__ __forceinline__ ElementDraws(const Alteration& a, const TileDraw& draw)
        : columns(a.sign_of == Alteration::Sign::of_column ? column_stream(a) : RandomStream()),
          elements(stream_of(draw.elements)),
          roundings(stream_of(draw.roundings)),
          amplitude(draw.amplitude),
          stochastic(a.hold == Alteration::Hold::stochastic) {}
    /// The changed value of a finite x as the site holds it; what was asked is multiplied by `sign`.
    __device__ double changed(const Alteration& a, double sign, double x, std::uint64_t column, std::uint64_t element,
                              double& asked) {
        asked = asked_change(
            a, x, amplitude, [&] { return columns.sign(column); }, [&] { return elements.sign(element); });
        if (a.sign_of == Alteration::Sign::one) asked *= sign;
        double held = 0;
        if (held_quickly(a, x + asked, stochastic ? roundings.upper_bits(element) : 0, held)) return held;
        return held_otherwise(a, x + asked, roundings.stream, element);
    }
};

/// Sum over 16 neighbours, joined by halves; the same bits in each of them.
__device__ inline double joined16(double x) {
#pragma unroll
    for (int step = 8; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}

/// Room that a block's sums take in shared memory.
struct BlockSums {
    double squares[16], counts[16];
    double parts[altering_threads / 32][7];
};

/// Joins the rows' squares: lane (of 16 rows) y has `squares` and `count` in its 16 threads. The amplitude, in every thread.
__device__ inline double joined_amplitude(const Alteration& a, double squares, double count, BlockSums& sums) {
    const int y = threadIdx.x / 16, x = threadIdx.x % 16;
    __syncthreads();
    if (x == 0) {
        sums.squares[y] = squares;
        sums.counts[y] = count;
    }
    __syncthreads();
    const double all = joined16(sums.squares[x]), counted = joined16(sums.counts[x]);
    __syncthreads();
    return counted == 0 ? 0.0 : a.magnitude * ::sqrt(all / counted);
}

/// Amplitude of a tile. value(i, j) is NaN where the fault does not touch the element.
template <class Value>
__device__ double block_amplitude(const Alteration& a, int rows, int cols, Value&& value, BlockSums& sums) {
    double squares = 0, count = 0;
    constexpr int at_once = 4;  // rows of a thread that are read beside each other
    const int y = threadIdx.x / 16;
    for (int first = y; first - y < rows; first += 16 * at_once) {  // whole warps go on together
        double mine[at_once] = {};
#pragma unroll 4
        for (int j = threadIdx.x % 16; j < cols; j += 16)
#pragma unroll
            for (int r = 0; r < at_once; ++r)
                if (const int i = first + 16 * r; i < rows)
                    if (const double v = value(i, j); is_finite(v)) {
                        mine[r] += v * v;
                        count += 1;
                    }
#pragma unroll
        for (double& row : mine) row = joined16(row);
#pragma unroll
        for (const double row : mine) squares += row;
    }
    return joined_amplitude(a, squares, joined16(count), sums);
}

/// A block's records into *to.
__device__ inline void keep_record(const Realised& mine, BlockSums& sums, Realised* to) {
    const double of[7] = {mine.count,     mine.sum,           mine.sum_squared,  mine.sum_abs,
                          mine.asked_sum, mine.asked_squared, mine.value_squared};
    __syncthreads();
#pragma unroll
    for (int k = 0; k < 7; ++k) {
        const double sum = warp_sum(of[k]);
        if (threadIdx.x % 32 == 0) sums.parts[threadIdx.x / 32][k] = sum;
    }
    __syncthreads();
    if (threadIdx.x < 7) {
        double sum = 0;
        for (int w = 0; w < altering_threads / 32; ++w) sum += sums.parts[w][threadIdx.x];
        reinterpret_cast<double*>(to)[threadIdx.x] = sum;
    }
    __syncthreads();
}

/// Changes a tile in place, rows x cols from element 0 on: a half warp has the groups of 128 elements first, first + step, …;
/// value(i, j) as above, store(i, j, held) returns what is now there, sign(j) a block of columns' own sign. `one_column`: the
/// tile is a column that stands as a row.
template <class Value, class Store, class SignOf>
__device__ Realised change_elements(const Alteration& shared, const TileDraw& draw, int rows, int cols, bool one_column,
                                    int first, int step, Value&& value, Store&& store, SignOf&& sign) {
    Realised mine{};
    const Alteration a = shared;
    ElementDraws draws(a, draw);
    const std::uint64_t all = static_cast<std::uint64_t>(rows) * static_cast<std::uint64_t>(cols);
    for (std::uint64_t group = first; group * 128 < all; group += step) {
        std::uint64_t element = group * 128 + threadIdx.x % 16;
        int i = static_cast<int>(element / cols), j = static_cast<int>(element % cols);
#pragma unroll 1
        for (int k = 0; k < 8 && element < all; ++k) {
            const double x = value(i, j);
            if (is_finite(x)) {
                double asked = 0, e = 0;
                if (a.magnitude != 0) {
                    const double held = draws.changed(a, sign(j), x, one_column ? 0 : j, element, asked);
                    e = store(i, j, held) - x;
                }
                tensor_kernel::add_change(mine, 1, x, e, asked);
            }
            element += 16;
            j += 16;
            while (j >= cols) {
                j -= cols;
                ++i;
            }
        }
    }
    return mine;
}

}  // namespace faultline::gpt::on_device
