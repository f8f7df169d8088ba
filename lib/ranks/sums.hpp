// SPDX-License-Identifier: Apache-2.0
// What ranks do together, in an order that is ours and not a library's: MPI_Allreduce adds in whatever order its algorithm
// for the message's size has. Every function is called by all ranks at the same point of their work, and waits for them.
// `ranks` null: one rank, and no message.
#pragma once

#include <exception>
#include <span>
#include <string>
#include <vector>

#include <faultline/ranks/ranks.hpp>

namespace faultline {

/// total += parts[0], += parts[1], … of rank 0, then those of rank 1, …: the additions, and so the bits, are those of one
/// rank that has all the parts in this order. `total` is the same on every rank before and after; what the ranks after the
/// first hold in it is not read. A chain: each rank adds to what comes from the one before, and the last one's sum goes back.
/// It moves twice the array through each rank, in pieces, so its time does not grow with the number of ranks.
template <class T>
void add_in_rank_order(Ranks* ranks, std::span<T> total, std::span<const std::span<const T>> parts);
template <class T>
void add_in_rank_order(Ranks* ranks, std::span<T> total, std::span<const T> part) {
    add_in_rank_order(ranks, total, std::span<const std::span<const T>>(&part, 1));
}
/// The same with total = max(total, part), as std::max has it.
void largest_in_rank_order(Ranks* ranks, std::span<double> total, std::span<const std::span<const double>> parts);

/// The texts of all ranks, in their order, on every rank.
[[nodiscard]] std::vector<std::string> all_texts(Ranks* ranks, std::string mine);
/// Bytes of the first rank, on every rank.
void from_first(Ranks* ranks, std::span<std::byte> bytes);

/// How a part of the work went on this rank: well (null), or badly. Where it went badly on any rank, all of them throw:
/// SharedFailure with the sentence of the first one for which it did, which names the rank if that is not the first of all.
/// A rank that `failed` throws too.
void settle(Ranks* ranks, std::exception_ptr failed);
/// The same, and whether `here` is true on any rank.
[[nodiscard]] bool settle_any(Ranks* ranks, std::exception_ptr failed, bool here);
/// Does the work, in which the ranks do not speak to each other, and settles how it went.
template <class F>
void together(Ranks* ranks, F&& work) {
    if (ranks == nullptr) return work();
    std::exception_ptr failed;
    try {
        work();
    } catch (...) {
        failed = std::current_exception();
    }
    settle(ranks, failed);
}
/// The same for work that returns whether all are to stop: whether any rank's did, in one exchange.
template <class F>
[[nodiscard]] bool any_together(Ranks* ranks, F&& work) {
    if (ranks == nullptr) return work();
    std::exception_ptr failed;
    bool here = false;
    try {
        here = work();
    } catch (...) {
        failed = std::current_exception();
    }
    return settle_any(ranks, failed, here);
}

}  // namespace faultline
