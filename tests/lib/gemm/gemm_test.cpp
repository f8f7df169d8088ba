// SPDX-License-Identifier: Apache-2.0
// Every bit of a product is what a plain loop of fma over ascending k gives, for all shapes around the tiles' sizes, all
// transpositions, strided operands, and every instruction set of this machine.
#include <faultline/gemm/block.hpp>
#include <faultline/gemm/gemm.hpp>

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <stdexcept>
#include <vector>

#include <faultline/random/random_stream.hpp>

namespace faultline {
namespace {

template <class T>
class Gemm : public testing::Test {
  protected:
    /// rows x cols of normal numbers in rows of stride cols + gap; the gap holds NaN, so that reading it shows.
    struct Storage {
        std::vector<T> values;
        std::ptrdiff_t rows, cols, stride;
        MatrixView<T> view() { return {values.data(), rows, cols, stride}; }
        MatrixView<const T> view() const { return {values.data(), rows, cols, stride}; }
    };
    static Storage random(std::ptrdiff_t rows, std::ptrdiff_t cols, std::ptrdiff_t gap, std::uint64_t seed) {
        Storage s{std::vector<T>(static_cast<std::size_t>(rows * (cols + gap)), std::nan("")), rows, cols, cols + gap};
        const RandomStream stream(seed);
        for (std::ptrdiff_t i = 0; i < rows; ++i)
            for (std::ptrdiff_t j = 0; j < cols; ++j)
                s.view()(i, j) = static_cast<T>(stream.normal(static_cast<std::uint64_t>(i * cols + j)));
        return s;
    }
    static void expect_specified(std::ptrdiff_t m, std::ptrdiff_t n, std::ptrdiff_t k, Transpose ta, Transpose tb,
                                 bool accumulate, std::ptrdiff_t gap) {
        const bool at = ta == Transpose::yes, bt = tb == Transpose::yes;
        const Storage a = at ? random(k, m, gap, 1) : random(m, k, gap, 1);
        const Storage b = bt ? random(n, k, gap, 2) : random(k, n, gap, 2);
        Storage c = random(m, n, gap, 3);
        Storage wanted = c;
        for (std::ptrdiff_t i = 0; i < m; ++i)
            for (std::ptrdiff_t j = 0; j < n; ++j) {
                T sum = accumulate ? wanted.view()(i, j) : T(0);
                for (std::ptrdiff_t t = 0; t < k; ++t)
                    sum = std::fma(at ? a.view()(t, i) : a.view()(i, t), bt ? b.view()(j, t) : b.view()(t, j), sum);
                wanted.view()(i, j) = sum;
            }
        gemm(ta, a.view(), tb, b.view(), c.view(), accumulate);
        for (std::ptrdiff_t i = 0; i < m; ++i)
            ASSERT_EQ(
                std::memcmp(c.view().row(i), wanted.view().row(i), static_cast<std::size_t>(c.stride) * sizeof(T)), 0)
                << "m " << m << " n " << n << " k " << k << " transposed " << at << bt << " row " << i;
    }
};

using Types = testing::Types<float, double>;
TYPED_TEST_SUITE(Gemm, Types);

TYPED_TEST(Gemm, EveryShapeAroundTheTiles) {
    for (const std::ptrdiff_t m : {1, 2, 5, 6, 7, 11, 12, 13, 25})
        for (const std::ptrdiff_t n : {1, 3, 8, 15, 16, 17, 32, 33, 48, 63, 64, 65, 100})
            for (const std::ptrdiff_t k : {1, 2, 8, 17, 32})
                for (const Transpose b : {Transpose::no, Transpose::yes})
                    this->expect_specified(m, n, k, m % 2 ? Transpose::yes : Transpose::no, b, k == 2, m % 3);
}

TYPED_TEST(Gemm, AcrossBlocksOfDepthAndOfRows) {
    this->expect_specified(7, 70, 513, Transpose::no, Transpose::yes, false, 0);
    this->expect_specified(7, 70, 256, Transpose::yes, Transpose::no, true, 1);
    this->expect_specified(195, 9, 257, Transpose::no, Transpose::no, true, 0);
    this->expect_specified(3, 1030, 19, Transpose::no, Transpose::yes, true, 0);
}

// The kernels that this machine would not choose give the same bits.
TYPED_TEST(Gemm, EveryInstructionSetGivesTheSameBits) {
    using T = TypeParam;
    std::vector<void (*)(const gemm_detail::Problem<T>&)> kernels{gemm_detail::multiply_plain};
#if defined(__x86_64__) && !defined(FAULTLINE_NO_CLONES)
    if (__builtin_cpu_supports("x86-64-v3")) kernels.push_back(gemm_detail::multiply_v3);
    if (__builtin_cpu_supports("x86-64-v4")) kernels.push_back(gemm_detail::multiply_v4);
#endif
    const std::ptrdiff_t m = 13, k = 40;
    for (const std::ptrdiff_t n : {5, 16, 31, 70})
        for (const bool transposed : {false, true}) {
            const auto a = this->random(m, k, 0, 1), b = this->random(transposed ? n : k, transposed ? k : n, 0, 2);
            std::vector<std::vector<T>> results;
            for (const auto kernel : kernels) {
                std::vector<T> c(static_cast<std::size_t>(m * n)), packed(gemm_detail::packed_size);
                kernel({m, n, k, a.values.data(), k, 1, b.values.data(), transposed ? 1 : n, transposed ? k : 1,
                        c.data(), n, false, packed.data()});
                results.push_back(c);
            }
            for (const auto& result : results) EXPECT_EQ(result, results[0]) << n << " " << transposed;
        }
}

TYPED_TEST(Gemm, DepthZeroGivesZerosOrLeavesC) {
    std::vector<TypeParam> c{1, 2};
    const MatrixView<const TypeParam> a(nullptr, 1, 0), b(nullptr, 0, 2);
    gemm(Transpose::no, a, Transpose::no, b, MatrixView<TypeParam>(c.data(), 1, 2), true);
    EXPECT_EQ(c, (std::vector<TypeParam>{1, 2}));
    gemm(Transpose::no, a, Transpose::no, b, MatrixView<TypeParam>(c.data(), 1, 2));
    EXPECT_EQ(c, (std::vector<TypeParam>{0, 0}));
}

TYPED_TEST(Gemm, ShapesThatDoNotFitAreRefused) {
    std::vector<TypeParam> x(12);
    const MatrixView<const TypeParam> a(x.data(), 2, 3), b(x.data(), 2, 3);
    const MatrixView<TypeParam> c(x.data(), 2, 3);
    EXPECT_THROW(gemm(Transpose::no, a, Transpose::no, b, c), std::invalid_argument);
    EXPECT_THROW(gemm(Transpose::yes, a, Transpose::no, b, c), std::invalid_argument);
}

}  // namespace
}  // namespace faultline
