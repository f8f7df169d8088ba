// SPDX-License-Identifier: Apache-2.0
// A tile of scores of gradients.cu, from its products to the cast score gradient, in a thread's registers: the sites in the order
// of kernels/emulated/scores.hpp and backward.hpp.
#pragma once

#include <faultline/device/gradient_products.cuh>
#include <faultline/emulated/backward.hpp>
#include <faultline/special/binary64.hpp>

namespace faultline::device::gradients {

__device__ __noinline__ double cut_in_general(double x, Format f) {
    return faultline::round(x, f, Rounding::nearest_even, 0);
}
__device__ __forceinline__ double cut(double x, const Cut& c) {
    if (c.none) return x;
    const std::uint64_t bits = detail::bits_as<std::uint64_t>(x);
    const int exponent = static_cast<int>(bits >> 52 & 0x7FF) - 1023;
    if (exponent < c.format.emin || exponent >= c.format.emax)
        return (bits << 1) == 0 ? x : cut_in_general(x, c.format);
    const std::uint64_t last = std::uint64_t{1} << c.drop;
    return detail::bits_as<double>((bits + (last / 2 - 1) + (bits >> c.drop & 1)) & ~(last - 1));
}
__device__ __forceinline__ float exp2_of_unit(float x) {
    float y;
    asm("ex2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));  // lib/special/ex2_approx.hpp: the same for every float
    return y;
}

/// p of a score that the mask leaves.
__device__ __forceinline__ double probability(const GradientPlan& g, double s, double reference, double shift) {
    if (g.scales) {
        s = s * g.natural;
        if (g.to_log2) s = cut(s, g.s_scale) * g.log2e;
        s = cut(s, g.s_scale);
    }
    double a;
    if (g.reference_in_sum) {
        a = s * g.c;
    } else if (g.subtracts_first) {
        a = s - reference;
        if (!g.scaled_before) a = cut(a, g.argument) * g.c;
    } else if (g.fused) {
        const float fs = static_cast<float>(s), fc = static_cast<float>(g.c), fshift = static_cast<float>(shift);
        const bool floats = g.in_fp32 && static_cast<double>(fs) == s && static_cast<double>(fc) == g.c &&
                            static_cast<double>(fshift) == shift;
        a = floats ? static_cast<double>(fmaf(fs, fc, -fshift)) : fma(s, g.c, -shift);
    } else {
        a = (g.scaled_before ? s : cut(s * g.c, g.argument)) - shift;
    }
    a = cut(a, g.argument);
    double p;
    if (g.by_unit)
        p = static_cast<double>(exp2_of_unit(static_cast<float>(a)));
    else
        p = g.base_two ? binary64_functions::exp2(a) : binary64_functions::exp(a);
    return cut(p, g.exp);
}
/// ds as the products receive it, of p as its formula has it.
__device__ __forceinline__ double score_gradient(const GradientPlan& g, double p, double dp, double delta) {
    double y = g.delta_in_sum ? dp : cut(dp - delta, g.ds);
    y = p * y;
    if (g.scales_ds) y = cut(y, g.ds) * g.gradient;
    y = cut(cut(y, g.ds), g.ds_cast);
    return g.scales_cast_ds ? cut(y * g.gradient, g.ds_scaled) : y;
}

/// A tile of scores: what p and ds are, as bf16 in shared memory; zeros beyond its rows and keys. transposed: keys are rows of p
/// and ds there, where the products are in groups (the unit transposes what it loads).
template <Products products, int d, bool transposed>
__device__ __forceinline__ void score_tile(const GradientPlan& g, Shared<d>& m, int row0, int rows, int key0, int keys,
                                           bool& usual) {
    using At = Layout;
    float s[4][4], dp[4][4];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            s[n][e] = g.reference_in_sum ? -static_cast<float>(m.rows.reference[At::row(e)]) : 0.0f;
            dp[n][e] = g.delta_in_sum ? -static_cast<float>(m.rows.delta[At::row(e)]) : 0.0f;
        }
    }
    if constexpr (products == Products::groups) {
        add_scores_in_groups<d>(s, m.q, m.k, usual);
        add_scores_in_groups<d>(dp, m.dout, m.v, usual);
    } else {
        add_scores<products, d>(s, m.q, m.k);
        add_scores<products, d>(dp, m.dout, m.v);
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
        for (int half = 0; half < 4; half += 2) {
#pragma unroll 1
            for (int h = 0; h < 2; ++h) {  // once in the code, not sixteen times
                const float own_s = h == 0 ? s[n][half] : s[n][half + 1];
                const float own_dp = h == 0 ? dp[n][half] : dp[n][half + 1];
                const int i = At::row(half + h), j = At::score_column(n, half + h);
                usual = usual && fabsf(own_s) <= FLT_MAX && fabsf(own_dp) <= FLT_MAX;
                float of_p = 0, of_ds = 0;
                if (i < rows && j < keys && key0 + j < visible_keys(row0 + i, g.n_q, g.n_k, g.causal)) {
                    const double score = cut(cut(static_cast<double>(own_s), g.s_accumulate), g.s_cast);
                    double p = probability(g, score, m.rows.reference[i], m.rows.shift[i]);
                    const double grad = cut(cut(static_cast<double>(own_dp), g.dp_accumulate), g.dp_cast);
                    const double rounded_p = cut(p, g.p_cast);
                    if (g.ds_of_cast_p) p = rounded_p;
                    of_ds = static_cast<float>(score_gradient(g, p, grad, m.rows.delta[i]));
                    of_p = static_cast<float>(rounded_p);
                }
                usual = usual && fabsf(of_p) <= FLT_MAX && fabsf(of_ds) <= FLT_MAX;
                if (h == 0)
                    s[n][half] = of_p, dp[n][half] = of_ds;
                else
                    s[n][half + 1] = of_p, dp[n][half + 1] = of_ds;
            }
        }
    }
    const auto both = [&](float low, float high) {
        const std::uint32_t pair = __byte_perm(__float_as_uint(low), __float_as_uint(high), 0x7632);
        if constexpr (products == Products::groups) usual = usual && emulated::groups::are_operands(pair);
        return pair;
    };
    constexpr int pitch = Shared<d>::score_pitch;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
        for (int half = 0; half < 4; half += 2) {
            const std::uint32_t of_p = both(s[n][half], s[n][half + 1]), of_ds = both(dp[n][half], dp[n][half + 1]);
            const int i = At::row(half), j = At::score_column(n, half);
            if constexpr (transposed && products == Products::groups) {  // keys are rows
                auto* const to_p = reinterpret_cast<std::uint16_t*>(m.p) + j * 2 * pitch + i;
                auto* const to_ds = reinterpret_cast<std::uint16_t*>(m.ds) + j * 2 * pitch + i;
                to_p[0] = static_cast<std::uint16_t>(of_p);
                to_p[2 * pitch] = static_cast<std::uint16_t>(of_p >> 16);
                to_ds[0] = static_cast<std::uint16_t>(of_ds);
                to_ds[2 * pitch] = static_cast<std::uint16_t>(of_ds >> 16);
            } else {
                m.p[i * pitch + j / 2] = of_p;
                m.ds[i * pitch + j / 2] = of_ds;
            }
        }
    }
}

