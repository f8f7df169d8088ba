// SPDX-License-Identifier: Apache-2.0
// What a trainer that is one of several ranks does beyond its part of the sums (share.hpp): what the others have to know or
// to be given.
#include <faultline/gpt/trainer.hpp>

#include <algorithm>
#include <cstdio>

#include <fmt/format.h>

#include <faultline/gpt/share.hpp>
#include <faultline/ranks/errors.hpp>

namespace faultline::gpt {
namespace {

std::string bytes_of(double value) { return {reinterpret_cast<const char*>(&value), sizeof value}; }

}  // namespace

std::string Trainer::reductions() const { return reductions_text(share_); }

/// The state is a function of what all ranks have, so it is the same on all of them; a processor or a library on which it is
/// not would train another model, and is named in the step in which it leaves.
void Trainer::expect_same_update(double norm) const {
    if (share_.ranks == nullptr) return;
    const std::vector<std::string> norms = all_texts(share_.ranks, bytes_of(norm));
    for (std::size_t rank = 1; rank < norms.size(); ++rank)
        if (norms[rank] != norms[0])
            throw SharedFailure(fmt::format("step {}: rank {} comes to another update than rank 0: expected processors "
                                            "and libraries that compute alike",
                                            next_, rank),
                                false, !share_.ranks->first());
}

void Trainer::share_hooks_parts() {
    if (share_.ranks == nullptr || hooks_.step == nullptr) return;
    hooks_.step->join(all_texts(share_.ranks, hooks_.step->part()));
}

/// The one that a single rank would have come upon: of the earliest micro-batch, there the first in the order of a pass, and of
/// equals the one of the first tokens.
void Trainer::find_first_of_ranks(int micro_step, FiniteWatch& first) const {
    if (share_.ranks == nullptr) return;
    const std::string mine = first.found_at < 0 ? std::string()
                                                : fmt::format("{} {} {} {} {}", micro_step, first.found_at, first.row,
                                                              first.column, first.site);
    long best_step = -1;
    FiniteWatch best;
    for (const std::string& text : all_texts(share_.ranks, mine)) {
        if (text.empty()) continue;
        long step = 0, at = 0, row = 0, column = 0;
        int end = 0;
        if (std::sscanf(text.c_str(), "%ld %ld %ld %ld %n", &step, &at, &row, &column, &end) < 4) continue;
        if (best.found_at >= 0 && std::pair(best_step, best.found_at) <= std::pair(step, at)) continue;
        best_step = step;
        best.found_at = at;
        best.row = row;
        best.column = column;
        best.site = text.substr(static_cast<std::size_t>(end));
    }
    first = best;
}

/// What every rank kept of a round of micro-batches goes to the first, which gives it to whoever asked for captures.
void Trainer::hand_over(int round, Captured& layers) {
    Ranks* const ranks = share_.ranks;
    if (ranks == nullptr) return capture_take_(next_, round, layers);
    const auto width = static_cast<std::size_t>(config_.model.width);
    const auto each = [&](int rank, auto&& move) {
        const Gpt<float>::TokenRange of = model_.tokens_of(share_, config_.batch, config_.model.context, rank);
        for (auto& layer : layers)
            for (std::vector<float>* values : {&layer.q, &layer.k, &layer.v, &layer.dout, &layer.x})
                move(std::span(*values).subspan(of.first * width, of.count * width));
    };
    if (!ranks->first())
        return each(ranks->rank(), [&](std::span<float> part) { ranks->send(0, std::as_bytes(part)); });
    const bool whole = share_.division == Division::micro_batches;
    if (whole) capture_take_(next_, micro_batch_of(share_, round), layers);
    for (int from = 1; from < ranks->size(); ++from) {
        each(from, [&](std::span<float> part) { ranks->receive(from, std::as_writable_bytes(part)); });
        if (whole) capture_take_(next_, micro_batch_of(share_, round, from), layers);
    }
    if (!whole) capture_take_(next_, round, layers);
}

}  // namespace faultline::gpt
