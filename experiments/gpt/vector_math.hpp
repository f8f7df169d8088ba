// SPDX-License-Identifier: Apache-2.0
// Rows as vectors of 64 bytes: exp, sums and maxima in a fixed order. GCC and Clang vectors, which the compiler splits
// where the processor's are narrower: plain loops with exp inlined were tried, and g++ 12 does not vectorise them.
// Additions, multiplications, comparisons and integer operations alone, so that every clone of a caller gives the same
// bits. Private to this folder.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace faultline::gpt {

template <class T>
struct Lanes {
    static constexpr std::ptrdiff_t width = 64 / sizeof(T);
    using Type [[gnu::vector_size(64)]] = T;
};
template <class T>
using Vector = typename Lanes<T>::Type;
using IntVector [[gnu::vector_size(64)]] = std::int32_t;

/// The first `count` elements; the rest are 0.
template <class T>
[[gnu::always_inline]] inline Vector<T> load(const T* from, std::ptrdiff_t count) {
    Vector<T> v{};
    if (count == Lanes<T>::width)
        std::memcpy(&v, from, sizeof v);
    else
        std::memcpy(&v, from, static_cast<std::size_t>(count) * sizeof(T));
    return v;
}
template <class T>
[[gnu::always_inline]] inline void store(T* to, const Vector<T>& v, std::ptrdiff_t count) {
    if (count == Lanes<T>::width)
        std::memcpy(to, &v, sizeof v);
    else
        std::memcpy(to, &v, static_cast<std::size_t>(count) * sizeof(T));
}

/// f(j, count) for every vector of [0, n): `count` elements from j, all `width` but in the last.
template <class T, class F>
[[gnu::always_inline]] inline void for_vectors(std::ptrdiff_t n, F&& f) {
    constexpr std::ptrdiff_t width = Lanes<T>::width;
    std::ptrdiff_t j = 0;
    for (; j + width <= n; j += width) f(j, width);
    if (j < n) f(j, n - j);
}

/// Lane l takes in lane l + half, half = width/2, …, 1.
template <class T>
[[gnu::always_inline]] inline T joined_sum(const Vector<T>& v) {
    T lane[Lanes<T>::width];
    std::memcpy(lane, &v, sizeof lane);
    for (std::ptrdiff_t half = Lanes<T>::width / 2; half > 0; half /= 2)
        for (std::ptrdiff_t l = 0; l < half; ++l) lane[l] += lane[l + half];
    return lane[0];
}
template <class T>
[[gnu::always_inline]] inline T joined_max(const Vector<T>& v) {
    T best = v[0];
    for (std::ptrdiff_t l = 1; l < Lanes<T>::width; ++l) best = v[l] > best ? v[l] : best;
    return best;
}

/// A vector whose elements from `count` on are `fill`.
template <class T>
[[gnu::always_inline]] inline Vector<T> filled_beyond(Vector<T> v, std::ptrdiff_t count, T fill) {
    if (count == Lanes<T>::width) return v;
    for (std::ptrdiff_t l = count; l < Lanes<T>::width; ++l) v[l] = fill;
    return v;
}

/// e^x to 1.1 ulp (a test sweeps it); 0 below -87, +inf above 88.7, NaN for NaN. x = n ln2 + r, |r| <= ln2/2, by Cody
/// and Waite's two-part ln2 (355/512 and the rest), n by adding 1.5 2^23; e^r by its Taylor polynomial of degree 7, whose
/// remainder is (ln2/2)^8/8! < 2^-27.
[[gnu::always_inline]] inline Vector<float> exp_of(Vector<float> x) {
    constexpr float shift = 0x1.8p23F, log2e = 0x1.715476p0F, ln2_high = 355.0F / 512.0F, ln2_low = -2.12194440e-4F;
    constexpr std::int32_t shift_bits = 0x4B400000;
    const Vector<float> low = Vector<float>{} - 87.0F, high = Vector<float>{} + 88.7F;
    Vector<float> clamped = x < low ? low : x;
    clamped = clamped > high ? high : clamped;
    const Vector<float> shifted = clamped * log2e + shift;
    const Vector<float> n = shifted - shift;
    const Vector<float> r = (clamped - n * ln2_high) - n * ln2_low;
    Vector<float> sum = r * (1.0F / 5040) + 1.0F / 720;
    sum = sum * r + 1.0F / 120;
    sum = sum * r + 1.0F / 24;
    sum = sum * r + 1.0F / 6;
    sum = sum * r + 0.5F;
    sum = (sum * r) * r + r;
    sum = sum + 1.0F;
    // 2^n as two factors: n reaches 128, which is no exponent of a float.
    IntVector whole;
    std::memcpy(&whole, &shifted, sizeof whole);
    whole = whole - shift_bits;
    const IntVector half = whole >> 1;
    const IntVector first_bits = (half + 127) << 23, second_bits = (whole - half + 127) << 23;
    Vector<float> first, second;
    std::memcpy(&first, &first_bits, sizeof first);
    std::memcpy(&second, &second_bits, sizeof second);
    const Vector<float> value = (sum * first) * second;
    const Vector<float> infinite = Vector<float>{} + __builtin_inff();
    const Vector<float> bounded = x < low ? Vector<float>{} : value;
    return x > high ? infinite : bounded;
}
inline Vector<double> exp_of(Vector<double> x) {
    for (std::ptrdiff_t l = 0; l < Lanes<double>::width; ++l) x[l] = std::exp(x[l]);
    return x;
}

}  // namespace faultline::gpt
