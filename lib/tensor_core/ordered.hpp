// SPDX-License-Identifier: Apache-2.0
// Private to this folder: the accumulations in a plain order, vectorised over the columns of C, so that every element
// still sees its products in the order of k.
#pragma once

#include <faultline/tensor_core/accumulate.hpp>

namespace faultline::ordered {

/// Any kind but fused; shapes agree and k >= 1.
void multiply_accumulate(Accumulation::Kind kind, MatrixView<const double> a, MatrixView<const double> b,
                         const MatrixView<double>& c);

}  // namespace faultline::ordered
