// SPDX-License-Identifier: Apache-2.0
// The smallest sets of n things that meet a target, where nothing is known of the target but what trying a set says: it
// need not be monotone, and adding to a set that meets it can unmeet it. All sets of one thing, then of two, of three, as
// far as a number of trials allows; then delta debugging (Zeller and Hildebrandt 2002, ddmin) and a greedy climb, whose
// sets are then 1-minimal: each removal was tried and none meets the target; then sets of the sizes up to theirs, as far as as
// many trials again allow. What is said of other sets of the size that was found, and of smaller ones, is counted from the sets
// that were tried.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace faultline::bisection {

/// A set of at most 64 things: bit i is thing i.
using SiteMask = std::uint64_t;

struct Trial {
    bool met = false;
    double distance = 0;  ///< how far from the target; what the climb goes down
};

/// Tries sets, all different; the answers in the same order. Deterministic.
using Try = std::function<std::vector<Trial>(const std::vector<SiteMask>&)>;

struct SearchOptions {
    std::size_t budget = 1000;  ///< sets that the search by size may try
    int largest_size = 3;       ///< sizes searched one after another before ddmin
    bool beyond = true;         ///< behind ddmin and climb, sizes from there to theirs too, by `budget` sets again
};

/// What was tried of one size.
struct SizeTried {
    int size = 0;
    std::size_t possible = 0;
    std::size_t tried = 0;
    int among = 0;  ///< things that the sets were made of: n, or those whose trial alone changes most
    std::size_t met = 0;
    bool behind = false;  ///< behind ddmin and climb
    [[nodiscard]] bool complete() const { return tried == possible; }
};

/// How many sets of a size were not tried, by any part of the search.
struct SizeUntried {
    int size = 0;
    std::size_t sets = 0;
};

struct FoundSet {
    SiteMask set = 0;
    bool minimal = false;            ///< every removal of one thing was tried and does not meet the target
    std::vector<SiteMask> removals;  ///< the sets that were tried for it, in the order of the things
};

struct SearchResult {
    bool none_met = false;  ///< the empty set
    bool all_met = false;   ///< the set of all things
    std::vector<SizeTried> sizes;
    /// All sets that were tried and met of the smallest size that has one, best first; empty: none that was tried meets it.
    std::vector<FoundSet> found;
    std::vector<SizeUntried> untried;  ///< of sizes up to that of `found`, those of which sets are left
    bool smallest = false;             ///< no set is smaller: all smaller ones were tried
    bool all_found = false;            ///< no other set of that size meets it: all were tried
    std::string method;                ///< "by size", "ddmin", "climb"
    std::map<SiteMask, Trial> tried;   ///< every set, with its answer
};

[[nodiscard]] SearchResult search(int things, const Try& attempt, const SearchOptions& options);

/// n over k, or the largest size_t where that does not hold it.
[[nodiscard]] std::size_t combinations(int n, int k);

}  // namespace faultline::bisection
