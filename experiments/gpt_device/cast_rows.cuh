// SPDX-License-Identifier: Apache-2.0
// Faults with one sign for a head in tiles of bf16 of at most 1024 rows: values in registers from one reading to one writing. A block
// has 128 rows of a tile, a cluster of blocks the tile where it is longer; a thread has four lanes (altered_casts.cuh) of a group of
// 128 elements, which are neighbours, so that it reads and writes 8 bytes at once and draws four blocks of Threefry for 32 elements.
// Elements take one path without branches; a thread among whose elements one asks for more (not finite, zero, at the ends of the
// range, or the one in 65,536 that the lower random bits decide) goes through its own again, one by one.
#pragma once

#include <cooperative_groups.h>

#include <type_traits>

#include <faultline/gpt_device/altered_casts.cuh>
#include <faultline/gpt_device/cluster_exchange.cuh>
#include <faultline/gpt_device/quick_sum.hpp>

namespace faultline::gpt::on_device {

/// Of a block: `rows` rows of `cols` columns, 64 or 128.
template <int cols>
struct CastRows {
    static constexpr int rows = 128, group_rows = 128 / cols, threads = rows * cols / 32, warps = threads / 32;
    static constexpr int most_parts = 8;  ///< blocks of a tile: what a cluster may have on every card
    /// What a tile's amplitude is made of.
    struct alignas(16) Squares {
        double of_row[rows];
        int left_out[warps];  ///< elements that are not finite
    };
    Squares squares;
    double amplitude;
    QuickSum sum;
    double sums[warps][7];
    double records[most_parts][7];  ///< of the first block: what each did
};

/// What makes of x what is asked: x + factor x, or x + constant.
struct QuickLaw {
    double factor, constant;
};
/// Of a thread's changed elements, halves of words: whether all of them took few instructions.
struct QuickRange {
    unsigned lower = 0, exponents = 0;

    __device__ __forceinline__ void see(unsigned held, unsigned cut_off, bool stochastic) {
        if (stochastic)
            lower = __vmaxu2(lower, cut_off);  // 0xFFFF: the lower random bits decide whether there is a carry
        exponents = __vmaxu2(exponents, (held & 0x7F807F80u) - 0x01000100u);
    }
    /// Of one element at least the exponent is not between the second and the last but one of normal numbers, or the carry is open.
    /// (A borrow from the half beside it comes from one that is out of the range.)
    [[nodiscard]] __device__ __forceinline__ bool left() const {
        return (lower & 0xFFFFu) == 0xFFFFu || lower >> 16 == 0xFFFFu || (exponents & 0xFFFFu) > 0x7D80u ||
               exponents >> 16 > 0x7D80u;
    }
};

__device__ __forceinline__ float lower_half(unsigned word) { return __uint_as_float(word << 16); }
__device__ __forceinline__ float upper_half(unsigned word) { return __uint_as_float(word & 0xFFFF0000u); }

/// y in bf16 in the upper half, by 16 random bits or to nearest; in the lower half what held_in_bf16() looks at.
template <bool stochastic>
__device__ __forceinline__ unsigned quickly_held(double y, unsigned random) {
    const unsigned cut = __float_as_uint(__double2float_rz(y));
    if constexpr (stochastic) return cut + random;
    const unsigned rest = (static_cast<unsigned>(__double2loint(y)) & 0x1FFFFFFFu) != 0 ? 1u : 0u;
    return (cut | rest) + 0x7FFFu + (cut >> 16 & 1u);
}

/// Two neighbours in a word; random: 16 bits for each.
template <bool of_value, bool stochastic, bool recorded>
__device__ __forceinline__ void change_two(const QuickLaw& law, unsigned& word, unsigned random0, unsigned random1,
                                           QuickRange& range, Realised& mine) {
    const double x[2] = {lower_half(word), upper_half(word)};
    const double asked[2] = {of_value ? law.factor * x[0] : law.constant, of_value ? law.factor * x[1] : law.constant};
    const unsigned held0 = quickly_held<stochastic>(x[0] + asked[0], random0),
                   held1 = quickly_held<stochastic>(x[1] + asked[1], random1);
    word = __byte_perm(held0, held1, 0x7632);
    range.see(word, __byte_perm(held0, held1, 0x5410), stochastic);
    if constexpr (recorded) {
        const double held[2] = {lower_half(word), upper_half(word)};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const double by = held[i] - x[i];
            mine.sum += by;
            mine.sum_squared = fma(by, by, mine.sum_squared);
            mine.sum_abs += fabs(by);
            if constexpr (of_value) {
                mine.asked_sum += asked[i];
                mine.asked_squared = fma(asked[i], asked[i], mine.asked_squared);
                mine.value_squared = fma(x[i], x[i], mine.value_squared);
            }
        }
    }
}

