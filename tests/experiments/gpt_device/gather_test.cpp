// SPDX-License-Identifier: Apache-2.0
// What comes from other ranks' cards and how it is added up, on one card: parts that a test wrote in place of copies.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <random>

#include <faultline/gpt_device/exchange_kernels.hpp>

#include "../../kernels/tensor_kernel/on_hopper.hpp"
#include "../../lib/ranks/on_ranks.hpp"

namespace faultline::gpt::on_device {
namespace {

using test::on_good_ranks;

/// Uniform deviates times powers of two from 2^-20 to 2^20: sums of which depend on their order.
template <class T>
std::vector<T> uneven(std::size_t count, unsigned seed) {
    std::mt19937 engine(seed);
    std::uniform_real_distribution<double> between(-1, 1);
    std::vector<T> values(count);
    for (T& x : values) x = static_cast<T>(std::ldexp(between(engine), static_cast<int>(engine() % 41) - 20));
    return values;
}

/// Of numbers far from bf16's largest, nearest even, on the bits.
float to_bf16(float x) {
    const auto bits = std::bit_cast<std::uint32_t>(x);
    return std::bit_cast<float>((bits + 0x7fffU + (bits >> 16 & 1U)) & 0xffff0000U);
}

template <class T>
struct OnDevice {
    OnDevice(const std::vector<T>& values, Stream stream) : count(values.size()), memory(count * sizeof(T), "values") {
        upload(memory.data(), values.data(), count * sizeof(T), stream);
        wait(stream);
    }
    [[nodiscard]] T* data() const { return reinterpret_cast<T*>(memory.data()); }
    [[nodiscard]] std::vector<T> host(Stream stream) const {
        std::vector<T> values(count);
        download(values.data(), memory.data(), count * sizeof(T), stream);
        return values;
    }
    std::size_t count;
    Memory memory;
};

/// The parts of all ranks but `self`, one after the other.
template <class T>
std::vector<T> others_of(const std::vector<std::vector<T>>& parts, std::size_t self) {
    std::vector<T> all;
    for (std::size_t r = 0; r < parts.size(); ++r)
        if (r != self) all.insert(all.end(), parts[r].begin(), parts[r].end());
    return all;
}

// Against additions of the host in the order of ranks; the norm against that of one rank that has the sum.
TEST(Gather, GradientsAddUpInTheOrderOfRanks) {
    NEEDS_HOPPER();
    constexpr std::size_t count = 5'500'000;  // 2.5 rounds of the blocks, an octet a thread
    const OwnedStream stream;
    std::vector<std::uint8_t> kinds(count / 8);
    for (std::size_t o = 0; o < kinds.size(); ++o) kinds[o] = o % 3 == 0 ? comes_rounded : decays;
    const OnDevice<std::uint8_t> on_card(kinds, stream);
    const OnDevice<double> sums(std::vector<double>(2048), stream), loss({3.0}, stream);
    const OnDevice<StepScalars> scalars({StepScalars{.clip = 1}}, stream);
    const OnDevice<StepResult> result({StepResult{}}, stream);
    for (const std::size_t ranks : {1, 2, 3}) {
        std::vector<std::vector<float>> parts;
        for (std::size_t r = 0; r < ranks; ++r) parts.push_back(uneven<float>(count, static_cast<unsigned>(r)));
        for (const bool round : {false, true}) {
            std::vector<float> expected(count);
            for (std::size_t i = 0; i < count; ++i)
                for (std::size_t r = 0; r < ranks; ++r) {
                    float x = parts[r][i];
                    if (round && (kinds[i / 8] & comes_rounded) != 0) x = to_bf16(x);
                    expected[i] = r == 0 ? x : expected[i] + x;
                }
            const OnDevice<float> whole(expected, stream);
            finish_gradient(whole.data(), on_card.data(), false, count, loss.data(), scalars.data(), sums.data(),
                            result.data(), stream);
            const StepResult alone = result.host(stream)[0];
            for (std::size_t self = 0; self < ranks; ++self) {
                SCOPED_TRACE(testing::Message() << "rank " << self << " of " << ranks << ", rounded: " << round);
                const OnDevice<float> own(parts[self], stream);
                std::vector<float> rest = others_of(parts, self);
                rest.resize(std::max<std::size_t>(rest.size(), 8));
                const OnDevice<float> others(rest, stream);
                const GatheredParts there{others.memory.data(), count * sizeof(float), static_cast<int>(self),
                                          static_cast<int>(ranks)};
                finish_gathered_gradient(there, own.data(), on_card.data(), round, count, loss.data(), scalars.data(),
                                         sums.data(), result.data(), stream);
                EXPECT_TRUE(own.host(stream) == expected);
                const StepResult here = result.host(stream)[0];
                EXPECT_EQ(here.squares, alone.squares);
                EXPECT_EQ(here.loss, 3.0);
                EXPECT_EQ(here.factor, alone.factor);
                EXPECT_EQ(here.finite, 1);
            }
        }
    }
}

TEST(Gather, LossesAndWhatTheHeadsSawAddUpInTheOrderOfRanks) {
    NEEDS_HOPPER();
    constexpr std::size_t heads = 300, fields = sizeof(HeadTotals) / sizeof(double), loss_at = 128, totals_at = 256;
    constexpr std::size_t doubles = totals_at / sizeof(double) + heads * fields, ranks = 3;
    const OwnedStream stream;
    std::vector<std::vector<double>> parts;
    for (std::size_t r = 0; r < ranks; ++r) parts.push_back(uneven<double>(doubles, static_cast<unsigned>(r)));
    const auto expected = [&](std::size_t i, bool largest) {
        double x = parts[0][i];
        for (std::size_t r = 1; r < ranks; ++r) x = largest ? std::fmax(x, parts[r][i]) : x + parts[r][i];
        return x;
    };
    for (std::size_t self = 0; self < ranks; ++self) {
        const OnDevice<double> own(parts[self], stream), others(others_of(parts, self), stream);
        double* const loss = own.data() + loss_at / sizeof(double);
        auto* const totals = reinterpret_cast<HeadTotals*>(own.memory.data() + totals_at);
        add_in_rank_order({others.memory.data(), doubles * sizeof(double), static_cast<int>(self), ranks}, loss_at,
                          loss, totals_at, totals, heads, stream);
        const std::vector<double> after = own.host(stream);
        EXPECT_EQ(after[loss_at / sizeof(double)], expected(loss_at / sizeof(double), false));
        for (std::size_t i = totals_at / sizeof(double); i < doubles; ++i)
            ASSERT_EQ(after[i], expected(i, (i - totals_at / sizeof(double)) % fields == 0)) << i;
    }
}

// One process cannot open its own memory a second time: as good as any other reason.
TEST(Gather, WhereItCannotBeAllRanksKnowWhy) {
    NEEDS_HOPPER();
    on_good_ranks(2, [](Ranks& self) {
        std::string why;
        EXPECT_EQ(Gather::among(self, 4096, why), nullptr);
        EXPECT_THAT(why, testing::StartsWith("rank 0: device cuda: opening another card's memory: "));
    });
}

// A step of one rank, whose words nobody else sets, and a second one recorded in a graph.
TEST(Gather, OfOneRankWaitsForNobody) {
    NEEDS_HOPPER();
    on_good_ranks(1, [](Ranks& self) {
        std::string why;
        const auto gather = Gather::among(self, 4096, why);
        ASSERT_NE(gather, nullptr) << why;
        const OwnedStream stream;
        const auto step = [&] {
            gather->begin(stream);
            gather->done(stream);
            gather->wait(stream);
            gather->release(stream);
        };
        step();
        const Graph graph(stream, step);
        graph.launch(stream);
        wait(stream);
        EXPECT_EQ(gather->room(), 0U);
    });
}

}  // namespace
}  // namespace faultline::gpt::on_device
