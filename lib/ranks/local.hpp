// SPDX-License-Identifier: Apache-2.0
// Ranks of one machine: the first starts the others. A pair of Unix sockets joins those that speak to each other: the first and
// every other, and neighbours, along which sums go (sums.hpp): 2 size - 3 pairs, where all with all would be size^2 / 2.
#pragma once

#include <memory>
#include <vector>

#include <faultline/ranks/ranks.hpp>

namespace faultline {

/// Starts `size` - 1 processes of this very program with this process's arguments, and becomes the first rank. The others
/// find what they are in the environment variable FAULTLINE_LOCAL_RANK: local_rank_of_environment(). WorkError where the limit
/// of open files does not allow so many. At the end of its life
/// the first rank waits for them. To be called where no other thread runs. WorkError where the system gives no process.
[[nodiscard]] std::unique_ptr<Ranks> start_local_ranks(int size);
/// The rank that start_local_ranks() has made this process; null: none.
[[nodiscard]] std::unique_ptr<Ranks> local_rank_of_environment();

/// Ranks in one process, one for each thread that a test starts: [i] is rank i.
[[nodiscard]] std::vector<std::unique_ptr<Ranks>> connected_ranks(int size);

}  // namespace faultline
