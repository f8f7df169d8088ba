// SPDX-License-Identifier: Apache-2.0
#include <faultline/truth/truth.hpp>

#include <faultline/truth/problem.hpp>
#include <faultline/truth/slow_path.hpp>

namespace faultline {

GroupTruth attention_truth(const TruthProblem& problem, const TruthOptions& options) {
    detail::check_problem(problem);
    GroupTruth truth = detail::shaped_truth(problem, options.keep_matrices);
    detail::decide(problem, detail::all_elements(problem), options.max_bits, truth);
    if (options.keep_matrices) detail::fill_matrices(problem, truth);
    return truth;
}

}  // namespace faultline
