// SPDX-License-Identifier: Apache-2.0
// The float kernels against the double ones at every length of a row, and exp against the C library.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <vector>

#include <faultline/gpt/attention_rows.hpp>
#include <faultline/gpt/row_kernels.hpp>
#include <faultline/random/random_stream.hpp>

namespace faultline::gpt {
namespace {

constexpr double unit = 0x1p-24;  // relative error of one float operation

template <class T>
std::vector<T> normals(std::size_t count, std::uint64_t seed) {
    const RandomStream stream(seed);
    std::vector<T> x(count);
    for (std::size_t i = 0; i < count; ++i) x[i] = static_cast<T>(static_cast<float>(stream.normal(i)));
    return x;
}

// exp through exponentials(): one row that sees everything, reference 0.
TEST(Exponential, IsWithinTwoUlpOverItsRange) {
    double worst = 0;
    std::vector<float> x;
    const auto judge = [&] {
        std::vector<float> y = x;
        const float zero = 0;
        exponentials(MatrixView<float>(y.data(), 1, static_cast<std::ptrdiff_t>(y.size())),
                     static_cast<std::ptrdiff_t>(y.size()) - 1, &zero, nullptr);
        for (std::size_t i = 0; i < x.size(); ++i) {
            const double wanted = std::exp(static_cast<double>(x[i]));
            worst = std::max(worst, std::fabs(y[i] - wanted) / std::ldexp(1.0, std::ilogb(wanted) - 23));
        }
        x.clear();
    };
    for (std::uint64_t bits = 0; bits < (1ULL << 32); bits += 1009) {
        const float value = std::bit_cast<float>(static_cast<std::uint32_t>(bits));
        if (value > -87 && value < 88.7F) x.push_back(value);
        if (x.size() == 4096) judge();
    }
    judge();
    EXPECT_LE(worst, 1.1);  // ulp; the bound that vector_math.hpp states
}

TEST(Exponential, Ends) {
    const float infinity = std::numeric_limits<float>::infinity();
    std::vector<float> y{0.0F, -infinity, -88.0F, 89.0F, infinity, std::nanf("")};
    const float zero = 0;
    exponentials(MatrixView<float>(y.data(), 1, 6), 5, &zero, nullptr);
    EXPECT_EQ(y[0], 1.0F);
    EXPECT_EQ(y[1], 0.0F);
    EXPECT_EQ(y[2], 0.0F);
    EXPECT_EQ(y[3], infinity);
    EXPECT_EQ(y[4], infinity);
    EXPECT_TRUE(std::isnan(y[5]));
}

class RowLength : public testing::TestWithParam<std::ptrdiff_t> {
  protected:
    template <class T>
    static MatrixView<T> rows(std::vector<T>& x, std::ptrdiff_t cols) {
        return {x.data(), static_cast<std::ptrdiff_t>(x.size()) / cols, cols};
    }
    static void expect_close(const std::vector<float>& value, const std::vector<double>& wanted, double tolerance) {
        double scale = 1;
        for (const double w : wanted) scale = std::max(scale, std::fabs(w));
        for (std::size_t i = 0; i < wanted.size(); ++i) ASSERT_NEAR(value[i], wanted[i], tolerance * scale) << i;
    }
};

// A float result of n-term sums errs by at most some n units of its terms' size: 8 n units here, for the few operations
// around the sums.
TEST_P(RowLength, FloatAgreesWithDouble) {
    const std::ptrdiff_t n = GetParam();
    const double tolerance = 8 * static_cast<double>(n + 4) * unit;
    const auto count = static_cast<std::size_t>(3 * n);
    std::vector<float> x = normals<float>(count, 1), dy = normals<float>(count, 2),
                       gain = normals<float>(static_cast<std::size_t>(n), 3);
    std::vector<double> xd = normals<double>(count, 1), dyd = normals<double>(count, 2),
                        gaind = normals<double>(static_cast<std::size_t>(n), 3);
    std::vector<float> s(6), y(count), dx(count), dg(static_cast<std::size_t>(n)), db(dg);
    std::vector<double> sd(6), yd(count), dxd(count), dgd(dg.size()), dbd(dg.size());

    norm_statistics(rows(x, n), 1e-1F, rows(s, 2));
    norm_statistics(rows(xd, n), static_cast<double>(1e-1F), rows(sd, 2));
    expect_close(s, sd, tolerance);
    norm_apply(rows(x, n), rows(s, 2), gain.data(), dg.data(), rows(y, n));
    norm_apply(rows(xd, n), rows(sd, 2), gaind.data(), dgd.data(), rows(yd, n));
    expect_close(y, yd, 4 * tolerance);
    norm_backward(rows(x, n), rows(s, 2), gain.data(), rows(dy, n), rows(dx, n), dg.data(), db.data());
    norm_backward(rows(xd, n), rows(sd, 2), gaind.data(), rows(dyd, n), rows(dxd, n), dgd.data(), dbd.data());
    expect_close(dx, dxd, 16 * tolerance);
    expect_close(dg, dgd, 16 * tolerance);
    expect_close(db, dbd, tolerance);

    gelu(rows(x, n), rows(y, n));
    gelu(rows(xd, n), rows(yd, n));
    expect_close(y, yd, 16 * unit);
    gelu_backward(rows(x, n), rows(dy, n), rows(dx, n));
    gelu_backward(rows(xd, n), rows(dyd, n), rows(dxd, n));
    expect_close(dx, dxd, 32 * unit);

    const std::vector<std::int32_t> targets{0, static_cast<std::int32_t>(n - 1), static_cast<std::int32_t>(n / 2)};
    const double only = cross_entropy_loss(rows(x, n), targets);
    const double loss = cross_entropy(rows(x, n), targets, 0.5, 0.01);
    const double lossd = cross_entropy(rows(xd, n), targets, 0.5, 0.01);
    EXPECT_NEAR(loss, lossd, 3 * tolerance);
    EXPECT_EQ(loss, only);
    expect_close(x, xd, tolerance);
}

TEST_P(RowLength, HeadsAreNormalisedToRmsOne) {
    const std::ptrdiff_t n = GetParam();
    std::vector<double> x = normals<double>(static_cast<std::size_t>(2 * 3 * n), 4), y(x.size()), inverse(6);
    rms_norm_heads(rows(x, 3 * n), n, nullptr, 0.0, rows(y, 3 * n), rows(inverse, 3));
    for (int i = 0; i < 6; ++i) {
        double squares = 0;
        for (std::ptrdiff_t j = 0; j < n; ++j) squares += std::pow(y[static_cast<std::size_t>(i * n + j)], 2);
        EXPECT_NEAR(squares / static_cast<double>(n), 1.0, 1e-14);
    }
}

INSTANTIATE_TEST_SUITE_P(Lengths, RowLength, testing::Values(1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 64, 100));

}  // namespace
}  // namespace faultline::gpt
