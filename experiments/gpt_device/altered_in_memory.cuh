// SPDX-License-Identifier: Apache-2.0
// Faults in tiles that stand in memory: what fault_kernels.cu does with the elements of a half warp.
#pragma once

#include <faultline/gpt_device/altered_tiles.cuh>

namespace faultline::gpt::on_device {

// Called, not copied into each of eight elements: the loop over them is to stay small beside the cache for instructions.
__device__ __noinline__ inline std::uint64_t column_key(const Alteration& a) { return column_stream(a).key; }
__device__ __noinline__ inline std::uint64_t drawn_bits(std::uint64_t key, std::uint64_t n) {
    return stream_of(key).bits(n);
}
__device__ __noinline__ inline double asked_otherwise(const Alteration& a, double x, double amplitude,
                                                      double column_sign, double element_sign) {
    return asked_change(
        a, x, amplitude, [&] { return column_sign; }, [&] { return element_sign; });
}

/// As change_elements, of a tile in memory: the eight elements that a thread has of a group are read before the first of them is
/// changed. (On an H200 a loop over them, one by one, waits for memory.)
template <class Value, class Store, class SignOf>
__device__ Realised change_in_memory(const Alteration& shared, const TileDraw& draw, int rows, int cols,
                                     bool one_column, int first, int step, Value&& value, Store&& store,
                                     SignOf&& sign) {
    Realised mine{};
    const Alteration a = shared;
    const bool stochastic = a.hold == Alteration::Hold::stochastic,
               by_element = a.sign_of == Alteration::Sign::of_element;
    const RandomStream roundings = stream_of(draw.roundings);
    const bool by_column = a.sign_of == Alteration::Sign::of_column, one_sign = a.sign_of == Alteration::Sign::one;
    const std::uint64_t columns = by_column ? column_key(shared) : 0;
    std::uint64_t at_columns = ~std::uint64_t{0}, column_bits = 0;  // drawn last
    const auto column_sign = [&](std::uint64_t column) {
        if (column / 64 != at_columns) column_bits = drawn_bits(columns, at_columns = column / 64);
        return sign_of_bit(column_bits, column % 64);
    };
    const std::uint64_t all = static_cast<std::uint64_t>(rows) * static_cast<std::uint64_t>(cols);
    const bool narrow = cols < 16, in_32_bits = all <= 0xFFFFFFFFu;
    const auto lane = static_cast<unsigned>(threadIdx.x % 16);
    struct At {
        int i, j;
    };
    const auto next = [&](At& at) {
        at.j += 16;
        if (narrow) {
            at.i += at.j / cols;
            at.j %= cols;
        } else if (at.j >= cols) {
            at.j -= cols;
            ++at.i;
        }
    };
    for (std::uint64_t group = first; group * 128 < all; group += step) {
        constexpr int each = 8;  // that a thread has of a group: read before the first is changed
        const std::uint64_t element = group * 128 + lane;
        const At begin = in_32_bits ? At{static_cast<int>(static_cast<unsigned>(element) / static_cast<unsigned>(cols)),
                                         static_cast<int>(static_cast<unsigned>(element) % static_cast<unsigned>(cols))}
                                    : At{static_cast<int>(element / cols), static_cast<int>(element % cols)};
        decltype(value(0, 0)) values[each];
        At at = begin;
#pragma unroll
        for (int k = 0; k < each; ++k) {
            values[k] = element + 16 * k < all ? value(at.i, at.j) : NAN;
            next(at);
        }
        // One block of Threefry, and one of Philox, for the eight (stochastic_bits.hpp; drawn_sign).
        const Block4x32 upper = stochastic ? detail::stochastic_block(draw.roundings, group, lane, 0) : Block4x32{};
        std::uint64_t bits[2] = {};
        if (by_element) {
            bits[0] = drawn_bits(draw.elements, 2 * group);
            bits[1] = drawn_bits(draw.elements, 2 * group + 1);
        }
        // By what is asked of each: the laws with one sign for the tile have few instructions.
        const auto change = [&](auto&& asked_of) {
            at = begin;
#pragma unroll
            for (int k = 0; k < each; ++k, next(at)) {
                const double x = values[k];
                if (!is_finite(x)) continue;
                double asked = 0, e = 0;
                if (a.magnitude != 0) {
                    asked = asked_of(k, x);
                    double held = 0;
                    if (!held_quickly(a, x + asked, upper.word[k % 4] >> (k / 4 * 16) & 0xFFFFu, held))
                        held = held_otherwise(shared, x + asked, roundings, element + 16 * k);
                    e = store(at.i, at.j, held) - x;
                }
                tensor_kernel::add_change(mine, 1, x, e, asked);
            }
        };
        if (one_sign && a.size == Alteration::Size::of_value)
            change([&](int, double x) { return a.magnitude * x * a.sign * sign(at.j); });
        else if (one_sign && a.size == Alteration::Size::of_rms)
            change([&](int, double) { return draw.amplitude * a.sign * sign(at.j); });
        else
            change([&](int k, double x) {
                return asked_otherwise(shared, x, draw.amplitude, by_column ? column_sign(one_column ? 0 : at.j) : 0.0,
                                       sign_of_bit(bits[k / 4], 16 * (k % 4) + lane)) *
                       (one_sign ? sign(at.j) : 1.0);
            });
    }
    return mine;
}

}  // namespace faultline::gpt::on_device
