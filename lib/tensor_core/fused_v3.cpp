// SPDX-License-Identifier: Apache-2.0
// The fused adds of fused_fast.cpp for AVX2, by intrinsics: g++ 12 takes that file's vectors of 512 bits apart through memory
// there.
#include <immintrin.h>

#include <faultline/tensor_core/fused_v3.hpp>

namespace faultline::fused {
namespace {

/// The largest exponents of each column's products: columns 0 to 15, and 16 to 31.
struct Exponents {
    __m256i low, high;
};
Exponents largest_exponents(const std::int16_t* a, const std::int16_t* b, std::ptrdiff_t stride, int count) {
    Exponents e{_mm256_set1_epi16(2 * no_exponent), _mm256_set1_epi16(2 * no_exponent)};
    for (int t = 0; t < count; ++t) {
        const auto* y = reinterpret_cast<const __m256i*>(b + t * stride);
        const __m256i x = _mm256_set1_epi16(a[t]);
        e.low = _mm256_max_epi16(e.low, _mm256_add_epi16(x, _mm256_loadu_si256(y)));
        e.high = _mm256_max_epi16(e.high, _mm256_add_epi16(x, _mm256_loadu_si256(y + 1)));
    }
    return e;
}

__m256d as_double(__m256i bits) { return _mm256_castsi256_pd(bits); }
__m256d sign_of(__m256d x) { return _mm256_and_pd(x, _mm256_set1_pd(-0.0)); }
__m256i larger(__m256i a, __m256i b) { return _mm256_blendv_epi8(b, a, _mm256_cmpgt_epi64(a, b)); }

/// x toward zero to an integer, |x| < 2^51: the sum with 2^52 of x's sign has no room for a fraction. Infinities and NaN pass.
__m256d truncated(__m256d x) {
    const __m256d anchor = _mm256_or_pd(sign_of(x), _mm256_set1_pd(0x1p52));
    return _mm256_sub_pd(_mm256_add_pd(x, anchor), anchor);
}

/// sum, in units whose size is `back`, to fp32 with `written_bits` bits behind the leading one, toward zero.
__m256d written(__m256d sum, __m256d back, int written_bits) {
    const __m256d v = _mm256_mul_pd(sum, back), magnitude = _mm256_andnot_pd(_mm256_set1_pd(-0.0), v);
    const __m256d up = as_double(_mm256_set1_epi64x((1023LL + 126 + written_bits) << 52));
    const __m256d down = as_double(_mm256_set1_epi64x((1023LL - 126 - written_bits) << 52));
    __m256d r = _mm256_and_pd(v, as_double(_mm256_set1_epi64x(-1LL << (52 - written_bits))));
    const __m256d of_subnormal = _mm256_mul_pd(truncated(_mm256_mul_pd(v, up)), down);
    r = _mm256_blendv_pd(r, of_subnormal, _mm256_cmp_pd(magnitude, _mm256_set1_pd(0x1p-126), _CMP_LT_OQ));
    const __m256d infinity = _mm256_or_pd(sign_of(v), _mm256_set1_pd(__builtin_huge_val()));
    r = _mm256_blendv_pd(r, infinity, _mm256_cmp_pd(magnitude, _mm256_set1_pd(0x1p128), _CMP_GE_OQ));
    r = _mm256_add_pd(r, _mm256_setzero_pd());  // -0 becomes +0
    const __m256d nan = as_double(_mm256_set1_epi64x(0x7FFFFFFFE0000000LL));
    return _mm256_blendv_pd(r, nan, _mm256_cmp_pd(v, v, _CMP_UNORD_Q));
}

/// Columns [0, 16) of c and b; of_products: the largest exponents there.
void wide_add_16(const CutUnit& unit, const WideGroup& g, const double* b, __m256i of_products, double* c) {
    constexpr int vectors = 4, lanes = 4;
    alignas(32) std::int16_t exponents[vectors * lanes];
    _mm256_store_si256(reinterpret_cast<__m256i*>(exponents), of_products);
    __m256d scale[vectors], sum[vectors], back[vectors];
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) {
        const __m256d start = _mm256_loadu_pd(c + v * lanes);
        const __m256i magnitude = _mm256_castpd_si256(_mm256_andnot_pd(_mm256_set1_pd(-0.0), start));
        __m256i e = _mm256_sub_epi64(_mm256_srli_epi64(magnitude, 52), _mm256_set1_epi64x(1023));
        e = larger(e, _mm256_set1_epi64x(unit.c_min_exponent));
        e = _mm256_blendv_epi8(e, _mm256_set1_epi64x(unit.zero_exponent),
                               _mm256_cmpeq_epi64(magnitude, _mm256_setzero_si256()));
        e = larger(e, _mm256_cvtepi16_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(exponents + v * lanes))));
        const __m256i cap = _mm256_set1_epi64x(exponent_cap);
        e = _mm256_blendv_epi8(e, cap, _mm256_cmpgt_epi64(e, cap));
        scale[v] = as_double(_mm256_slli_epi64(_mm256_sub_epi64(_mm256_set1_epi64x(unit.fraction_bits + 1023), e), 52));
        back[v] = as_double(_mm256_slli_epi64(_mm256_add_epi64(e, _mm256_set1_epi64x(1023 - unit.fraction_bits)), 52));
        sum[v] = truncated(_mm256_mul_pd(start, scale[v]));
    }
    for (int t = 0; t < g.count; ++t) {
        const __m256d x = _mm256_broadcast_sd(g.a + t);
        // 2^52 of the product's sign, as in truncated(); the product itself is rounded nowhere. A y that its scale takes below the
        // normal numbers, where bits may be lost, is times x of at most 2^500 below one unit.
        const __m256d anchor_of_x = _mm256_or_pd(sign_of(x), _mm256_set1_pd(0x1p52));
#pragma GCC unroll 4
        for (int v = 0; v < vectors; ++v) {
            const __m256d y = _mm256_mul_pd(_mm256_loadu_pd(b + t * g.stride + v * lanes), scale[v]);
            const __m256d anchor = _mm256_xor_pd(sign_of(y), anchor_of_x);
            sum[v] = _mm256_add_pd(sum[v], _mm256_sub_pd(_mm256_fmadd_pd(x, y, anchor), anchor));
        }
    }
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) _mm256_storeu_pd(c + v * lanes, written(sum[v], back[v], unit.written_bits));
}

}  // namespace

