// SPDX-License-Identifier: Apache-2.0
// One attention head, forward and backward, the way one would write it with MPFR or Arb: s, p, o, dp, delta, ds, dq, dk,
// dv in 128 bits. What truth is measured against.
#pragma once

#include <vector>

#include <faultline/truth/truth.hpp>

namespace faultline::bench {

/// Row-major, rounded to double.
struct PeerResult {
    std::vector<double> o, dq, dk, dv;
};

inline constexpr int peer_bits = 128;

/// One query head, scale 1/sqrt(d) with sqrt(d) exact, no bias.
PeerResult mpfr_attention(const TruthProblem& problem);
PeerResult arb_attention(const TruthProblem& problem);
/// Whether arb_attention exists in this build.
bool have_arb();

}  // namespace faultline::bench
