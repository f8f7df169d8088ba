// SPDX-License-Identifier: Apache-2.0
// The arithmetic that host and device share (kernels/cpu/alteration_law.hpp), element by element, against apply_fault, which
// works on rows: every bit of every value.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include <faultline/cpu/head_alteration.hpp>
#include <faultline/injectors/apply.hpp>

#include "../kernels/cpu/heads.hpp"

namespace faultline::testing {
namespace {

/// The law as a device applies it.
void alter(const Alteration& a, const FaultPlace& place, Matrix& m) {
    const MatrixView<double> x = m.view();
    const auto seen = [&](std::ptrdiff_t i) {
        return place.visible0 >= x.cols ? x.cols : std::clamp<std::ptrdiff_t>(place.visible0 + i, 0, x.cols);
    };
    const auto touched = [&](double v) { return std::isfinite(v) && !(place.skip_zeros && v == 0); };
    double squares = 0, count = 0;
    sum_squares(
        x.rows, seen, [&](auto i, auto j) { return touched(x(i, j)) ? x(i, j) * x(i, j) : -1.0; }, squares, count);
    const double amplitude = count == 0 ? 0.0 : a.magnitude * std::sqrt(squares / count);
    const RandomStream elements = tile_stream(a, fault_stream::element_signs, place.tile, place.part);
    const RandomStream roundings = tile_stream(a, fault_stream::roundings, place.tile, place.part);
    for (std::ptrdiff_t i = 0; i < x.rows; ++i)
        for (std::ptrdiff_t j = 0; j < seen(i); ++j) {
            if (!touched(x(i, j))) continue;
            const auto element = static_cast<std::uint64_t>(i * x.cols + j);
            const double asked = asked_change(
                a, x(i, j), amplitude, [&] { return drawn_sign(column_stream(a), static_cast<std::uint64_t>(j)); },
                [&] { return drawn_sign(elements, element); });
            x(i, j) = held_change(a, x(i, j) + asked, stochastic_bits(roundings, element));
        }
}

TEST(AlterationLaw, IsWhatApplyFaultDoes) {
    FaultPlace place{.step = 5, .layer = 1, .head = 2, .batch = 3, .tile = std::uint64_t{64} << 32};
    for (const bool masked : {false, true}) {
        if (masked) {
            place.visible0 = 7;
            place.skip_zeros = true;
        }
        for (const LawInfo& law : laws())
            for (const auto unit : {Fault::Unit::relative, Fault::Unit::ulps})
                for (const bool by_value : {false, true})
                    for (const Hold hold : {Hold::exact, Hold::nearest, Hold::stochastic})
                        for (const Format format : {fp32, bf16, fp16, e4m3}) {
                            Fault fault{.law = law.law, .period = 2, .magnitude = 0.3, .by_value = by_value};
                            fault.unit = unit;
                            fault.hold = hold;
                            Matrix wanted = random_matrix(37, 53, 3.0, 5);
                            wanted.values[100] = 0;
                            wanted.values[101] = 1e-40;
                            wanted.values[102] = 1e300;
                            wanted.values[103] = std::nan("");
                            for (std::size_t i = 200; i < 300; ++i) wanted.values[i] *= 0x1p-130;
                            Matrix found = wanted;
                            (void)apply_fault(fault, place, format, wanted.view());
                            alter(alteration_of(fault, place, format), place, found);
                            ASSERT_EQ(std::memcmp(wanted.values.data(), found.values.data(),
                                                  wanted.values.size() * sizeof(double)),
                                      0)
                                << law.name << " ulps " << (unit == Fault::Unit::ulps) << " hold "
                                << static_cast<int>(hold) << " masked " << masked;
                        }
    }
}

/// What a device's kernels do in a few instructions is held_change wherever they do it: all but one of 65,536 random numbers, and
/// numbers that the format does not hold at full precision. The random numbers run through all upper halves, so that those which
/// leave the choice to the lower half are among them.
TEST(AlterationLaw, WhatIsHeldQuicklyIsHeldAsAnyOther) {
    const RandomStream roundings(3);
    Matrix normal = random_matrix(1, 64, 2.0, 9);
    for (double& x : normal.values) x += std::copysign(1.0, x);  // in all formats' normal range
    for (const Hold hold : {Hold::exact, Hold::nearest, Hold::stochastic})
        for (const Format format : {fp32, bf16, fp16, e4m3, exact}) {
            Fault fault{.law = Law::multiplicative, .magnitude = 0.1};
            fault.hold = hold;
            const Alteration a = alteration_of(fault, {}, format);
            long long slow = 0, all = 0;
            const auto compare = [&](double x, std::uint64_t random) {
                double held = 0;
                ++all;
                if (!held_quickly(a, x, static_cast<std::uint32_t>(random >> 48), held)) return void(++slow);
                const double wanted = held_change(a, x, random);
                ASSERT_EQ(std::memcmp(&held, &wanted, sizeof held), 0) << x << " " << random;
            };
            for (const double x : normal.values)
                for (std::uint64_t upper = 0; upper < 1 << 16; ++upper)
                    compare(x, upper << 48 | (roundings.bits(upper) & 0xFFFF00000000));
            EXPECT_LE(slow, format == exact ? all : all / (1 << 16)) << static_cast<int>(hold);
            for (std::uint64_t n = 0; n < 20000;
                 ++n)  // every exponent, and the middle between two numbers of the format
                for (const std::uint64_t bits : {roundings.bits(n), roundings.bits(n) >> 45 << 45,
                                                 roundings.bits(n) >> 44 << 44, roundings.bits(n) >> 28 << 28})
                    if (const auto x = detail::bits_as<double>(bits); std::isfinite(x))
                        compare(x, roundings.bits(n + 1) << 32);
            for (const double x : {0.0, -0.0}) compare(x, 0);
        }
}

/// Squares do not depend on who adds them: a butterfly of 16 threads gives what one thread gives.
TEST(AlterationLaw, LanesAreJoinedAsAButterflyOfThreadsJoinsThem) {
    const Matrix x = random_matrix(1, square_lanes, 1.0, 8);
    double lane[square_lanes], butterfly[square_lanes];
    std::copy_n(x.values.data(), square_lanes, lane);
    std::copy_n(x.values.data(), square_lanes, butterfly);
    for (int step = square_lanes / 2; step > 0; step /= 2) {
        double next[square_lanes];
        for (int l = 0; l < square_lanes; ++l) next[l] = butterfly[l] + butterfly[l ^ step];
        std::copy_n(next, square_lanes, butterfly);
    }
    for (const double thread : butterfly) EXPECT_EQ(thread, joined_lanes(lane));
}

}  // namespace
}  // namespace faultline::testing
