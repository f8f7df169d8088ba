// SPDX-License-Identifier: Apache-2.0
// The recorder inside the forward: what a consuming warp does on a tile that is looked at (recording.hpp says what that is).
// A kernel without one (NoRecorder) is the kernel as it stands without these calls.
#pragma once

#include <faultline/tensor_kernel/hopper.cuh>
#include <faultline/tensor_kernel/recording.hpp>

namespace faultline::tensor_kernel {

/// Counts and sums of one site, a thread's own until they are written.
struct ErrorSum {
    float sum = 0, sum_squared = 0, max_abs = 0, count = 0;

    __device__ __forceinline__ void add(float error, bool counts = true) {
        const bool taken = counts && fabsf(error) < INFINITY;
        const float e = taken ? error : 0.0f;
        sum += e;
        sum_squared = fmaf(e, e, sum_squared);
        max_abs = fmaxf(max_abs, fabsf(e));
        count += taken ? 1.0f : 0.0f;
    }
};

/// Of 2 half numbers a thread gives away the half that its partner, 2 half lanes away, keeps. Kinds go round by four: the third
/// is a maximum, the others are sums; of two numbers or one left, the lane says which they are.
template <int half>
__device__ __forceinline__ void exchange(float (&x)[16]) {
    const int lane = threadIdx.x % 32;
    const bool upper = lane & (2 * half);
#pragma unroll
    for (int i = 0; i < half; ++i) {
        const float given = __shfl_xor_sync(~0u, upper ? x[i] : x[i + half], 2 * half),
                    kept = upper ? x[i + half] : x[i];
        const int kind = half >= 4 ? i % 4 : half == 2 ? i + (upper ? 2 : 0) : ((lane & 4) >> 1) + (upper ? 1 : 0);
        x[i] = kind == 2 ? fmaxf(kept, given) : kept + given;
    }
}

/// The sums of four sites over all threads of the warp, to four cells one after another, by 16 exchanges in place of 80.
__device__ __forceinline__ void write_four(const ErrorSum (&sums)[4], RecordedCell* cells, bool written) {
    float x[16];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        x[4 * i] = sums[i].sum;
        x[4 * i + 1] = sums[i].sum_squared;
        x[4 * i + 2] = sums[i].max_abs;
        x[4 * i + 3] = sums[i].count;
    }
    exchange<8>(x);
    exchange<4>(x);
    exchange<2>(x);
    exchange<1>(x);
    const int number = threadIdx.x % 32 / 2;  // the bits of the lane say what it kept: site, then kind
    const float other = __shfl_xor_sync(~0u, x[0], 1);
    const float all = number % 4 == 2 ? fmaxf(x[0], other) : x[0] + other;
    if (written && threadIdx.x % 2 == 0) reinterpret_cast<float*>(cells)[number] = all;
}

/// One error a thread.
__device__ __forceinline__ void write_one(float error, bool counts, RecordedCell* cell, bool written) {
    const bool taken = counts && fabsf(error) < INFINITY;
    const float e = taken ? error : 0.0f;
    float sum = e, sum_squared = e * e, max_abs = fabsf(e);
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        sum += __shfl_xor_sync(~0u, sum, distance);
        sum_squared += __shfl_xor_sync(~0u, sum_squared, distance);
        max_abs = fmaxf(max_abs, __shfl_xor_sync(~0u, max_abs, distance));
    }
    const auto count = static_cast<float>(__popc(__ballot_sync(~0u, taken)));
    if (written && threadIdx.x % 32 == 0) *reinterpret_cast<float4*>(cell) = {sum, sum_squared, max_abs, count};
}

