// SPDX-License-Identifier: Apache-2.0
#include <faultline/device/truth.hpp>

#include <algorithm>

#include <faultline/cpu/backend.hpp>
#include <faultline/device/refusals.hpp>
#include <faultline/device/room.hpp>
#include <faultline/device/truth_backend.cuh>
#include <faultline/truth_teams/driver.hpp>

namespace faultline::device {
namespace {

/// Teams that work on rows at once, each with its own three rows; a card holds no more.
constexpr std::size_t most_teams = 2048;

truth_teams::TruthNeed need_of(const TruthProblem& problem, std::size_t room) {
    truth_teams::TruthNeed need(problem, threads_per_team);
    if (need.least() > room) throw NoRoom(no_room_for_truth(need.keys(), need.least(), room));
    return need;
}

}  // namespace

void expect_room_for_truth(const TruthProblem& problem) {
    if (detail::fast_path_applies(problem)) (void)need_of(problem, shared_room().all());
}

GroupTruth attention_truth(const TruthProblem& problem, const TruthOptions& options, std::size_t memory_limit) {
    Room& room = shared_room();
    if (options.keep_matrices)
        throw RequestError(
            "device cuda: s, p, dp and ds of truth are kept on the CPU alone: expected keep_matrices = false");
    return detail::attention_truth_by(
        [&](const TruthProblem& given, bool first_key_is_sink, GroupTruth& truth, detail::FastReport& report) {
            const std::size_t most = std::min(room.all(), memory_limit);
            const truth_teams::TruthNeed need = need_of(given, most);
            const detail::FastInputs inputs(given);
            // A quarter of the room at most, so that head groups and plans run beside each other, unless one row needs more.
            const std::size_t bytes = std::min({need.all(most_teams), most, std::max(room.all() / 4, need.least())});
            const std::size_t beside = bytes - need.least();  // for more teams, and more rows
            const std::size_t teams = std::min((most_teams - 1) * need.team(), beside / 4) + need.team();
            const Lease lease(room, bytes);
            TruthBackend backend(bytes, teams);
            truth_teams::Driver<TruthBackend>(backend, inputs).run(first_key_is_sink, truth, report);
        },
        problem, options);
}

}  // namespace faultline::device
