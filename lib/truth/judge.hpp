// SPDX-License-Identifier: Apache-2.0
// One row of attention in plain MPFR: what the judge and the verification are made of.
#pragma once

#include <memory>
#include <vector>

#include <faultline/truth/exact_dot.hpp>
#include <faultline/truth/mpfr_real.hpp>
#include <faultline/truth/truth.hpp>

namespace faultline::detail {

/// Row i of one query head. Entries of keys that the row does not see are 0 and visible[j] is false. A sink stands
/// behind the keys, as a key whose dp is 0.
struct JudgedRow {
    explicit JudgedRow(const TruthProblem& problem, int bits);
    /// The same with the integers of another row of the problem.
    JudgedRow(const TruthProblem& problem, int bits, const JudgedRow& other);

    std::vector<bool> visible;       // [n_k], and the sink
    std::vector<Real> s, p, dp, ds;  // the same
    std::vector<Real> pd, dz;        // p o M / keep, and ds (1 - tanh^2): p and ds again without dropout and softcap
    Real lse, delta;
    // What the rounding errors of dp_j, ds_j, lse, delta and of sums with p_j are proportional to: sums of |terms|.
    std::vector<Real> dp_size, ds_size, dz_size;
    Real lse_size, delta_size;
    bool empty = true;  // sees no key
    Real scale;         // the factor on q k^T

    /// The inputs as integers, whose dot products are exact; where 128 bits do not hold them, MPFR adds them up.
    struct Integers {
        explicit Integers(const TruthProblem& problem);
        std::vector<IntegerRows> q, dout;
        IntegerRows k, v;
    };
    std::shared_ptr<const Integers> integers;

    /// Overwrites all of the above with row i of query head `head`.
    void compute(const TruthProblem& problem, std::size_t head, std::ptrdiff_t i);
    /// sum_j p_j v_jc and scale sum_j dz_j k_jc, with their sizes; with dropout, pd in place of p.
    void output(const TruthProblem& problem, std::ptrdiff_t c, Real& o, Real& size) const;
    void query_gradient(const TruthProblem& problem, std::ptrdiff_t c, Real& dq, Real& size) const;

  private:
    JudgedRow(const TruthProblem& problem, int bits, std::shared_ptr<const Integers> of_problem);
};

/// sum <- sum + x factor, size <- size + x_size |factor|.
void add_term(const Real& x, const Real& x_size, double factor, Real& sum, Real& size);

/// Rounding errors of a result of this size in `bits` bits: 2^40 units in the last place are ample for the dozen
/// operations behind each term, thousands of terms, and logits of 10^8.
inline void to_noise(Real& size, mpfr_prec_t bits) {
    mpfr_mul_2si(size, size, 40 - static_cast<long>(bits), MPFR_RNDU);
}

}  // namespace faultline::detail