/// x in a register of its own: otherwise nvcc moves accumulators about to keep two values of one, and wgmma waits for that.
__device__ __forceinline__ float copied(float x) {
    float y;
    asm volatile("mov.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

struct NoRecorder {
    static constexpr bool records = false, alters = false, alters_state = false;
    struct Arguments {};
    struct Memory {};
    struct Place {};
    static constexpr int kept_scores = 1;
    __device__ __forceinline__ NoRecorder(const Arguments&, Memory&, int) {}
};

/// 2^(i/8) as the sum of two floats.
__constant__ const float2 eighths_of_two[8] = {
    {1.0f, 0.0f},
    {1.0905077457427979f, -1.3077539939843064e-08f},
    {1.1892070770263672f, 3.7976352729174323e-08f},
    {1.2968395948410034f, -4.0189995331729733e-08f},
    {1.4142135381698608f, 2.4203234971764687e-08f},
    {1.5422108173370361f, 8.0709048333460487e-09f},
    {1.6817928552627563f, -2.4755326677450284e-08f},
    {1.8340080976486206f, -1.1239277952768134e-08f},
};

template <class T>
__device__ __forceinline__ double widened(std::uint16_t bits);
/// Of bf16 the upper word of the double is the number's own bits with another bias; 0 becomes 2^-127, which no sum notices.
template <>
__device__ __forceinline__ double widened<__nv_bfloat16>(std::uint16_t bits) {
    const std::uint32_t word = static_cast<std::uint32_t>(bits) << 16;
    return __hiloint2double(
        static_cast<int>((word & 0x80000000u) | (((word & 0x7FFF0000u) >> 3) + (std::uint32_t{1023 - 127} << 20))), 0);
}

template <class T, int d, int keys>
struct Recorder {
    static constexpr bool records = true, alters = false, alters_state = false;
    struct Arguments {
        RecordedCell* cells;
        std::uint64_t threshold;
        std::uint32_t seed;
        int row_groups, k_tiles;
    };
    /// A warp's.
    struct Scratch {
        double q[d], p[keys];
        float s[keys], o_before[d], o_after[d];
    };
    struct Memory {
        Scratch warps[8];
        float2 eighths[8];
    };

    /// A query tile's 16 rows of this warp.
    struct Place {
        int head, row_group, product_row, rows;  ///< rows that exist, from the warp's first
    };

    const Arguments& in;
    Scratch& scratch;
    const float2* eighths;
    int lane;

    __device__ __forceinline__ Recorder(const Arguments& arguments, Memory& memory, int warp)
        : in(arguments), scratch(memory.warps[warp]), eighths(memory.eighths), lane(threadIdx.x % 32) {}

    __device__ __forceinline__ bool looks_at(int head, int q_tile) const {
        return sample::tile_bits(in.seed, head, q_tile) < in.threshold;
    }
    __device__ __forceinline__ RecordedCell* cell(const Place& at, int key_tile, int site) const {
        const std::int64_t tile = (static_cast<std::int64_t>(at.head) * in.row_groups + at.row_group) * in.k_tiles;
        return in.cells + (tile + key_tile) * site_cells + site;
    }
    /// Whether this thread holds a part of the row whose products are looked at: its row product_row/8 of two.
    __device__ __forceinline__ bool holds_row(const Place& at) const { return lane / 4 == at.product_row % 8; }
    __device__ __forceinline__ bool exists(const Place& at, int r) const { return lane / 4 + 8 * r < at.rows; }

    /// 8 elements of row `row` from column `column` (a multiple of 8) of a swizzled operand of `rows` rows.
    __device__ __forceinline__ static const uint4& eight(const T* panels, int rows, int row, int column) {
        return *reinterpret_cast<const uint4*>(panels + (column / 64 * rows + row) * 64 +
                                               ((column % 64 / 8) ^ (row % 8)) * 8);
    }

    /// A query tile begins: warp_row is the warp's first row in the block's Q, of block_q rows.
    __device__ __forceinline__ Place begin(int head, int first_row, int n_q, const T* q, int block_q, int warp_row) {
        const int row_group = first_row / 16;
        const Place at{head, row_group, sample::product_row(in.seed, head, row_group), n_q - first_row};
        if (lane < d / 8) {
            const uint4 words = eight(q, block_q, warp_row + at.product_row, 8 * lane);
            const auto* elements = reinterpret_cast<const std::uint16_t*>(&words);
#pragma unroll
            for (int i = 0; i < 8; ++i) scratch.q[8 * lane + i] = widened<T>(elements[i]);
        }
        __syncwarp();
        return at;
    }

    /// s = q k^T of a tile before any mask; limit: how many of its keys the row product_row sees.
    __device__ __forceinline__ void scores(const Place& at, const float (&s)[keys / 2], const T* k, int key_tile,
                                           int limit) {
        if (holds_row(at)) {
#pragma unroll
            for (int j = 0; j < keys / 8; ++j) {
                const float low = at.product_row < 8 ? s[4 * j] : s[4 * j + 2];
                const float high = at.product_row < 8 ? s[4 * j + 1] : s[4 * j + 3];
                *reinterpret_cast<float2*>(&scratch.s[8 * j + 2 * (lane % 4)]) = {low, high};
            }
        }
        __syncwarp();
        const int key = sample::first_product_column(key_tile, keys) + lane;
        double exact[4] = {};  // four sums, since an addition waits for the one before
#pragma unroll 2
        for (int c = 0; c < d; c += 8) {
            const uint4 words = eight(k, keys, key, c);
            const auto* elements = reinterpret_cast<const std::uint16_t*>(&words);
#pragma unroll
            for (int i = 0; i < 8; ++i) exact[i % 4] = fma(scratch.q[c + i], widened<T>(elements[i]), exact[i % 4]);
        }
        const double all = (exact[0] + exact[1]) + (exact[2] + exact[3]);
        write_one(static_cast<float>(scratch.s[key] - all),
                  key < limit && at.product_row<at.rows, cell(at, key_tile, 0), at.rows> 0);
        __syncwarp();
    }

    /// Before o (+)= p v is issued: o as the product finds it.
    __device__ __forceinline__ void before_output(const Place& at, const float (&o)[d / 2],
                                                  const std::uint32_t (&p)[keys / 16][4], bool accumulate) {
        if (holds_row(at)) {
            const bool upper = at.product_row >= 8;
#pragma unroll
            for (int j = 0; j < d / 8; ++j)
                *reinterpret_cast<float2*>(&scratch.o_before[8 * j + 2 * (lane % 4)]) = {
                    accumulate ? (upper ? o[4 * j + 2] : o[4 * j]) : 0.0f,
                    accumulate ? (upper ? o[4 * j + 3] : o[4 * j + 1]) : 0.0f};
#pragma unroll
            for (int i = 0; i < keys / 16; ++i)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const std::uint32_t pair = upper ? p[i][2 * h + 1] : p[i][2 * h];
                    double* to = &scratch.p[16 * i + 8 * h + 2 * (lane % 4)];
                    to[0] = widened<T>(static_cast<std::uint16_t>(pair));
                    to[1] = widened<T>(static_cast<std::uint16_t>(pair >> 16));
                }
        }
        __syncwarp();
    }
    /// When it is complete.
    __device__ __forceinline__ void output(const Place& at, const float (&o)[d / 2], const T* v, int key_tile) {
        if (holds_row(at)) {
#pragma unroll
            for (int j = 0; j < d / 8; ++j)
                *reinterpret_cast<float2*>(&scratch.o_after[8 * j + 2 * (lane % 4)]) = {
                    at.product_row < 8 ? o[4 * j] : o[4 * j + 2], at.product_row < 8 ? o[4 * j + 1] : o[4 * j + 3]};
        }
        __syncwarp();
        const int column = sample::first_product_column(key_tile, d) + lane;
        const auto* elements = reinterpret_cast<const std::uint16_t*>(v) + column / 64 * keys * 64 + column % 8;
        double exact[4] = {scratch.o_before[column], 0, 0, 0};
#pragma unroll 8
        for (int key = 0; key < keys; ++key)
            exact[key % 4] = fma(scratch.p[key], widened<T>(elements[key * 64 + ((column % 64 / 8) ^ (key % 8)) * 8]),
                                 exact[key % 4]);
        const double all = (exact[0] + exact[1]) + (exact[2] + exact[3]);
        write_one(static_cast<float>(scratch.o_after[column] - all),
                  at.product_row<at.rows, cell(at, key_tile, 5), at.rows> 0);
        __syncwarp();
    }

    /// y - 2^x for -126 < x < 1.
    __device__ __forceinline__ float exp_error(float x, float y) const {
        constexpr float magic = 1572864.0f;  // 1.5 2^20: the sum's last bit is 1/8
        const float shifted = x + magic;
        const float f = x - (shifted - magic);
        const int eighth = static_cast<int>(__float_as_uint(shifted));
        const float2 t = eighths[eighth & 7];
        // 2^f - 1 = a + low: f ln 2 as a pair, the rest of the series (below 2^-10) in fp32
        constexpr float ln2 = 0.693147182464599609375f, ln2_rest = -1.9046542121259336e-09f;
        const float a = f * ln2;
        const float series =
            fmaf(f, fmaf(f, fmaf(f, fmaf(f, 1.3333558146e-3f, 9.6181291076e-3f), 5.5504108665e-2f), 2.4022650696e-1f),
                 ln2_rest);
        const float low = fmaf(f, series, fmaf(f, ln2, -a));
        const float b = t.x * a;
        const float rest = fmaf(t.x, a, -b) + fmaf(t.x, low, fmaf(t.y, a, t.y));
        const std::uint32_t exponent = static_cast<std::uint32_t>((eighth << 20) >> 23) << 23;
        const float scaled = __uint_as_float(__float_as_uint(y) - exponent);
        const float error = ((scaled - t.x) - b) - rest;
        return ldexpf_by(error, exponent);
    }
    /// error 2^e of an exponent e that stands at the place of a float's; errors are far from the ends of the range.
    __device__ __forceinline__ static float ldexpf_by(float error, std::uint32_t exponent) {
        return error * __uint_as_float(0x3F800000u + exponent);
    }

    /// The scores that are looked at, in a thread's order: they come before p, which takes their place. (Two softmaxes, one
    /// with sums and one without, would do without copies, but where their p meet nvcc moves registers that wgmma waits for.)
    static constexpr int kept_scores = keys / 16;
    __device__ __forceinline__ static void keep_scores(float (&kept)[kept_scores], const float (&s)[keys / 2]) {
#pragma unroll
        for (int j = 0; j < keys / 8; ++j)
            if (sample::has_column(8 * j))
#pragma unroll
                for (int i = 0; i < 4; ++i) kept[j / 8 * 4 + i] = copied(s[4 * j + i]);
    }
    /// exp_argument, exp and p_cast of a tile, the first three of sums.
    template <class Softmax>
    __device__ __forceinline__ void elements(const Place& at, const Softmax& softmax, const float (&kept)[kept_scores],
                                             const float (&p)[keys / 2], float scale, ErrorSum (&sums)[4]) const {
        ErrorSum argument, exp, cast;
#pragma unroll
        for (int j = 0; j < keys / 8; ++j) {
            if (!sample::has_column(8 * j)) continue;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float score = kept[j / 8 * 4 + i], y = copied(p[4 * j + i]), reference = softmax.reference(i / 2);
                const bool visible = exists(at, i / 2) && score > -INFINITY;
                const float x = Softmax::argument(score, reference, scale);
                // (score - reference) scale as a pair
                const float t = score - reference;
                const float from = t - score;
                const float t_rest = (score - (t - from)) + (-reference - from);
                const float product = t * scale;
                argument.add((x - product) - (fmaf(t, scale, -product) + t_rest * scale), visible);
                exp.add(x > -126.0f ? exp_error(x, y) : 0.0f, visible);
                cast.add(unpack<T>(pack<T>(y, 0.0f)).x - y, visible);
            }
        }
        sums[0] = argument;
        sums[1] = exp;
        sums[2] = cast;
    }

    /// o_rescale, the fourth: the output before it is multiplied with alpha. Writes the four. key_tile: whose maximum asks for
    /// it.
    __device__ __forceinline__ void rescale(const Place& at, const float (&before)[d / 2], const float (&alpha)[2],
                                            ErrorSum (&sums)[4], int key_tile) const {
#pragma unroll
        for (int i = 0; i < d / 2; ++i)
            if (sample::has_column(i / 4 * 8)) {
                const float a = alpha[i / 2 % 2], o = copied(before[i]);
                sums[3].add(-fmaf(o, a, -(o * a)), exists(at, i / 2 % 2));
            }
        write_elements(at, sums, key_tile);
    }
    __device__ __forceinline__ void write_elements(const Place& at, const ErrorSum (&sums)[4], int key_tile) const {
        write_four(sums, cell(at, key_tile, 1), at.rows > 0);
    }
    /// The output as it is cast: o times 1 / row sum, of two rows.
    __device__ __forceinline__ void output_cast(const Place& at, const float (&o)[d / 2],
                                                const float (&inverse)[2]) const {
        ErrorSum error;
#pragma unroll
        for (int i = 0; i < d / 2; i += 2)
            if (sample::has_column(i / 4 * 8)) {
                const int r = i / 2 % 2;
                const float low = copied(o[i]) * inverse[r], high = copied(o[i + 1]) * inverse[r];
                const float2 cast = unpack<T>(pack<T>(low, high));
                error.add(cast.x - low, exists(at, r));
                error.add(cast.y - high, exists(at, r));
            }
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2) {
            error.sum += __shfl_xor_sync(~0u, error.sum, distance);
            error.sum_squared += __shfl_xor_sync(~0u, error.sum_squared, distance);
            error.max_abs = fmaxf(error.max_abs, __shfl_xor_sync(~0u, error.max_abs, distance));
            error.count += __shfl_xor_sync(~0u, error.count, distance);
        }
        if (at.rows > 0 && lane == 0)
            *reinterpret_cast<float4*>(cell(at, 0, 6)) = {error.sum, error.sum_squared, error.max_abs, error.count};
    }
};

}  // namespace faultline::tensor_kernel
