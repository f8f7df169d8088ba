// SPDX-License-Identifier: Apache-2.0
// The plain meaning of every Accumulation, one dot product at a time: what the fast paths are compared with, bit for bit.
#pragma once

#include <cstddef>

#include <faultline/tensor_core/accumulate.hpp>

namespace faultline::reference {

/// c + sum over i < k of a[i * a_step] * b[i * b_step], formed as the accumulation says. The accumulation must be valid.
[[nodiscard]] double dot(const Accumulation& accumulation, const double* a, std::ptrdiff_t a_step, const double* b,
                         std::ptrdiff_t b_step, std::ptrdiff_t k, double c);

/// multiply_accumulate by dot(); shapes must agree.
void multiply_accumulate(const Accumulation& accumulation, MatrixView<const double> a, MatrixView<const double> b,
                         MatrixView<double> c);

}  // namespace faultline::reference
