// SPDX-License-Identifier: Apache-2.0
// What read_capture refuses, one function for each kind of mistake. Each throws a RequestError of one sentence
//   FILE: tensor "NAME": what is there: what was expected
#pragma once

#include <string>
#include <string_view>

#include <faultline/attribution/capture.hpp>
#include <faultline/tensor/tensor.hpp>

namespace faultline::detail {

/// Throws RequestError `SOURCE: tensor "NAME": WRONG`.
[[noreturn]] void refuse(const TensorSet& file, std::string_view tensor, std::string_view wrong);

/// An extent that may be broadcast: "4 or 1", and "1" where there is one.
[[nodiscard]] std::string or_one(std::ptrdiff_t extent);

/// A tensor of rank 2, 3 or 4 as [batch, heads, rows, cols], missing leading dimensions 1. Refuses other ranks, empty
/// dimensions and dtypes that are no floating-point format.
[[nodiscard]] HeadArray head_array(const TensorSet& file, const Tensor& tensor);

/// Refuses NaN and infinity, naming the first such element.
void expect_finite(const TensorSet& file, const Tensor& tensor, const HeadArray& array);

/// The additive mask, [1 or batch, 1 or heads, n_q, n_k]; a boolean one (true: attend) becomes 0 and -inf. Refuses
/// shapes that do not broadcast, NaN, +inf, and the most negative finite number of a format unless `mask_min` is allowed.
[[nodiscard]] HeadArray mask_array(const TensorSet& file, const Tensor& tensor, const LayerCapture& layer,
                                   const Allowances& allow);

/// q, k, v, dout of one layer fit together; one key only, and rows that see no key, as `allow` says.
void expect_consistent(const TensorSet& file, const LayerCapture& layer);
void expect_not_degenerate(const TensorSet& file, const LayerCapture& layer, const Allowances& allow);

/// "[1, 8, 512, 64]" of an array as it stands in memory.
[[nodiscard]] std::string shape_text(const HeadArray& array);

}  // namespace faultline::detail
