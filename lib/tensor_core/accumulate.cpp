// SPDX-License-Identifier: Apache-2.0
#include <faultline/tensor_core/accumulate.hpp>

#include <string>

#include <faultline/base/error.hpp>
#include <faultline/tensor_core/fused_fast.hpp>
#include <faultline/tensor_core/ordered.hpp>

namespace faultline {

void multiply_accumulate(const Accumulation& accumulation, MatrixView<const double> a, MatrixView<const double> b,
                         MatrixView<double> c) {
    validate(accumulation);
    if (a.rows != c.rows || b.cols != c.cols || a.cols != b.rows) {
        const auto shape = [](std::ptrdiff_t rows, std::ptrdiff_t cols) {
            return "[" + std::to_string(rows) + ", " + std::to_string(cols) + "]";
        };
        throw RequestError("multiply_accumulate: A " + shape(a.rows, a.cols) + " times B " + shape(b.rows, b.cols) +
                           " does not give C " + shape(c.rows, c.cols) + ": expected [m, k], [k, n] and [m, n]");
    }
    if (c.rows == 0 || c.cols == 0 || a.cols == 0) return;
    if (accumulation.kind == Accumulation::Kind::fused)
        fused::multiply_accumulate(accumulation.unit, a, b, c);
    else
        ordered::multiply_accumulate(accumulation.kind, a, b, c);
}

}  // namespace faultline