/// As change_quickly<false, true, false>, in binary32 (quick_sum.hpp): false where that leaves an element open.
__device__ __forceinline__ bool change_in_binary32(const QuickSum& law, const Block4x32 (&drawn)[4], uint2 (&v)[8]) {
    unsigned open = ~0u, least = ~0u;  // of halves of words
#pragma unroll
    for (int j = 0; j < 4; j += 2) {
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            unsigned& word = j == 0 ? v[k].x : v[k].y;
            const unsigned r0 = drawn[j].word[k % 4], r1 = drawn[j + 1].word[k % 4];
            const unsigned held0 = __float_as_uint(law.of(lower_half(word))) + (k < 4 ? r0 & 0xFFFFu : r0 >> 16),
                           held1 = __float_as_uint(law.of(upper_half(word))) + (k < 4 ? r1 & 0xFFFFu : r1 >> 16);
            word = __byte_perm(held0, held1, 0x7632);
            // A carry into the upper half is from a lower half that is open itself.
            open = __vminu2(open, __byte_perm(held0, held1, 0x5410) + QuickSum::before * 0x00010001u);
            least = __vminu2(least, word & 0x7FFF7FFFu);
        }
    }
    const unsigned both = min(open & 0xFFFFu, open >> 16);
    return both >= QuickSum::open && min(least & 0xFFFFu, least >> 16) >= law.least;
}

/// A thread's elements one by one, as change_casts(): lanes 4 quarter to 4 quarter + 3 of a group, which begins at `from`.
template <int cols>
__device__ __noinline__ void change_one_by_one(const Alteration& a, const TileDraw& draw, int group, int quarter,
                                               Bf16* from, std::size_t row_stride, int rows_left, Realised& mine) {
    const CastLaw law(a, draw);
    RoundingDraws draws(law.roundings);
#pragma unroll 1
    for (int i = 0; i < 32; ++i) {
        const int at = i / 8 + 4 * quarter + i % 8 * 16, row = at / cols;
        if (row >= rows_left) continue;
        Bf16* const to = from + row * row_stride + at % cols;
        const Bf16 before = *to;
        if (!is_finite(before)) continue;
        const double x = widened(before), asked = law.of_value ? law.magnitude * x * law.sign : law.constant;
        double by = 0;
        if (law.magnitude != 0) {
            const auto element = static_cast<std::uint64_t>(group) * 128 + at;
            Bf16 held;
            if (!held_in_bf16(x + asked, law.stochastic, law.stochastic ? draws.upper_bits(element) : 0, held))
                store1(&held, static_cast<float>(held_otherwise(a, x + asked, law.roundings, element)));
            *to = held;
            by = value_of(held) - x;
        }
        tensor_kernel::add_change(mine, 1, x, by, asked);
    }
}

/// |x| of a finite x in the upper half of a word. Sign, exponent and significand move by three bits, which is x 2^-896, of a subnormal
/// number too; the product is exact. (A conversion of types takes four times as long as a product.)
__device__ __forceinline__ double widened_magnitude(unsigned word) {
    return __hiloint2double(static_cast<int>(word >> 3 & 0x0FFFE000u), 0) * 0x1p896;
}

/// Sums of squares of a thread's four lanes in the two rows, or the one, of its group.
template <int cols>
__device__ __forceinline__ void square_lanes(const uint2 (&v)[8], double (&lane)[CastRows<cols>::group_rows][4]) {
    constexpr int each = cols / 16, group_rows = CastRows<cols>::group_rows;
#pragma unroll
    for (int r = 0; r < group_rows; ++r)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            double sum = 0;
#pragma unroll
            for (int k = 0; k < each; ++k) {
                const unsigned word = j < 2 ? v[r * each + k].x : v[r * each + k].y;
                const double x = j % 2 == 0 ? widened_magnitude(word << 16) : widened_magnitude(word);
                sum = fma(x, x, sum);
            }
            lane[r][j] = sum;
        }
}
/// Whether one of the elements is infinite or no number, which widened_magnitude() makes at least 2^128 of; true, too, where finite ones
/// are that large.
template <int cols>
__device__ __forceinline__ bool any_not_finite(const double (&lane)[CastRows<cols>::group_rows][4]) {
    int most = 0;  // the upper halves of positive numbers are in their order
#pragma unroll
    for (const auto& row : lane)
#pragma unroll
        for (const double sum : row) most = max(most, __double2hiint(sum));
    return most >= (1023 + 256) << 20;
}

