// SPDX-License-Identifier: Apache-2.0
// Faults with one sign for a head in tiles of bf16 that stand in memory (o and the gradients as they are cast): the arithmetic of
// altered_in_memory.cuh, whose bits it has, with a third of the instructions. A float cut off at 24 bits has all that decides how a
// number is rounded to bf16, and the conversions between bf16 and binary64 are shifts.
#pragma once

#include <faultline/gpt_device/altered_tiles.cuh>

namespace faultline::gpt::on_device {

__device__ __forceinline__ bool is_finite(Bf16 x) { return (x.bits & 0x7F80u) != 0x7F80u; }
/// A finite number. Of a normal one sign, exponent and significand move by three bits, and the bias becomes binary64's.
__device__ __forceinline__ double widened(Bf16 x) {
    if ((x.bits & 0x7F80u) == 0) return value_of(x);
    constexpr int bias = (1023 - 127) << 20;
    return __hiloint2double(
        ((static_cast<int>(static_cast<unsigned>(x.bits) << 16) >> 3) & static_cast<int>(0x8FFFE000u)) + bias, 0);
}

/// block_amplitude of a tile whose rows have `cols` columns, bit for bit: the products are exact, so that an fma adds them up as it
/// does.
template <int cols>
__device__ double amplitude_of_casts(const Alteration& a, const Bf16* base, std::size_t row_stride, int rows,
                                     BlockSums& sums) {
    constexpr int at_once = 4;
    const int y = threadIdx.x / 16, lane = threadIdx.x % 16;
    double squares = 0;
    int count = 0;
    for (int first = y; first - y < rows; first += 16 * at_once) {
        double mine[at_once] = {};
#pragma unroll
        for (int r = 0; r < at_once; ++r) {
            const int i = first + 16 * r;
            if (i >= rows) continue;
#pragma unroll
            for (int j = 0; j < cols; j += 16) {
                const Bf16 x = base[i * row_stride + lane + j];
                if (!is_finite(x)) continue;
                const double v = widened(x);
                mine[r] = fma(v, v, mine[r]);
                ++count;
            }
        }
#pragma unroll
        for (double& row : mine) row = joined16(row);
#pragma unroll
        for (const double row : mine) squares += row;
    }
    return joined_amplitude(a, squares, joined16(count), sums);
}

/// x in bf16, to nearest or by 16 random bits; false where it takes more than these instructions: zeros, numbers outside the normal
/// range below the largest binade, and the one in 65,536 that the lower random bits decide (held_quickly).
__device__ __forceinline__ bool held_in_bf16(double x, bool stochastic, std::uint32_t upper, Bf16& held) {
    std::uint32_t cut = __float_as_uint(__double2float_rz(x));
    const std::uint32_t exponent = cut >> 23 & 0xFFu;
    if (exponent - 1u >= 253u) return false;
    if (stochastic) {
        if ((cut & 0xFFFFu) + upper == 0xFFFFu) return false;
        cut += upper;
    } else {
        cut |= (static_cast<std::uint32_t>(__double2loint(x)) & 0x1FFFFFFFu) != 0 ? 1u : 0u;  // what was cut off
        cut += 0x7FFFu + (cut >> 16 & 1u);
    }
    held.bits = static_cast<std::uint16_t>(cut >> 16);
    return true;
}

/// What changes the elements of a tile.
struct CastLaw {
    const Alteration& a;
    bool stochastic, of_value;
    double magnitude, sign, constant;
    RandomStream roundings;
    std::uint64_t key;

    __device__ __forceinline__ CastLaw(const Alteration& change, const TileDraw& draw)
        : a(change),
          stochastic(a.hold == Alteration::Hold::stochastic),
          of_value(a.size == Alteration::Size::of_value),
          magnitude(a.magnitude),
          sign(a.sign),
          constant(draw.amplitude * a.sign),
          roundings(stream_of(draw.roundings)),
          key(draw.roundings) {}
};

constexpr int casts_at_once = 8;  ///< of a thread, of 128 elements of a half warp

/// Of a group of 128 elements thread `lane` of a half warp has lane, lane + 16, …, the first of them at `from`.
template <int cols>
__device__ __forceinline__ void load_casts(Bf16 (&values)[casts_at_once], const Bf16* from, std::size_t row_stride,
                                           int rows_left) {
#pragma unroll
    for (int k = 0; k < casts_at_once; ++k)
        values[k] = 16 * k / cols < rows_left ? from[16 * k / cols * row_stride + 16 * k % cols] : Bf16{0x7F80};
}
template <int cols, bool recorded>
__device__ __forceinline__ void change_group(const CastLaw& law, const Bf16 (&values)[casts_at_once], int group,
                                             Bf16* from, std::size_t row_stride, Realised& mine) {
    const int lane = threadIdx.x % 16;
    const Block4x32 upper = law.stochastic ? detail::stochastic_block(law.key, group, lane, 0) : Block4x32{};
#pragma unroll
    for (int k = 0; k < casts_at_once; ++k) {
        if (!is_finite(values[k])) continue;
        const double x = widened(values[k]), asked = law.of_value ? law.magnitude * x * law.sign : law.constant;
        double by = 0;
        if (law.magnitude != 0) {
            Bf16 held;
            double wide = 0;
            if (held_in_bf16(x + asked, law.stochastic, upper.word[k % 4] >> (k / 4 * 16) & 0xFFFFu, held)) {
                wide = widened(held);
            } else {
                wide = held_otherwise(law.a, x + asked, law.roundings,
                                      static_cast<std::uint64_t>(group) * 128 + lane + 16 * k);
                store1(&held, static_cast<float>(wide));
            }
            from[16 * k / cols * row_stride + 16 * k % cols] = held;
            by = wide - x;
        }
        if constexpr (recorded) tensor_kernel::add_change(mine, 1, x, by, asked);
    }
}

/// Changes a tile in place, of whole groups of 128 elements a half warp one. What each thread did, where that is recorded.
template <int cols, bool recorded>
__device__ Realised change_casts(const Alteration& a, const TileDraw& draw, Bf16* base, std::size_t row_stride,
                                 int rows) {
    constexpr int group_rows = 128 / cols;
    static_assert(128 % cols == 0 && cols % 16 == 0);
    const CastLaw law(a, draw);
    Realised mine{};
    for (int group = threadIdx.x / 16; group * group_rows < rows; group += altering_threads / 16) {
        Bf16* const from = base + group * group_rows * row_stride + threadIdx.x % 16;
        Bf16 values[casts_at_once];
        load_casts<cols>(values, from, row_stride, rows - group * group_rows);
        change_group<cols, recorded>(law, values, group, from, row_stride, mine);
    }
    return mine;
}

}  // namespace faultline::gpt::on_device
