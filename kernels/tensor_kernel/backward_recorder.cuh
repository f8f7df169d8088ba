// SPDX-License-Identifier: Apache-2.0
// The recorder inside the backward: what a consuming warp, which holds 16 keys and 64 queries, does on a tile that is looked at
// (backward_recording.hpp says what that is). A kernel without one is the kernel as it stands without these calls.
#pragma once

#include <iterator>

#include <faultline/tensor_kernel/backward_recording.hpp>
#include <faultline/tensor_kernel/backward_tiles.cuh>
#include <faultline/tensor_kernel/probability.cuh>
#include <faultline/tensor_kernel/recorder.cuh>
#include <faultline/tensor_kernel/shadow.hpp>
#include <faultline/tensor_kernel/widen.cuh>

namespace faultline::tensor_kernel {

struct NoBackwardRecorder {
    static constexpr bool records = false, alters = false;
    struct Arguments {};
    struct Place {};
    struct Sums {};
};

/// Of the key tiles of a launch some, by their numbers. On the host, so that a block knows at once whether its tile is one.
struct KeyTileSet {
    static constexpr int most = 16384;
    std::uint32_t words[most / 32];
    [[nodiscard]] __device__ __forceinline__ bool has(unsigned number) const {
        return (words[number / 32] >> number % 32 & 1u) != 0;
    }
};

template <class T, class Tiles, class Variant>
struct BackwardTileRecorder {
    static constexpr bool records = true, alters = false;
    struct Sums {};
    static constexpr int d = Tiles::head_dim;
    struct Arguments {
        RecordedCell* cells;
        std::uint64_t threshold;
        std::uint32_t seed;
        int q_steps, key_groups;
        /// The key tiles that are looked at, one a block, which a launch of their own takes (backward_others() the rest beside
        /// it). None where a block decides by itself whether it records: where dq is summed in the order of `turn`, in which a
        /// block waits for others, and where they are more than there is place for.
        int listed = 0, list[512];

        void list_for(const BackwardArguments& call) {
            const int tiles = call.k_tiles * call.all_heads;
            if (call.turn != nullptr || tiles > KeyTileSet::most) return;
            for (int number = 0; number < tiles; ++number) {
                if (!looks_at(*this, call, number)) continue;
                if (listed == static_cast<int>(std::size(list))) {
                    listed = 0;
                    return;
                }
                list[listed++] = number;
            }
        }
        [[nodiscard]] KeyTileSet set() const {
            KeyTileSet all{};
            for (int i = 0; i < listed; ++i) all.words[list[i] / 32] |= 1u << list[i] % 32;
            return all;
        }
    };
    /// A warp's 16 keys and a step of 64 queries; and what a thread keeps of the eight queries whose elements are looked at:
    /// accumulator columns 0 and 1 of rows lane/4 and lane/4 + 8, as d[0..3].
    struct Place {
        int head, first_query, first_key, k_tile;
        float scores[4], gradients[4];
        ErrorSum product;
    };

    const BackwardArguments& call;
    const Arguments& in;

    FAULTLINE_HD static bool looks_at(const Arguments& in, const BackwardArguments& call, int number) {
        const KeyTile<Tiles> tile(call, number);
        return sample::key_tile_bits(in.seed, tile.head, tile.first_key / Tiles::block_k) < in.threshold;
    }
    __device__ __forceinline__ bool is_visible(int query, int key) const {
        return query < call.n_q && key < call.n_k && (!call.causal || key <= query + call.n_k - call.n_q);
    }
    /// Four sites, from `site` on.
    __device__ __forceinline__ void write(const ErrorSum (&sums)[4], const Place& at, int site) const {
        const bool has_cell = at.first_query < call.n_q && at.first_key < call.n_k;
        const std::int64_t step = static_cast<std::int64_t>(at.head) * in.q_steps + at.first_query / 64;
        write_four(sums, in.cells + (step * in.key_groups + at.first_key / 16) * backward_site_cells + site, has_cell);
    }

    /// Eight elements of a row from column 8 group on, of a swizzled operand whose panels have `rows` rows.
    __device__ __forceinline__ static uint4 eight(const T* panels, int rows, int row, int group) {
        return *reinterpret_cast<const uint4*>(panels + (group / 8 * rows + row) * 64 + ((group % 8) ^ (row & 7)) * 8);
    }

