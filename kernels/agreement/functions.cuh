// SPDX-License-Identifier: Apache-2.0
// What the card computes, what lib/special says it computes, and rivals that differ from that in one respect. A rival
// that agrees with the card as well as the model does would say that no input can tell the two apart.
#pragma once

#include <cstdint>

#include <faultline/random/bits_as.hpp>
#include <faultline/special/ex2_approx.hpp>
#include <faultline/special/lg2_approx.hpp>

namespace faultline::agreement {

constexpr int function_rivals = 3;

// ---- Rivals ----

enum class Ex2Rival { twos_complement, whole_numbers_not_apart, nearest };

/// 2^x with x made a fixed-point number by another rule: the sign applied by two's complement; by one's complement to
/// whole numbers too; or |x| rounded to nearest even, as the first Tesla generation's separate instruction did.
FAULTLINE_HD inline float ex2_with(float x, Ex2Rival rule) {
    const float magnitude = x < 0.0f ? -x : x;
    if (!(magnitude < 128.0f)) return ex2_approx_ftz(x);
    const double scaled = static_cast<double>(magnitude) * 8388608.0;  // exact
    std::int64_t fixed = static_cast<std::int64_t>(scaled);            // truncates
    if (rule == Ex2Rival::nearest) {
        const double rest = scaled - static_cast<double>(fixed);
        fixed += rest > 0.5 || (rest == 0.5 && (fixed & 1) != 0) ? 1 : 0;
    }
    if (x < 0.0f) {
        const bool negate = rule == Ex2Rival::twos_complement || (rule == Ex2Rival::nearest && (fixed & 0x7FFFFF) == 0);
        fixed = negate ? -fixed : ~fixed;
    }
    const std::int32_t exponent = static_cast<std::int32_t>(fixed >> 23);  // rounds down
    if (exponent < -126) return 0.0f;
    if (exponent > 127) return detail::bits_as<float>(0x7F800000u);
    const std::uint32_t significand = mufu::ex2_significand(static_cast<std::uint32_t>(fixed & 0x7FFFFF));
    return detail::bits_as<float>((static_cast<std::uint32_t>(exponent + 126) << 23) + significand);
}

/// log2 x from the sum with `kept` fraction bits; a negative sum is negated, or complemented where `complement`.
FAULTLINE_HD inline float lg2_with(float x, int kept, bool complement) {
    const std::uint32_t bits = detail::bits_as<std::uint32_t>(x);
    if (bits < 0x800000u || bits >= 0x7F800000u || bits == 0x3F800000u) return lg2_approx_ftz(x);
    const std::int64_t whole = static_cast<std::int64_t>(bits >> 23) - 127;
    const std::int64_t sum = (mufu::lg2_sum(bits & 0x7FFFFFu) >> (38 - kept)) + whole * (std::int64_t{1} << kept);
    const std::int64_t magnitude = sum >= 0 ? sum : complement ? ~sum : -sum;
    const std::uint64_t wide = detail::bits_as<std::uint64_t>(static_cast<double>(magnitude));
    const std::uint32_t result =
        static_cast<std::uint32_t>(wide >> 29) - ((1023u - 127u + static_cast<std::uint32_t>(kept)) << 23);
    return detail::bits_as<float>(result | (sum < 0 ? 0x80000000u : 0u));
}

// ---- Functions: card() runs on the device, model() on both ----

/// A function that is made of one of the instructions which have rivals.
struct WithoutRivals {
    static constexpr int rivals = 0;
    static constexpr const char* rival_names[function_rivals] = {};
    static FAULTLINE_HD float rival(int, float x) { return x; }
};

struct Ex2Ftz {
    static constexpr const char* name = "ex2.approx.ftz.f32";
    static constexpr int rivals = 3;
    static constexpr const char* rival_names[function_rivals] = {"two's complement of x", "whole numbers not apart",
                                                                 "x to nearest"};
    static __device__ float card(float x) {
        float y;
        asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
        return y;
    }
    static FAULTLINE_HD float model(float x) { return ex2_approx_ftz(x); }
    static FAULTLINE_HD float rival(int r, float x) { return ex2_with(x, static_cast<Ex2Rival>(r)); }
};

struct Ex2 : WithoutRivals {
    static constexpr const char* name = "ex2.approx.f32";
    static __device__ float card(float x) {
        float y;
        asm("ex2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
        return y;
    }
    static FAULTLINE_HD float model(float x) { return ex2_approx(x); }
};

struct Exp2f : WithoutRivals {
    static constexpr const char* name = "exp2f";
    static __device__ float card(float x) { return ::exp2f(x); }
    static FAULTLINE_HD float model(float x) { return exp2f_cuda(x); }
};

struct ExpfFast : WithoutRivals {
    static constexpr const char* name = "__expf";
    static __device__ float card(float x) { return ::__expf(x); }
    static FAULTLINE_HD float model(float x) { return expf_fast_cuda(x); }
};

struct Lg2Ftz {
    static constexpr const char* name = "lg2.approx.ftz.f32";
    static constexpr int rivals = 3;
    static constexpr const char* rival_names[function_rivals] = {"38 fraction bits", "negation in place of complement",
                                                                 "35 fraction bits"};
    static __device__ float card(float x) {
        float y;
        asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
        return y;
    }
    static FAULTLINE_HD float model(float x) { return lg2_approx_ftz(x); }
    static FAULTLINE_HD float rival(int r, float x) {
        return r == 0 ? lg2_with(x, 38, true) : r == 1 ? lg2_with(x, 36, false) : lg2_with(x, 35, true);
    }
};

struct Lg2 : WithoutRivals {
    static constexpr const char* name = "lg2.approx.f32";
    static __device__ float card(float x) {
        float y;
        asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
        return y;
    }
    static FAULTLINE_HD float model(float x) { return lg2_approx(x); }
};

struct LogfFast : WithoutRivals {
    static constexpr const char* name = "__logf";
    static __device__ float card(float x) { return ::__logf(x); }
    static FAULTLINE_HD float model(float x) { return logf_fast_cuda(x); }
};

}  // namespace faultline::agreement
