// SPDX-License-Identifier: Apache-2.0
// The streaming softmax of two rows, as a thread of a warpgroup holds them: rows g and g + 8 of its warp, of every eight
// columns two. The operations and their order are those of kernels/cpu (forward.hpp, row_arithmetic.hpp): the bits are the
// emulation's. Compiled with -fmad=false: an fma is one where it is written.
#pragma once

#include <faultline/tensor_kernel/forward_variant.hpp>
#include <faultline/tensor_kernel/hopper.cuh>
#include <faultline/tensor_kernel/state_rounding.cuh>

namespace faultline::tensor_kernel {

/// The numbers of one call that the exponent needs.
struct SoftmaxScales {
    float exponent;          ///< scale log2(e), rounded once from double
    float stable_beta;       ///< Schedule::stable_beta
    float stable_tolerance;  ///< Schedule::stable_tolerance over scale: in units of the scores
    StreamingState state;    ///< where the variant has it
};

/// natural log2(e), rounded once from double.
FAULTLINE_HD inline float exponent_of(float natural) {
    return static_cast<float>(static_cast<double>(natural) * 1.4426950408889634074);
}

/// exp2_polynomial (special/ex2_polynomial.hpp) by the instructions that give its bits: floor as an addition that rounds down.
__device__ __forceinline__ float exp2_by_polynomial(float x) {
    constexpr float round_down = 12582912.0f;  // 2^23 + 2^22
    const float clamped = fmaxf(x, -127.0f);
    const float shifted = __fadd_rd(clamped, round_down);
    const float fraction = clamped - (shifted - round_down);
    float p = fmaf(fraction, 0.077119089663028717041015625f, 0.227564394474029541015625f);
    p = fmaf(p, fraction, 0.695146143436431884765625f);
    p = fmaf(p, fraction, 1.0f);
    return __uint_as_float(__float_as_uint(p) + (__float_as_uint(shifted) << 23));
}

/// What changes the state of two rows in the kernels with such faults: nothing. Those that do have row_max(maxima),
/// row_sum(joined sums, this thread's lanes of them) and continued(a lane so far, alpha, its next term).
struct UnalteredRows {
    static constexpr bool alters = false;
};

/// Lane: of the row sums; double holds a changed one as the emulation does, whose lane is the sum that it had plus the change.
template <class T, ForwardVariant variant, int columns, class Lane = float>
struct StreamingSoftmax {
    static constexpr bool has_state = variant.state;
    static constexpr int max_offset = variant.max_offset;
    float maximum[2] = {-INFINITY, -INFINITY};
    Lane sum[2] = {0, 0};                    ///< this thread's lane of the quad
    float seen[2] = {-INFINITY, -INFINITY};  ///< where the variant moves or rounds maxima: the largest score itself

    /// The largest score of a row so far, before a state rounds it.
    [[nodiscard]] __device__ __forceinline__ float largest(int r) const {
        return variant.stable || variant.state ? seen[r] : maximum[r];
    }
    /// Of a row of a tile, over its four threads.
    [[nodiscard]] __device__ __forceinline__ static float row_maximum(const float (&s)[columns / 2], int r) {
        float m = fmaxf(s[2 * r], s[2 * r + 1]);
#pragma unroll
        for (int j = 1; j < columns / 8; ++j) m = fmaxf(m, fmaxf(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]));
        m = fmaxf(m, __shfl_xor_sync(~0u, m, 1));
        return fmaxf(m, __shfl_xor_sync(~0u, m, 2));
    }

    /// What is subtracted from a row's scores: its maximum, 0 where there is none.
    [[nodiscard]] __device__ __forceinline__ float reference(int r) const {
        return maximum[r] == -INFINITY ? 0.0f : maximum[r];
    }
    /// scale (score - reference) in log2 units, as the variant rounds it.
    [[nodiscard]] __device__ __forceinline__ static float argument(float score, float reference, float scale) {
        if constexpr (variant.max_offset != 0) return fmaf(score, scale, -(reference * scale - variant.max_offset));
        if constexpr (variant.argument == ArgumentForm::fused) return fmaf(score, scale, -(reference * scale));
        if constexpr (variant.argument == ArgumentForm::unfused) return score * scale - reference * scale;
        return (score - reference) * scale;
    }

