// SPDX-License-Identifier: Apache-2.0
// How many elements of two runs differ.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

#include <faultline/cpu/attention.hpp>

namespace faultline::agreement {

/// Elements whose values differ (zeros of either sign are equal, and so are two NaN); all of the longer where there are not as
/// many.
inline std::size_t differing(const std::vector<double>& a, const std::vector<double>& b) {
    if (a.size() != b.size()) return std::max(a.size(), b.size());
    std::size_t count = 0;
    for (std::size_t i = 0; i < a.size(); ++i) count += a[i] == b[i] || (std::isnan(a[i]) && std::isnan(b[i])) ? 0 : 1;
    return count;
}
inline std::size_t differing(const Matrix& a, const Matrix& b) { return differing(a.values, b.values); }
/// Of o, of o before its cast and of lse; all of a head that one of them lacks.
inline std::size_t differing(const GroupForward& a, const GroupForward& b) {
    if (a.heads.size() > b.heads.size()) return differing(b, a);
    std::size_t count = 0;
    for (std::size_t h = a.heads.size(); h < b.heads.size(); ++h)
        count += b.heads[h].o.values.size() + b.heads[h].o_unrounded.values.size() + b.heads[h].lse.size();
    for (std::size_t h = 0; h < a.heads.size(); ++h)
        count += differing(a.heads[h].o, b.heads[h].o) + differing(a.heads[h].o_unrounded, b.heads[h].o_unrounded) +
                 differing(a.heads[h].lse, b.heads[h].lse);
    return count;
}

/// Elements further from the truth than the bound; NaN is.
inline std::size_t beyond(const Matrix& x, const Matrix& truth, const Matrix& bound) {
    if (x.values.size() != truth.values.size()) return truth.values.size();
    std::size_t count = 0;
    for (std::size_t i = 0; i < truth.values.size(); ++i)
        count += std::abs(x.values[i] - truth.values[i]) <= bound.values[i] ? 0 : 1;
    return count;
}

}  // namespace faultline::agreement
