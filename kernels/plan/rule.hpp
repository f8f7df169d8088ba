// SPDX-License-Identifier: Apache-2.0
// What happens to a value at one site of the schedule.
#pragma once

#include <faultline/format/format.hpp>
#include <faultline/plan/site.hpp>
#include <faultline/tensor_core/accumulate.hpp>

namespace faultline {

/// The two sums that need no plan: binary64, and fp32 additions in the order of the terms.
inline constexpr Accumulation exact_sum{};
inline constexpr Accumulation fp32_sequential{.kind = Accumulation::Kind::sequential};

/// A rule is data. The exact rule (the default) rounds nothing and sums in binary64.
struct Rule {
    Format format = faultline::exact;            ///< the format that the value is rounded to
    Rounding rounding = Rounding::nearest_even;  ///< how
    Accumulation accumulation = exact_sum;       ///< order and width of the sum; only at sites that accumulate

    friend bool operator==(const Rule&, const Rule&) = default;
    [[nodiscard]] bool is_exact() const { return faultline::is_exact(format) && accumulation == exact_sum; }
};

}  // namespace faultline
