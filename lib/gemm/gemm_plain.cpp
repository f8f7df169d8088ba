// SPDX-License-Identifier: Apache-2.0
// For any processor: the C library's fma, one element at a time. Right and slow; the sanitizer builds run it too.
#include "kernel.hpp"

namespace faultline::gemm_detail {
namespace {

template <class T>
struct Scalar {
    using Element = T;
    using Type = T;
    static constexpr std::ptrdiff_t width = 1;
    static constexpr int wide = 8, rows_wide = 2, rows_two = 4, rows_narrow = 8;
    static T zero() { return 0; }
    static T load(const T* x) { return *x; }
    static void store(T* x, T v) { *x = v; }
    static T broadcast(T x) { return x; }
    static float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
    static double fma(double a, double b, double c) { return __builtin_fma(a, b, c); }
};

}  // namespace

void multiply_plain(const Problem<float>& problem) { multiply<Scalar<float>>(problem); }
void multiply_plain(const Problem<double>& problem) { multiply<Scalar<double>>(problem); }

}  // namespace faultline::gemm_detail
