// SPDX-License-Identifier: Apache-2.0
// What every way of computing truth asks of a problem.
#pragma once

#include <cmath>
#include <cstddef>

#include <faultline/truth/truth.hpp>

namespace faultline::detail {

/// Throws RequestError, see attention_truth.
void check_problem(const TruthProblem& problem);

inline std::ptrdiff_t query_rows(const TruthProblem& problem) { return problem.q.front().rows; }

/// Keys [0, this) are not hidden from query i by causality.
inline std::ptrdiff_t causal_end(const TruthProblem& problem, std::ptrdiff_t i) {
    if (!problem.causal) return problem.k.rows;
    const std::ptrdiff_t end = i + (problem.k.rows - query_rows(problem)) + 1;
    return end < 0 ? 0 : end;  // at most n_k, since i < n_q
}

/// Row i of the bias of a head; null when there is none.
inline const double* bias_row(const TruthProblem& problem, std::size_t head, std::ptrdiff_t i) {
    if (problem.bias.empty()) return nullptr;
    return problem.bias[problem.bias.size() == 1 ? 0 : head].row(i);
}

/// Row i of the dropout mask of a head; null when nothing is dropped.
inline const double* dropout_row(const TruthProblem& problem, std::size_t head, std::ptrdiff_t i) {
    if (problem.dropout.empty()) return nullptr;
    return problem.dropout[problem.dropout.size() == 1 ? 0 : head].row(i);
}

inline bool visible(const TruthProblem& problem, std::size_t head, std::ptrdiff_t i, std::ptrdiff_t j) {
    if (j >= causal_end(problem, i)) return false;
    const double* bias = bias_row(problem, head, i);
    return bias == nullptr || !std::isinf(bias[j]);
}

/// Empty results of the right shapes.
[[nodiscard]] GroupTruth shaped_truth(const TruthProblem& problem, bool with_matrices);

}  // namespace faultline::detail
