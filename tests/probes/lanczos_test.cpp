// SPDX-License-Identifier: Apache-2.0
// Leading singular values by Lanczos against a full decomposition, for the weights that training has and for those that are hard.
#include <cmath>
#include <functional>
#include <limits>
#include <string>

#include <gtest/gtest.h>

#include <Eigen/QR>
#include <Eigen/SVD>

#include <faultline/probes/lanczos.hpp>
#include <faultline/random/random_stream.hpp>

namespace faultline {
namespace {

using Rows = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using Eigen::MatrixXd;

MatrixXd gaussian(Eigen::Index rows, Eigen::Index cols, std::uint64_t seed) {
    const RandomStream stream(seed);
    MatrixXd m(rows, cols);
    for (Eigen::Index i = 0; i < m.size(); ++i) m.data()[i] = stream.normal(static_cast<std::uint64_t>(i));
    return m;
}
/// With these singular values.
MatrixXd planted(Eigen::Index rows, Eigen::Index cols, const std::function<double(Eigen::Index)>& value) {
    const Eigen::Index n = std::min(rows, cols);
    const MatrixXd u = Eigen::HouseholderQR<MatrixXd>(gaussian(rows, n, 5)).householderQ() *
                       MatrixXd::Identity(rows, n),
                   v = Eigen::HouseholderQR<MatrixXd>(gaussian(cols, n, 6)).householderQ() *
                       MatrixXd::Identity(cols, n);
    Eigen::VectorXd values(n);
    for (Eigen::Index i = 0; i < n; ++i) values(i) = value(i);
    return u * values.asDiagonal() * v.transpose();
}
MatrixView<const float> view(const Rows& w) { return {w.data(), w.rows(), w.cols(), w.cols()}; }
std::vector<double> of_svd(const MatrixXd& w, int count) {
    const Eigen::VectorXd values = Eigen::BDCSVD<MatrixXd>(w).singularValues();
    std::vector<double> leading(static_cast<std::size_t>(count), 0.0);
    for (Eigen::Index i = 0; i < std::min<Eigen::Index>(count, values.size()); ++i)
        leading[static_cast<std::size_t>(i)] = values(i);
    return leading;
}
/// Each found to lanczos_error of the largest, and what rounding in binary64 leaves of either decomposition.
void expect_found(const LeadingValues& found, const std::vector<double>& exact, const std::string& what) {
    ASSERT_EQ(found.values.size(), exact.size());
    for (std::size_t i = 0; i < exact.size(); ++i)
        EXPECT_NEAR(found.values[i], exact[i], (lanczos_error + 0x1p-46) * exact[0]) << what << ", value " << i;
    std::printf("%-44s %3d steps, off by %.1e %.1e %.1e of the first\n", what.c_str(), found.steps,
                std::abs(found.values[0] - exact[0]) / exact[0], std::abs(found.values[1] - exact[1]) / exact[0],
                std::abs(found.values[2] - exact[2]) / exact[0]);
}

struct Kind {
    std::string name;
    std::function<MatrixXd(Eigen::Index rows, Eigen::Index cols)> make;
};
const std::vector<Kind>& kinds() {
    static const std::vector<Kind> all{
        {"random", [](auto m, auto n) { return gaussian(m, n, 1); }},
        {"one direction leads",
         [](auto m, auto n) {
             return MatrixXd(0.02 * gaussian(m, n, 2) + 0.3 * gaussian(m, 1, 3) * gaussian(1, n, 4));
         }},
        {"collapsed: 500, 0.7, 0.1, noise",
         [](auto m, auto n) {
             return planted(m, n, [](auto i) {
                 return i == 0 ? 500.0 : i == 1 ? 0.7 : i == 2 ? 0.1 : 0.05 / double(i);
             });
         }},
        {"falling as 1/i", [](auto m, auto n) { return planted(m, n, [](auto i) { return 1.0 / double(i + 1); }); }},
        {"flat, 1 to 0.9",
         [](auto m, auto n) { return planted(m, n, [n](auto i) { return 1.0 - 0.1 * double(i) / double(n); }); }},
        {"three close: 1, 1 - 1e-3, 1 - 2e-3",
         [](auto m, auto n) { return planted(m, n, [](auto i) { return i < 3 ? 1.0 - 1e-3 * double(i) : 0.5; }); }},
        {"third and fourth close: 1e-5 apart",
         [](auto m, auto n) {
             return planted(m, n, [](auto i) { return i < 3 ? 3.0 - double(i) : i == 3 ? 1.0 - 1e-5 : 0.5; });
         }},
    };
    return all;
}

TEST(Lanczos, FindsTheLeadingValuesOfWeights) {
    for (const Eigen::Index width : {8, 20, 64, 129, 256})
        for (const Kind& kind : kinds()) {
            const Rows w = kind.make(width, width).cast<float>();
            expect_found(leading_singular_values(view(w), 3), of_svd(w.cast<double>(), 3),
                         kind.name + " " + std::to_string(width));
        }
}

TEST(Lanczos, FindsThoseOfOblongOnesAndOfColumns) {
    for (const Kind& kind : kinds()) {
        const Rows w = kind.make(96, 40).cast<float>(), t = w.transpose();
        expect_found(leading_singular_values(view(w), 3), of_svd(w.cast<double>(), 3), kind.name + " 96 x 40");
        expect_found(leading_singular_values(view(t), 3), of_svd(w.cast<double>(), 3), kind.name + " 40 x 96");
        const MatrixView<const float> columns{w.data() + 7, 96, 13, 40};
        expect_found(leading_singular_values(columns, 3), of_svd(w.middleCols(7, 13).cast<double>(), 3),
                     kind.name + " 13 columns");
    }
}

TEST(Lanczos, FindsThoseOfProducts) {
    for (const Eigen::Index width : {64, 256})
        for (const Eigen::Index d : {8, 36, 64})
            for (const Kind& kind : kinds()) {
                const Rows q = kind.make(width, d).cast<float>(),
                           k = (kind.make(width, d) + 0.1 * gaussian(width, d, 9)).cast<float>();
                const MatrixXd product = q.cast<double>() * k.cast<double>().transpose();
                expect_found(leading_product_singular_values(view(q), view(k), 3), of_svd(product, 3),
                             kind.name + " " + std::to_string(width) + ", heads of " + std::to_string(d));
            }
}

TEST(Lanczos, OfLittleRankHasZeros) {
    const MatrixXd column = gaussian(40, 1, 1), row = gaussian(1, 40, 2);
    const Rows one = (column * row).cast<float>(), none = Rows::Zero(12, 12);
    const LeadingValues of_one = leading_singular_values(view(one), 3);
    EXPECT_NEAR(of_one.values[0], of_svd(one.cast<double>(), 1)[0], 1e-13 * of_one.values[0]);
    // fp32's rounding of the elements is a matrix of full rank.
    EXPECT_LT(of_one.values[1], 0x1p-20 * of_one.values[0]);
    EXPECT_EQ(leading_singular_values(view(none), 3).values, (std::vector<double>{0, 0, 0}));
    const Rows exact = Rows::Ones(16, 16);
    const LeadingValues of_ones = leading_singular_values(view(exact), 3);
    EXPECT_NEAR(of_ones.values[0], 16, 1e-13);
    EXPECT_LE(of_ones.values[1], 1e-13);
    EXPECT_EQ(of_ones.values[2], 0);
}

TEST(Lanczos, AValueThatIsNotFiniteIsSaid) {
    Rows w = gaussian(24, 24, 1).cast<float>();
    const Rows k = w;
    for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
        w(23, 5) = bad;
        EXPECT_TRUE(std::isnan(leading_singular_values(view(w), 3).values[2]));
        EXPECT_TRUE(std::isnan(leading_product_singular_values(view(w), view(k), 3).values[0]));
        EXPECT_TRUE(std::isnan(leading_product_singular_values(view(k), view(w), 3).values[0]));
    }
    EXPECT_THROW((void)leading_singular_values(view(k), 4), std::invalid_argument);
}

}  // namespace
}  // namespace faultline
