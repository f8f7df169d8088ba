// SPDX-License-Identifier: Apache-2.0
// Student's t far out in its tail, where tests on thousands of cells have their thresholds.
#pragma once

namespace faultline {

/// log10 of P(|T| > |t|) for T of Student's distribution with `degrees` > 0 degrees of freedom (Abramowitz and Stegun
/// 26.7.1: the regularised incomplete beta function I_x(degrees/2, 1/2) at x = degrees / (degrees + t^2)); relative error
/// of the probability below 1e-10 for degrees up to 1000. 0 for t = 0, -inf for infinite t, NaN for NaN.
[[nodiscard]] double log10_two_sided_p(double t, double degrees);

}  // namespace faultline
