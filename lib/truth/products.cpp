// SPDX-License-Identifier: Apache-2.0
#include <faultline/truth/products.hpp>

#include <cmath>

#include <faultline/base/clones.hpp>

namespace faultline::detail {
namespace {

/// One product into the pair (acc, low).
[[gnu::always_inline]] inline void step(double a, double b, double& acc, double& low) {
    const double t = std::fma(a, b, acc);
    const double h = t - acc;
    low += std::fma(a, b, -h);
    acc = t;
}

[[gnu::always_inline]] inline void step(double a_high, double a_low, double b, double& acc, double& low) {
    const double t = std::fma(a_high, b, acc);
    const double h = t - acc;
    low += std::fma(a_low, b, std::fma(a_high, b, -h));
    acc = t;
}

}  // namespace

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
            step(a0, b0[j], s, l);
            step(a1, b1[j], s, l);
            step(a2, b2[j], s, l);
            step(a3, b3[j], s, l);
            acc[j] = s;
            low[j] = l;
        }
    }
    for (; k < count; ++k)
        for (std::ptrdiff_t j = 0; j < width; ++j) step(a[k], b[k * stride + j], acc[j], low[j]);
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
            step(a0, c0, b0[j], s, l);
            step(a1, c1, b1[j], s, l);
            step(a2, c2, b2[j], s, l);
            step(a3, c3, b3[j], s, l);
            acc[j] = s;
            low[j] = l;
        }
    }
    for (; k < count; ++k)
        for (std::ptrdiff_t j = 0; j < width; ++j) step(a_high[k], a_low[k], b[k * stride + j], acc[j], low[j]);
}

FAULTLINE_CLONES
void finish(const double* sigma, std::ptrdiff_t width, const double* acc, const double* low_sum, double* high,
            double* low) {
    for (std::ptrdiff_t j = 0; j < width; ++j) {
        const double a = acc[j] - sigma[j];
        const double b = low_sum[j];
        const double s = a + b;
        const double t = s - a;
        high[j] = s;
        low[j] = (a - (s - t)) + (b - t);  // TwoSum (Knuth)
    }
}

}  // namespace faultline::detail
