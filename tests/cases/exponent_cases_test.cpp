// SPDX-License-Identifier: Apache-2.0
// Rows 1 and 2: the winner's exponent is not 0 where scale and maximum are one fma.
#include <gtest/gtest.h>

#include "cases.hpp"

namespace faultline::testing {
namespace {

RoundingPlan correctly_rounded(std::string_view name, std::ptrdiff_t d) {
    RoundingPlan plan = preset(name, d);
    plan.schedule.functions = Functions::correctly_rounded;  // the residual is in question, not ex2.approx
    return plan;
}

/// Values of q = k = v that bf16 holds, from where nothing happens to where everything overflows.
constexpr double sizes[] = {1, 16, 100, 128, 300, 1000, 2000, 16384, 133120, 1048576, 3.0e6};

// pytorch/pytorch#121558, deepseek-ai/FlashMLA#68: the whole chain of one query and one key, against MPFR. s is exact: d
// products of 16 bits. P = exp2(s c - fl(s c)), row sum P, O = bf16(P) v / P; the backward has P again from lse.
TEST(Row1, EqualInputsGiveWhatTheFormulaSays) {
    int drifted = 0, infinite = 0, zero = 0, in_fp16 = 0;
    for (const Format& format : {bf16, fp16})
        for (const std::ptrdiff_t d : head_sizes)
            for (const double size : sizes) {
                const double x = round(size, format, Rounding::nearest_even);
                if (!std::isfinite(x)) continue;  // fp16 ends at 65504
                in_fp16 += format == fp16;
                const double s = static_cast<double>(d) * x * x;  // exact: 16 bits and d
                const double c = exponent_constant_mpfr(d);
                const double residual = fused_residual_mpfr(s, c);
                const double p =
                    round(exp2_mpfr(residual), fp32, Rounding::nearest_even);  // overflows and underflows here
                Seen seen(Site::exp);
                RoundingPlan plan = in_format(correctly_rounded("fa2", d), format);
                const Result r = run(equal_head(x, d), plan, &seen);
                const double got = seen.tiles.at(0).value(0, 0);
                EXPECT_EQ(got, p) << "d " << d << " x " << x;
                const double o = r.forward.heads[0].o(0, 0);
                const double cast = round(p, format, Rounding::nearest_even);
                if (std::isinf(p)) {
                    EXPECT_TRUE(std::isnan(o)) << "d " << d << " x " << x;
                    ++infinite;
                } else if (p == 0) {
                    EXPECT_EQ(o, 0) << "d " << d << " x " << x;  // inv_sum is 1 where the sum is 0
                    ++zero;
                } else {
                    drifted += p != 1;
                    // O = cast(cast(P) x / P): at most an ulp apart, for the reciprocal and the product are rounded to fp32.
                    const double expected = cast * x / p;
                    if (std::isfinite(cast))
                        EXPECT_NEAR(o, expected, ulp(expected, format)) << "d " << d << " x " << x;
                    else
                        EXPECT_FALSE(std::isfinite(o)) << "d " << d << " x " << x;
                }
                // Unfused and subtract-then-scale: exactly 1, and O is V.
                for (const ArgumentForm form : {ArgumentForm::unfused, ArgumentForm::subtract_then_scale}) {
                    plan.schedule.argument = form;
                    Seen repaired(Site::exp);
                    const Result right = run(equal_head(x, d), plan, &repaired);
                    EXPECT_EQ(repaired.tiles.at(0).value(0, 0), 1);
                    EXPECT_EQ(right.forward.heads[0].o(0, 0), x);
                }
            }
    EXPECT_GT(drifted, 8);
    EXPECT_GT(in_fp16, 20);
    EXPECT_GT(infinite, 0);
    EXPECT_GT(zero, 0) << "no residual of the sizes tried is so negative that P is 0";
}

// The figures of the report at d = 64, to the digits that it gives.
TEST(Row1, TheReportsFigures) {
    struct Figure {
        double x, p, o_over_v;
    };
    for (const Figure& figure : {Figure{300, 0.984916, 0.99945}, Figure{1000, 1.127427, 0.997847}}) {
        const double c = exponent_constant_mpfr(64);
        const double p = exp2_mpfr(fused_residual_mpfr(64 * figure.x * figure.x, c));
        EXPECT_NEAR(p, figure.p, 5e-7);
        EXPECT_NEAR(round(p, bf16, Rounding::nearest_even) / p, figure.o_over_v, 5e-6);
        RoundingPlan plan = correctly_rounded("fa2", 64);
        plan.set(Site::o_cast, Rule{});
        Seen forward(Site::exp), backward(Site::bwd_exp);
        Instruments both({&forward, &backward});
        const Result r = run(equal_head(figure.x, 64), plan, &both);
        EXPECT_EQ(forward.last(), p);
        EXPECT_NEAR(r.forward.heads[0].o(0, 0) / figure.x, figure.o_over_v, 5e-6);
        // The backward subtracts log2(e) lse, and lse = fl(m scale + ln P): rounded once more, it is off by as much again.
        // lse is near s/8, so its ulp in log2 units bounds the exponent's error.
        const double lse_ulp = ulp(64 * figure.x * figure.x / 8, fp32) * std::numbers::log2e;
        EXPECT_NEAR(std::log2(backward.last()), 0, 2 * lse_ulp);
        // At 300 lse is so large that ln P is lost in it, and the backward has the forward's P: the report's other figure.
        if (figure.x == 300) {
            EXPECT_NEAR(backward.last(), 0.984916, 5e-7);
        }
    }
}

// gabrieldemarmiesse/torch-mojo-backend#398: a sweep of |x| = 2^k, one saturated row. With 2^k <= |x| < 2^(k+1) the residual
// is at most half an ulp of x, 2^(k-24), so |P - 1| <= 2^(2^(k-24)) - 1; bf16(P) can leave 1 only where that is 2^-9 or
// more, from k = 16 on; fp16(P), of precision 11, from 13 on; e4m3(P), of precision 4, from 20 on.
TEST(Row2, TheEnvelopeGrowsByBinade) {
    for (const std::ptrdiff_t d : head_sizes) {
        const RoundingPlan plan = correctly_rounded("fa2", d);
        const double c = exponent_constant_mpfr(d);
        bool left_bf16 = false, left_fp16 = false;
        for (int k = 4; k <= 20; ++k)
            for (const double part : {1.0, 1.2, 1.4, 1.6, 1.8}) {
                const double x =
                    round(std::sqrt(std::ldexp(part, k) / c / static_cast<double>(d)), bf16, Rounding::nearest_even);
                Seen seen(Site::exp);
                (void)run(equal_head(x, d), plan, &seen);
                const int binade = std::ilogb(static_cast<double>(d) * x * x * c);
                const double residual = std::ldexp(1.0, binade - 24);
                // and P's own rounding to fp32
                EXPECT_LE(std::abs(seen.last() - 1), std::exp2(residual) - 1 + 0x1p-23) << d << " " << k;
                for (const Format& format : {bf16, fp16, e4m3}) {
                    const bool out = round(seen.last(), format, Rounding::nearest_even) != 1;
                    // ln 2 2^(15-24) < 2^-9, half of bf16's ulp below 1
                    if (binade < 24 - format.precision) {
                        EXPECT_FALSE(out) << d << " " << binade << " " << format.precision;
                    }
                    left_bf16 = left_bf16 || (out && format == bf16);
                    left_fp16 = left_fp16 || (out && format == fp16);
                }
            }
        EXPECT_TRUE(left_bf16 && left_fp16) << d;
    }
}

}  // namespace
}  // namespace faultline::testing
