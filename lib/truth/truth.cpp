// SPDX-License-Identifier: Apache-2.0
#include <faultline/truth/truth.hpp>

#include <limits>
#include <utility>

#include <faultline/truth/fast_head.hpp>
#include <faultline/truth/fast_inputs.hpp>
#include <faultline/truth/fast_values.hpp>
#include <faultline/truth/problem.hpp>
#include <faultline/truth/slow_path.hpp>

namespace faultline {
namespace {

/// Keys more than 2^40 below their row's largest were left out: nothing is exact any more.
void admit_negligible_keys(CertifiedMatrix& m) {
    for (double& b : m.bound)
        if (b == 0) b = std::numeric_limits<double>::denorm_min();
}

/// The processor's.
void fast_values(const TruthProblem& problem, bool has_sink, GroupTruth& truth, detail::FastReport& report) {
    const detail::FastInputs inputs(problem);
    std::vector<detail::HeadRows> rows;
    for (std::size_t h = 0; h < problem.q.size(); ++h) {
        rows.emplace_back(inputs.n_q, inputs.n_k);
        detail::fast_head(inputs, h, rows.back(), truth, report);
    }
    if (has_sink) detail::fast_sink(rows, truth, report);
    detail::fast_columns(inputs, rows, truth, report);
}

void fast_path(const detail::FastValues& values, const TruthProblem& problem, const TruthOptions& options,
               GroupTruth& truth) {
    detail::FastReport report;
    if (problem.sink.empty()) {
        values(problem, false, truth, report);
    } else {
        const detail::SinkAsKey with_key(problem);
        GroupTruth found = detail::shaped_truth(with_key.problem, options.keep_matrices);
        values(with_key.problem, true, found, report);
        detail::drop_sink_key(found, report);
        found.elements = truth.elements;
        truth = std::move(found);
    }
    if (report.negligible) {
        for (HeadTruth& head : truth.heads)
            for (CertifiedMatrix* m : {&head.o, &head.dq, &head.lse, &head.delta, &head.dsink})
                admit_negligible_keys(*m);
        admit_negligible_keys(truth.dk);
        admit_negligible_keys(truth.dv);
    }
    if (options.correctly_rounded || report.lost_row)  // of a lost row there are no values yet
        detail::decide(problem, std::move(report.undecided), options.max_bits, truth);
    else
        truth.undecided_elements = report.undecided.size();
    if (options.keep_matrices && (report.lost_row || report.negligible)) detail::fill_matrices(problem, truth);
}

}  // namespace

GroupTruth detail::attention_truth_by(const FastValues& values, const TruthProblem& problem,
                                      const TruthOptions& options) {
    detail::check_problem(problem);
    GroupTruth truth = detail::shaped_truth(problem, options.keep_matrices);
    if (options.fast_path && detail::fast_path_applies(problem)) {
        fast_path(values, problem, options, truth);
    } else {
        detail::decide(problem, detail::all_elements(problem), options.max_bits, truth);
        if (options.keep_matrices) detail::fill_matrices(problem, truth);
    }
    return truth;
}

GroupTruth attention_truth(const TruthProblem& problem, const TruthOptions& options) {
    return detail::attention_truth_by(fast_values, problem, options);
}

}  // namespace faultline
