// SPDX-License-Identifier: Apache-2.0
#include <faultline/truth/problem.hpp>

#include <string>

#include <faultline/base/error.hpp>

namespace faultline::detail {
namespace {

std::string shape(MatrixView<const double> a) {
    return "[" + std::to_string(a.rows) + ", " + std::to_string(a.cols) + "]";
}

void check_shape(const std::string& name, MatrixView<const double> a, std::ptrdiff_t rows, std::ptrdiff_t cols) {
    if (a.rows != rows || a.cols != cols)
        throw RequestError("attention truth: " + name + ": shape " + shape(a) + " where [" + std::to_string(rows) +
                           ", " + std::to_string(cols) + "] was expected");
}

void check_finite(const std::string& name, MatrixView<const double> a) {
    for (std::ptrdiff_t i = 0; i < a.rows; ++i)
        for (std::ptrdiff_t j = 0; j < a.cols; ++j)
            if (!std::isfinite(a(i, j)))
                throw RequestError("attention truth: " + name + "[" + std::to_string(i) + ", " + std::to_string(j) +
                                   "] is " + (std::isnan(a(i, j)) ? "NaN" : "infinite") + ": finite values expected");
}

void check_bias(const std::string& name, MatrixView<const double> a) {
    for (std::ptrdiff_t i = 0; i < a.rows; ++i)
        for (std::ptrdiff_t j = 0; j < a.cols; ++j)
            if (std::isnan(a(i, j)) || (std::isinf(a(i, j)) && a(i, j) > 0))
                throw RequestError("attention truth: " + name + "[" + std::to_string(i) + ", " + std::to_string(j) +
                                   "] is " + (std::isnan(a(i, j)) ? "NaN" : "+inf") +
                                   ": finite values or -inf expected");
}

void check_dropout(const std::string& name, MatrixView<const double> a, std::ptrdiff_t rows, std::ptrdiff_t cols) {
    check_shape(name, a, rows, cols);
    for (std::ptrdiff_t i = 0; i < a.rows; ++i)
        for (std::ptrdiff_t j = 0; j < a.cols; ++j)
            if (a(i, j) != 0 && a(i, j) != 1)
                throw RequestError("attention truth: " + name + "[" + std::to_string(i) + ", " + std::to_string(j) +
                                   "] is neither 0 nor 1: 1 for kept, 0 for dropped expected");
}

}  // namespace

void check_problem(const TruthProblem& problem) {
    if (problem.q.empty()) throw RequestError("attention truth: q: no query head: at least one expected");
    if (problem.dout.size() != problem.q.size())
        throw RequestError("attention truth: dout: " + std::to_string(problem.dout.size()) + " heads where q has " +
                           std::to_string(problem.q.size()));
    if (problem.k.cols < 1 || problem.v.cols < 1)
        throw RequestError("attention truth: k, v: head_dim 0: at least 1 expected");
    const std::ptrdiff_t n_q = query_rows(problem);
    const std::ptrdiff_t n_k = problem.k.rows;
    check_shape("v", problem.v, n_k, problem.v.cols);
    for (std::size_t h = 0; h < problem.q.size(); ++h) {
        check_shape("q of head " + std::to_string(h), problem.q[h], n_q, problem.k.cols);
        check_shape("dout of head " + std::to_string(h), problem.dout[h], n_q, problem.v.cols);
        check_finite("q of head " + std::to_string(h), problem.q[h]);
        check_finite("dout of head " + std::to_string(h), problem.dout[h]);
    }
    check_finite("k", problem.k);
    check_finite("v", problem.v);
    if (problem.bias.size() > 1 && problem.bias.size() != problem.q.size())
        throw RequestError("attention truth: bias: " + std::to_string(problem.bias.size()) +
                           " matrices: none, one, or one per query head (" + std::to_string(problem.q.size()) +
                           ") expected");
    for (std::size_t h = 0; h < problem.bias.size(); ++h) {
        check_shape("bias " + std::to_string(h), problem.bias[h], n_q, n_k);
        check_bias("bias " + std::to_string(h), problem.bias[h]);
    }
    if (problem.scale.kind == Scale::Kind::exact && !std::isfinite(problem.scale.value))
        throw RequestError("attention truth: scale is not finite: a finite value expected");
    if (!(problem.softcap >= 0) || std::isinf(problem.softcap))
        throw RequestError("attention truth: softcap is not a finite number of 0 or more: one expected");
    if (!problem.sink.empty() && problem.sink.size() != problem.q.size())
        throw RequestError("attention truth: sink: " + std::to_string(problem.sink.size()) +
                           " logits: none, or one per query head (" + std::to_string(problem.q.size()) + ") expected");
    for (const double logit : problem.sink)
        if (!std::isfinite(logit)) throw RequestError("attention truth: sink is not finite: finite logits expected");
    if (problem.dropout.size() > 1 && problem.dropout.size() != problem.q.size())
        throw RequestError("attention truth: dropout: " + std::to_string(problem.dropout.size()) +
                           " matrices: none, one, or one per query head (" + std::to_string(problem.q.size()) +
                           ") expected");
    for (std::size_t h = 0; h < problem.dropout.size(); ++h)
        check_dropout("dropout " + std::to_string(h), problem.dropout[h], n_q, n_k);
    if (!(problem.keep > 0 && problem.keep <= 1))
        throw RequestError("attention truth: keep is " + std::to_string(problem.keep) +
                           ": a probability above 0 and at most 1 expected");
    if (problem.keep != 1 && problem.dropout.empty())
        throw RequestError("attention truth: keep is " + std::to_string(problem.keep) +
                           " without a dropout mask: the mask of what is kept, or 1, expected");
}

GroupTruth shaped_truth(const TruthProblem& problem, bool with_matrices) {
    const std::ptrdiff_t n_q = query_rows(problem);
    const std::ptrdiff_t n_k = problem.k.rows;
    GroupTruth truth;
    truth.heads.resize(problem.q.size());
    for (HeadTruth& head : truth.heads) {
        head.o = CertifiedMatrix(n_q, problem.v.cols);
        head.dq = CertifiedMatrix(n_q, problem.k.cols);
        head.lse = CertifiedMatrix(n_q, 1);
        head.delta = CertifiedMatrix(n_q, 1);
        if (!problem.sink.empty()) head.dsink = CertifiedMatrix(1, 1);
        if (with_matrices)
            for (CertifiedMatrix* m : {&head.s, &head.p, &head.dp, &head.ds}) *m = CertifiedMatrix(n_q, n_k);
        truth.elements += head.o.size() + head.dq.size() + head.lse.size() + head.delta.size() + head.dsink.size();
    }
    truth.dk = CertifiedMatrix(n_k, problem.k.cols);
    truth.dv = CertifiedMatrix(n_k, problem.v.cols);
    truth.elements += truth.dk.size() + truth.dv.size();
    return truth;
}

}  // namespace faultline::detail
