// SPDX-License-Identifier: Apache-2.0
// The fast path as a device runs it, run on the host: every value, bound and exponent of lib/truth's fast path, bit for
// bit, whatever the strips.
#include <limits>

#include <gtest/gtest.h>

#include <faultline/truth_teams/host.hpp>

#include "cases.hpp"

namespace faultline {
namespace {

constexpr std::size_t all_memory = std::numeric_limits<std::size_t>::max() / 2;
constexpr TruthOptions fast{.correctly_rounded = false};

GroupTruth by_teams(const TruthProblem& problem, const TruthOptions& options, std::size_t room = all_memory,
                    std::size_t* jobs = nullptr) {
    return detail::attention_truth_by(
        [=](const TruthProblem& p, bool sink, GroupTruth& truth, detail::FastReport& report) {
            truth_teams::HostBackend backend(room);
            truth_teams::fast_values(backend, p, sink, truth, report);
            if (jobs != nullptr) *jobs = backend.jobs();
        },
        problem, options);
}

/// In one strip and in strips of some nine rows.
void expect_bits_of_the_fast_path(const TruthProblem& problem, const std::string& name) {
    const GroupTruth cpu = attention_truth(problem, fast);
    std::size_t whole = 0, in_strips = 0;
    test::expect_same_bits(cpu, by_teams(problem, fast, all_memory, &whole), name);
    const std::ptrdiff_t keys = problem.k.rows + (problem.sink.empty() ? 0 : 1);
    const std::size_t few = truth_teams::bytes_beside_rows(keys) +
                            9 * truth_teams::bytes_of_row(keys, problem.k.cols, problem.v.cols, problem.softcap > 0);
    test::expect_same_bits(cpu, by_teams(problem, fast, few, &in_strips), name + ", strips");
    const std::size_t rows = static_cast<std::size_t>(problem.q.front().rows) * problem.q.size();
    EXPECT_EQ(in_strips > whole, rows > 9 && cpu.slow_elements == 0) << name << ": there were no strips";
}

TEST(TruthTeams, ShapesMasksAndFormats) { test::shapes_masks_and_formats(expect_bits_of_the_fast_path); }
TEST(TruthTeams, SaturatedRows) { test::saturated_rows(expect_bits_of_the_fast_path); }
TEST(TruthTeams, BiasSoftcapSinkDropout) { test::bias_softcap_sink_dropout(expect_bits_of_the_fast_path); }

TEST(TruthTeams, KeysThatAgreeInAColumn) { test::keys_that_agree_in_a_column(expect_bits_of_the_fast_path); }

TEST(TruthTeams, RowsThatAreLost) {
    test::rows_that_are_lost([](const TruthProblem& problem, const std::string& name) {
        expect_bits_of_the_fast_path(problem, name);
        EXPECT_GT(attention_truth(problem, fast).slow_elements, 0U) << "no row is lost";
    });
}

TEST(TruthTeams, AgainstTheJudge) {
    test::Shape shape{.n_q = 33, .n_k = 33, .d = 16, .d_v = 12, .heads = 2};
    shape.q_size = shape.k_size = 5;
    const auto owned = test::random_problem(shape, 9);
    const GroupTruth truth = by_teams(owned.problem, {});
    EXPECT_EQ(truth.undecided_elements, 0U);
    test::expect_same(truth, attention_truth_mpfr(owned.problem, 320));
    test::expect_within_bounds(owned.problem, truth, "teams");
}

TEST(TruthTeams, RefusesWhatItHasNoMemoryForAndMatrices) {
    const auto owned = test::random_problem({}, 3);
    EXPECT_THROW((void)by_teams(owned.problem, {}, 100), WorkError);
    EXPECT_THROW((void)by_teams(owned.problem, {.keep_matrices = true}), RequestError);
}

}  // namespace
}  // namespace faultline