/// Sums of squares of the rows: joined over a group's four threads as joined16() joins lanes. all: of the thread's elements.
template <int cols>
__device__ __forceinline__ void square_rows_of(const double (&lane)[CastRows<cols>::group_rows][4], int group,
                                               double (&rows)[CastRows<cols>::rows], double& all) {
    constexpr int group_rows = CastRows<cols>::group_rows;
    all = 0;
#pragma unroll
    for (int r = 0; r < group_rows; ++r) all += (lane[r][0] + lane[r][1]) + (lane[r][2] + lane[r][3]);
    const int quarter = threadIdx.x % 4;
    const bool second = group_rows == 2 && quarter >= 2;  // of two rows a thread goes on with one
    double of[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        constexpr int last = group_rows - 1;
        const double kept = second ? lane[last][j] : lane[0][j], sent = second ? lane[0][j] : lane[last][j];
        of[j] = kept + __shfl_xor_sync(~0u, sent, 2);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) of[j] += __shfl_xor_sync(~0u, of[j], 1);
    if (quarter % 2 == 0 && (group_rows == 2 || quarter == 0))
        rows[group * group_rows + (second ? 1 : 0)] = (of[0] + of[2]) + (of[1] + of[3]);
}

/// Elements that are not finite are made 0, and counted.
__device__ __forceinline__ int leave_out(uint2 (&v)[8]) {
    unsigned any = 0;
    const auto flags = [](unsigned word) { return ((word & 0x7F807F80u) + 0x00800080u) & 0x80008000u; };
#pragma unroll
    for (const uint2& two : v) any |= flags(two.x) | flags(two.y);
    if (any == 0) return 0;
    int count = 0;
    const auto clear = [&](unsigned& word) {
        const unsigned of = flags(word);
        count += __popc(of);
        word &= ~((of >> 15) * 0xFFFFu);
    };
#pragma unroll
    for (uint2& two : v) {
        clear(two.x);
        clear(two.y);
    }
    return count;
}

/// A tile's amplitude by one warp, as joined_amplitude(), from the squares of its blocks.
template <int cols>
__device__ __forceinline__ double amplitude_of_rows(double magnitude, const typename CastRows<cols>::Squares* squares,
                                                    int parts, int elements) {
    using Rows = CastRows<cols>;
    const int lane = threadIdx.x % 32;
    double sum = 0;
    int left = 0;
    for (int p = 0; p < parts; ++p) {
#pragma unroll
        for (int i = 0; i < Rows::rows; i += 16) sum += squares[p].of_row[i + lane % 16];
        if (lane < Rows::warps) left += squares[p].left_out[lane];
    }
    const double count = elements - __reduce_add_sync(~0u, left), all = joined16(sum);
    return count == 0 ? 0.0 : magnitude * ::sqrt(all / count);
}

/// What the threads of a tile's blocks did, into *to.
template <int cols, bool clustered>
__device__ __forceinline__ void keep_rows(const Realised& mine, CastRows<cols>& shared, int part, int parts,
                                          Realised* to) {
    const double of[7] = {mine.count,     mine.sum,           mine.sum_squared,  mine.sum_abs,
                          mine.asked_sum, mine.asked_squared, mine.value_squared};
#pragma unroll
    for (int n = 0; n < 7; ++n) {
        const double sum = warp_sum(of[n]);
        if (threadIdx.x % 32 == 0) shared.sums[threadIdx.x / 32][n] = sum;
    }
    if constexpr (clustered)
        cooperative_groups::this_cluster().sync();  // and every block runs, whose memory is written
    else
        __syncthreads();
    if (threadIdx.x < 7) {
        double sum = 0;
        for (int w = 0; w < CastRows<cols>::warps; ++w) sum += shared.sums[w][threadIdx.x];
        if constexpr (clustered)  // to the first block, which adds them up
            cooperative_groups::this_cluster().map_shared_rank(&shared, 0)->records[part][threadIdx.x] = sum;
        else
            reinterpret_cast<double*>(to)[threadIdx.x] = sum;
    }
    if constexpr (clustered) {
        cooperative_groups::this_cluster().sync();
        if (part == 0 && threadIdx.x < 7) {
            double sum = 0;
            for (int p = 0; p < parts; ++p) sum += shared.records[p][threadIdx.x];
            reinterpret_cast<double*>(to)[threadIdx.x] = sum;
        }
    }
}

