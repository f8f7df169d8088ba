// SPDX-License-Identifier: Apache-2.0
// No two launches that can run at one time draw their tiles from one counter.
#include <set>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include <faultline/tensor_kernel/launch_counters.hpp>

namespace faultline::tensor_kernel {
namespace {

const void* handle(std::size_t i) { return reinterpret_cast<const void*>(0x1000 + 16 * i); }

TEST(LaunchCounters, OfAStreamTakeTurns) {
    LaunchCounters counters;
    std::vector<int> first, second;
    for (int i = 0; i < LaunchCounters::turns; ++i) first.push_back(counters.next(handle(0)));
    for (int i = 0; i < LaunchCounters::turns; ++i) second.push_back(counters.next(handle(0)));
    EXPECT_EQ(first, second);
    EXPECT_EQ(std::set<int>(first.begin(), first.end()).size(), std::size_t{LaunchCounters::turns});
}

// Six runs with four recorded graphs of 24 layers each: what they were given when recorded, they use at every step.
TEST(LaunchCounters, OfTwoStreamsAreNeverTheSame) {
    LaunchCounters counters;
    std::vector<std::set<int>> of(LaunchCounters::streams);
    for (int launch = 0; launch < 4 * 24; ++launch)
        for (std::size_t s = 0; s < of.size(); ++s) of[s].insert(counters.next(handle(s)));
    std::set<int> all;
    for (const std::set<int>& given : of) {
        EXPECT_GE(*given.begin(), 0);
        EXPECT_LT(*given.rbegin(), LaunchCounters::count);
        all.insert(given.begin(), given.end());
    }
    EXPECT_EQ(all.size(), std::size_t{LaunchCounters::count});  // each in one set alone
}

TEST(LaunchCounters, OfOneNameInTwoThreadsAreTwo) {
    LaunchCounters counters;
    const int here = counters.next(handle(0), std::this_thread::get_id());
    int there = here;
    std::jthread([&] { there = counters.next(handle(0), std::this_thread::get_id()); }).join();
    EXPECT_NE(here / LaunchCounters::turns, there / LaunchCounters::turns);
}

TEST(LaunchCounters, AreGivenAgainAfterTheLastStream) {
    LaunchCounters counters;
    for (std::size_t s = 0; s < LaunchCounters::streams; ++s) (void)counters.next(handle(s));
    EXPECT_EQ(counters.next(handle(LaunchCounters::streams)), 0);
}

}  // namespace
}  // namespace faultline::tensor_kernel