void wide_add_v3(const CutUnit& unit, const WideGroup& g, double* c) {
    const Exponents e = largest_exponents(g.a_exponents, g.b_exponents, g.stride, g.count);
    wide_add_16(unit, g, g.b, e.low, c);
    wide_add_16(unit, g, g.b + 16, e.high, c + 16);
}

bool narrow_add_v3(const CutUnit& unit, const NarrowGroup& g, float* c) {
    constexpr int vectors = 4, lanes = 8;
    const auto [low, high] = largest_exponents(g.a_exponents, g.b_exponents, g.stride, g.count);
    const __m256i of_products[vectors] = {
        _mm256_cvtepi16_epi32(_mm256_castsi256_si128(low)), _mm256_cvtepi16_epi32(_mm256_extracti128_si256(low, 1)),
        _mm256_cvtepi16_epi32(_mm256_castsi256_si128(high)), _mm256_cvtepi16_epi32(_mm256_extracti128_si256(high, 1))};
    __m256 up[vectors], down[vectors];
    __m256i sum[vectors];
    __m256i outside = _mm256_setzero_si256();
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) {
        const __m256 start = _mm256_loadu_ps(c + v * lanes);
        const __m256i magnitude = _mm256_and_si256(_mm256_castps_si256(start), _mm256_set1_epi32(0x7FFFFFFF));
        const __m256i is_zero = _mm256_cmpeq_epi32(magnitude, _mm256_setzero_si256());
        __m256i e = _mm256_sub_epi32(_mm256_srli_epi32(magnitude, 23), _mm256_set1_epi32(127));
        e = _mm256_max_epi32(e, _mm256_set1_epi32(unit.c_min_exponent));
        e = _mm256_blendv_epi8(e, _mm256_set1_epi32(unit.zero_exponent), is_zero);
        e = _mm256_max_epi32(e, of_products[v]);
        const __m256i no_products = _mm256_cmpgt_epi32(_mm256_set1_epi32(no_product), of_products[v]);
        e = _mm256_andnot_si256(_mm256_and_si256(is_zero, no_products), e);  // any exponent serves where all is zero
        const __m256i below = _mm256_sub_epi32(e, _mm256_set1_epi32(narrow_lowest));
        const __m256i above = _mm256_sub_epi32(_mm256_set1_epi32(narrow_highest), e);
        outside = _mm256_or_si256(outside, _mm256_or_si256(below, above));  // negative where e is
        const __m256i bits_up = _mm256_slli_epi32(_mm256_sub_epi32(_mm256_set1_epi32(unit.fraction_bits + 127), e), 23);
        const __m256i bits_down =
            _mm256_slli_epi32(_mm256_add_epi32(e, _mm256_set1_epi32(127 - unit.fraction_bits)), 23);
        up[v] = _mm256_castsi256_ps(bits_up);
        down[v] = _mm256_castsi256_ps(bits_down);
        sum[v] = _mm256_cvttps_epi32(_mm256_mul_ps(start, up[v]));
    }
    if (_mm256_movemask_ps(_mm256_castsi256_ps(outside)) != 0) return false;
    __m256i total[vectors] = {};
    __m256i overflow = _mm256_setzero_si256();
    for (int t = 0; t < g.count;) {
        const int end = g.count - t < unit.most_products ? g.count : t + unit.most_products;
        for (; t < end; ++t) {
            const __m256 x = _mm256_broadcast_ss(g.a + t);
            const float* y = g.b + t * g.stride;
#pragma GCC unroll 4
            for (int v = 0; v < vectors; ++v) {
                const __m256 product = _mm256_mul_ps(x, _mm256_loadu_ps(y + v * lanes));
                sum[v] = _mm256_add_epi32(sum[v], _mm256_cvttps_epi32(_mm256_mul_ps(product, up[v])));
            }
        }
#pragma GCC unroll 4
        for (int v = 0; v < vectors; ++v) {
            // Of two numbers of one sign the sum has the other where it overflows.
            const __m256i before = total[v];
            total[v] = _mm256_add_epi32(before, sum[v]);
            overflow = _mm256_or_si256(
                overflow, _mm256_and_si256(_mm256_xor_si256(before, total[v]), _mm256_xor_si256(sum[v], total[v])));
            sum[v] = _mm256_setzero_si256();
        }
    }
    if (_mm256_movemask_ps(_mm256_castsi256_ps(overflow)) != 0) return false;
    // To fp32 toward zero; the power of two changes no bit, since units are normal numbers in the window.
    const __m256 kept = _mm256_castsi256_ps(_mm256_set1_epi32(-1 << (23 - unit.written_bits)));
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) {
        const __m256 result = _mm256_mul_ps(_mm256_cvtepi32_ps(total[v]), down[v]);
        _mm256_storeu_ps(c + v * lanes, _mm256_and_ps(result, kept));
    }
    return true;
}

}  // namespace faultline::fused
