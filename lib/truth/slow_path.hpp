// SPDX-License-Identifier: Apache-2.0
// Elements that the fast path left undecided, again in interval arithmetic with growing precision.
#pragma once

#include <cstdint>
#include <vector>

#include <faultline/truth/truth.hpp>

namespace faultline::detail {

enum class Output : std::uint8_t { o, dq, lse, delta, dsink, dk, dv };

/// An element still to be decided. `row` is the query for o, dq, lse, delta, the key for dk, dv (whose head is 0), 0 for
/// dsink.
struct Undecided {
    Output output;
    std::size_t head;
    std::ptrdiff_t row;
    std::ptrdiff_t col;
};

/// Overwrites the listed elements of `truth` and adds to its two counters.
void decide(const TruthProblem& problem, std::vector<Undecided> elements, int max_bits, GroupTruth& truth);

/// Every element of a problem.
[[nodiscard]] std::vector<Undecided> all_elements(const TruthProblem& problem);

/// s, p, dp, ds of every head with 256 bits.
void fill_matrices(const TruthProblem& problem, GroupTruth& truth);

}  // namespace faultline::detail
