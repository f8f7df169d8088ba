// SPDX-License-Identifier: Apache-2.0
// Inputs that a file holds as small elements with scales, as the numbers that they stand for. For X of q, k, v, do:
//   LAYER.X_descale        one number, [heads] or [batch, heads] of X: X times that, as FlashAttention-3's fp8 has it
//   LAYER.X_scale          uint8: e8m0 codes, OCP MX 1.0, blocks of 32; X in float8 (mxfp8), or uint8 with two e2m1 to a byte
//                          (mxfp4), the first in the low half
//                          float8_e4m3fn: nvfp4, blocks of 16; X in uint8 likewise, LAYER.X_global_scale one number or 1
// Block scales are [.., seq, ceil(head_dim / block)], or [.., ceil(seq / block), head_dim] where the blocks run down the
// sequence, as the second product's V has them.
#pragma once

#include <optional>

#include <faultline/tensor/tensor.hpp>

namespace faultline::detail {

/// The set with such inputs in binary64, which holds every product exactly, and without their scales; nothing where it has
/// none. RequestError: scales without their tensor, of another type, or of a shape that fits it in no way.
[[nodiscard]] std::optional<TensorSet> inputs_unscaled(const TensorSet& file);

}  // namespace faultline::detail
