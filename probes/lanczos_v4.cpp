// SPDX-License-Identifier: Apache-2.0
// For AVX-512.
#include <immintrin.h>

#include "lanczos_passes.hpp"

namespace faultline::lanczos_detail {
namespace {

struct Double8 {
    using Type = __m512d;
    static Type zero() { return _mm512_setzero_pd(); }
    static Type load(const double* x) { return _mm512_loadu_pd(x); }
    /// All of them: the intrinsic without a mask warns of its own undefined vector (g++ 12).
    static Type load(const float* x) { return _mm512_maskz_cvtps_pd(0xFF, _mm256_loadu_ps(x)); }
    static void store(double* x, Type v) { _mm512_storeu_pd(x, v); }
    static Type broadcast(double x) { return _mm512_set1_pd(x); }
    static Type fma(Type a, Type b, Type c) { return _mm512_fmadd_pd(a, b, c); }
};

}  // namespace

const Passes passes_v4 = PassesOf<Double8, 8>::all;

}  // namespace faultline::lanczos_detail
