// SPDX-License-Identifier: Apache-2.0
// Ranks as threads of a test.
#pragma once

#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include <faultline/ranks/local.hpp>

namespace faultline::test {

/// work(rank) on `size` ranks at once. What it throws is left in `failures`, by rank, once the others cannot wait for it.
inline std::vector<std::exception_ptr> on_ranks(int size, const std::function<void(Ranks&)>& work) {
    const std::vector<std::unique_ptr<Ranks>> ranks = connected_ranks(size);
    std::vector<std::exception_ptr> failures(ranks.size());
    std::vector<std::thread> threads;
    for (std::size_t r = 0; r < ranks.size(); ++r)
        threads.emplace_back([&, r] {
            try {
                work(*ranks[r]);
            } catch (...) {
                failures[r] = std::current_exception();
                ranks[r]->abandon();
            }
        });
    for (std::thread& thread : threads) thread.join();
    return failures;
}

/// The same where none may fail.
inline void on_good_ranks(int size, const std::function<void(Ranks&)>& work) {
    for (const std::exception_ptr& failure : on_ranks(size, work))
        if (failure) std::rethrow_exception(failure);
}

}  // namespace faultline::test
