// SPDX-License-Identifier: Apache-2.0
// Every element of a truth against the judge.
#pragma once

#include <cmath>
#include <string>

#include <gtest/gtest.h>

#include <faultline/truth/truth.hpp>

namespace faultline::test {

inline const WideReal judge_noise(1.0, -280);  // 320 bits less what sums of a few hundred terms and their cancellation cost

/// Same 53-bit numbers, and each within its bound. The judge's own value is an exact element rounded to 53 bits, off by
/// at most its half-ulp bound, so |truth - judge| may exceed truth's bound by that much and no more; with equal values
/// what is left to see is that the bound is not absurd: at most one ulp wherever the element was decided.
inline void expect_same(const CertifiedMatrix& truth, const CertifiedMatrix& judge, const std::string& name) {
    ASSERT_EQ(truth.rows, judge.rows) << name;
    ASSERT_EQ(truth.cols, judge.cols) << name;
    std::size_t shown = 0;
    for (std::ptrdiff_t i = 0; i < truth.rows && shown < 5; ++i) {
        WideReal largest;
        for (std::ptrdiff_t c = 0; c < judge.cols; ++c)
            if (abs(judge.at(i, c)) > largest) largest = abs(judge.at(i, c));
        for (std::ptrdiff_t c = 0; c < truth.cols && shown < 5; ++c) {
            const WideReal a = truth.at(i, c);
            const WideReal b = judge.at(i, c);
            const WideReal one_ulp(std::ldexp(1.0, -52), b.exponent);
            // What is exactly 0 (a column over equal keys) the judge knows only to its 320 bits.
            if (a.mantissa == 0 && truth.bound_at(i, c).mantissa == 0 && abs(b) <= largest * judge_noise) continue;
            const bool small_bound = truth.bound_at(i, c) <= one_ulp || std::isinf(b.mantissa);
            if (a == b && (small_bound || b.mantissa == 0)) continue;
            ++shown;
            ADD_FAILURE() << name << "[" << i << ", " << c << "]: " << a.to_string(20) << " +- "
                          << truth.bound_at(i, c).to_string() << ", judge " << b.to_string(20);
        }
    }
}

inline void expect_same(const GroupTruth& truth, const GroupTruth& judge, const std::string& name = "") {
    ASSERT_EQ(truth.heads.size(), judge.heads.size());
    for (std::size_t h = 0; h < truth.heads.size(); ++h) {
        const std::string head = name + " head " + std::to_string(h) + " ";
        expect_same(truth.heads[h].lse, judge.heads[h].lse, head + "lse");
        expect_same(truth.heads[h].o, judge.heads[h].o, head + "o");
        expect_same(truth.heads[h].delta, judge.heads[h].delta, head + "delta");
        expect_same(truth.heads[h].dq, judge.heads[h].dq, head + "dq");
    }
    expect_same(truth.dk, judge.dk, name + " dk");
    expect_same(truth.dv, judge.dv, name + " dv");
}

/// No element outside its bound, among as many samples as there are elements.
inline void expect_within_bounds(const TruthProblem& problem, const GroupTruth& truth, const std::string& name = "",
                                 int bits = 320) {
    const TruthVerification found = verify_truth(problem, truth, 300, 7, bits);
    EXPECT_EQ(found.outside, 0U) << name << ": worst " << found.worst << " ratio " << found.worst_ratio;
    EXPECT_GT(found.checked, 0U) << name;
}

}  // namespace faultline::test
