// SPDX-License-Identifier: Apache-2.0
// What a consumer of the backward (backward.cuh) does element by element: scores become p, dp become ds, and what a projection
// adds to ds.
#pragma once

#include <cstdint>

#include <faultline/tensor_kernel/backward_recorder.cuh>
#include <faultline/tensor_kernel/backward_tiles.cuh>
#include <faultline/tensor_kernel/fragment.cuh>
#include <faultline/tensor_kernel/probability.cuh>
#include <faultline/tensor_kernel/widen.cuh>
#include <faultline/tensor_kernel/zero_sum.cuh>

namespace faultline::tensor_kernel {

/// What stands in a recorder's place has factors of the head in its sums: `exponent`, and `dk_scale` of dk's last scaling.
template <class Rec>
concept Descales = requires {
    Rec::descales;
};

template <class T, class Tiles, class Variant, class Rec>
struct BackwardElements {
    static constexpr BackwardVariant variant = Variant::value;
    static constexpr int block_q = Tiles::block_q, block_k = Tiles::block_k;

    const BackwardArguments& in_;
    const typename Rec::Arguments& recording_;
    typename Tiles::Memory& m_;
    const int which_;  ///< of the two consumers
    unsigned step_ = 0;
    ZeroSum16 zero_sum_;
    [[no_unique_address]] typename Rec::Sums sums_{};

    [[nodiscard]] __device__ __forceinline__ unsigned stage() const { return step_ % Tiles::stages; }
    /// 64 queries of a tile.
    struct Step {
        int first_query, half;
        typename Rec::Place place{};
    };
    [[nodiscard]] __device__ __forceinline__ Step step_of(const KeyTile<Tiles>& tile, int q_tile, int g,
                                                          int half) const {
        Step step{q_tile * block_q + half * 64, half};
        if constexpr (Rec::records) {
            const int head = tile.head * in_.group + g, k_tile = tile.first_key / block_k;
            step.place = {head, step.first_query, tile.first_key + first_row(), k_tile, {}, {}, {}};
        }
        return step;
    }
    [[nodiscard]] __device__ __forceinline__ Rec recorder() const { return {in_, recording_}; }
    /// BackwardArguments::exponent, of this head where it has one of its own.
    [[nodiscard]] __device__ __forceinline__ float exponent() const {
        if constexpr (Descales<Rec>)
            return sums_.exponent;
        else
            return in_.exponent;
    }
    /// Of this warp in the key tile.
    [[nodiscard]] __device__ __forceinline__ int first_row() const { return which_ * 64 + threadIdx.x / 32 % 4 * 16; }

    /// s becomes p: in place, masked.
    __device__ __forceinline__ void probabilities(float (&s)[32], const KeyTile<Tiles>& tile, Step& step) {
        const int offset = in_.n_k - in_.n_q, lane = threadIdx.x % 32;
        if constexpr (Rec::records)
            recorder().product(s, m_.k + first_row() * 64, m_.q[stage()] + step.half * 64 * 64, step.place, true);
        const bool cut = in_.causal && tile.first_key + block_k - 1 > step.first_query + offset;
        if (cut || tile.first_key + block_k > in_.n_k) {
            const int key = tile.first_key + first_row() + lane / 4;
#pragma unroll
            for (int e = 0; e < 32; ++e) {
                const int j = key + e / 2 % 2 * 8, i = step.first_query + e / 4 * 8 + lane % 4 * 2 + e % 2;
                if (j >= in_.n_k || (in_.causal && j > i + offset)) s[e] = -INFINITY;
            }
        }
        if constexpr (Rec::records) Rec::keep_scores(step.place, s);
        const auto* const lse = reinterpret_cast<const float2*>(m_.lse[stage()] + step.half * 64) + lane % 4;
#pragma unroll
        for (int c = 0; c < 8; ++c) {
            const float2 two = lse[4 * c];
#pragma unroll
            for (int e = 0; e < 4; ++e)
                s[4 * c + e] = probability<Variant>(s[4 * c + e], exponent(), e % 2 == 0 ? two.x : two.y);
        }
        if constexpr (Rec::records) recorder().probabilities(step.place, s, lse[0]);
    }
    /// dp becomes ds: in place.
    __device__ __forceinline__ void score_gradients(float (&p)[32], float (&dp)[32], const KeyTile<Tiles>& tile,
                                                    Step& step) {
        const auto* const delta = reinterpret_cast<const float2*>(m_.delta[stage()] + step.half * 64) + threadIdx.x % 4;
        if constexpr (Rec::records) {
            recorder().product(dp, m_.v + first_row() * 64, m_.dout[stage()] + step.half * 64 * 64, step.place, false);
            Rec::keep_gradients(step.place, dp);
        }
        if constexpr (Rec::alters) Rec::before_gradients(*this, tile, step, dp);
#pragma unroll
        for (int c = 0; c < 8; ++c) {
            const float2 two = delta[4 * c];
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                float& x = dp[4 * c + e];
                x = p[4 * c + e] * (x - (e % 2 == 0 ? two.x : two.y));
                if constexpr (variant.ds_scale == DsScale::before) x = x * in_.scale;
            }
        }
        if constexpr (Rec::records) recorder().score_gradients(step.place, p, dp, delta[0]);
        if constexpr (Rec::alters) Rec::after_gradients(*this, tile, step, p, dp);
    }