/// The blocks of Threefry of a thread's lanes j and j + 1 of its four.
template <int j>
__device__ __forceinline__ void draw_two(std::uint64_t stream, int group, Block4x32 (&to)[4]) {
#pragma unroll
    for (int i = j; i < j + 2; ++i) to[i] = detail::stochastic_block(stream, group, threadIdx.x % 4 * 4 + i, 0);
        // Here: the compiler would put it where it is used, when all wait for it.
#pragma unroll
    for (int i = j; i < j + 2; ++i)
        asm volatile("" : "+r"(to[i].word[0]), "+r"(to[i].word[1]), "+r"(to[i].word[2]), "+r"(to[i].word[3]));
}

/// A thread's 32 elements: v, and what comes of them in their place. drawn: of its four lanes, read where the law is stochastic.
template <bool of_value, bool stochastic, bool recorded>
__device__ __forceinline__ bool change_quickly(const QuickLaw& law, const Block4x32 (&drawn)[4], uint2 (&v)[8],
                                               Realised& mine) {
    QuickRange range;
#pragma unroll
    for (int j = 0; j < 4; j += 2) {
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            const unsigned r0 = drawn[j].word[k % 4], r1 = drawn[j + 1].word[k % 4];
            change_two<of_value, stochastic, recorded>(law, j == 0 ? v[k].x : v[k].y, k < 4 ? r0 & 0xFFFFu : r0 >> 16,
                                                       k < 4 ? r1 & 0xFFFFu : r1 >> 16, range, mine);
        }
    }
    return !range.left();
}

/// Of what sequences it is recorded what was done.
enum class RecordedRows { all, first_sequence };

