// SPDX-License-Identifier: Apache-2.0
// The plain orders, on the three generators of FLINT's t-dot.c: independent terms; exact cancellation, the second half
// being the negated first; near cancellation, the second half rounded to a random number of bits. The fp32 orders are
// compared bit for bit with the same steps in MPFR at 24 bits with fp32's exponent range; exact with its error bound.
#include <mpfr.h>

#include <cmath>

#include <gtest/gtest.h>

#include <faultline/tensor_core/accumulate.hpp>

#include "numbers.hpp"

namespace faultline {
namespace {

using testing::bits;
using testing::Numbers;
using Kind = Accumulation::Kind;

/// While it lives MPFR has fp32's range: 2^-149 is 0.5 * 2^-148, the largest number below 1 * 2^128.
struct Fp32Range {
    mpfr_exp_t low = mpfr_get_emin(), high = mpfr_get_emax();
    Fp32Range() {
        mpfr_set_emin(-148);
        mpfr_set_emax(128);
    }
    ~Fp32Range() {
        mpfr_set_emin(low);
        mpfr_set_emax(high);
    }
};

/// One rounded operation of fp32 through MPFR.
template <class Operation>
double fp32(Operation operation) {
    const Fp32Range range;
    mpfr_t r;
    mpfr_init2(r, 24);
    const int ternary = operation(r);
    mpfr_subnormalize(r, ternary, MPFR_RNDN);
    const double x = mpfr_get_d(r, MPFR_RNDN);
    mpfr_clear(r);
    return x;
}

struct Exact {  // a double as an MPFR number
    mpfr_t value;
    explicit Exact(double x) {
        mpfr_init2(value, 53);
        mpfr_set_d(value, x, MPFR_RNDN);
    }
    ~Exact() { mpfr_clear(value); }
    Exact(const Exact&) = delete;
    Exact& operator=(const Exact&) = delete;
};

double multiply(double x, double y) {
    const Exact a(x), b(y);
    return fp32([&](mpfr_t r) { return mpfr_mul(r, a.value, b.value, MPFR_RNDN); });
}
double add(double x, double y) {
    const Exact a(x), b(y);
    return fp32([&](mpfr_t r) { return mpfr_add(r, a.value, b.value, MPFR_RNDN); });
}
double fma(double x, double y, double z) {
    const Exact a(x), b(y), c(z);
    return fp32([&](mpfr_t r) { return mpfr_fma(r, a.value, b.value, c.value, MPFR_RNDN); });
}

/// Sum of [first, last) as a tree whose left part holds the largest power of two below the count: neighbours first.
double tree(const std::vector<double>& p, std::size_t first, std::size_t last) {
    if (last - first == 1) return p[first];
    std::size_t left = 1;
    while (2 * left < last - first) left *= 2;
    return add(tree(p, first, first + left), tree(p, first + left, last));
}

double judge(Kind kind, const std::vector<double>& a, const std::vector<double>& b, double c) {
    std::vector<double> products;
    for (std::size_t i = 0; i < a.size(); ++i) {
        if (kind == Kind::sequential) c = add(c, multiply(a[i], b[i]));
        if (kind == Kind::fma) c = fma(a[i], b[i], c);
        if (kind == Kind::pairwise) products.push_back(multiply(a[i], b[i]));
    }
    return kind == Kind::pairwise ? add(c, tree(products, 0, products.size())) : c;
}

enum class Generator { independent, exact_cancellation, near_cancellation };

void generate(Generator generator, Numbers& numbers, const testing::Shape& shape, int low, int high,
              std::vector<double>& a, std::vector<double>& b) {
    const std::size_t k = a.size();
    for (std::size_t i = 0; i < k; ++i) {
        a[i] = numbers.normal(shape, low, high);
        b[i] = numbers.normal(shape, low, high);
    }
    if (generator == Generator::independent) return;
    for (std::size_t i = k / 2; i < k / 2 * 2; ++i) {
        a[i] = -a[i - k / 2];
        b[i] = b[i - k / 2];
        if (generator == Generator::near_cancellation) {
            const int keep = numbers.between(2, shape.fraction_bits + 1) - 1 - std::ilogb(a[i]);
            a[i] = std::ldexp(std::nearbyint(std::ldexp(a[i], keep)), -keep);
        }
    }
    std::vector<std::size_t> order(k);
    for (std::size_t i = 0; i < k; ++i) order[i] = i;
    for (std::size_t i = k; i > 1; --i) {  // the halves mixed
        const auto j = static_cast<std::size_t>(numbers.next() % i);
        std::swap(a[i - 1], a[j]);
        std::swap(b[i - 1], b[j]);
    }
}

template <class Check>
void on_all_generators(std::uint64_t seed, Check check) {
    Numbers numbers(seed);
    for (const Generator g : {Generator::independent, Generator::exact_cancellation, Generator::near_cancellation})
        for (const testing::Shape& shape : {testing::bf16, testing::fp16, testing::fp32})
            for (int trial = 0; trial < 60; ++trial) {
                const bool ends = trial % 3 == 0;  // products in fp32's subnormal range
                std::vector<double> a(static_cast<std::size_t>(numbers.between(1, 40))), b(a.size());
                generate(g, numbers, shape, ends ? -75 : -12, ends ? -60 : 12, a, b);
                check(g, a, b, trial % 2 == 0 ? 0.0 : numbers.normal(testing::fp32, -20, 5));
            }
}

double dot(Kind kind, const std::vector<double>& a, const std::vector<double>& b, double c) {
    const auto k = static_cast<std::ptrdiff_t>(a.size());
    multiply_accumulate({kind, {}}, {a.data(), 1, k}, {b.data(), k, 1}, {&c, 1, 1});
    return c;
}

TEST(Orders, Fp32OrdersStepByStep) {
    for (const Kind kind : {Kind::sequential, Kind::fma, Kind::pairwise})
        on_all_generators(21, [&](Generator, const std::vector<double>& a, const std::vector<double>& b, double c) {
            ASSERT_EQ(bits(dot(kind, a, b, c)), bits(judge(kind, a, b, c)))
                << Accumulation{kind, {}} << " k=" << a.size();
        });
}

// |computed - exact| <= gamma(k + 1) (|c| + sum |a b|), gamma(n) = n u / (1 - n u), u = 2^-53: k additions and, for
// products of more than 53 bits, one rounding each (Higham, "Accuracy and Stability", section 3.1).
TEST(Orders, ExactWithinItsBound) {
    on_all_generators(22, [&](Generator g, const std::vector<double>& a, const std::vector<double>& b, double c) {
        mpfr_t sum, size, x, y;
        mpfr_inits2(1000, sum, size, x, y, static_cast<mpfr_ptr>(nullptr));
        mpfr_set_d(sum, c, MPFR_RNDN);
        mpfr_set_d(size, std::fabs(c), MPFR_RNDN);
        for (std::size_t i = 0; i < a.size(); ++i) {
            mpfr_set_d(x, a[i], MPFR_RNDN);
            mpfr_set_d(y, b[i], MPFR_RNDN);
            mpfr_mul(x, x, y, MPFR_RNDN);
            mpfr_add(sum, sum, x, MPFR_RNDN);
            mpfr_abs(x, x, MPFR_RNDN);
            mpfr_add(size, size, x, MPFR_RNDN);
        }
        const double computed = dot(Kind::exact, a, b, c);
        mpfr_sub_d(sum, sum, computed, MPFR_RNDN);
        const double u = 0x1p-53, n = static_cast<double>(a.size() + 1);
        const double bound = n * u / (1 - n * u) * mpfr_get_d(size, MPFR_RNDU);
        EXPECT_LE(std::fabs(mpfr_get_d(sum, MPFR_RNDA)), bound);
        if (g == Generator::exact_cancellation && c == 0 && a.size() == 2) {
            EXPECT_EQ(computed, 0.0);
        }
        mpfr_clears(sum, size, x, y, static_cast<mpfr_ptr>(nullptr));
    });
}

// By hand: 2^24, 1, 1, 1 in order: each 1 is a tie that goes back to the even 2^24. As a tree: (2^24 + 1) + (1 + 1) =
// 2^24 + 2. By fma with 1 = (1 + 2^-12)^2 - 2^-11 - 2^-24: the product's last bit survives in fma alone.
TEST(Orders, ByHand) {
    const std::vector<double> a{0x1p24, 1, 1, 1}, b{1, 1, 1, 1};
    EXPECT_EQ(dot(Kind::sequential, a, b, 0), 0x1p24);
    EXPECT_EQ(dot(Kind::pairwise, a, b, 0), 0x1p24 + 2);
    EXPECT_EQ(dot(Kind::exact, a, b, 0), 0x1p24 + 3);
    const double x = 1 + 0x1p-12;
    EXPECT_EQ(dot(Kind::fma, {x}, {x}, -(1 + 0x1p-11)), 0x1p-24);
    EXPECT_EQ(dot(Kind::sequential, {x}, {x}, -(1 + 0x1p-11)), 0.0);
}

// Five leaves: ((0 1)(2 3)) 4. Seven: ((0 1)(2 3)) ((4 5) 6). Values are chosen so that another tree gives another sum.
TEST(Orders, PairwiseTreeOfOddCounts) {
    Numbers numbers(23);
    for (std::size_t k = 1; k <= 67; ++k) {
        std::vector<double> a(k), b(k, 1.0);
        for (double& x : a) x = numbers.normal(testing::fp32, -3, 3);
        EXPECT_EQ(bits(dot(Kind::pairwise, a, b, 0.5)), bits(judge(Kind::pairwise, a, b, 0.5))) << k;
    }
}

}  // namespace
}  // namespace faultline
