// SPDX-License-Identifier: Apache-2.0
// The narrow path for AVX2, by intrinsics: g++ 12 takes fused_fast.cpp's vectors of 512 bits apart through memory there.
#include <immintrin.h>

#include <faultline/tensor_core/narrow.hpp>

namespace faultline::fused {

bool narrow_add_v3(const NarrowUnit& unit, const NarrowGroup& g, float* c) {
    constexpr int vectors = 4, lanes = 8;
    __m256i low = _mm256_set1_epi16(2 * no_exponent), high = low;  // of the products' largest exponents
    for (int t = 0; t < g.count; ++t) {
        const auto* y = reinterpret_cast<const __m256i*>(g.b_exponents + t * g.stride);
        const __m256i x = _mm256_set1_epi16(g.a_exponents[t]);
        low = _mm256_max_epi16(low, _mm256_add_epi16(x, _mm256_loadu_si256(y)));
        high = _mm256_max_epi16(high, _mm256_add_epi16(x, _mm256_loadu_si256(y + 1)));
    }
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
    const __m256 written = _mm256_castsi256_ps(_mm256_set1_epi32(unit.written));
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) {
        const __m256 result = _mm256_mul_ps(_mm256_cvtepi32_ps(total[v]), down[v]);
        _mm256_storeu_ps(c + v * lanes, _mm256_and_ps(result, written));
    }
    return true;
}

}  // namespace faultline::fused
