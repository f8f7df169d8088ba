// SPDX-License-Identifier: Apache-2.0
// The fast path as a device runs it, run on the host: every value, bound and exponent of lib/truth's fast path, bit for
// bit, whatever the strips.
#include <algorithm>
#include <limits>
#include <stdexcept>

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

/// Takes no more than it was given, piece by piece, as a device does; team: what one team has.
class StrictBackend : public truth_teams::HostBackend {
  public:
    explicit StrictBackend(std::size_t room) : left_(room) {}
    template <class T>
    T* allocate(std::size_t n) {
        const std::size_t whole =
            (n * sizeof(T) + truth_teams::piece_bytes - 1) / truth_teams::piece_bytes * truth_teams::piece_bytes;
        if (whole > left_) throw std::logic_error("no room");
        left_ -= whole;
        taken_ += whole;
        return HostBackend::allocate<T>(n);
    }
    template <class T>
    T* upload(const T* values, std::size_t n) {
        T* to = allocate<T>(n);
        std::copy_n(values, n, to);
        return to;
    }
    [[nodiscard]] std::size_t room() const { return left_; }
    [[nodiscard]] std::size_t taken() const { return taken_; }

  private:
    std::size_t left_, taken_ = 0;
};

/// The inputs to the byte; what is least suffices, with the same bits, and 1 byte less does not.
void expect_need(const TruthProblem& given, const std::string& name) {
    if (!detail::fast_path_applies(given)) return;
    const truth_teams::TruthNeed need(given, 1);
    const auto within = [&](std::size_t room) {
        return detail::attention_truth_by(
            [&](const TruthProblem& p, bool sink, GroupTruth& truth, detail::FastReport& report) {
                EXPECT_EQ(truth_teams::TruthNeed(p, 1).least(), need.least()) << name << ": a sink as a key";
                const detail::FastInputs inputs(p);
                StrictBackend backend(room);
                truth_teams::Driver<StrictBackend> driver(backend, inputs);
                EXPECT_EQ(backend.taken(), need.inputs()) << name;
                driver.run(sink, truth, report);
            },
            given, fast);
    };
    (void)within(need.all(0));
    constexpr std::size_t few = 12;  // rows, each a strip
    if (given.q.size() * static_cast<std::size_t>(given.q.front().rows) > few) return;
    const GroupTruth cpu = attention_truth(given, fast);
    test::expect_same_bits(cpu, within(need.least() - need.team()), name + ", one row at a time");
    EXPECT_THROW((void)within(need.least() - need.team() - 1), WorkError) << name;
}

TEST(TruthTeamsNeeds, ShapesMasksAndFormats) { test::shapes_masks_and_formats(expect_need); }
TEST(TruthTeamsNeeds, BiasSoftcapSinkDropout) { test::bias_softcap_sink_dropout(expect_need); }

/// Heads of 4096 keys at head size 128, from what is written down of them in docs/device.md.
TEST(TruthTeamsNeeds, AreKnownWithoutValues) {
    const Matrix none(4096, 128);
    TruthProblem problem;
    problem.q = problem.dout = {none.view()};
    problem.k = problem.v = none.view();
    const truth_teams::TruthNeed need(problem, 256);
    // Twelve matrices of doubles of the inputs, and of dk and dv each two sums, value, bound, exponent and a byte.
    const std::size_t elements = std::size_t{4096} * 128;
    EXPECT_NEAR(static_cast<double>(need.inputs() + need.sums()), static_cast<double>(elements * (10 * 8 + 2 * 41)),
                0.02 * static_cast<double>(need.inputs()));
    // 88 bytes for each pair of query and key, beside two sums of each output, its value, bound, exponent and a byte.
    EXPECT_NEAR(static_cast<double>(need.row()), 88.0 * 4096 + 128 * (2 * 8 + 2 * 25), 0.01 * 88 * 4096);
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
