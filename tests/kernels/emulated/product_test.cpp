// SPDX-License-Identifier: Apache-2.0
// A team's product of matrices against lib/tensor_core's, bit for bit: every named order of summation and units that have no
// name, in blocks of every shape, with operands that lie either way and with what the quick way does not take.
#include <faultline/emulated/product.hpp>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include <faultline/format/format.hpp>
#include <faultline/tensor/matrix.hpp>
#include <faultline/tensor_core/accumulate.hpp>

namespace faultline {
namespace {

/// bf16 numbers of sizes far apart, with zeros of both signs among them, and where they are asked for with what is huge, tiny or
/// no number.
Matrix drawn(std::ptrdiff_t rows, std::ptrdiff_t cols, bool extreme, std::mt19937_64& random) {
    std::normal_distribution<double> normal;
    Matrix m(rows, cols);
    for (double& x : m.values) {
        x = round(std::ldexp(normal(random), static_cast<int>(random() % 40) - 20), bf16);
        const auto kind = random() % 64;
        if (kind < 4) x = kind % 2 == 0 ? 0.0 : -0.0;
        if (!extreme) continue;
        if (kind == 4) x = std::ldexp(x, 700);
        if (kind == 5) x = std::ldexp(x, -140);
        if (kind == 6 && random() % 8 == 0) x = random() % 2 == 0 ? INFINITY : NAN;
    }
    return m;
}
Matrix transposed(const Matrix& m) {
    Matrix t(m.cols, m.rows);
    for (std::ptrdiff_t i = 0; i < m.rows; ++i)
        for (std::ptrdiff_t j = 0; j < m.cols; ++j) t(j, i) = m(i, j);
    return t;
}

std::vector<Accumulation> orders() {
    std::vector<Accumulation> all;
    for (const NamedAccumulation& named : accumulations())  // many names stand for the same
        if (std::count(all.begin(), all.end(), named.accumulation) == 0) all.push_back(named.accumulation);
    for (const int terms : {1, 12, 33})
        for (const ZeroOperand zero : {ZeroOperand::ignored, ZeroOperand::at_minimum, ZeroOperand::at_fp32_minimum}) {
            MatrixUnit unit;
            unit.terms = terms;
            unit.fraction_bits = terms == 12 ? 40 : 11;
            unit.zero = zero;
            all.push_back({Accumulation::Kind::fused, unit});
        }
    return all;
}

TEST(Product, HasTheBitsOfEveryOrderInEveryShape) {
    struct Size {
        std::ptrdiff_t m, n, k;
    };
    std::mt19937_64 random(1);
    const auto memory = std::make_unique<double[]>(emulated::product::staging_bytes / sizeof(double) + 1);
    std::size_t compared = 0;
    for (const Accumulation& order : orders())
        for (const Size& size : {Size{1, 1, 1}, {33, 70, 40}, {16, 130, 35}, {70, 31, 65}})
            for (const bool extreme : {false, true}) {
                const Matrix a = drawn(size.m, size.k, extreme, random), b = drawn(size.k, size.n, extreme, random);
                const Matrix c = drawn(size.m, size.n, false, random);
                Matrix expected = c;
                multiply_accumulate(order, a.view(), b.view(), expected.view());
                const Matrix a_t = transposed(a), b_t = transposed(b);
                for (const bool across : {false, true}) {
                    Matrix own = c;
                    const emulated::Operands in{across ? a_t.values.data() : a.values.data(),
                                                across ? 1 : size.k,
                                                across ? size.m : 1,
                                                across ? b_t.values.data() : b.values.data(),
                                                across ? size.k : 1,
                                                across ? 1 : size.n,
                                                size.k};
                    emulated::multiply(emulated::SerialTeam{memory.get()}, order, in,
                                       emulated::View<double>{own.values.data(), size.m, size.n, size.n});
                    for (std::size_t i = 0; i < own.values.size(); ++i, ++compared) {
                        const double x = own.values[i], y = expected.values[i];
                        const bool both_nan = x != x && y != y && order.kind != Accumulation::Kind::fused;
                        ASSERT_TRUE(both_nan || std::memcmp(&x, &y, sizeof x) == 0)
                            << name(order) << ", " << size.m << " x " << size.n << " x " << size.k << ", element " << i
                            << ": " << x << ", expected " << y;
                    }
                }
            }
    EXPECT_GT(compared, 100000u);
}

}  // namespace
}  // namespace faultline
