// SPDX-License-Identifier: Apache-2.0
// Bisection of plans whose roundings repeat and cancel each other, against every set of their sites: which sets meet a target is
// counted from plans that are run one by one and from truth in plain MPFR loops, and every answer, and every word of what was
// not tried, has to be what that count says.
#include <algorithm>
#include <bit>
#include <cmath>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <faultline/bisection/bisect.hpp>
#include <faultline/bisection/report.hpp>

#include "made_captures.hpp"

namespace faultline {
namespace {

using bisection::SearchResult;
using bisection::SiteMask;
using ::testing::HasSubstr;
using testing::made_capture;

/// Eleven roundings of one head's O and dQ, all but the last two coarse: scores rounded twice, a delta of a rounded O under
/// P's own cast, an lse that moves the backward's P alone.
RoundingPlan interacting() {
    RoundingPlan plan;
    plan.name = "interacting";
    for (const Site site : {Site::s_cast, Site::p_cast, Site::row_sum, Site::lse, Site::o_cast, Site::delta,
                            Site::bwd_s_cast, Site::dp_cast, Site::ds_cast})
        plan.set(site, Rule{bf16});
    for (const Site site : {Site::exp_argument, Site::dq_cast}) plan.set(site, Rule{fp16});
    Rule sum = plan[Site::row_sum];
    sum.accumulation = fp32_sequential;
    plan.set(Site::row_sum, sum);
    Rule delta = plan[Site::delta];
    delta.accumulation = fp32_sequential;
    plan.set(Site::delta, delta);
    return plan;
}

/// |value - truth| / |truth| of an output for every set of the sites, which are exact (repair) or round alone (reproduce).
std::vector<double> values_of_all(const Capture& capture, const RoundingPlan& plan, Output output,
                                  const std::vector<Site>& sites, BisectionKind kind) {
    const attribution::Group group = attribution::groups_of(capture.layers[0], {}, 0)[0];
    const GroupTruth truth = attention_truth_mpfr(group.problem);
    const CertifiedMatrix& of_output = output == Output::o ? truth.heads[0].o : truth.heads[0].dq;
    Matrix exact(of_output.rows, of_output.cols);
    of_output.copy_to(exact.view());
    double norm = 0;
    for (const double x : exact.values) norm += x * x;
    std::vector<double> values;
    for (SiteMask set = 0; set < SiteMask{1} << sites.size(); ++set) {
        RoundingPlan changed = kind == BisectionKind::repair ? plan : RoundingPlan{};
        changed.schedule = plan.schedule;
        for (std::size_t i = 0; i < sites.size(); ++i)
            if ((set >> i & 1) != 0) changed.set(sites[i], kind == BisectionKind::repair ? Rule{} : plan[sites[i]]);
        const Matrix value = attribution::run_plan(group, changed)[output][0];
        double error = 0;
        for (std::size_t e = 0; e < value.values.size(); ++e) error += std::pow(value.values[e] - exact.values[e], 2);
        values.push_back(std::sqrt(error / norm));
    }
    return values;
}

/// A bound that some sets of `size` are below and no smaller one, halfway between the last of them and the first that is not;
/// `wanted` of them where there are as many. 0: the smallest error of smaller sets is below theirs.
double bound_for(const std::vector<double>& values, int size, std::size_t wanted) {
    double smaller = INFINITY;
    std::vector<double> these;
    for (SiteMask set = 0; set < values.size(); ++set) {
        if (std::popcount(set) < size) smaller = std::min(smaller, values[set]);
        if (std::popcount(set) == size) these.push_back(values[set]);
    }
    std::sort(these.begin(), these.end());
    std::erase_if(these, [&](double x) { return x >= smaller; });
    if (these.empty()) return 0;
    const std::size_t last = std::min(wanted, these.size()) - 1;
    return 0.5 * (these[last] + (last + 1 < these.size() ? these[last + 1] : smaller));
}

/// The table with its broken lines joined.
std::string one_line(const Bisection& found) {
    std::string text;
    for (const char c : table(found)) {
        if (c != '\n' && c != ' ')
            text += c;
        else if (!text.empty() && text.back() != ' ')
            text += ' ';
    }
    return text;
}

/// What the count says of a search's answer.
void expect_counted(const SearchResult& result, const std::vector<double>& values, double bound,
                    const std::string& text) {
    int smallest = -1;
    std::vector<SiteMask> meet;
    for (SiteMask set = 0; set < values.size(); ++set) {
        if (!(values[set] < bound)) continue;
        const int size = std::popcount(set);
        if (smallest < 0 || size < smallest) meet.clear(), smallest = size;
        if (size == smallest) meet.push_back(set);
    }
    ASSERT_FALSE(result.found.empty());
    const int size = std::popcount(result.found.front().set);
    for (const bisection::FoundSet& found : result.found) {
        EXPECT_EQ(std::popcount(found.set), size);
        EXPECT_LT(values[found.set], bound);
    }
    if (result.smallest) EXPECT_EQ(size, smallest);
    if (result.all_found && result.smallest) EXPECT_EQ(result.found.size(), meet.size());
    EXPECT_EQ(text.find("no smaller set does") != std::string::npos, result.smallest);
    EXPECT_EQ(text.find("no other of that size does") != std::string::npos, result.all_found);
    const int sites = std::countr_zero(values.size());
    for (int k = 0; k <= size; ++k) {
        std::size_t tried = 0;
        for (const auto& [set, trial] : result.tried) tried += std::popcount(set) == k;
        const std::size_t left = bisection::combinations(sites, k) - tried;
        const auto said = std::find_if(result.untried.begin(), result.untried.end(),
                                       [&](const bisection::SizeUntried& u) { return u.size == k; });
        EXPECT_EQ(said == result.untried.end() ? 0 : said->sets, left) << k;
        if (left > 0 && k > 1) EXPECT_THAT(text, HasSubstr(fmt::format("{} sets of {}", left, k)));
    }
}

TEST(Exhaustive, AllSetsOfTheSmallestSizeAreFoundUpToFour) {
    const RoundingPlan plan = interacting();
    int questions = 0, of_four = 0;
    for (const std::uint64_t seed : {1, 2})
        for (const double query_size : {2.0, 9.0})
            for (const Output output : {Output::o, Output::dq})
                for (const BisectionKind kind : {BisectionKind::repair, BisectionKind::reproduce}) {
                    const Capture capture = made_capture({}, {.n = 16, .d = 8, .query_size = query_size, .seed = seed});
                    std::vector<Site> sites;
                    for (const Site site : plan.rounding_sites())
                        if (can_touch(plan, site, output)) sites.push_back(site);
                    const std::vector<double> values = values_of_all(capture, plan, output, sites, kind);
                    for (int size = 1; size <= 4; ++size)
                        for (const std::size_t wanted : {std::size_t{1}, std::size_t{2}, std::size_t{7}}) {
                            if (kind == BisectionKind::reproduce) continue;
                            const double bound = bound_for(values, size, wanted);
                            if (bound == 0) continue;
                            BisectionOptions options;
                            options.until = {parse_target(fmt::format("{}.rel_error < {:.17g}", name(output), bound),
                                                          {"layer0"}, {})};
                            options.threads = 1;
                            const Bisection found = bisect(capture, plan, options);
                            const SearchResult& search = found.answers[0].search;
                            ASSERT_EQ(found.answers[0].sites, sites);
                            SCOPED_TRACE(options.until[0].text);
                            EXPECT_TRUE(search.all_found && search.smallest);
                            expect_counted(search, values, bound, one_line(found));
                            ++questions;
                            of_four += size == 4;
                        }
                    if (kind == BisectionKind::repair) continue;
                    // Within a tenth of the plan's own error, which many sets are: the smallest of them all.
                    BisectionOptions options;
                    options.reproduce = {parse_target(fmt::format("{}.rel_error", name(output)), {"layer0"}, 0.1)};
                    options.threads = 1;
                    const Bisection found = bisect(capture, plan, options);
                    std::vector<double> away;
                    for (const double x : values) away.push_back(std::abs(x / values.back() - 1));
                    expect_counted(found.answers[0].search, away, 0.1, one_line(found));
                    ++questions;
                }
    EXPECT_GE(questions, 60);
    EXPECT_GE(of_four, 6) << "no question was one of sets of four";
}

TEST(Exhaustive, WhatABudgetLeavesOutIsSaid) {
    const RoundingPlan plan = interacting();
    const Capture capture = made_capture({}, {.n = 16, .d = 8, .query_size = 9, .seed = 1});
    std::vector<Site> sites;
    for (const Site site : plan.rounding_sites())
        if (can_touch(plan, site, Output::dq)) sites.push_back(site);
    const std::vector<double> values = values_of_all(capture, plan, Output::dq, sites, BisectionKind::repair);
    bool left_something = false;
    for (int size = 2; size <= 5; ++size)
        for (const std::size_t budget : {1, 20, 60, 150, 400})
            for (const int largest : {1, 2, 3})
                for (const bool beyond : {false, true}) {
                    const double bound = bound_for(values, size, 3);
                    if (bound == 0) continue;
                    BisectionOptions options;
                    options.until = {parse_target(fmt::format("dq.rel_error < {:.17g}", bound), {"layer0"}, {})};
                    options.threads = 1;
                    options.search = {.budget = budget, .largest_size = largest, .beyond = beyond};
                    const Bisection found = bisect(capture, plan, options);
                    SCOPED_TRACE(fmt::format("size {} budget {} largest {} beyond {}", size, budget, largest, beyond));
                    expect_counted(found.answers[0].search, values, bound, one_line(found));
                    left_something = left_something || !found.answers[0].search.untried.empty();
                }
    EXPECT_TRUE(left_something);
}

}  // namespace
}  // namespace faultline
