// SPDX-License-Identifier: Apache-2.0
// The sums of ordered.cpp for AVX2, by intrinsics: the same operations in the same order, in vectors that this instruction set
// has, and as many at a time as its sixteen registers hold.
#include <immintrin.h>

#include <faultline/tensor_core/ordered_block.hpp>

namespace faultline::ordered {
namespace {

struct Float8 {
    using Element = float;
    using Type = __m256;
    static constexpr int width = 8;
    static Type load(const float* x) { return _mm256_loadu_ps(x); }
    static void store(float* x, Type v) { _mm256_storeu_ps(x, v); }
    static Type broadcast(float x) { return _mm256_set1_ps(x); }
    static Type add(Type a, Type b) { return _mm256_add_ps(a, b); }
    static Type multiply(Type a, Type b) { return _mm256_mul_ps(a, b); }
};

struct Double4 {
    using Element = double;
    using Type = __m256d;
    static constexpr int width = 4;
    static Type load(const double* x) { return _mm256_loadu_pd(x); }
    static void store(double* x, Type v) { _mm256_storeu_pd(x, v); }
    static Type broadcast(double x) { return _mm256_set1_pd(x); }
    static Type add(Type a, Type b) { return _mm256_add_pd(a, b); }
    static Type multiply(Type a, Type b) { return _mm256_mul_pd(a, b); }
};

/// Product rounded, then added, in the order of k: row_block rows and two vectors of columns at a time.
template <class V>
void multiply_then_add(const Block<typename V::Element>& g) {
    constexpr int vectors = 2;
    for (int first = 0; first < block_width; first += vectors * V::width) {
        typename V::Type sum[row_block][vectors];
#pragma GCC unroll 4
        for (int r = 0; r < row_block; ++r)
#pragma GCC unroll 2
            for (int v = 0; v < vectors; ++v) sum[r][v] = V::load(g.c[r] + first + v * V::width);
        for (std::ptrdiff_t t = 0; t < g.k; ++t) {
            const typename V::Element* b = g.b + t * g.stride + first;
            const typename V::Type y[vectors] = {V::load(b), V::load(b + V::width)};
#pragma GCC unroll 4
            for (int r = 0; r < row_block; ++r) {
                const typename V::Type x = V::broadcast(g.a[r][t]);
#pragma GCC unroll 2
                for (int v = 0; v < vectors; ++v) sum[r][v] = V::add(sum[r][v], V::multiply(x, y[v]));
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < row_block; ++r)
#pragma GCC unroll 2
            for (int v = 0; v < vectors; ++v) V::store(g.c[r] + first + v * V::width, sum[r][v]);
    }
}

/// A sum of 2^level products that waits for its neighbour.
struct Subtree {
    __m256 sum;
    int level;
};

__m256 product(float a, const float* b) { return Float8::multiply(Float8::broadcast(a), Float8::load(b)); }

/// The tree of neighbours for one row and eight columns: pairwise() of ordered.cpp.
void pairwise_columns(const float* a, const float* b, std::ptrdiff_t stride, std::ptrdiff_t k, float* c) {
    constexpr int leaves = 8, leaf_level = 3;
    Subtree waiting[64];
    int depth = 0;
    const auto push = [&](__m256 sum, int level) __attribute__((always_inline)) {
        for (; depth > 0 && waiting[depth - 1].level == level; ++level) sum = Float8::add(waiting[--depth].sum, sum);
        waiting[depth++] = {sum, level};
    };
    std::ptrdiff_t t = 0;
    for (; t + leaves <= k; t += leaves) {
        __m256 p[leaves];
#pragma GCC unroll 8
        for (int i = 0; i < leaves; ++i) p[i] = product(a[t + i], b + (t + i) * stride);
        push(Float8::add(Float8::add(Float8::add(p[0], p[1]), Float8::add(p[2], p[3])),
                         Float8::add(Float8::add(p[4], p[5]), Float8::add(p[6], p[7]))),
             leaf_level);
    }
    for (; t < k; ++t) push(product(a[t], b + t * stride), 0);
    __m256 sum = waiting[--depth].sum;
    while (depth > 0) sum = Float8::add(waiting[--depth].sum, sum);
    Float8::store(c, Float8::add(Float8::load(c), sum));
}

}  // namespace

void exact_v3(const Block<double>& g) { multiply_then_add<Double4>(g); }
void sequential_v3(const Block<float>& g) { multiply_then_add<Float8>(g); }

void pairwise_v3(const Block<float>& g) {
    for (int r = 0; r < row_block; ++r)
        for (int first = 0; first < block_width; first += Float8::width)
            pairwise_columns(g.a[r], g.b + first, g.stride, g.k, g.c[r] + first);
}

}  // namespace faultline::ordered
