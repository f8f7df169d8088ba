// SPDX-License-Identifier: Apache-2.0
#include <faultline/tensor_core/accumulate.hpp>

#include <string>

#include <faultline/base/error.hpp>
#include <faultline/tensor_core/reference.hpp>

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
    reference::multiply_accumulate(accumulation, a, b, {c.data, c.rows, c.cols, c.stride});
}

}  // namespace faultline
