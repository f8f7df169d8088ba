// SPDX-License-Identifier: Apache-2.0
// How the work of a step is divided over ranks, so that every sum is the one that a single rank makes: the ranks are to a run
// what threads are, and its bits do not depend on them.
//
// A step is accumulate x groups units of work in a row (model.hpp has the groups of a micro-batch). Where the ranks divide
// the micro-batches, rank r of R takes micro-batches r, r + R, …, and each round of R of them is added to the gradient in rank
// order. Else each micro-batch is divided: rank r of R takes groups [G r / R, G (r + 1) / R) of its G, and they are added
// before the bf16 rounding of a micro-batch's gradient.
#pragma once

#include <span>
#include <string>
#include <vector>

#include <faultline/gpt/step_context.hpp>
#include <faultline/ranks/sums.hpp>

namespace faultline::gpt {

struct TrainConfig;

/// RequestError where there are more ranks than units of work: `groups` of a micro-batch (groups_of_batch), micro-batches.
void expect_work_for(int ranks, const TrainConfig& config, int groups);
/// RequestError as of expect_work_for().
[[nodiscard]] Share share_of(Ranks* ranks, const TrainConfig& config, int groups);
/// What is added up over ranks, and in which order: for the record of a run.
[[nodiscard]] std::string reductions_text(const Share& share);

/// The ranks among which a micro-batch's groups, or a round of micro-batches, are divided; null: they are all here.
[[nodiscard]] inline Ranks* of_groups(const Share& share) {
    return share.division == Division::groups ? share.ranks : nullptr;
}
[[nodiscard]] inline Ranks* of_micro_batches(const Share& share) {
    return share.division == Division::micro_batches ? share.ranks : nullptr;
}
/// Micro-batches of a step that this rank goes through, and the number of its i-th.
[[nodiscard]] inline int rounds(const Share& share, int accumulate) {
    return of_micro_batches(share) != nullptr ? accumulate / share.ranks->size() : accumulate;
}
[[nodiscard]] inline int micro_batch_of(const Share& share, int round, int rank) {
    return of_micro_batches(share) != nullptr ? round * share.ranks->size() + rank : round;
}
[[nodiscard]] inline int micro_batch_of(const Share& share, int round) {
    return micro_batch_of(share, round, share.ranks != nullptr ? share.ranks->rank() : 0);
}

/// Groups [first, last) of a micro-batch that a rank takes.
struct GroupRange {
    int first = 0, last = 0;
};
[[nodiscard]] GroupRange groups_of(const Share& share, int groups, int rank);
[[nodiscard]] inline GroupRange own_groups(const Share& share, int groups) {
    return groups_of(share, groups, share.ranks != nullptr ? share.ranks->rank() : 0);
}

/// Adds the statistics of groups to the total, rank after rank; the largest of the logits.
void add_statistics(const Share& share, std::span<const BatchStatistics* const> groups, BatchStatistics& total);

}  // namespace faultline::gpt
