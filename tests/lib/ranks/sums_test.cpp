// SPDX-License-Identifier: Apache-2.0
// Sums over ranks against a plain loop over the same parts, bit for bit; failures that all ranks hear of.
#include <faultline/ranks/sums.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <limits>
#include <mutex>

#include <faultline/random/random_stream.hpp>
#include <faultline/ranks/ending.hpp>
#include <faultline/ranks/errors.hpp>

#include "on_ranks.hpp"

namespace faultline {
namespace {

using test::on_good_ranks;
using test::on_ranks;
using testing::HasSubstr;

/// Part p of rank r: of sizes from 2^-20 to 2^20, so that another order of additions gives other bits.
std::vector<float> part(int rank, int p, std::size_t size) {
    const RandomStream stream(7, rank, p);
    std::vector<float> values(size);
    for (std::size_t i = 0; i < size; ++i)
        values[i] = static_cast<float>(std::ldexp(stream.normal(i), static_cast<int>(40 * stream.uniform(i)) - 20));
    return values;
}

constexpr int parts_of_a_rank = 2;

std::vector<float> added(Ranks* ranks, int rank, std::size_t size) {
    std::vector<std::vector<float>> own;
    for (int p = 0; p < parts_of_a_rank; ++p) own.push_back(part(rank, p, size));
    const std::vector<std::span<const float>> parts(own.begin(), own.end());
    std::vector<float> total(size, 1.0F);
    add_in_rank_order(ranks, std::span(total), std::span<const std::span<const float>>(parts));
    return total;
}

TEST(SumsOverRanks, AreThoseOfALoopOverAllParts) {
    for (const int ranks : {2, 3, 5})
        for (const std::size_t size :
             {std::size_t{0}, std::size_t{1}, std::size_t{200'001}}) {  // the last in four pieces
            SCOPED_TRACE(size);
            std::vector<float> forward(size, 1.0F), backward = forward;
            for (int i = 0; i < ranks * parts_of_a_rank; ++i) {
                const int last = ranks * parts_of_a_rank - 1 - i;
                const std::vector<float> next = part(i / parts_of_a_rank, i % parts_of_a_rank, size),
                                         other = part(last / parts_of_a_rank, last % parts_of_a_rank, size);
                for (std::size_t e = 0; e < size; ++e) {
                    forward[e] += next[e];
                    backward[e] += other[e];
                }
            }
            if (size > 1) {
                EXPECT_NE(forward, backward);  // the order is seen
            }
            on_good_ranks(ranks, [&](Ranks& self) { EXPECT_EQ(added(&self, self.rank(), size), forward); });
        }
    std::vector<float> alone(100, 1.0F);
    for (int p = 0; p < parts_of_a_rank; ++p)
        for (std::size_t e = 0; e < alone.size(); ++e) alone[e] += part(0, p, alone.size())[e];
    EXPECT_EQ(added(nullptr, 0, alone.size()), alone);
}

TEST(SumsOverRanks, TheLargestIsOfAllRanks) {
    on_good_ranks(3, [](Ranks& self) {
        const double low = -std::numeric_limits<double>::infinity();
        std::vector<double> total(3, low), own(3, low);
        own[static_cast<std::size_t>(self.rank())] = 10.0 + self.rank();
        const std::span<const double> one(own);
        largest_in_rank_order(&self, std::span(total), std::span(&one, 1));
        EXPECT_THAT(total, testing::ElementsAre(10, 11, 12));
    });
}

TEST(Texts, OfAllRanksInTheirOrder) {
    on_good_ranks(4, [](Ranks& self) {
        const std::string mine =
            self.rank() == 2 ? "" : std::string(static_cast<std::size_t>(70'000 * self.rank()), 'x');
        const std::vector<std::string> all = all_texts(&self, mine);
        ASSERT_EQ(all.size(), 4U);
        for (std::size_t r = 0; r < 4; ++r) EXPECT_EQ(all[r].size(), r == 2 ? 0 : 70'000 * r);
        EXPECT_TRUE(any_together(&self, [&] { return self.rank() == 3; }));
        EXPECT_FALSE(any_together(&self, [] { return false; }));
        double value = self.rank() == 0 ? 2.5 : 0;
        from_first(&self, std::as_writable_bytes(std::span(&value, 1)));
        EXPECT_EQ(value, 2.5);
    });
}

TEST(Failures, OfOneRankAreThoseOfAll) {
    std::mutex mutex;
    std::vector<std::string> sentences;
    int silent = 0;
    on_good_ranks(3, [&](Ranks& self) {
        together(&self, [] {});
        try {
            together(&self, [&] {
                if (self.rank() == 2) throw WorkError("disk: full");
                if (self.rank() == 1) throw RequestError("file: missing");
            });
            ADD_FAILURE();
        } catch (const SharedFailure& failure) {
            const std::lock_guard lock(mutex);
            EXPECT_TRUE(failure.refused());  // of the first rank that failed
            sentences.emplace_back(failure.what());
            silent += failure.silent();
        }
    });
    EXPECT_THAT(sentences,
                testing::ElementsAre("rank 1: file: missing", "rank 1: file: missing", "rank 1: file: missing"));
    EXPECT_EQ(silent, 2);
    EXPECT_THROW(settle(nullptr, std::make_exception_ptr(RequestError("alone"))), RequestError);
}

TEST(Failures, OneOfTheRanksHasTheWord) {
    std::atomic<int> words = 0;
    on_good_ranks(4, [&](Ranks& self) {
        words += self.take_word() ? 1 : 0;
        words += self.take_word() ? 1 : 0;
    });
    EXPECT_EQ(words, 1);
}

// Work that waits for a rank that is gone, and cannot be called off.
TEST(Endings, WorkThatWaitsForEverEndsWithTheRankThatItWaitsFor) {
    GTEST_FLAG_SET(death_test_style, "threadsafe");
    EXPECT_EXIT(
        {
            const auto ranks = connected_ranks(2);
            std::thread other([&] { ranks[1]->abandon(); });
            watched(*ranks[0], [] {
                while (true) std::this_thread::sleep_for(std::chrono::hours(1));
            });
        },
        testing::ExitedWithCode(1), "faultline: another rank is gone: expected all of them to stay");
}

TEST(Endings, WatchedWorkIsDoneAndItsFailureItsOwn) {
    on_good_ranks(2, [](Ranks& self) {
        bool done = false;
        watched(self, [&] { done = true; });
        EXPECT_TRUE(done);
        EXPECT_THROW(watched(self, [] { throw LoneFailure("alone"); }), LoneFailure);
        together(&self, [] {});
    });
}

// Who leaves outlasts one that has first to find that out, in the middle of a message that nobody takes.
TEST(Endings, WhoSeesTheOthersOffIsTheLastToGo) {
    std::atomic<bool> gone = false;
    (void)on_ranks(2, [&](Ranks& self) {
        if (self.rank() == 0) {
            self.see_off(std::chrono::minutes(10));
            EXPECT_TRUE(gone);
            return;
        }
        const std::vector<std::byte> much(std::size_t{8} << 20);
        self.send(0, much);
        EXPECT_TRUE(self.lost());
        std::byte answer{};
        EXPECT_THROW(self.receive(0, std::span(&answer, 1)), PeerLost);
        gone = true;
        self.abandon();
    });
}

TEST(Endings, WhoSeesTheOthersOffDoesNotWaitForEver) {
    on_good_ranks(3, [&](Ranks& self) {
        together(&self, [] {});
        if (self.rank() == 0) self.see_off(std::chrono::milliseconds(50));
        while (self.rank() == 2 && !self.lost()) std::this_thread::yield();
    });
}

TEST(Failures, ARankThatIsGoneIsNotWaitedFor) {
    const std::vector<std::exception_ptr> failures = on_ranks(2, [](Ranks& self) {
        if (self.rank() == 1) throw WorkError("away");
        double value = 0;
        while (!self.lost()) std::this_thread::yield();
        self.receive(1, std::as_writable_bytes(std::span(&value, 1)));
    });
    ASSERT_TRUE(failures[0]);
    try {
        std::rethrow_exception(failures[0]);
    } catch (const PeerLost& error) {
        EXPECT_THAT(error.what(), HasSubstr("rank 1 of 2 is gone"));
    }
}

}  // namespace
}  // namespace faultline
