// SPDX-License-Identifier: Apache-2.0
// The last step of the fast path: high + low with an error bound becomes a 53-bit value, when the bound decides which
// (Ziv's rounding test).
#pragma once

#include <cstddef>
#include <vector>

#include <faultline/truth/certified.hpp>
#include <faultline/truth/double_double.hpp>
#include <faultline/truth/row_passes.hpp>

namespace faultline::detail {

/// Element <- x; returns whether the error decides its rounding. The element gets its value and bound in any case.
bool settle(const WideSum& x, CertifiedMatrix& out, std::size_t at);

/// Row of elements <- high_c + low_c times 2^exponent, with errors error_c times 2^exponent; all arrays aligned and
/// padded to a multiple of 8. Appends the columns that are not decided to `left`.
void settle_row(const double* high, const double* low, const double* error, double exponent, CertifiedMatrix& out,
                std::ptrdiff_t row, std::vector<std::ptrdiff_t>& left);

}  // namespace faultline::detail
