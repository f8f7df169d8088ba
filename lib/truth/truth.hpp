// SPDX-License-Identifier: Apache-2.0
// What attention and its gradients are in exact arithmetic, element by element with a certified bound. The proofs behind
// the bounds are in docs/numerics-truth.md.
//
// With s = scale q k^T + bias (masked: -inf), p = softmax of each row of s:
//   o = p v            lse = log sum_j exp(s_j)       dp = dout v^T      delta = sum_j p_j dp_j
//   ds = p (dp - delta), the gradient with respect to s;  dq = scale ds k;  dk = scale ds^T q;  dv = p^T dout.
// With a softcap c (arXiv 2408.00118, section 2): s = c tanh(scale q k^T / c) + bias, and ds times 1 - tanh^2 stands in
// place of ds in dq and dk. With a sink of logit t, one per query head (gpt-oss; arXiv 2309.17453): exp(t) is added to
// every row's denominator, so that sum_j p_j < 1, lse = log(exp(t) + sum_j exp(s_j)), and dsink = -sum_i p_i,sink delta_i.
// With dropout, M the elements that are kept and k the probability to be: o = (p o M / k) v, dp = (dout v^T) o M / k and
// dv = (p o M / k)^T dout; p, lse and ds = p (dp - delta) as ever.
// A row that sees no key (and no sink) has o = 0, p = 0, lse = -inf, delta = 0 and adds nothing to any gradient. A key
// whose s lies more than 2^40 below its row's largest (a mask of finfo.min) counts as masked: what it adds is below
// 2^(-2^40), and a value that consists of nothing else is 0 with bound 2^-1074. So does a key whose capped score is so
// flat that 1 - tanh^2 is below that.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <faultline/tensor/matrix_view.hpp>
#include <faultline/truth/certified.hpp>

namespace faultline {

/// The factor on q k^T: the real number 1/sqrt(head_dim), or a double taken as exact.
struct Scale {
    enum class Kind { inverse_sqrt_head_dim, exact };
    Kind kind = Kind::inverse_sqrt_head_dim;
    double value = 0;  // for Kind::exact

    [[nodiscard]] static Scale inverse_sqrt_head_dim() { return {}; }
    [[nodiscard]] static Scale exactly(double scale) { return {Kind::exact, scale}; }
};

/// One key/value head with the query heads that share it (one, or several under GQA/MQA). All finite, bias excepted.
struct TruthProblem {
    std::vector<MatrixView<const double>> q;     // per query head [n_q, d]
    std::vector<MatrixView<const double>> dout;  // per query head [n_q, d_v]: gradient of the loss with respect to o
    MatrixView<const double> k;                  // [n_k, d]
    MatrixView<const double> v;                  // [n_k, d_v]
    Scale scale;
    /// Key j is visible to query i when j <= i + (n_k - n_q): bottom-right aligned, as FlashAttention since 2.1.
    bool causal = false;
    /// Added to the scaled score, [n_q, n_k], -inf masks: none, one for all query heads, or one per query head.
    std::vector<MatrixView<const double>> bias;
    double softcap = 0;        ///< c of c tanh(scale q k^T / c), before the bias; 0: none
    std::vector<double> sink;  ///< none, or the logit of each query head's sink
    /// Which p are kept, [n_q, n_k], 1 kept and 0 dropped: none, one for all query heads, or one per query head.
    std::vector<MatrixView<const double>> dropout;
    double keep = 1;  ///< the probability that an element is kept, a double taken as exact
};

struct TruthOptions {
    /// o, lse, delta, dq, dk, dv: value is the exact element rounded to 53 bits, ties to even. Elements that the fast
    /// path leaves undecided are computed again in interval arithmetic with 192 bits, then twice that, … up to max_bits.
    bool correctly_rounded = true;
    int max_bits = 1024;
    /// Also fill HeadTruth::s, p, dp, ds (bounds certified; value within an ulp of correctly rounded).
    bool keep_matrices = false;
    /// false: interval arithmetic for every element. Slow (seconds per head); a second opinion for tests.
    bool fast_path = true;
};

/// One query head. Keys that a row does not see: s = -inf, p = dp = ds = 0. s is the score that softmax receives, and ds
/// the gradient with respect to it: its rows sum to 0, or with a sink to minus the sink's share.
struct HeadTruth {
    CertifiedMatrix o;             // [n_q, d_v]
    CertifiedMatrix dq;            // [n_q, d]
    CertifiedMatrix lse;           // [n_q, 1], natural logarithm
    CertifiedMatrix delta;         // [n_q, 1]
    CertifiedMatrix dsink;         // [1, 1] where there is a sink, else empty: gradient with respect to its logit
    CertifiedMatrix s, p, dp, ds;  // [n_q, n_k], empty unless TruthOptions::keep_matrices
};

struct GroupTruth {
    std::vector<HeadTruth> heads;
    CertifiedMatrix dk;             // [n_k, d], summed over the query heads
    CertifiedMatrix dv;             // [n_k, d_v]
    std::size_t elements = 0;       // elements of o, lse, delta, dsink, dq, dk, dv
    std::size_t slow_elements = 0;  // of these, computed in interval arithmetic
    std::size_t undecided_elements =
        0;  // of these, whose 53-bit rounding max_bits did not decide (a tie, a hidden zero)
};

/// Throws RequestError when shapes disagree, a value is NaN or infinite (bias: NaN or +inf), the softcap is below 0, the
/// kept share outside (0, 1], a dropout element neither 0 nor 1, or there is no head or column. n_q = 0 and n_k = 0 are allowed. Single threaded: callers parallelise over heads. Working memory is about
/// 70 bytes times n_q times n_k times the number of query heads.
[[nodiscard]] GroupTruth attention_truth(const TruthProblem& problem, const TruthOptions& options = {});

/// The judge: the definitions above in plain MPFR loops of `bits` bits, rounding to nearest, no error analysis but
/// an estimate: bounds are half an ulp of the 53-bit value, or 2^40 units of the last of the `bits` bits of the sum of
/// |terms| where that is more. dp_j - delta is formed from differences to the row's
/// largest element, so that a saturated row needs no more bits than another. Fills s, p, dp, ds too.
[[nodiscard]] GroupTruth attention_truth_mpfr(const TruthProblem& problem, int bits = 256);

/// What verify_truth found.
struct TruthVerification {
    std::size_t checked = 0;  // elements recomputed
    std::size_t outside = 0;  // of these, with |difference| > bound
    double worst_ratio = 0;   // largest |difference| / bound (0/0 = 0, x/0 = infinity)
    std::string worst;        // where: "dk[3, 17]", "head 1 dq[0, 2]"
};

/// Recomputes `sample_count` elements of each of o, lse, delta, dq (spread over a few random rows) and of dk, dv (random)
/// in MPFR with `bits` bits and compares them with their bounds; every element, once, where there are no more than that.
/// Deterministic in `seed`. dk and dv cost one pass over the whole head in MPFR (0.2 s for 256 x 128 in bf16), on `threads`
/// threads (0: one for each hardware thread). `cancelled` is polled row by row, from any of them; true ends it with what has
/// been checked.
[[nodiscard]] TruthVerification verify_truth(const TruthProblem& problem, const GroupTruth& truth,
                                             std::size_t sample_count, std::uint64_t seed, int bits = 320,
                                             const std::function<bool()>& cancelled = {}, int threads = 1);

}  // namespace faultline