    /// s <- exp2(scale (s - max)) of a tile of `columns` keys; maxima and sums move on. alpha: what the output so far is to be
    /// multiplied with. In the first tile the sums begin at zero and alpha has no meaning.
    template <bool first, class Altered = UnalteredRows>
    __device__ __forceinline__ void step(float (&s)[columns / 2], float (&alpha)[2], const SoftmaxScales& scales,
                                         const Altered& altered = {}) {
        constexpr bool alters = Altered::alters;
        if constexpr (variant.state)
            if (scales.state.s != StateFormat::fp32) {
#pragma unroll
                for (int r = 0; r < 2; ++r) seen[r] = fmaxf(seen[r], row_maximum(s, r));
#pragma unroll
                for (float& x : s) x = held(x, scales.state.s);
            }
        float tile_maximum[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) tile_maximum[r] = row_maximum(s, r);
        if (variant.stable || (variant.state && scales.state.s == StateFormat::fp32)) {
#pragma unroll
            for (int r = 0; r < 2; ++r) seen[r] = fmaxf(seen[r], tile_maximum[r]);
        }
        if constexpr (variant.stable) move_repeated(s, tile_maximum, scales);
        float before[2];
        if constexpr (alters) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                before[r] = maximum[r];
                maximum[r] = fmaxf(before[r], tile_maximum[r]);
            }
            altered.row_max(maximum);
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float old = alters ? before[r] : maximum[r];
            if constexpr (!alters) maximum[r] = fmaxf(old, tile_maximum[r]);
            if constexpr (variant.state) maximum[r] = held(maximum[r], scales.state.row_max);
            const float top = reference(r);
            if (!first) alpha[r] = ex2((old - top) * scales.exponent);
            auto lane = static_cast<float>(first ? 0.0f : sum[r]);
#pragma unroll
            for (int j = 0; j < columns / 8; ++j) {
                float* const pair = &s[4 * j + 2 * r];
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const float x = argument(pair[e], top, scales.exponent);
                    pair[e] = variant.polynomial && j < columns / 8 - 4 ? exp2_by_polynomial(x) : ex2(x);
                }
                float2 terms{pair[0], pair[1]};
                if constexpr (variant.row_sum_adds == RowSumAdds::rounded) terms = unpack<T>(pack<T>(terms.x, terms.y));
                if (j > 0)
                    lane += terms.x;
                else if constexpr (alters)
                    lane = first ? terms.x : altered.continued(sum[r], alpha[r], terms.x);
                else
                    lane = first ? terms.x : fmaf(lane, alpha[r], terms.x);  // nvcc contracts FlashAttention's so
                lane += terms.y;
            }
            sum[r] = variant.state ? held(lane, scales.state.row_sum) : lane;
        }
        if constexpr (alters) {
            const float all[2] = {joined(0), joined(1)};
            altered.row_sum(all, sum);
        }
    }

    /// The output once a key tile's P V has been added.
    template <int count>
    __device__ __forceinline__ static void hold_output(float (&o)[count], const StreamingState& state) {
        if constexpr (variant.state)
            if (state.pv_accumulate != StateFormat::fp32) {
#pragma unroll
                for (float& x : o) x = held(x, state.pv_accumulate);
            }
    }
    /// o <- o alpha.
    template <int count>
    __device__ __forceinline__ static void rescale(float (&o)[count], const float (&alpha)[2],
                                                   const StreamingState& state) {
#pragma unroll
        for (int i = 0; i < count; ++i) {
            if constexpr (variant.state)
                o[i] = held_product(o[i], alpha[i / 2 % 2], state.o_rescale);
            else
                o[i] *= alpha[i / 2 % 2];
        }
    }

    /// The row's sum over the quad's lanes.
    [[nodiscard]] __device__ __forceinline__ float joined(int r) const {
        const auto half = static_cast<float>(sum[r] + __shfl_xor_sync(~0u, sum[r], 2));
        return half + __shfl_xor_sync(~0u, half, 1);
    }

  private:
    /// A maximum that the row's tile has more than once, within the tolerance, is moved off the scores.
    __device__ __forceinline__ static void move_repeated(const float (&s)[columns / 2], float (&m)[2],
                                                         const SoftmaxScales& scales) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            int repeats = 0;
#pragma unroll
            for (int j = 0; j < columns / 8; ++j)
                repeats += (m[r] - s[4 * j + 2 * r] <= scales.stable_tolerance) +
                           (m[r] - s[4 * j + 2 * r + 1] <= scales.stable_tolerance);
            repeats += __shfl_xor_sync(~0u, repeats, 1);
            repeats += __shfl_xor_sync(~0u, repeats, 2);
            if (repeats >= 2 && m[r] > -INFINITY) m[r] = m[r] > 0 ? scales.stable_beta * m[r] : m[r] < 0 ? 0.0f : m[r];
        }
    }
};

}  // namespace faultline::tensor_kernel