    /// A product of keys (the warp's first row, of block_k) and queries (the step's first, of block_q), where it is its turn.
    /// Four threads share an element and take every fourth eight columns.
    __device__ __forceinline__ void product(const float (&x)[32], const T* keys, const T* queries, Place& at,
                                            bool scores) const {
        at.product = ErrorSum{};
        if (scores != sample::has_score_product(at.first_key / 16, at.first_query / 64)) return;
        const int lane = threadIdx.x % 32, key = sample::product_key(in.seed, at.head, at.first_key / 16);
        const int first = sample::first_product_query(at.k_tile), query = first + lane / 4;
        float low = 0, high = 0;  // columns of this thread, of row key % 8 + 8 (key / 8)
#pragma unroll
        for (int j = 0; j < 8; ++j)
            if (8 * j == first) {
                low = key < 8 ? x[4 * j] : x[4 * j + 2];
                high = key < 8 ? x[4 * j + 1] : x[4 * j + 3];
            }
        const int from = key % 8 * 4 + lane / 4 / 2;
        const float of_low = __shfl_sync(~0u, low, from), of_high = __shfl_sync(~0u, high, from);
        const float value = lane / 4 % 2 == 0 ? of_low : of_high;
        float sum = 0, rest = 0;
#pragma unroll 2
        for (int group = lane % 4; group < d / 8; group += 4) {
            const uint4 a = eight(keys, Tiles::block_k, key, group), b = eight(queries, Tiles::block_q, query, group);
            const std::uint32_t as[4] = {a.x, a.y, a.z, a.w}, bs[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float2 p = widen<T>(as[i]), q = widen<T>(bs[i]);
                shadow::add_exactly(sum, rest, p.x * q.x);
                shadow::add_exactly(sum, rest, p.y * q.y);
            }
        }
#pragma unroll
        for (int distance = 1; distance < 4; distance *= 2) {
            const float other = __shfl_xor_sync(~0u, sum, distance);
            rest += __shfl_xor_sync(~0u, rest, distance);
            shadow::add_exactly(sum, rest, other);
        }
        const bool counts = lane % 4 == 0 && is_visible(at.first_query + query, at.first_key + key);
        at.product.add((value - sum) - rest, counts);
    }
    /// The sampled scores, masked, before they become p.
    __device__ __forceinline__ static void keep_scores(Place& at, const float (&s)[32]) {
#pragma unroll
        for (int e = 0; e < 4; ++e) at.scores[e] = copied(s[e]);
    }
    __device__ __forceinline__ void probabilities(const Place& at, const float (&p)[32], float2 lse) const {
        ErrorSum sums[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const float reference = e % 2 == 0 ? lse.x : lse.y,
                        x = argument<Variant>(at.scores[e], call.exponent, reference), y = copied(p[e]);
            const bool counts = at.scores[e] > -INFINITY && at.first_query + threadIdx.x % 4 * 2 + e % 2 < call.n_q;
            sums[0].add(shadow::argument_error(at.scores[e], call.exponent, reference, x), counts);
            sums[1].add(static_cast<float>(static_cast<double>(y) - exact_exp2(x)), counts);
            sums[2].add(static_cast<float>(static_cast<T>(y)) - y, counts);
        }
        sums[3] = at.product;
        write(sums, at, 0);
    }
    /// 2^x, x <= 128: to the nearest whole number, and the series of e^r, |r| <= ln(2)/2, to the ninth power; the next term is
    /// below 2^-36.
    __device__ __forceinline__ static double exact_exp2(float x) {
        static_assert(Variant::value.base == ExpBase::two);
        const double clamped = fmaxf(x, -1000.0f), whole = rint(clamped), r = (clamped - whole) * 0x1.62e42fefa39efp-1;
        double sum = 1.0 / 362880;
        for (const double factor : {1.0 / 40320, 1.0 / 5040, 1.0 / 720, 1.0 / 120, 1.0 / 24, 1.0 / 6, 0.5, 1.0, 1.0})
            sum = fma(sum, r, factor);
        return __hiloint2double(__double2hiint(sum) + (static_cast<int>(whole) << 20), __double2loint(sum));
    }

    /// The sampled dp, before they become ds.
    __device__ __forceinline__ static void keep_gradients(Place& at, const float (&dp)[32]) {
#pragma unroll
        for (int e = 0; e < 4; ++e) at.gradients[e] = copied(dp[e]);
    }
    __device__ __forceinline__ void score_gradients(const Place& at, const float (&p)[32], const float (&ds)[32],
                                                    float2 delta) const {
        ErrorSum sums[4];
        sums[0] = at.product;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const float reference = e % 2 == 0 ? delta.x : delta.y, y = copied(ds[e]);
            const bool counts = at.scores[e] > -INFINITY && at.first_query + threadIdx.x % 4 * 2 + e % 2 < call.n_q;
            static_assert(Variant::value.ds_scale != DsScale::before);
            sums[1].add(shadow::gradient_error(copied(p[e]), at.gradients[e], reference, y), counts);
            sums[2].add(static_cast<float>(static_cast<T>(y)) - y, counts);
        }
        write(sums, at, 4);
    }
};

}  // namespace faultline::tensor_kernel
