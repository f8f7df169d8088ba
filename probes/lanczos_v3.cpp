// SPDX-License-Identifier: Apache-2.0
// For AVX2 and FMA: eight doubles are two registers, of the 16 there are.
#include <immintrin.h>

#include "lanczos_passes.hpp"

namespace faultline::lanczos_detail {
namespace {

struct TwoDouble4 {
    struct Type {
        __m256d low, high;
    };
    static Type zero() { return {_mm256_setzero_pd(), _mm256_setzero_pd()}; }
    static Type load(const double* x) { return {_mm256_loadu_pd(x), _mm256_loadu_pd(x + 4)}; }
    static Type load(const float* x) {
        return {_mm256_cvtps_pd(_mm_loadu_ps(x)), _mm256_cvtps_pd(_mm_loadu_ps(x + 4))};
    }
    static void store(double* x, Type v) {
        _mm256_storeu_pd(x, v.low);
        _mm256_storeu_pd(x + 4, v.high);
    }
    static Type broadcast(double x) { return {_mm256_set1_pd(x), _mm256_set1_pd(x)}; }
    static Type fma(Type a, Type b, Type c) {
        return {_mm256_fmadd_pd(a.low, b.low, c.low), _mm256_fmadd_pd(a.high, b.high, c.high)};
    }
};

}  // namespace

const Passes passes_v3 = PassesOf<TwoDouble4, 4>::all;

}  // namespace faultline::lanczos_detail
