// SPDX-License-Identifier: Apache-2.0
#include <faultline/device/truth.hpp>

#include <algorithm>

#include <faultline/device/room.hpp>
#include <faultline/device/truth_backend.cuh>
#include <faultline/truth_teams/driver.hpp>

namespace faultline::device {
namespace {

/// Teams that work on rows at once, each with its own three rows; a card holds no more.
constexpr std::size_t most_teams = 2048;

}  // namespace

GroupTruth attention_truth(const TruthProblem& problem, const TruthOptions& options, std::size_t memory_limit) {
    Room& room = shared_room();
    if (options.keep_matrices)
        throw RequestError(
            "device cuda: s, p, dp and ds of truth are kept on the CPU alone: expected keep_matrices = false");
    return detail::attention_truth_by(
        [&](const TruthProblem& given, bool first_key_is_sink, GroupTruth& truth, detail::FastReport& report) {
            const detail::FastInputs inputs(given);
            const std::size_t teams =
                truth_teams::row_memory(threads_per_team, given.k.rows) * sizeof(double) * most_teams;
            // A quarter of the room at most, so that head groups and plans run beside each other.
            const std::size_t wanted = truth_teams::bytes_of_all_rows(inputs) + teams;
            const std::size_t bytes = std::min({wanted, room.all() / 4, memory_limit});
            const Lease lease(room, bytes);
            TruthBackend backend(bytes, std::min(teams, bytes / 4));
            truth_teams::Driver<TruthBackend>(backend, inputs).run(first_key_is_sink, truth, report);
        },
        problem, options);
}

}  // namespace faultline::device
