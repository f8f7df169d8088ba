// SPDX-License-Identifier: Apache-2.0
// The operation that a back end of truth implements: every value of a problem by the fast path, with its bound. What
// lies around it (problems that the fast path is not for, sinks, elements to be decided by interval arithmetic) is the
// same for all.
#pragma once

#include <functional>
#include <vector>

#include <faultline/truth/slow_path.hpp>
#include <faultline/truth/truth.hpp>

namespace faultline::detail {

/// What the fast path leaves to the slow one.
struct FastReport {
    std::vector<Undecided> undecided;
    bool lost_row = false;    // a row whose p is not known well enough: nothing was added to dk and dv for it
    bool negligible = false;  // some key lies more than 2^40 below its row's largest
};

/// Fills `truth`, which has its shapes and zeros, and `report`. The problem has no sink and fast_path_applies to it;
/// first_key_is_sink: its first key stands for sinks (SinkAsKey), and dsink is asked for.
using FastValues =
    std::function<void(const TruthProblem& problem, bool first_key_is_sink, GroupTruth& truth, FastReport& report)>;

/// attention_truth with the fast path of a back end.
[[nodiscard]] GroupTruth attention_truth_by(const FastValues& fast_values, const TruthProblem& problem,
                                            const TruthOptions& options);

}  // namespace faultline::detail
