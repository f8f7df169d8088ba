// SPDX-License-Identifier: Apache-2.0
#include <faultline/gpt/share.hpp>

#include <algorithm>
#include <array>

#include <fmt/format.h>

#include <faultline/base/error.hpp>
#include <faultline/gpt/training.hpp>

namespace faultline::gpt {
namespace {

/// Everything but the largest logits, one after the other.
template <class Statistics>
auto sums_of(Statistics& s) {
    return std::array{&s.q_rms, &s.k_rms, &s.zero_sum, &s.zero_sum_abs, &s.saturated, &s.entropy, &s.rows};
}

std::vector<double> flat(const BatchStatistics& s) {
    std::vector<double> all{s.loss_sum};
    for (const std::vector<double>* part : sums_of(s)) all.insert(all.end(), part->begin(), part->end());
    return all;
}

}  // namespace

void expect_work_for(int size, const TrainConfig& config, int groups) {
    if (config.accumulate % size == 0 || size <= groups) return;
    const int per_chunk = std::max(1, chunk_tokens / config.model.context);
    const bool few_tokens = (config.batch + per_chunk - 1) / per_chunk <= groups;  // each chunk is a group
    throw RequestError(fmt::format(
        "ranks: {}: a batch of {} is cut into {} group{}: expected at most so many, or accumulate (now {}) a multiple of the "
        "ranks, as --accumulate {}{}",
        size, config.batch, groups, groups == 1 ? "" : "s", config.accumulate, size,
        few_tokens ? fmt::format(", or a larger batch: a group has some {} tokens, whole sequences", chunk_tokens)
                   : ""));
}

Share share_of(Ranks* ranks, const TrainConfig& config, int groups) {
    if (ranks == nullptr) return {};
    expect_work_for(ranks->size(), config, groups);
    return {ranks, config.accumulate % ranks->size() == 0 ? Division::micro_batches : Division::groups};
}

std::string reductions_text(const Share& share) {
    const char* units = share.division == Division::micro_batches ? "micro-batches" : "groups of a micro-batch";
    if (share.ranks == nullptr)
        return "none: one rank adds the groups of a micro-batch, and micro-batches, in ascending order";
    return fmt::format(
        "gradient (fp32), loss and statistics (fp64): {} in ascending order, from rank to rank along a chain, "
        "the additions of one rank; by {}",
        units, share.ranks->transport());
}

GroupRange groups_of(const Share& share, int groups, int rank) {
    if (of_groups(share) == nullptr) return {0, groups};
    const int size = share.ranks->size();
    return {groups * rank / size, groups * (rank + 1) / size};
}

void add_statistics(const Share& share, std::span<const BatchStatistics* const> groups, BatchStatistics& total) {
    std::vector<std::vector<double>> sums;
    std::vector<std::span<const double>> parts, largest;
    for (const BatchStatistics* group : groups) {
        sums.push_back(flat(*group));
        largest.emplace_back(group->max_logit);
    }
    for (const std::vector<double>& part : sums) parts.emplace_back(part);
    std::vector<double> all = flat(total);
    add_in_rank_order(share.ranks, std::span(all), std::span<const std::span<const double>>(parts));
    largest_in_rank_order(share.ranks, std::span(total.max_logit), std::span<const std::span<const double>>(largest));
    total.loss_sum = all[0];
    auto from = all.begin() + 1;
    for (std::vector<double>* part : sums_of(total)) {
        std::copy_n(from, part->size(), part->begin());
        from += static_cast<std::ptrdiff_t>(part->size());
    }
}

}  // namespace faultline::gpt
