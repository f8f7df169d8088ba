// SPDX-License-Identifier: Apache-2.0
// The log-sum-exp that a kernel returned: what fp32 arithmetic may do to it, and rows without a key.
#pragma once

#include <vector>

#include <faultline/attribution/group_run.hpp>

namespace faultline::verdict {

/// [n_q] what arithmetic in fp32 in another order than the plan's may do to the lse of a row (natural units), in units u =
/// 2^-24, or 2^-53 where the plan rounds nothing:
///   score    u sqrt(d/3) of the root of the products' squares, the mean over keys by their p: a sequential sum errs by
///            sqrt(d/6), a matrix unit that truncates by about twice that in energy
///   row sum  u sqrt(n/3), as for the score's, of a relative error that the logarithm makes an absolute one
///   the rest 2 u of |lse| + ln n: scale, log2(e), ln 2 and the last addition, four roundings; 4 u: exponential and logarithm
///   file     u of |lse| where it is stored in fp32, also of a plan that rounds nothing
/// The errors of constants (log2 e) are the same in all rows. 0 where the truth is infinite: no key reaches the row.
[[nodiscard]] std::vector<double> lse_floor(const attribution::Group& group, std::size_t head,
                                            const CertifiedMatrix& truth, bool plan_rounds, Dtype stored);

/// The lse of a head, of truth, plan and kernel, made comparable: where the truth is -inf the kernel's may be that or
/// +inf (FlashAttention-2, so that exp(s - lse) is 0 in the backward), and all become 0. Returns how many such rows have a
/// finite lse, or NaN, in the kernel.
std::size_t settle_rows_without_keys(Matrix& truth, Matrix& observed, Matrix& plan);

/// Whether the values are lse log2(e): far from the truth, and near it once multiplied by ln 2.
[[nodiscard]] bool reads_as_log2(const Matrix& observed, const Matrix& truth);

}  // namespace faultline::verdict
