// SPDX-License-Identifier: Apache-2.0
// For AVX2 and FMA: 6 x 2 accumulators of 8 floats, of the 16 registers there are.
#include <immintrin.h>

#include "kernel.hpp"

namespace faultline::gemm_detail {
namespace {

struct Float8 {
    using Element = float;
    using Type = __m256;
    using Index [[gnu::vector_size(32)]] = int;
    static constexpr std::ptrdiff_t width = 8;
    static constexpr int wide = 2, rows_wide = 6, rows_two = 6, rows_narrow = 12;
    static Type zero() { return _mm256_setzero_ps(); }
    static Type load(const float* x) { return _mm256_loadu_ps(x); }
    static void store(float* x, Type v) { _mm256_storeu_ps(x, v); }
    static Type broadcast(float x) { return _mm256_set1_ps(x); }
    static Type fma(Type a, Type b, Type c) { return _mm256_fmadd_ps(a, b, c); }
};

struct Double4 {
    using Element = double;
    using Type = __m256d;
    using Index [[gnu::vector_size(32)]] = long long;
    static constexpr std::ptrdiff_t width = 4;
    static constexpr int wide = 2, rows_wide = 6, rows_two = 6, rows_narrow = 12;
    static Type zero() { return _mm256_setzero_pd(); }
    static Type load(const double* x) { return _mm256_loadu_pd(x); }
    static void store(double* x, Type v) { _mm256_storeu_pd(x, v); }
    static Type broadcast(double x) { return _mm256_set1_pd(x); }
    static Type fma(Type a, Type b, Type c) { return _mm256_fmadd_pd(a, b, c); }
};

}  // namespace

void multiply_v3(const Problem<float>& problem) { multiply<Float8>(problem); }
void multiply_v3(const Problem<double>& problem) { multiply<Double4>(problem); }

}  // namespace faultline::gemm_detail
