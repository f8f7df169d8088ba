// SPDX-License-Identifier: Apache-2.0
// exp and log1p to about 100 bits with a proven error, exp vectorised and with an exponent apart. Table-driven as in Tang,
// "Table-driven implementation of the exponential function in IEEE floating-point arithmetic", ACM TOMS 15 (1989), in
// double-double. Proofs: docs/numerics-truth.md, lemmas 3 and 4; sweeps against MPFR: tests/lib/truth/elementary_test.cpp.
#pragma once

#include <cstddef>

#include <faultline/truth/double_double.hpp>
#include <faultline/truth/exp_element.hpp>

namespace faultline::detail {

/// Absolute error of log1p, for arguments from 0 to 2^20; relative besides where the argument is at most 2^-30.
inline constexpr double log1p_error = 0x1p-99;
inline constexpr double log1p_small = 0x1p-30;

/// high_j + low_j times 2^exponent_j <- exp(x_high_j + x_low_j) for j < count, a multiple of 8: high in [0.99, 2.02],
/// exponent an integer. Where x_high_j < exp_lowest: 0 and no_exponent.
void exp(const double* x_high, const double* x_low, std::ptrdiff_t count, double* high, double* low, double* exponent);

/// The constants of exp, from MPFR once, so that no digit of them is typed in.
[[nodiscard]] const ExpConstants& exp_constants();

/// ln(1 + t), t >= 0.
[[nodiscard]] DoubleDouble log1p(DoubleDouble t);

/// The double-double nearest to 1/sqrt(n); relative error at most u^2.
[[nodiscard]] DoubleDouble inverse_sqrt(unsigned long n);

}  // namespace faultline::detail
