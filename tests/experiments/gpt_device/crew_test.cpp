// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <atomic>
#include <mutex>
#include <set>
#include <stdexcept>
#include <thread>
#include <vector>

#include <faultline/gpt_device/crew.hpp>

namespace faultline::gpt {
namespace {

TEST(Crew, DoesEachTaskOnceWhoeverIsThere) {
    Crew crew;
    for (const int threads : {1, 3, 8, 2, 0})
        for (const std::size_t count : {0, 1, 5, 1000}) {
            std::vector<std::atomic<int>> done(count);
            crew.run(count, threads, [&](std::size_t i) { ++done[i]; });
            for (const auto& times : done) EXPECT_EQ(times, 1) << threads << " threads, " << count << " tasks";
        }
}

TEST(Crew, HasAsManyThreadsAtWorkAsAreAsked) {
    Crew crew;
    for (const int threads : {4, 2, 1}) {
        std::mutex mutex;
        std::set<std::thread::id> who;
        std::atomic<int> there = 0;
        crew.run(static_cast<std::size_t>(threads), threads, [&](std::size_t) {
            ++there;
            while (there < threads) std::this_thread::yield();  // all at once, or never
            const std::lock_guard lock(mutex);
            who.insert(std::this_thread::get_id());
        });
        EXPECT_EQ(who.size(), static_cast<std::size_t>(threads));
    }
    std::set<std::thread::id> others;
    std::mutex mutex;
    crew.run(100, 1, [&](std::size_t) {
        const std::lock_guard lock(mutex);
        others.insert(std::this_thread::get_id());
    });
    EXPECT_EQ(others, std::set{std::this_thread::get_id()});  // the helpers of before keep out of it
}

TEST(Crew, ThrowsWhatATaskThrowsAndGoesOn) {
    Crew crew;
    std::atomic<int> done = 0;
    const auto fails = [&](std::size_t i) {
        if (i == 3) throw std::runtime_error("the third");
        ++done;
    };
    EXPECT_THROW(crew.run(100000, 4, fails), std::runtime_error);
    EXPECT_LT(done, 99999);
    done = 0;
    crew.run(10, 4, [&](std::size_t) { ++done; });
    EXPECT_EQ(done, 10);
}

}  // namespace
}  // namespace faultline::gpt
