// SPDX-License-Identifier: Apache-2.0
#include <faultline/verdict/judge.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include <faultline/attribution/level.hpp>

namespace faultline::verdict {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

void set_ratios(const OutputWork& work, OutputCheck& out) {
    double observed = 0, plan = 0, expected = 0;
    std::vector<double> runs(work.run_squared.size());
    for (const HeadCells& head : work.heads) {
        for (std::size_t c = 0; c < head.cells.size(); ++c) {
            if (head.cells[c].direction != Direction::size || head.cells[c].extent != Extent::head) continue;
            observed += head.observed_sums[c];
            plan += head.plan_sums[c];
            if (!head.null[c].exact) expected += std::exp(head.null[c].center);
        }
        for (std::size_t r = 0; r < runs.size(); ++r) runs[r] += head.run_sizes[r];
    }
    const auto ratio = [&](double size) { return expected > 0 ? std::sqrt(size / expected) : size > 0 ? infinity : 0; };
    out.size_ratio = ratio(observed);
    out.plan_ratio = ratio(plan);
    out.least_ratio = ratio(*std::min_element(runs.begin(), runs.end()));
    out.largest_ratio = ratio(*std::max_element(runs.begin(), runs.end()));
}

void put_in_order(std::vector<Finding>& findings) {
    const auto before = [](const Finding& a, const Finding& b) {
        return a.kind != b.kind ? a.kind > b.kind : a.log10_p < b.log10_p;
    };
    std::stable_sort(findings.begin(), findings.end(), before);
    // The first of its direction, of a kind that has not told of it yet.
    std::vector<std::pair<Verdict, Direction>> told;
    std::stable_partition(findings.begin(), findings.end(), [&](const Finding& f) {
        const std::pair<Verdict, Direction> test{f.kind, f.cell.direction};
        if (f.nonfinite || f.finite) return true;
        if (std::find(told.begin(), told.end(), test) != told.end()) return false;
        told.push_back(test);
        return true;
    });
}

/// Whether a size goes beyond the plan's own run too. Where it does not, it is the plan's numerics that make errors of
/// agreeing signs, larger than random ones: biased.
bool beyond_plan(const HeadCells& head, std::size_t c, double slack) {
    const double power = head.cells[c].direction == Direction::element ? 1 : 2;
    return head.observed_sums[c] > head.plan_sums[c] * std::pow(slack, power);
}

void add_counts(const HeadCells& head, int number, OutputCheck& out) {
    for (const bool nonfinite : {true, false}) {
        const std::size_t count = nonfinite ? head.nonfinite.elements : head.finite;
        if (count == 0) continue;
        Finding finding;
        finding.kind = Verdict::wrong;
        finding.head = number;
        finding.nonfinite = nonfinite;
        finding.finite = !nonfinite;
        finding.effect = static_cast<double>(count);
        finding.log10_p = -infinity;
        finding.of_plan = nonfinite && head.nonfinite_of_plan == count;
        if (nonfinite) {
            finding.not_finite = head.nonfinite;
            finding.not_finite_of_plan = head.nonfinite_of_plan;
        }
        out.findings.push_back(finding);
    }
}

void add_findings(const HeadCells& head, int number, double log10_threshold, double slack, OutputCheck& out) {
    add_counts(head, number, out);
    for (std::size_t c = 0; c < head.cells.size(); ++c) {
        const CellNull& null = head.null[c];
        const CellNull::Range range = null.t_range(head.observed_sums[c], head.doubt[c]);
        if (head.cells[c].direction == Direction::size && head.cells[c].extent == Extent::head &&
            null.log10_p(head.observed[c]) < out.size_log10_p) {
            out.size_t = head.observed[c];
            out.size_log10_p = null.log10_p(head.observed[c]);
        }
        if (!(null.log10_p(range.most) < log10_threshold)) continue;
        if (!(null.log10_p(range.least) < log10_threshold)) {
            ++out.undecided;
            continue;
        }
        Finding finding;
        const Cell& cell = head.cells[c];
        const bool by_size = cell.direction == Direction::size || cell.direction == Direction::element;
        finding.kind = by_size && beyond_plan(head, c, slack) ? Verdict::wrong : Verdict::biased;
        finding.head = number;
        finding.cell = cell;
        finding.worst = head.worst[c];
        finding.t = head.observed[c];
        finding.log10_p = null.log10_p(head.observed[c]);
        finding.plan_t = head.plan[c];
        finding.of_plan = null.log10_p(head.plan[c]) < log10_threshold &&
                          std::signbit(head.plan[c]) == std::signbit(head.observed[c]);
        if (is_signed(cell.direction))
            finding.effect = head.observed_sums[c] / cell.elements;
        else if (null.exact)
            finding.effect = infinity;
        else
            finding.effect = std::exp((std::log(head.observed_sums[c]) - null.center) /
                                      (cell.direction == Direction::element ? 1 : 2));
        out.findings.push_back(finding);
    }
}

/// Without an output: lse.
OutputCheck judged(const OutputWork& work, std::optional<Output> output, double log10_threshold, double slack) {
    OutputCheck out;
    out.lse = !output;
    out.output = output.value_or(Output::o);
    ErrorSums observed = work.observed_errors.front(), plan = work.plan_errors.front();
    for (std::size_t h = 1; h < work.observed_errors.size(); ++h)
        observed.join(work.observed_errors[h]), plan.join(work.plan_errors[h]);
    out.observed = observed.measure();
    out.plan = plan.measure();
    out.truth_norm = sqrt(work.truth_squared);
    out.truth_bound = sqrt(work.bound_squared);
    out.in_log2 = out.lse && work.in_log2;
    std::vector<WideReal> runs = work.run_squared;
    std::nth_element(runs.begin(), runs.begin() + static_cast<std::ptrdiff_t>(runs.size() / 2), runs.end());
    const WideReal median = runs[runs.size() / 2];
    out.runs = runs.size();
    out.nonfinite_runs = static_cast<std::size_t>(
        std::count_if(runs.begin(), runs.end(), [](const WideReal& run) { return std::isinf(run.mantissa); }));
    if (work.truth_squared > WideReal(0.0))
        out.expected = sqrt(median / work.truth_squared);
    else if (median > WideReal(0.0))
        out.expected = WideReal(infinity);
    out.bit_equal_to_plan = static_cast<double>(work.equal) / static_cast<double>(work.total);
    for (std::size_t h = 0; h < work.heads.size(); ++h) {
        const HeadCells& head = work.heads[h];
        out.cells = head.cells;
        out.t.push_back(head.observed);
        out.tests += head.cells.size();
        out.unpredicted += head.unpredicted;
        if (head.plan_nonfinite.elements > 0 && out.plan_nonfinite.elements == 0) {
            out.plan_nonfinite = head.plan_nonfinite;
            out.plan_nonfinite_head = work.numbers[h];
        }
        add_findings(head, work.numbers[h], log10_threshold, slack, out);
    }
    set_ratios(work, out);
    put_in_order(out.findings);
    if (out.undecided > 0 || out.unpredicted > 0) out.verdict = Verdict::unresolved;
    for (const Finding& finding : out.findings) out.verdict = std::max(out.verdict, finding.kind);
    return out;
}

}  // namespace

LayerCheck judged(const LayerWork& work, double log10_threshold, double slack) {
    LayerCheck check;
    check.name = work.name();
    check.unjudged = work.unjudged();
    for (const Output output : work.outputs())
        check.outputs.push_back(judged(work.work(output), output, log10_threshold, slack));
    if (work.has_lse()) check.outputs.push_back(judged(work.lse(), std::nullopt, log10_threshold, slack));
    for (const OutputCheck& output : check.outputs) check.verdict = std::max(check.verdict, output.verdict);
    return check;
}

}  // namespace faultline::verdict
