// SPDX-License-Identifier: Apache-2.0
// The recorder inside the forward: what a consuming warp does on a tile that is looked at (recording.hpp says what that is).
// A kernel without one (NoRecorder) is the kernel as it stands without these calls.
#pragma once

#include <type_traits>

#include <faultline/tensor_kernel/mma.cuh>
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
    /// The same of an error that is a number where it is taken, without the count.
    __device__ __forceinline__ void add_if(bool taken, float error) {
        const float e = taken ? error : 0.0f;
        sum += e;
        sum_squared = fmaf(e, e, sum_squared);
        max_abs = fmaxf(max_abs, fabsf(e));
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

/// Two errors a thread, over all threads of the warp to one cell.
__device__ __forceinline__ void write_two(const float (&errors)[2], const bool (&counts)[2], RecordedCell* cell,
                                          bool written) {
    float x[16] = {};
    int count = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const bool taken = counts[i] && fabsf(errors[i]) < INFINITY;
        const float e = taken ? errors[i] : 0.0f;
        x[0] += e;
        x[1] = fmaf(e, e, x[1]);
        x[2] = fmaxf(x[2], fabsf(e));
        count += __popc(__ballot_sync(~0u, taken));
    }
    exchange<2>(x);
    exchange<1>(x);
    const int kind = threadIdx.x % 8 / 2;  // the bits of the lane say what it kept
#pragma unroll
    for (const int distance : {16, 8, 1}) {
        const float other = __shfl_xor_sync(~0u, x[0], distance);
        x[0] = kind == 2 ? fmaxf(x[0], other) : x[0] + other;
    }
    if (written && threadIdx.x % 32 < 8 && threadIdx.x % 2 == 0)
        reinterpret_cast<float*>(cell)[kind] = kind == 3 ? static_cast<float>(count) : x[0];
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

/// c += a b in binary64 (PTX ISA, mma.m8n8k4 with .f64): of a row lane/4, k lane%4; of b k lane%4, column lane/4; of c row
/// lane/4, columns 2 (lane%4) and the next.
__device__ __forceinline__ void mma_binary64(double (&c)[2], double a, double b) {
    asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
                 : "+d"(c[0]), "+d"(c[1])
                 : "d"(a), "d"(b));
}
/// A bf16 in the upper half of a word as a double without a change of its exponent's bits, so that its bias is off by 896: x
/// is 2^-896 x, exactly, and as `large` 2^896 x, which a subnormal or 0 is not: it has a leading 1 then. The products of both
/// are exact.
__device__ __forceinline__ double small(std::uint32_t word) {
    return __hiloint2double((static_cast<int>(word) >> 3) & static_cast<int>(0x8FFFE000u), 0);
}
__device__ __forceinline__ double large(std::uint32_t word) {
    return __hiloint2double(((static_cast<int>(word) >> 3) & static_cast<int>(0x8FFFE000u)) | 0x70000000, 0);
}
/// sums[i] += the products of the halves i of a pair of a and a pair of b.
__device__ __forceinline__ void add_products(double (&sums)[2][2], std::uint32_t a, std::uint32_t b) {
    mma_binary64(sums[0], large(a << 16), small(b << 16));
    mma_binary64(sums[1], large(a), small(b));
}

template <class T, int d, int keys>
struct Recorder {
    static_assert(std::is_same_v<T, __nv_bfloat16>);  // small() and large()
    static constexpr bool records = true, alters = false, alters_state = false;
    struct Arguments {
        RecordedCell* cells;
        std::uint64_t threshold;
        std::uint32_t seed;
        int row_groups, k_tiles;
        int part;  ///< query tiles that a block looks through at once, 1 to 32
        [[nodiscard]] bool is_all() const { return threshold > 0xFFFFFFFFu; }
    };
    struct Memory {
        float2 eighths[8];
    };

