// SPDX-License-Identifier: Apache-2.0
// One row of attention in plain MPFR: what the judge and the verification are made of.
#pragma once

#include <vector>

#include <faultline/truth/mpfr_real.hpp>
#include <faultline/truth/truth.hpp>

namespace faultline::detail {

/// Row i of one query head. Entries of keys that the row does not see are 0 and visible[j] is false.
struct JudgedRow {
    explicit JudgedRow(const TruthProblem& problem, int bits);

    std::vector<bool> visible;         // [n_k]
    std::vector<Real> s, p, dp, ds;    // [n_k]
    Real lse, delta;
    bool empty = true;                 // sees no key
    Real scale;                        // the factor on q k^T

    /// Overwrites all of the above with row i of query head `head`.
    void compute(const TruthProblem& problem, std::size_t head, std::ptrdiff_t i);
    /// sum_j p_j v_jc and scale sum_j ds_j k_jc.
    void output(const TruthProblem& problem, std::ptrdiff_t c, Real& o) const;
    void query_gradient(const TruthProblem& problem, std::ptrdiff_t c, Real& dq) const;
};

}  // namespace faultline::detail
