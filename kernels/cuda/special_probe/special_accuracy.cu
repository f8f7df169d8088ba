// SPDX-License-Identifier: Apache-2.0
// ex2.approx, lg2.approx and division of a real card against the correctly rounded value over every float: histogram of the
// error, the largest one, and neighbours whose results are in the wrong order (a function that should rise falls). What the
// models of lib/special are to the card is special_probe's matter.
//
//   ninja -C build/cuda special_accuracy && build/cuda/kernels/cuda/special_probe/special_accuracy
//
// 2^x and log2 x by lib/special's correct_rounding.hpp, and by MPFR on the host where binary64 does not decide; quotients by
// div.rn.f32, which is held to the host's division first. Division takes every float as divisor, for two dividends.
// Exit status: 0, 1 where div.rn.f32 is not the host's, there is no card or a CUDA error, which standard error says.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include <cuda_runtime.h>
#include <mpfr.h>

#include "accuracy.hpp"

namespace faultline::probe {
namespace {

constexpr std::uint64_t all_floats = std::uint64_t{1} << 32;
constexpr std::uint32_t threads = 1u << 20;  // each takes 2^12 floats
constexpr std::uint32_t most_undecided = 1u << 16;
constexpr std::uint32_t chunk = 1u << 26;  // quotients held at a time, 256 MiB

void check(cudaError_t status, const char* what) {
    if (status == cudaSuccess) return;
    std::fprintf(stderr, "special_accuracy: %s: %s\n", what, cudaGetErrorString(status));
    std::exit(1);
}

// ---- The instructions ----

#define FAULTLINE_UNARY(instruction)                    \
    static __device__ float card(float x) {             \
        float y;                                        \
        asm(instruction " %0, %1;" : "=f"(y) : "f"(x)); \
        return y;                                       \
    }                                                   \
    static constexpr const char* name = instruction
#define FAULTLINE_QUOTIENT(instruction)                                    \
    static __device__ float card(float x) {                                \
        float y;                                                           \
        asm(instruction " %0, %1, %2;" : "=f"(y) : "f"(dividend), "f"(x)); \
        return y;                                                          \
    }                                                                      \
    static constexpr const char* name = instruction

struct PowerOfTwo {
    static constexpr bool rises = true;
    static constexpr float dividend = 0;
    static constexpr auto mpfr = mpfr_exp2;
    static __device__ RoundedValue right(float x) { return exp2_rounded(x); }
};
struct Logarithm {
    static constexpr bool rises = true;
    static constexpr float dividend = 0;
    static constexpr auto mpfr = mpfr_log2;
    static __device__ RoundedValue right(float x) { return log2_rounded(x); }
};
template <int hundredths>
struct Quotient {
    static constexpr bool rises = false;
    static constexpr float dividend = hundredths / 100.0f;
    static constexpr int (*mpfr)(mpfr_ptr, mpfr_srcptr, mpfr_rnd_t) = nullptr;  // nothing is undecided
    static __device__ RoundedValue right(float x) {
        return {static_cast<double>(dividend) / static_cast<double>(x), __fdiv_rn(dividend, x), true};
    }
};
struct Ex2Ftz : PowerOfTwo {
    FAULTLINE_UNARY("ex2.approx.ftz.f32");
};
struct Ex2 : PowerOfTwo {
    FAULTLINE_UNARY("ex2.approx.f32");
};
struct Lg2Ftz : Logarithm {
    FAULTLINE_UNARY("lg2.approx.ftz.f32");
};
struct Lg2 : Logarithm {
    FAULTLINE_UNARY("lg2.approx.f32");
};
struct RcpFtz : Quotient<100> {
    FAULTLINE_UNARY("rcp.approx.ftz.f32");
};
struct Rcp : Quotient<100> {
    FAULTLINE_UNARY("rcp.approx.f32");
};
template <int hundredths>
struct DivApprox : Quotient<hundredths> {
    static constexpr float dividend = hundredths / 100.0f;
    FAULTLINE_QUOTIENT("div.approx.f32");
};
template <int hundredths>
struct DivFull : Quotient<hundredths> {
    static constexpr float dividend = hundredths / 100.0f;
    FAULTLINE_QUOTIENT("div.full.f32");
};

// ---- On the card ----

struct Undecided {
    std::uint32_t count;
    struct {
        std::uint32_t x, result;
    } of[most_undecided];
};

__device__ bool is_number(float x) { return x == x; }

/// The float beside x, away from 0, is out of order by this many encodings; 0 where it is not, or where one is NaN.
template <class F>
__device__ std::uint32_t break_after(std::uint32_t x) {
    const std::uint32_t magnitude = x & 0x7FFFFFFFu;
    if (magnitude >= 0x7F800000u) return 0;
    const float here = F::card(detail::bits_as<float>(x)), next = F::card(detail::bits_as<float>(x + 1));
    const bool up = F::rises == (x >> 31 == 0);  // whether the results should rise on the way from 0
    if (!(up ? next < here : next > here)) return 0;
    const std::int64_t apart = static_cast<std::int64_t>(detail::bits_as<std::uint32_t>(next) & 0x7FFFFFFFu) -
                               static_cast<std::int64_t>(detail::bits_as<std::uint32_t>(here) & 0x7FFFFFFFu);
    return static_cast<std::uint32_t>(apart < 0 ? -apart : apart);
}

template <class F>
__global__ void measure(Accuracy* total, Undecided* undecided) {
    const std::uint32_t thread = blockIdx.x * blockDim.x + threadIdx.x;
    Accuracy own{};
    for (std::uint64_t first = 0; first < all_floats; first += threads) {
        const std::uint32_t x = static_cast<std::uint32_t>(first) + thread;
        const float input = detail::bits_as<float>(x);
        if (const std::uint32_t apart = break_after<F>(x)) {
            ++own.breaks;
            raise(own.worst_break, static_cast<unsigned long long>(apart) << 32 | x);
        }
        if (!is_number(input)) continue;
        const float result = F::card(input);
        const RoundedValue right = F::right(input);
        if (right.certain) {
            tally(own, x, outcome_of(result, right));
        } else if (const std::uint32_t place = atomicAdd(&undecided->count, 1u); place < most_undecided) {
            undecided->of[place].x = x;
            undecided->of[place].result = detail::bits_as<std::uint32_t>(result);
        }
    }
    constexpr int counts = sizeof(Accuracy) / sizeof(unsigned long long);
    const auto* from = reinterpret_cast<const unsigned long long*>(&own);
    auto* to = reinterpret_cast<unsigned long long*>(total);
    const auto is_extreme = [&](const unsigned long long* at) {
        return (at >= own.farthest && at <= &own.absolute) || at == &own.worst_break;
    };
    for (int i = 0; i < counts; ++i) {
        if (from[i] == 0) continue;
        if (is_extreme(from + i))
            atomicMax(to + i, from[i]);
        else
            atomicAdd(to + i, from[i]);
    }
}

__global__ void quotients(float dividend, std::uint32_t base, std::uint32_t* results) {
    const std::uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    results[i] = detail::bits_as<std::uint32_t>(__fdiv_rn(dividend, detail::bits_as<float>(base + i)));
}

// ---- On the host ----

/// f(x), of 200 digits, once rounded to fp32.
template <class F>
float by_mpfr(float x) {
    mpfr_t y;
    mpfr_init2(y, 200);
    mpfr_set_flt(y, x, MPFR_RNDN);
    F::mpfr(y, y, MPFR_RNDN);
    const float rounded = mpfr_get_flt(y, MPFR_RNDN);
    mpfr_clear(y);
    return rounded;
}

double as_double(unsigned long long bits) { return detail::bits_as<double>(bits); }

void print(const Accuracy& found, int kind, const char* what) {
    unsigned long long all = 0;
    for (const unsigned long long count : found.histogram[kind]) all += count;
    if (all == 0) return;
    std::printf("  %-34s %10llu ", what, all);
    for (int d = -widest; d <= widest; ++d)
        std::printf("  %s%+d %llu",
                    d == -widest  ? "<="
                    : d == widest ? ">="
                                  : "",
                    d, found.histogram[kind][d + widest]);
    std::printf("\n%36s of them flushed to 0: %llu", "", found.flushed[kind]);
    if (const unsigned long long farthest = found.farthest[kind]; farthest >> 32 != 0)
        std::printf("; farthest otherwise: %llu at %08llx", farthest >> 32, farthest & 0xFFFFFFFFull);
    if (kind != static_cast<int>(Kind::end)) std::printf("; %.4f ulp", as_double(found.in_ulps[kind]));
    if (kind == static_cast<int>(Kind::normal))
        std::printf(", absolute 2^%.3f; value 1: %llu", std::log2(as_double(found.absolute)), found.ones);
    std::printf("\n");
}

template <class F>
void probe(Accuracy* total, Undecided* undecided) {
    check(cudaMemset(total, 0, sizeof *total), "clearing the counts");
    check(cudaMemset(undecided, 0, sizeof *undecided), "clearing the list");
    measure<F><<<threads / 256, 256>>>(total, undecided);
    check(cudaGetLastError(), F::name);
    Accuracy found;
    std::vector<Undecided> list(1);
    check(cudaMemcpy(&found, total, sizeof found, cudaMemcpyDeviceToHost), F::name);
    check(cudaMemcpy(list.data(), undecided, sizeof *undecided, cudaMemcpyDeviceToHost), F::name);
    const std::uint32_t open = list[0].count;
    if (open > most_undecided) {
        std::fprintf(stderr, "special_accuracy: %s: %u values undecided, more than the list holds\n", F::name, open);
        std::exit(1);
    }
    for (std::uint32_t i = 0; i < open; ++i) {
        const float x = detail::bits_as<float>(list[0].of[i].x), right = by_mpfr<F>(x);
        const RoundedValue value{static_cast<double>(right), right, true};
        tally(found, list[0].of[i].x, outcome_of(detail::bits_as<float>(list[0].of[i].result), value));
    }
    std::printf("\n%s", F::name);
    if (F::dividend != 0) std::printf(", dividend %g", F::dividend);
    std::printf(": result - correctly rounded value, in encodings (%u values by MPFR)\n", open);
    print(found, static_cast<int>(Kind::normal), "value normal");
    print(found, static_cast<int>(Kind::subnormal), "value below 2^-126");
    print(found, static_cast<int>(Kind::end), "value 0, infinite or NaN");
    std::printf("  neighbours in the wrong order: %llu", found.breaks);
    if (found.breaks != 0)
        std::printf(", by %llu encodings at most, after %08llx", found.worst_break >> 32,
                    found.worst_break & 0xFFFFFFFFull);
    std::printf("\n");
    std::fflush(stdout);
}

/// How many floats div.rn.f32 divides otherwise than the host does.
std::uint64_t unlike_the_host(float dividend, std::uint32_t* results) {
    std::vector<std::uint32_t> bits(chunk);
    std::uint64_t unlike = 0;
    for (std::uint64_t base = 0; base < all_floats; base += chunk) {
        quotients<<<chunk / 256, 256>>>(dividend, static_cast<std::uint32_t>(base), results);
        check(cudaGetLastError(), "div.rn.f32");
        check(cudaMemcpy(bits.data(), results, chunk * sizeof bits[0], cudaMemcpyDeviceToHost), "div.rn.f32");
        for (std::uint32_t i = 0; i < chunk; ++i) {
            const float here = dividend / detail::bits_as<float>(static_cast<std::uint32_t>(base) + i);
            const float there = detail::bits_as<float>(bits[i]);
            unlike += detail::bits_as<std::uint32_t>(here) != bits[i] && !(here != here && there != there) ? 1 : 0;
        }
    }
    return unlike;
}

int run() {
    cudaDeviceProp properties{};
    check(cudaGetDeviceProperties(&properties, 0), "no device");
    std::printf("%s, compute capability %d.%d\n", properties.name, properties.major, properties.minor);
    Accuracy* total = nullptr;
    Undecided* undecided = nullptr;
    check(cudaMalloc(&total, sizeof *total), "memory for the counts");
    check(cudaMalloc(&undecided, sizeof *undecided), "memory for the list");
    probe<Ex2Ftz>(total, undecided);
    probe<Ex2>(total, undecided);
    probe<Lg2Ftz>(total, undecided);
    probe<Lg2>(total, undecided);
    probe<RcpFtz>(total, undecided);
    probe<Rcp>(total, undecided);
    probe<DivApprox<100>>(total, undecided);
    probe<DivApprox<170>>(total, undecided);
    probe<DivFull<100>>(total, undecided);
    probe<DivFull<170>>(total, undecided);

    std::uint32_t* results = nullptr;
    check(cudaMalloc(&results, chunk * sizeof *results), "memory for quotients");
    const std::uint64_t unlike = unlike_the_host(1.0f, results), others = unlike_the_host(1.7f, results);
    std::printf("\ndiv.rn.f32 of 2^32 divisors, not as the host divides: dividend 1 %llu, dividend 1.7 %llu\n",
                static_cast<unsigned long long>(unlike), static_cast<unsigned long long>(others));
    return unlike + others == 0 ? 0 : 1;
}

}  // namespace
}  // namespace faultline::probe

int main() { return faultline::probe::run(); }