    /// A query tile's 16 rows of this warp.
    struct Place {
        int head, row_group, rows;  ///< rows that exist, from the warp's first
        std::uint32_t bits;         ///< sample::product_bits
        [[nodiscard]] __device__ __forceinline__ int half() const { return sample::product_half(bits); }
    };

    const Arguments& in;
    const float2* eighths;
    int lane;
    float before[2];  ///< the output where its product is looked at, before that is added

    __device__ __forceinline__ Recorder(const Arguments& arguments, Memory& memory, int)
        : in(arguments), eighths(memory.eighths), lane(threadIdx.x % 32) {}

    __device__ __forceinline__ static bool looks_at(const Arguments& in, int head, int q_tile) {
        return sample::tile_bits(in.seed, head, q_tile) < in.threshold;
    }
    __device__ __forceinline__ RecordedCell* cell(const Place& at, int key_tile, int site) const {
        const std::int64_t tile = (static_cast<std::int64_t>(at.head) * in.row_groups + at.row_group) * in.k_tiles;
        return in.cells + (tile + key_tile) * site_cells + site;
    }
    /// Whether the thread's row r of two exists.
    __device__ __forceinline__ bool exists(const Place& at, int r) const { return lane / 4 + 8 * r < at.rows; }

    /// 8 elements of row `row` from column `column` (a multiple of 8) of a swizzled operand of `rows` rows.
    __device__ __forceinline__ static const uint4& eight(const T* panels, int rows, int row, int column) {
        return *reinterpret_cast<const uint4*>(panels + (column / 64 * rows + row) * 64 +
                                               ((column % 64 / 8) ^ (row % 8)) * 8);
    }

    /// A query tile begins.
    __device__ __forceinline__ Place begin(int head, int first_row, int n_q) const {
        const int row_group = first_row / 16;
        return {head, row_group, n_q - first_row, sample::product_bits(in.seed, head, row_group)};
    }

    /// s = q k^T of a tile before any mask. q: the block's, of block_q rows, the warp's from warp_row on; limit: how many of the
    /// tile's keys the thread's row of product_half() sees. The order of k is free in a sum whose error does not matter: a
    /// thread takes eight neighbours of 32, one a product.
    template <int block_q>
    __device__ __forceinline__ void scores(const Place& at, const float (&s)[keys / 2], const T* q, int warp_row,
                                           const T* k, int key_tile, int limit) const {
        const int half = at.half(), column = sample::first_score_column(at.bits, key_tile);
        double exact[2][2] = {};
#pragma unroll
        for (int c = 0; c < d; c += 32) {
            const uint4 a = eight(q, block_q, warp_row + 8 * half + lane / 4, c + 8 * (lane % 4)),
                        b = eight(k, keys, column + lane / 4, c + 8 * (lane % 4));
            add_products(exact, a.x, b.x);
            add_products(exact, a.y, b.y);
            add_products(exact, a.z, b.z);
            add_products(exact, a.w, b.w);
        }
        float errors[2];
        bool counts[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float upper = chosen(half, s[32 + 2 + i], s[32 + i]), lower = chosen(half, s[2 + i], s[i]);
            errors[i] = static_cast<float>((column != 0 ? upper : lower) - (exact[0][i] + exact[1][i]));
            counts[i] = column + 2 * (lane % 4) + i < limit && exists(at, half);
        }
        write_two(errors, counts, cell(at, key_tile, 0), at.rows > 0);
    }

