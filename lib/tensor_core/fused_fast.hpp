// SPDX-License-Identifier: Apache-2.0
// Private to this folder: fused_add.hpp's rule for whole matrices, a block of columns at a time.
#pragma once

#include <faultline/tensor_core/accumulate.hpp>

namespace faultline::fused {

/// C <- C + A B by a valid unit; shapes agree and k >= 1.
void multiply_accumulate(const MatrixUnit& unit, MatrixView<const double> a, MatrixView<const double> b,
                         const MatrixView<double>& c);

}  // namespace faultline::fused
