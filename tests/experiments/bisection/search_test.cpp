// SPDX-License-Identifier: Apache-2.0
// The search over sets, judged by trying every set of a small world.
#include <bit>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <faultline/bisection/search.hpp>
#include <faultline/random/random_stream.hpp>

namespace faultline::bisection {
namespace {

using Meets = std::function<bool(SiteMask)>;

Try tries(const Meets& meets, std::size_t* count = nullptr) {
    return [=](const std::vector<SiteMask>& sets) {
        std::vector<Trial> trials;
        for (const SiteMask set : sets) trials.push_back({meets(set), meets(set) ? -1.0 : 1.0});
        if (count != nullptr) *count += sets.size();
        return trials;
    };
}

/// The smallest size that meets, and the number of sets of it, by trying all.
std::pair<int, std::size_t> exhaustive(int n, const Meets& meets) {
    for (int k = 0; k <= n; ++k) {
        std::size_t met = 0;
        for (SiteMask set = 0; set < SiteMask{1} << n; ++set) met += std::popcount(set) == k && meets(set);
        if (met > 0) return {k, met};
    }
    return {-1, 0};
}

TEST(Search, FindsTheSmallestSetsOfWorldsWithoutAnyOrder) {
    // Every set meets by a coin of its own, rarer for small sets: nothing is monotone.
    constexpr int n = 9;
    for (std::uint64_t world = 0; world < 60; ++world) {
        const RandomStream coin(world, 7);
        const Meets meets = [&](SiteMask set) { return coin.uniform(set) < 0.004 * std::popcount(set); };
        const auto [size, count] = exhaustive(n, meets);
        const SearchResult result = search(n, tries(meets), {.budget = 1000, .largest_size = n});
        ASSERT_EQ(result.found.empty(), size < 0) << world;
        if (size < 0) continue;
        EXPECT_EQ(std::popcount(result.found.front().set), size);
        EXPECT_EQ(result.found.size(), count);
        EXPECT_TRUE(result.smallest);
        for (const FoundSet& found : result.found) EXPECT_TRUE(meets(found.set));
    }
}

TEST(Search, TwoThatCancelAreFoundThoughEachAloneMakesItWorse) {
    // e = p + o with p = 10, o = -9 and five small ones: without one of the two the error is 9 or 10, without both 0.5.
    const std::vector<double> errors{10, -9, 0.1, 0.1, 0.1, 0.1, 0.1};
    const Try attempt = [&](const std::vector<SiteMask>& sets) {
        std::vector<Trial> trials;
        for (const SiteMask set : sets) {
            double e = 0;
            for (std::size_t i = 0; i < errors.size(); ++i)
                if ((set >> i & 1) == 0) e += errors[i];
            trials.push_back({std::abs(e) < 0.7, std::abs(e)});
        }
        return trials;
    };
    const SearchResult result = search(7, attempt, {});
    ASSERT_EQ(result.found.size(), 1u);
    EXPECT_EQ(result.found[0].set, 0b11u);
    EXPECT_TRUE(result.found[0].minimal);
    EXPECT_TRUE(result.smallest);
    EXPECT_GT(result.tried.at(0b01).distance, result.tried.at(0).distance);
    EXPECT_GT(result.tried.at(0b10).distance, result.tried.at(0).distance);
}

TEST(Search, BeyondTheBudgetASetIsMinimalAndThatIsAllThatIsSaid) {
    constexpr int n = 24;
    const SiteMask needed = 0b1000'0100'0010'0001'0001'0000;  // five of 24
    const Meets meets = [&](SiteMask set) { return (set & needed) == needed; };
    const SearchResult result = search(n, tries(meets), {.budget = 400, .largest_size = 3});
    ASSERT_EQ(result.found.size(), 1u);
    EXPECT_EQ(result.found[0].set, needed);
    EXPECT_TRUE(result.found[0].minimal);
    EXPECT_EQ(result.found[0].removals.size(), 5u);
    EXPECT_FALSE(result.smallest);
    ASSERT_GE(result.sizes.size(), 2u);
    EXPECT_TRUE(result.sizes[0].complete());
    EXPECT_TRUE(result.sizes[1].complete());
    std::size_t first = 0, behind = 0;
    for (const SizeTried& size : result.sizes) (size.behind ? behind : first) += size.tried;
    EXPECT_LE(first, 400u);
    EXPECT_LE(behind, 400u);
    ASSERT_EQ(result.untried.size(), 3u) << "sets of 3, 4 and 5";
    EXPECT_FALSE(result.all_found);
}

TEST(Search, SetsOfTheSizeThatDeltaDebuggingFindsAreAllTriedWhereTheyAreFew) {
    // Of 15 sets of four things of six, two: ddmin comes upon one of them.
    const Meets meets = [](SiteMask set) { return (set & 0b001111u) == 0b001111u || (set & 0b111001u) == 0b111001u; };
    const SearchResult result = search(6, tries(meets), {});
    ASSERT_EQ(result.found.size(), 2u);
    EXPECT_TRUE(result.all_found && result.smallest && result.untried.empty());
    const SearchResult as_asked = search(6, tries(meets), {.budget = 1000, .largest_size = 3, .beyond = false});
    EXPECT_FALSE(as_asked.found.empty() || as_asked.all_found);
    ASSERT_EQ(as_asked.untried.size(), 1u);
    EXPECT_EQ(as_asked.untried[0].size, 4);
    EXPECT_TRUE(as_asked.smallest);
}

TEST(Search, ASmallerSetBetweenIsTheAnswer) {
    // Ten of twelve things meet, which the climb and ddmin find; so do four that alone do nothing.
    const Meets meets = [](SiteMask set) {
        return (set & 0b0011'1111'1111u) == 0b0011'1111'1111u || set == 0b1100'0000'0011u;
    };
    const SearchResult result = search(12, tries(meets), {});
    ASSERT_EQ(result.found.size(), 1u);
    EXPECT_EQ(result.found[0].set, 0b1100'0000'0011u);
    EXPECT_EQ(result.method, "by size");
    EXPECT_TRUE(result.smallest && result.all_found);
}

TEST(Search, SaysThatNothingMeets) {
    std::size_t count = 0;
    const SearchResult result =
        search(6, tries([](SiteMask) { return false; }, &count), {.budget = 100, .largest_size = 3});
    EXPECT_TRUE(result.found.empty());
    EXPECT_FALSE(result.all_met);
    EXPECT_EQ(count, result.tried.size()) << "a set was tried twice";
}

TEST(Search, TheEmptySetIsTheAnswerWhereItMeets) {
    const SearchResult result = search(6, tries([](SiteMask) { return true; }), {});
    ASSERT_EQ(result.found.size(), 1u);
    EXPECT_EQ(result.found[0].set, 0u);
    EXPECT_TRUE(result.smallest);
}

TEST(Search, NothingToTryIsNoMistake) {
    const SearchResult result = search(0, tries([](SiteMask) { return false; }), {});
    EXPECT_TRUE(result.found.empty());
}

TEST(Search, CountsCombinations) {
    EXPECT_EQ(combinations(32, 3), 4960u);
    EXPECT_EQ(combinations(42, 1), 42u);
    EXPECT_EQ(combinations(5, 6), 0u);
    EXPECT_EQ(combinations(64, 32), 1832624140942590534u);
}

}  // namespace
}  // namespace faultline::bisection