__device__ __forceinline__ bool is_finite(double x) { return fabs(x) <= DBL_MAX; }

template <Products products, int d>
__device__ __forceinline__ void load_rows(const GradientPlan& g, const emulated::BackwardRows& r, int row0, int rows,
                                          Shared<d>& m, bool& usual) {
    const int i = static_cast<int>(threadIdx.x);
    if (i >= side) return;
    const double reference = i < rows ? r.reference[row0 + i] : 0, delta = i < rows ? r.delta[row0 + i] : 0;
    m.rows.reference[i] = reference;
    m.rows.delta[i] = delta;
    m.rows.shift[i] = g.reference_is_scaled ? reference : cut(reference * g.c, g.argument);
    usual = usual && is_finite(reference) && is_finite(delta);
    const auto can_begin = [](double x) {
        const auto c = static_cast<float>(x);
        return static_cast<double>(c) == x && (products != Products::groups || emulated::groups::can_begin(c));
    };
    if (g.reference_in_sum) usual = usual && can_begin(reference);
    if (g.delta_in_sum) usual = usual && can_begin(delta);
}

/// What a plan's tile leaves in c, from row0 on: added to what stands there, or put there.
template <Products products, int d>
__device__ __forceinline__ void store(float (&c)[d / 16][4], const View<double>& to, int row0, const Cut& site,
                                      bool added, bool first, bool& usual) {
    using At = Layout;
#pragma unroll
    for (int n = 0; n < d / 16; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int row = row0 + At::row(e);
            usual = usual && fabsf(c[n][e]) <= FLT_MAX;
            if (row >= to.rows) continue;
            double* const out = to.row(row) + At::template gradient_column<d>(n, e);
            double x = c[n][e];
            if (added) {
                x = cut((first ? 0.0 : *out) + cut(x, site), site);
                usual = usual && is_finite(x);
                c[n][e] = 0;
            }
            *out = x;
        }
    }
}
}  // namespace faultline::device::gradients
