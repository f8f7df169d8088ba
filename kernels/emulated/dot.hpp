// SPDX-License-Identifier: Apache-2.0
// One element of a product of matrices in any order and width of summation, for both sides. The same orders stand in
// lib/tensor_core/reference.cpp, which is the judge of the fast paths and shares no code with what it judges.
#pragma once

#include <cmath>
#include <cstddef>

#include <faultline/cpu/row_arithmetic.hpp>
#include <faultline/tensor_core/accumulate.hpp>
#include <faultline/tensor_core/fused_float.hpp>

namespace faultline::emulated {

/// Numbers that stand `step` elements apart.
struct Strided {
    const double* first;
    std::ptrdiff_t step;

    [[nodiscard]] FAULTLINE_HD double operator()(std::ptrdiff_t i) const { return first[i * step]; }
};

/// c + sum over i < k of x(i) * y(i).
FAULTLINE_HD_CALLED inline double dot(const Accumulation& accumulation, std::ptrdiff_t k, double c, Strided x,
                                      Strided y) {
    using Kind = Accumulation::Kind;
    const auto xf = [&](std::ptrdiff_t i) { return static_cast<float>(x(i)); };
    const auto yf = [&](std::ptrdiff_t i) { return static_cast<float>(y(i)); };
    if (k == 0) return c;
    switch (accumulation.kind) {
        case Kind::exact:
            for (std::ptrdiff_t i = 0; i < k; ++i) c += x(i) * y(i);
            return c;
        case Kind::sequential: {
            auto sum = static_cast<float>(c);
            for (std::ptrdiff_t i = 0; i < k; ++i) sum += xf(i) * yf(i);
            return static_cast<double>(sum);
        }
        case Kind::fma: {
            auto sum = static_cast<float>(c);
            for (std::ptrdiff_t i = 0; i < k; ++i) sum = fmaf(xf(i), yf(i), sum);
            return static_cast<double>(sum);
        }
        case Kind::pairwise: {
            const float products = tree_of_neighbours(
                k, [&](std::ptrdiff_t i) { return xf(i) * yf(i); }, [](float sum) { return sum; });
            return static_cast<double>(static_cast<float>(c) + products);
        }
        case Kind::fused:
            break;
    }
    return fused::sum_of_products(accumulation.unit, k, c, x, y);
}

}  // namespace faultline::emulated