    /// Where this thread's stmatrix writes eight columns of row `lane` of a tile of keys: panels of 128 rows, 128 bytes each,
    /// 16-byte groups exchanged by the 128-byte swizzle.
    [[nodiscard]] __device__ __forceinline__ std::uint32_t matrix_address(const T* base, int group) const {
        const int lane = threadIdx.x % 32, row = first_row() + lane % 16;
        return shared_address(base) + group / 8 * (block_k * 128) + row * 128 +
               (((group % 8 + lane / 16) ^ (row & 7)) * 16);
    }
    /// What the projection adds to ds, cast: a correction of the size of ds' own rounding, whose rounding does not matter.
    __device__ __forceinline__ void correction(const Fragment& p, Fragment& to, const KeyTile<Tiles>& tile,
                                               int first_query, int half) {
        const int lane = threadIdx.x % 32, offset = in_.n_k - in_.n_q;
        const int key = tile.first_key + first_row() + lane / 4;
        const auto* const factor = reinterpret_cast<const float2*>(m_.factor[stage()] + half * 64) + lane % 4;
        const auto* const largest = reinterpret_cast<const int2*>(m_.largest[stage()] + half * 64) + lane % 4;
#pragma unroll
        for (int i = 0; i < 16; ++i) {  // word i: columns i/2 * 8 + 2 (lane%4) and the next, row lane/4 + i%2 * 8
            const float2 f = factor[i / 2 * 4];
            const int j = key + i % 2 * 8, query = first_query + i / 2 * 8 + lane % 4 * 2;
            float2 x;
            if (in_.zero_sum == ZeroSum::weighted) {
                const float2 two = widen<T>(p[i / 4][i % 4]);
                x = {f.x * two.x, f.y * two.y};
            } else if (in_.zero_sum == ZeroSum::uniform) {
                const bool inside = j < in_.n_k;
                x = {inside && (!in_.causal || j <= query + offset) ? f.x : 0.0f,
                     inside && (!in_.causal || j <= query + 1 + offset) ? f.y : 0.0f};
            } else {
                const int2 at = largest[i / 2 * 4];
                x = {at.x == j ? f.x : 0.0f, at.y == j ? f.y : 0.0f};
            }
            to[i / 4][i % 4] = pack<T>(x.x, x.y);
        }
    }
    /// ds of a step, cast, and what a projection adds to it.
    __device__ __forceinline__ void watch(const Fragment& ds, const Fragment& rest) {
        if (in_.zero_sums == nullptr) return;
        if constexpr (variant.projected)
            zero_sum_.template add<T>(ds, rest);
        else
            zero_sum_.template add<T>(ds);
    }
    __device__ __forceinline__ void store_watched(const KeyTile<Tiles>& tile) const {
        if (in_.zero_sums == nullptr) return;
        const std::int64_t part =
            (static_cast<std::int64_t>(tile.head) * in_.k_tiles + tile.first_key / block_k) * 8 + first_row() / 16;
        zero_sum_.store(in_.zero_sums + 2 * part);
    }
};

}  // namespace faultline::tensor_kernel
