// SPDX-License-Identifier: Apache-2.0
#include <faultline/truth/products.hpp>

#include <faultline/base/clones.hpp>
#include <faultline/truth/wide_elements.hpp>

namespace faultline::detail {
// Four products at a time: the accumulators, in the first-level cache, are then read and written once in sixteen
// operations. Holding a block of them in registers instead gains nothing measurable and needs intrinsics.
FAULTLINE_CLONES
void accumulate(const double* a, std::ptrdiff_t count, const double* b, std::ptrdiff_t stride, std::ptrdiff_t width,
                double* __restrict acc, double* __restrict low) {
    std::ptrdiff_t k = 0;
    for (; k + 4 <= count; k += 4) {
        const double a0 = a[k], a1 = a[k + 1], a2 = a[k + 2], a3 = a[k + 3];
        const double* __restrict b0 = b + k * stride;
        const double* __restrict b1 = b0 + stride;
        const double* __restrict b2 = b1 + stride;
        const double* __restrict b3 = b2 + stride;
        for (std::ptrdiff_t j = 0; j < width; ++j) {
            double s = acc[j];
            double l = low[j];
            product_step(a0, b0[j], s, l);
            product_step(a1, b1[j], s, l);
            product_step(a2, b2[j], s, l);
            product_step(a3, b3[j], s, l);
            acc[j] = s;
            low[j] = l;
        }
    }
    for (; k < count; ++k)
        for (std::ptrdiff_t j = 0; j < width; ++j) product_step(a[k], b[k * stride + j], acc[j], low[j]);
}

FAULTLINE_CLONES
void accumulate(const double* a_high, const double* a_low, std::ptrdiff_t count, const double* b, std::ptrdiff_t stride,
                std::ptrdiff_t width, double* __restrict acc, double* __restrict low) {
    std::ptrdiff_t k = 0;
    for (; k + 4 <= count; k += 4) {
        const double a0 = a_high[k], a1 = a_high[k + 1], a2 = a_high[k + 2], a3 = a_high[k + 3];
        const double c0 = a_low[k], c1 = a_low[k + 1], c2 = a_low[k + 2], c3 = a_low[k + 3];
        const double* __restrict b0 = b + k * stride;
        const double* __restrict b1 = b0 + stride;
        const double* __restrict b2 = b1 + stride;
        const double* __restrict b3 = b2 + stride;
        for (std::ptrdiff_t j = 0; j < width; ++j) {
            double s = acc[j];
            double l = low[j];
            product_step(a0, c0, b0[j], s, l);
            product_step(a1, c1, b1[j], s, l);
            product_step(a2, c2, b2[j], s, l);
            product_step(a3, c3, b3[j], s, l);
            acc[j] = s;
            low[j] = l;
        }
    }
    for (; k < count; ++k)
        for (std::ptrdiff_t j = 0; j < width; ++j) product_step(a_high[k], a_low[k], b[k * stride + j], acc[j], low[j]);
}

FAULTLINE_CLONES
void finish(const double* sigma, std::ptrdiff_t width, const double* acc, const double* low_sum, double* high,
            double* low) {
    for (std::ptrdiff_t j = 0; j < width; ++j) {
        const DoubleDouble sum = finished(sigma[j], acc[j], low_sum[j]);
        high[j] = sum.high;
        low[j] = sum.low;
    }
}

}  // namespace faultline::detail
