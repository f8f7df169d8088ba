// SPDX-License-Identifier: Apache-2.0
// Updates worked out by hand, and what Newton-Schulz must do to singular values.
#include <faultline/gpt/optimizer.hpp>

#include <gtest/gtest.h>

#include <Eigen/SVD>
#include <cmath>

#include <faultline/random/random_stream.hpp>

namespace faultline::gpt {
namespace {

ModelConfig tiny() {
    ModelConfig config;
    config.layers = 1;
    config.width = 4;
    config.heads = 1;
    config.context = 2;
    config.vocabulary = 3;
    return config;
}

struct Flat {
    ParameterLayout layout{tiny()};
    std::vector<float> weights, gradient, update;
    Flat()
        : weights(static_cast<std::size_t>(layout.size()), 2.0F),
          gradient(weights.size(), 0.5F),
          update(weights.size(), 0.0F) {}
    [[nodiscard]] float of(const char* name) const { return update[static_cast<std::size_t>(layout.at(name).offset)]; }
};

// Step 1: m = 0.1 g, v = 0.05 g^2; corrected m = g, v = g^2: the step is 1 / (1 + epsilon/|g|), so -lr (1 + wd w).
// Step 2 with g2 = -g: m = 0.9 0.1 g - 0.1 g = -0.01 g over 1 - 0.81; v = 0.95 0.05 g^2 + 0.05 g^2 over 1 - 0.9025, which
// is g^2: the step is -0.01/0.19.
TEST(AdamW, TwoStepsByHand) {
    Flat x;
    OptimizerConfig config;
    config.weight_decay = 0.25;
    Optimizer optimizer(config, x.layout);
    optimizer.propose(x.weights, x.gradient, 0.01, x.update);
    EXPECT_FLOAT_EQ(x.of("layer0.w_q"), -0.01F * (1 + 0.25F * 2));
    EXPECT_FLOAT_EQ(x.of("final_norm.gain"), -0.01F);  // no decay of vectors
    for (float& g : x.gradient) g = -0.5F;
    optimizer.propose(x.weights, x.gradient, 0.01, x.update);
    EXPECT_NEAR(x.of("final_norm.gain"), 0.01 * 0.01 / 0.19, 1e-8);
    optimizer.reset();
    optimizer.propose(x.weights, x.gradient, 0.01, x.update);
    EXPECT_FLOAT_EQ(x.of("final_norm.gain"), 0.01F);
}

// v1 = g, v2 = 0.9 g + g.
TEST(Sgd, MomentumAddsUp) {
    Flat x;
    Optimizer optimizer({.kind = OptimizerKind::sgd}, x.layout);
    optimizer.propose(x.weights, x.gradient, 0.1, x.update);
    EXPECT_FLOAT_EQ(x.of("wte"), -0.05F);
    optimizer.propose(x.weights, x.gradient, 0.1, x.update);
    EXPECT_FLOAT_EQ(x.of("wte"), -0.095F);
}

// Every singular value ends within [0.68, 1.14], Jordan's bound for these coefficients, and the vectors stay.
TEST(Muon, OrthogonalisesEveryShape) {
    for (const auto& [rows, cols] : {std::pair{8, 8}, std::pair{16, 5}, std::pair{5, 16}}) {
        const RandomStream stream(3);
        std::vector<float> x(static_cast<std::size_t>(rows * cols));
        for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(stream.normal(i));
        using Rows = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
        const Eigen::MatrixXf before = Eigen::Map<Rows>(x.data(), rows, cols);
        orthogonalise(MatrixView<float>(x.data(), rows, cols), 5);
        const Eigen::MatrixXf after = Eigen::Map<Rows>(x.data(), rows, cols);
        const Eigen::JacobiSVD<Eigen::MatrixXf> svd(before, Eigen::ComputeThinU | Eigen::ComputeThinV);
        const Eigen::MatrixXf in_basis = svd.matrixU().transpose() * after * svd.matrixV();
        for (Eigen::Index i = 0; i < in_basis.rows(); ++i)
            for (Eigen::Index j = 0; j < in_basis.cols(); ++j) {
                if (i != j) {
                    EXPECT_NEAR(in_basis(i, j), 0, 1e-4);  // 15 products of norm about 1 with sums of 16 floats each
                } else if (svd.singularValues()(i) > 0.02F * svd.singularValues()(0)) {
                    EXPECT_GT(in_basis(i, j), 0.67F);
                    EXPECT_LT(in_basis(i, j), 1.21F);
                }
            }
    }
}

TEST(Muon, UpdatesHiddenMatricesAloneAndScalesByShape) {
    Flat x;
    const RandomStream stream(9);
    for (std::size_t i = 0; i < x.gradient.size(); ++i) x.gradient[i] = static_cast<float>(stream.normal(i));
    Optimizer optimizer({.kind = OptimizerKind::muon, .momentum = 0.95}, x.layout);
    optimizer.propose(x.weights, x.gradient, 0.02, x.update);
    EXPECT_FLOAT_EQ(std::fabs(x.of("wte")), 0.02F);  // AdamW's first step
    const auto norm = [&](const char* name) {
        double squares = 0;
        const MatrixView<float> u = x.layout.at(name).of(std::span(x.update));
        for (std::ptrdiff_t i = 0; i < u.rows; ++i)
            for (std::ptrdiff_t j = 0; j < u.cols; ++j) squares += std::pow(u(i, j), 2);
        return std::sqrt(squares);
    };
    // Four singular values near 1 each; of the [4, 16] matrix times sqrt(16/4).
    EXPECT_NEAR(norm("layer0.w_q"), 0.02 * 2, 0.02 * 2 * 0.35);
    EXPECT_NEAR(norm("layer0.w_fc"), 0.02 * 4, 0.02 * 4 * 0.35);
}

TEST(Schedule, WarmsUpAndFalls) {
    ScheduleConfig s{.learning_rate = 1, .warmup = 10};
    EXPECT_DOUBLE_EQ(learning_rate(s, 0, 110), 0.1);
    EXPECT_DOUBLE_EQ(learning_rate(s, 9, 110), 1);
    EXPECT_DOUBLE_EQ(learning_rate(s, 100, 110), 1);
    s.cosine = true;
    s.final_rate = 0.2;
    EXPECT_DOUBLE_EQ(learning_rate(s, 10, 110), 1);
    EXPECT_DOUBLE_EQ(learning_rate(s, 60, 110), 0.6);
    EXPECT_DOUBLE_EQ(learning_rate(s, 110, 110), 0.2);
    s.warmup = 0;
    EXPECT_DOUBLE_EQ(learning_rate(s, 0, 100), 1);
}

TEST(Norm, OfAKnownVector) {
    EXPECT_DOUBLE_EQ(norm_of(std::vector<float>{3, 0, 0, 0, 0, 0, 0, 0, 4}), 5);
    EXPECT_DOUBLE_EQ(norm_of(std::vector<float>{}), 0);
}

}  // namespace
}  // namespace faultline::gpt