    /// Before o (+)= p v is issued: o as the product finds it.
    __device__ __forceinline__ void before_output(const Place& at, const float (&o)[d / 2], int key_tile,
                                                  bool accumulate) {
        const float2 found = eight_columns(o, sample::first_output_column(at.bits, key_tile, d) / 8, at.half());
        before[0] = accumulate ? found.x : 0.0f;
        before[1] = accumulate ? found.y : 0.0f;
    }
    /// When it is complete.
    __device__ __forceinline__ void output(const Place& at, const float (&o)[d / 2],
                                           const std::uint32_t (&p)[keys / 16][4], const T* v, int key_tile) const {
        const int half = at.half(), column = sample::first_output_column(at.bits, key_tile, d);
        double exact[2][2] = {{before[0], before[1]}, {}};
#pragma unroll
        for (int c = 0; c < keys; c += 32) {
            std::uint32_t b[4];
            load_matrices<true>(b, &eight(v, keys, c + lane, column));
#pragma unroll
            for (int i = 0; i < 4; ++i)
                add_products(exact, chosen(half, p[c / 16 + i / 2][i % 2 * 2 + 1], p[c / 16 + i / 2][i % 2 * 2]), b[i]);
        }
        const float2 after = eight_columns(o, column / 8, half);
        const bool there = exists(at, half);
        write_two({static_cast<float>(after.x - (exact[0][0] + exact[1][0])),
                   static_cast<float>(after.y - (exact[0][1] + exact[1][1]))},
                  {there, there}, cell(at, key_tile, 5), at.rows > 0);
    }

    /// yes where `which` is not 0. As an instruction that stands here: see copied().
    __device__ __forceinline__ static float chosen(int which, float yes, float no) {
        float x;
        asm volatile("{\n.reg .pred p;\nsetp.ne.s32 p, %1, 0;\nselp.f32 %0, %2, %3, p;\n}\n"
                     : "=f"(x)
                     : "r"(which), "f"(yes), "f"(no));
        return x;
    }
    __device__ __forceinline__ static std::uint32_t chosen(int which, std::uint32_t yes, std::uint32_t no) {
        return which != 0 ? yes : no;
    }
    /// Of eight columns, the j-th eight, the thread's two of its row `half`. Registers have no index: a tree of choices.
    __device__ __forceinline__ static float2 eight_columns(const float (&o)[d / 2], int j, int half) {
        float2 x[d / 8];
#pragma unroll
        for (int i = 0; i < d / 8; ++i)
            x[i] = {chosen(half, o[4 * i + 2], o[4 * i]), chosen(half, o[4 * i + 3], o[4 * i + 1])};
#pragma unroll
        for (int bit = 1; bit < d / 8; bit *= 2)
#pragma unroll
            for (int i = 0; i < d / 8; i += 2 * bit) x[i] = (j & bit) != 0 ? x[i + bit] : x[i];
        return x[0];
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
    /// exp_argument, exp and p_cast of a tile, the first three of sums. Elements count whose argument is a number below 2^100 in
    /// size (masked ones are -inf), so that no error needs a look of its own at whether it is one.
    template <class Softmax>
    __device__ __forceinline__ void elements(const Place& at, const Softmax& softmax, const float (&kept)[kept_scores],
                                             const float (&p)[keys / 2], float scale, ErrorSum (&sums)[4]) const {
        ErrorSum argument, exp, cast;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float reference = softmax.reference(r), limit = exists(at, r) ? 0x1p100f : 0.0f;
#pragma unroll
            for (int j = 0; j < keys / 8; ++j) {
                if (!sample::has_column(8 * j)) continue;
#pragma unroll
                for (int i = 2 * r; i < 2 * r + 2; ++i) {
                    const float score = kept[j / 8 * 4 + i], y = copied(p[4 * j + i]);
                    const float x = Softmax::argument(score, reference, scale);
                    const bool taken = fabsf(x) < limit;
                    // (score - reference) scale as a pair
                    const float t = score - reference;
                    const float from = t - score;
                    const float t_rest = (score - (t - from)) + (-reference - from);
                    const float product = t * scale;
                    argument.add_if(taken, (x - product) - fmaf(t_rest, scale, fmaf(t, scale, -product)));
                    exp.add_if(taken && x > -126.0f, exp_error(x, y));
                    cast.add_if(taken, unpack<T>(pack<T>(y, 0.0f)).x - y);
                    argument.count += taken ? 1.0f : 0.0f;
                }
            }
        }
        exp.count = cast.count = argument.count;
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
