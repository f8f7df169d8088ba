// SPDX-License-Identifier: Apache-2.0
// A test as two ranks, each a process: what cards give to other processes cannot be opened in one. On one card, and where there are two
// on two besides.
#pragma once

#include <cstdlib>
#include <functional>
#include <iostream>
#include <memory>
#include <string>

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <faultline/ranks/local.hpp>
#include <faultline/ranks/sums.hpp>

namespace faultline::test {

/// This test again, and alone, in a process that has not used the device yet; its exit status.
inline int again_with_cards(int cards) {
    const testing::TestInfo& test = *testing::UnitTest::GetInstance()->current_test_info();
    const std::string filter = std::string("--gtest_filter=") + test.test_suite_name() + "." + test.name();
    std::cout.flush();
    const pid_t child = ::fork();
    if (child == 0) {
        (void)::setenv("FAULTLINE_TEST_CARDS", std::to_string(cards).c_str(), 1);
        (void)::execl("/proc/self/exe", "two_processes", filter.c_str(), nullptr);
        ::_exit(127);
    }
    int status = 0;
    (void)::waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

/// work(rank) in two processes. Where one of them fails, or is gone by the end, the test has failed.
inline void on_two_processes(const std::function<void(Ranks&)>& work) {
    if (const char* const cards = std::getenv("FAULTLINE_TEST_CARDS")) {
        std::unique_ptr<Ranks> ranks = local_rank_of_environment();
        if (ranks == nullptr) ranks = start_local_ranks(2);
        ASSERT_EQ(cudaSetDevice(ranks->rank() % std::atoi(cards)), cudaSuccess);
        work(*ranks);
        if (ranks->lost()) return;
        for (const std::string& how : all_texts(ranks.get(), testing::Test::HasFailure() ? "failed" : ""))
            EXPECT_EQ(how, "");
        return;
    }
    int there = 0;
    ASSERT_EQ(cudaGetDeviceCount(&there), cudaSuccess);
    for (const int cards : {1, 2}) {
        if (cards > there) continue;
        std::cout << "two ranks on " << (cards == 1 ? "one card" : "two cards") << std::endl;
        EXPECT_EQ(again_with_cards(cards), 0) << cards << " cards";
    }
}

}  // namespace faultline::test
