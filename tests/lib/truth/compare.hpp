// SPDX-License-Identifier: Apache-2.0
// Every element of a truth against the judge.
#pragma once

#include <cmath>
#include <string>

#include <gtest/gtest.h>

#include <faultline/truth/truth.hpp>

namespace faultline::test {

/// Same 53-bit numbers, and no bound above one ulp of them. (That a bound is large enough is for expect_within_bounds.)
/// Where the judge cannot tell its element from 0, which happens when it is exactly 0, truth has to say 0.
inline void expect_same(const CertifiedMatrix& truth, const CertifiedMatrix& judge, const std::string& name) {
    ASSERT_EQ(truth.rows, judge.rows) << name;
    ASSERT_EQ(truth.cols, judge.cols) << name;
    std::size_t shown = 0;
    for (std::ptrdiff_t i = 0; i < truth.rows && shown < 5; ++i) {
        for (std::ptrdiff_t c = 0; c < truth.cols && shown < 5; ++c) {
            const WideReal a = truth.at(i, c);
            const WideReal b = judge.at(i, c);
            const WideReal one_ulp(std::ldexp(1.0, -52), b.exponent);
            if (a.mantissa == 0 && abs(b) <= judge.bound_at(i, c)) continue;
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
        expect_same(truth.heads[h].dsink, judge.heads[h].dsink, head + "dsink");
    }
    expect_same(truth.dk, judge.dk, name + " dk");
    expect_same(truth.dv, judge.dv, name + " dv");
}

/// s, p, dp, ds: within the bound of truth and the judge's half ulp together.
inline void expect_matrices(const GroupTruth& truth, const GroupTruth& judge) {
    const auto expect_close = [](const CertifiedMatrix& a, const CertifiedMatrix& b, const std::string& name) {
        ASSERT_EQ(a.size(), b.size()) << name;
        for (std::ptrdiff_t i = 0; i < a.rows; ++i)
            for (std::ptrdiff_t j = 0; j < a.cols; ++j) {
                if (a.at(i, j) == b.at(i, j)) continue;  // -inf among them
                const WideReal allowed = (a.bound_at(i, j) + b.bound_at(i, j)) * WideReal(1 + 0x1p-40);
                const WideReal difference = abs(a.at(i, j) - b.at(i, j));
                EXPECT_LE(difference, allowed) << name << "[" << i << ", " << j << "]: " << a.at(i, j).to_string(20)
                                               << " judge " << b.at(i, j).to_string(20);
            }
    };
    for (std::size_t h = 0; h < truth.heads.size(); ++h) {
        expect_close(truth.heads[h].s, judge.heads[h].s, "s");
        expect_close(truth.heads[h].p, judge.heads[h].p, "p");
        expect_close(truth.heads[h].dp, judge.heads[h].dp, "dp");
        expect_close(truth.heads[h].ds, judge.heads[h].ds, "ds");
    }
}

/// No element outside its bound, among as many samples as there are elements.
inline void expect_within_bounds(const TruthProblem& problem, const GroupTruth& truth, const std::string& name = "",
                                 int bits = 320) {
    const TruthVerification found = verify_truth(problem, truth, 300, 7, bits);
    EXPECT_EQ(found.outside, 0U) << name << ": worst " << found.worst << " ratio " << found.worst_ratio;
    EXPECT_GT(found.checked, 0U) << name;
}

}  // namespace faultline::test
