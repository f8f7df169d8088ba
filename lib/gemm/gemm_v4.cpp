// SPDX-License-Identifier: Apache-2.0
// For AVX-512: 6 x 4 accumulators of 16 floats, of the 32 registers there are.
#include <immintrin.h>

#include "kernel.hpp"

namespace faultline::gemm_detail {
namespace {

struct Float16 {
    using Element = float;
    using Type = __m512;
    using Index [[gnu::vector_size(64)]] = int;
    static constexpr std::ptrdiff_t width = 16;
    static constexpr int wide = 4, rows_wide = 6, rows_two = 12, rows_narrow = 12;
    static Type zero() { return _mm512_setzero_ps(); }
    static Type load(const float* x) { return _mm512_loadu_ps(x); }
    static void store(float* x, Type v) { _mm512_storeu_ps(x, v); }
    static Type broadcast(float x) { return _mm512_set1_ps(x); }
    static Type fma(Type a, Type b, Type c) { return _mm512_fmadd_ps(a, b, c); }
};

struct Double8 {
    using Element = double;
    using Type = __m512d;
    using Index [[gnu::vector_size(64)]] = long long;
    static constexpr std::ptrdiff_t width = 8;
    static constexpr int wide = 4, rows_wide = 6, rows_two = 12, rows_narrow = 12;
    static Type zero() { return _mm512_setzero_pd(); }
    static Type load(const double* x) { return _mm512_loadu_pd(x); }
    static void store(double* x, Type v) { _mm512_storeu_pd(x, v); }
    static Type broadcast(double x) { return _mm512_set1_pd(x); }
    static Type fma(Type a, Type b, Type c) { return _mm512_fmadd_pd(a, b, c); }
};

}  // namespace

void multiply_v4(const Problem<float>& problem) { multiply<Float16>(problem); }
void multiply_v4(const Problem<double>& problem) { multiply<Double8>(problem); }

}  // namespace faultline::gemm_detail
