// SPDX-License-Identifier: Apache-2.0
// The quadratic interpolator inside NVIDIA's multi-function unit (MUFU), as far as 2^x and log2 x use it: tables,
// truncated square, rounding constants.
//
// Both functions see 23 fraction bits. The upper 6 choose one of 64 segments, the lower 17 are u, and
//     2^(f)    ~ c0 + c1 u + c2 square(u),     log2(1 + f) ~ c0 + c1 u - c2 square(u)
// in fixed point with c0 of 26, c1 of 16 and c2 of 10 bits (Oberman and Siu, "A high-performance area-efficient
// multifunction interpolator", ARITH-17, 2005, give these widths). The products are exact; only the square is cut.
//
// Source of every number here: fitted to the results of one NVIDIA H200 (compute capability 9.0) for all 2^23 floats of
// [1, 2), 2026-11-29, which they give without exception; ranges that the fit never saw agree too (ex2_approx.hpp and
// lg2_approx.hpp say which; tests/lib/special holds checksums of what was measured). They turned out equal, entry by
// entry, to those that M. Kościelnicki found on the first Tesla generation (envytools, 2015).
#pragma once

#include <cstdint>

#include <faultline/base/host_device.hpp>

namespace faultline::mufu {

/// One segment's coefficients: magnitudes, the signs are in the formulae above.
struct Segment {
    std::uint32_t c0, c1, c2;
};

/// Segment of 2^f by the upper 6 bits of f: c0 has 25 fraction bits (1.0 is 0x2000000).
FAULTLINE_HD inline Segment ex2_segment(std::uint32_t index) {
    struct Table {
        Segment row[64];
    };
    // clang-format off
    static constexpr Table table{{
        {0x2000000, 0x58b9, 0x1ee}, {0x2059347, 0x59b0, 0x1f5}, {0x20b361b, 0x5aaa, 0x1fa}, {0x210e8a2, 0x5ba7, 0x1ff},
        {0x216ab0f, 0x5ca6, 0x206}, {0x21c7d86, 0x5da9, 0x209}, {0x2226039, 0x5eae, 0x20f}, {0x2285356, 0x5fb6, 0x214},
        {0x22e5709, 0x60c0, 0x21d}, {0x2346b7e, 0x61ce, 0x222}, {0x23a90e5, 0x62df, 0x227}, {0x240c772, 0x63f2, 0x22f},
        {0x2470f4e, 0x6509, 0x234}, {0x24d68ad, 0x6623, 0x238}, {0x253d3c0, 0x673f, 0x241}, {0x25a50b6, 0x685f, 0x247},
        {0x260dfc2, 0x6982, 0x24d}, {0x2678117, 0x6aa8, 0x254}, {0x26e34e6, 0x6bd2, 0x258}, {0x274fb67, 0x6cfe, 0x261},
        {0x27bd4c9, 0x6e2e, 0x267}, {0x282c145, 0x6f61, 0x26e}, {0x289c10b, 0x7098, 0x273}, {0x290d456, 0x71d2, 0x279},
        {0x297fb5a, 0x730f, 0x281}, {0x29f364e, 0x7450, 0x287}, {0x2a6856a, 0x7594, 0x28f}, {0x2ade8e7, 0x76dc, 0x295},
        {0x2b560fb, 0x7827, 0x29e}, {0x2bcede2, 0x7976, 0x2a5}, {0x2c48fd7, 0x7ac8, 0x2ae}, {0x2cc4710, 0x7c1f, 0x2b3},
        {0x2d413cc, 0x7d79, 0x2bb}, {0x2dbf648, 0x7ed7, 0x2c1}, {0x2e3eebe, 0x8038, 0x2cb}, {0x2ebfd6a, 0x819e, 0x2d1},
        {0x2f4228e, 0x8307, 0x2da}, {0x2fc5e67, 0x8474, 0x2e3}, {0x304b134, 0x85e5, 0x2ec}, {0x30d1b33, 0x875b, 0x2f1},
        {0x3159ca8, 0x88d4, 0x2fb}, {0x31e35d3, 0x8a51, 0x305}, {0x326e6f7, 0x8bd3, 0x30b}, {0x32fb054, 0x8d59, 0x313},
        {0x3389230, 0x8ee3, 0x31c}, {0x3418ccf, 0x9071, 0x326}, {0x34aa076, 0x9204, 0x32d}, {0x353cd6a, 0x939b, 0x336},
        {0x35d13f4, 0x9536, 0x341}, {0x3667457, 0x96d6, 0x34a}, {0x36feede, 0x987b, 0x351}, {0x37983d3, 0x9a24, 0x35a},
        {0x383337d, 0x9bd1, 0x366}, {0x38cfe27, 0x9d84, 0x36d}, {0x396e41c, 0x9f3b, 0x377}, {0x3a0e5aa, 0xa0f7, 0x380},
        {0x3ab031d, 0xa2b7, 0x38d}, {0x3b53cc1, 0xa47d, 0x395}, {0x3bf92e7, 0xa648, 0x39d}, {0x3ca05dd, 0xa817, 0x3aa},
        {0x3d495f5, 0xa9ec, 0x3b2}, {0x3df437f, 0xabc5, 0x3bf}, {0x3ea0ecc, 0xada4, 0x3c9}, {0x3f4f831, 0xaf88, 0x3d4},
    }};
    // clang-format on
    return table.row[index];
}

/// Segment of log2(1 + f) by the upper 6 bits of f: c0 has 26 fraction bits. The first c0 is not zero: log2(1) is a
/// case of its own in the unit.
FAULTLINE_HD inline Segment lg2_segment(std::uint32_t index) {
    struct Table {
        Segment row[64];
    };
    // clang-format off
    static constexpr Table table{{
        {0x0000004, 0xb8a8, 0x2d7}, {0x016e797, 0xb5d1, 0x2c1}, {0x02d75ad, 0xb310, 0x2ad}, {0x043ace7, 0xb064, 0x299},
        {0x0598fe2, 0xadcc, 0x286}, {0x06f210f, 0xab47, 0x273}, {0x08462c9, 0xa8d5, 0x262}, {0x0995750, 0xa674, 0x250},
        {0x0ae00d8, 0xa424, 0x240}, {0x0c26162, 0xa1e4, 0x22f}, {0x0d67af5, 0x9fb4, 0x220}, {0x0ea4f76, 0x9d93, 0x212},
        {0x0fde0b9, 0x9b81, 0x206}, {0x111307c, 0x997c, 0x1f8}, {0x124407c, 0x9784, 0x1eb}, {0x1371251, 0x9599, 0x1df},
        {0x149a786, 0x93ba, 0x1d2}, {0x15c01a8, 0x91e7, 0x1c7}, {0x16e2222, 0x9020, 0x1bd}, {0x1800a59, 0x8e63, 0x1b1},
        {0x191bbac, 0x8cb2, 0x1a9}, {0x1a33760, 0x8b0a, 0x19e}, {0x1b47ebe, 0x896c, 0x194}, {0x1c592fb, 0x87d8, 0x18c},
        {0x1d6753f, 0x864c, 0x181}, {0x1e726aa, 0x84ca, 0x179}, {0x1f7a857, 0x8350, 0x170}, {0x207fb52, 0x81df, 0x169},
        {0x218209f, 0x8076, 0x162}, {0x2281942, 0x7f14, 0x15a}, {0x237e627, 0x7dba, 0x153}, {0x247883b, 0x7c67, 0x14b},
        {0x257006a, 0x7b1c, 0x146}, {0x2664f8d, 0x79d7, 0x13f}, {0x2757682, 0x7898, 0x137}, {0x2847614, 0x7761, 0x133},
        {0x2934f0d, 0x762f, 0x12c}, {0x2a20233, 0x7503, 0x125}, {0x2b0904a, 0x73de, 0x121}, {0x2befa00, 0x72be, 0x11b},
        {0x2cd4011, 0x71a3, 0x114}, {0x2db632e, 0x708e, 0x10f}, {0x2e963fd, 0x6f7e, 0x10a}, {0x2f7431d, 0x6e74, 0x106},
        {0x305013a, 0x6d6e, 0x101}, {0x3129eee, 0x6c6d, 0x0fd}, {0x3201cc6, 0x6b71, 0x0f9}, {0x32d7b5d, 0x6a79, 0x0f4},
        {0x33abb41, 0x6985, 0x0ee}, {0x347dd00, 0x6896, 0x0ea}, {0x354e121, 0x67ac, 0x0e8}, {0x361c823, 0x66c5, 0x0e3},
        {0x36e9293, 0x65e2, 0x0df}, {0x37b40e4, 0x6503, 0x0db}, {0x387d398, 0x6428, 0x0d8}, {0x3944b1e, 0x6350, 0x0d3},
        {0x3a0a7ec, 0x627d, 0x0d1}, {0x3acea7a, 0x61ac, 0x0cc}, {0x3b91337, 0x60df, 0x0c9}, {0x3c52285, 0x6016, 0x0c7},
        {0x3d118da, 0x5f4f, 0x0c3}, {0x3dcf690, 0x5e8c, 0x0c0}, {0x3e8bc12, 0x5dcc, 0x0bd}, {0x3f469c1, 0x5d0f, 0x0ba},
    }};
    // clang-format on
    return table.row[index];
}

/// Row j of square(): the partial products kept whose larger index is j.
template <int j>
FAULTLINE_HD inline std::uint32_t square_row(std::uint32_t u) {
    constexpr std::uint32_t half = 1u << (j - 1);
    return (((u & (2 * half - 1)) + half) >> (18 - j)) & (0u - (u >> j & 1u));
}

/// u^2 / 2^19 for u of 17 bits, by a folded squarer that leaves out every partial product below 2^19: of
///     u^2 = sum over i of u_i 2^(2i) + sum over i < j of u_i u_j 2^(i+j+1)
/// the terms with 2i >= 19 and i + j + 1 >= 19 remain. In row j the addend 2^(j-1) is the diagonal term, a multiple of
/// the power shifted out, so that the cut drops bits of u alone. Seven calls, since GCC 12 vectorises no loop around
/// another.
FAULTLINE_HD inline std::uint32_t square(std::uint32_t u) {
    return square_row<10>(u) + square_row<11>(u) + square_row<12>(u) + square_row<13>(u) + square_row<14>(u) +
           square_row<15>(u) + square_row<16>(u);
}

/// 2^(fraction / 2^23) with 23 fraction bits, in [2^23, 2^24), truncated. fraction < 2^23.
///
/// The rounding constant is 0.936 ulp of the result, three quarters of it taken out of the table so that c0 begins at
/// 1.0. On the grid of the products, 2^-38, the measurements admit this value alone.
FAULTLINE_HD inline std::uint32_t ex2_significand(std::uint32_t fraction) {
    constexpr std::uint64_t rounding = 0x77e2;
    const std::uint32_t u = fraction & 0x1FFFF;
    const Segment s = ex2_segment(fraction >> 17);
    const std::uint64_t sum = (static_cast<std::uint64_t>(s.c0) << 13) + static_cast<std::uint64_t>(s.c1) * u +
                              static_cast<std::uint64_t>(s.c2) * square(u) + rounding;
    return static_cast<std::uint32_t>(sum >> 15);
}

/// log2(1 + fraction / 2^23) with 38 fraction bits, in (0, 2^38). fraction < 2^23. The measurements admit this value of
/// the rounding constant alone.
FAULTLINE_HD inline std::int64_t lg2_sum(std::uint32_t fraction) {
    constexpr std::int64_t rounding = 0x3345;
    const std::uint32_t u = fraction & 0x1FFFF;
    const Segment s = lg2_segment(fraction >> 17);
    return (static_cast<std::int64_t>(s.c0) << 12) + static_cast<std::int64_t>(s.c1) * u -
           2 * static_cast<std::int64_t>(s.c2) * square(u) + rounding;
}

}  // namespace faultline::mufu