/// Grid: tiles times their parts of 128 rows, heads, sequences. keys: of the streams of roundings, [head, sequence, tile]; read where
/// the hold is stochastic. records: likewise.
template <int cols, bool clustered, RecordedRows rows_recorded, bool of_value, bool stochastic>
__global__ void __launch_bounds__(CastRows<cols>::threads, 1024 / CastRows<cols>::threads)
    alter_cast_rows(TileSet<Bf16> set, const HeadFault* faults, const std::uint64_t* keys, int parts,
                    Realised* records) {
    using Rows = CastRows<cols>;
    constexpr int each = cols / 16;  // vectors of a row
    constexpr bool exchanges = clustered && !of_value;
    __shared__ Uninitialised<Rows> shared_rows;
    __shared__
        std::conditional_t<exchanges, Uninitialised<ClusterExchange<typename Rows::Squares, Rows::most_parts>>, char>
            shared_exchange;
    Rows& shared = shared_rows.value();
    // A cluster is a tile: no division of indices, which would be some 30 instructions.
    const int index = static_cast<int>(clustered ? cluster_number() : blockIdx.x),
              tiles = static_cast<int>(clustered ? cluster_count() : gridDim.x),
              part = clustered ? static_cast<int>(cooperative_groups::this_cluster().block_rank()) : 0;
    const int head = static_cast<int>(blockIdx.y), sequence = static_cast<int>(blockIdx.z);
    const std::size_t slot = (static_cast<std::size_t>(head) * set.sequences + sequence) * tiles + index;
    const bool recorded = rows_recorded == RecordedRows::all || sequence == 0;
    const HeadFault& fault = faults[head];
    if (!fault.touched) {
        if (recorded && part == 0 && threadIdx.x < 7) reinterpret_cast<double*>(records + slot)[threadIdx.x] = 0;
        return;
    }
    if constexpr (exchanges) shared_exchange.value().begin(parts);
    const Alteration& a = fault.change;
    const int quarter = threadIdx.x % 4, group = threadIdx.x / 4;
    const int tile_rows = min(set.tile, set.rows - index * set.tile);
    const int rows_left = tile_rows - part * Rows::rows - group * Rows::group_rows;
    Bf16* const from =
        set.values + sequence * set.sequence_stride + head * set.head_stride +
        static_cast<std::size_t>(index * set.tile + part * Rows::rows + group * Rows::group_rows) * set.row_stride;
    const auto vector = [&](int k) {
        return reinterpret_cast<uint2*>(from + k / each * set.row_stride + k % each * 16 + 4 * quarter);
    };
    uint2 v[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) v[k] = k / each < rows_left ? *vector(k) : uint2{0, 0};
    const double magnitude = a.magnitude, sign = a.sign;
    TileDraw draw;
    draw.roundings = stochastic ? keys[slot] : 0;
    const int group_of_tile = part * (Rows::rows / Rows::group_rows) + group;
    // Half of the random numbers while the elements are on their way, half while the other blocks or one warp are waited for.
    Block4x32 drawn[4];
    if constexpr (stochastic) draw_two<0>(draw.roundings, group_of_tile, drawn);
    bool whole = rows_left >= Rows::group_rows;
    double squares = 0;  // of this thread's elements
    if constexpr (!of_value) {
        double lanes[Rows::group_rows][4];
        square_lanes<cols>(v, lanes);
        int left_out = 0;
        if (any_not_finite<cols>(lanes)) {
            left_out = leave_out(v);
            whole &= left_out == 0;
            square_lanes<cols>(v, lanes);
        }
        square_rows_of<cols>(lanes, group, shared.squares.of_row, squares);
        const int of_warp = __reduce_add_sync(~0u, left_out);
        if (threadIdx.x % 32 == 0) shared.squares.left_out[threadIdx.x / 32] = of_warp;
        __syncthreads();
        if constexpr (exchanges) {
            shared_exchange.value().send(shared.squares, part, parts);
            if constexpr (stochastic) draw_two<2>(draw.roundings, group_of_tile, drawn);
        }
        if (threadIdx.x < 32) {
            const typename Rows::Squares* all = &shared.squares;
            if constexpr (exchanges) {
                shared_exchange.value().wait();
                all = shared_exchange.value().of;
            }
            const double amplitude = amplitude_of_rows<cols>(magnitude, all, parts, tile_rows * cols);
            if (threadIdx.x == 0) {
                shared.amplitude = amplitude;
                shared.sum = QuickSum(amplitude * sign, magnitude);
            }
        }
    }
    if constexpr (stochastic && !exchanges) draw_two<2>(draw.roundings, group_of_tile, drawn);
    if constexpr (!of_value) {
        __syncthreads();
        draw.amplitude = shared.amplitude;
    }
    const QuickLaw law{magnitude * sign, draw.amplitude * sign};
    Realised mine{};
    const auto change = [&]<bool counts>(std::bool_constant<counts>) {
        bool quick = false;
        if constexpr (!counts && !of_value && stochastic) {
            const QuickSum sum = shared.sum;
            quick = sum.fits && change_in_binary32(sum, drawn, v);
            if (!quick && whole) {  // of one thread in some 400
#pragma unroll
                for (int k = 0; k < 8; ++k) v[k] = *vector(k);
                quick = change_quickly<of_value, stochastic, counts>(law, drawn, v, mine);
            }
        } else {
            quick = change_quickly<of_value, stochastic, counts>(law, drawn, v, mine);
        }
        if (whole && quick) {
#pragma unroll
            for (int k = 0; k < 8; ++k) *vector(k) = v[k];
            if constexpr (counts) {
                mine.count = 32;
                if (!of_value) {
                    mine.asked_sum = 32 * law.constant;
                    mine.asked_squared = 32 * (law.constant * law.constant);
                    mine.value_squared = squares;
                }
            }
        } else {
            Realised one_by_one{};
            change_one_by_one<cols>(a, draw, group_of_tile, quarter, from, set.row_stride, rows_left, one_by_one);
            if constexpr (counts) mine = one_by_one;
        }
    };
    if (recorded)
        change(std::true_type());
    else
        change(std::false_type());
    if (recorded) keep_rows<cols, clustered>(mine, shared, part, parts, records + slot);
}

}  // namespace faultline::gpt::on_device
