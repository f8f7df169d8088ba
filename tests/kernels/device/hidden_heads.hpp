// SPDX-License-Identifier: Apache-2.0
// Heads of finite operands in which a pair that the mask hides has a dp, or dp - delta, that is not finite.
#pragma once

#include <vector>

#include "heads.hpp"

namespace faultline::testing {

/// Of head size 64, causal; of each the first row of dO is large, and keys that it does not see have a large v.
inline std::vector<Head> heads_with_hidden_infinities() {
    const auto zeros = [](std::ptrdiff_t n_q, std::ptrdiff_t n_k) {
        Head head(n_q, n_k, 64, 90, 1, 1.0);
        for (Matrix* m : {&head.v, &head.dout.front()}) m->values.assign(m->values.size(), 0.0);
        return head;
    };
    std::vector<Head> heads;
    // dp of the next key is 1.5 x 2^127, delta, by the key that is seen, -1.5 x 2^127: their difference overflows.
    heads.push_back(zeros(64, 64));
    heads.back().dout.front().values[0] = 0x1.8p63;
    heads.back().v.values[0] = -0x1p64;
    heads.back().v.values[64] = 0x1p64;
    // dp overflows in a block of 64 x 64 that is hidden whole.
    heads.push_back(zeros(128, 128));
    heads.back().dout.front().values[0] = 0x1p100;
    heads.back().v.values[64 * 64] = 0x1p100;
    // The first 64 rows see no key.
    heads.push_back(zeros(128, 64));
    heads.back().dout.front().values[0] = 0x1p100;
    heads.back().v.values[0] = 0x1p100;
    return heads;
}

}  // namespace faultline::testing
