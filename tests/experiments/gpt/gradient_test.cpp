// SPDX-License-Identifier: Apache-2.0
// The gradient is that of the loss: judged by central differences of the loss in binary64, for every option.
#include <gtest/gtest.h>

#include <cmath>

#include "small_model.hpp"

namespace faultline::gpt {
namespace {

struct Case {
    const char* name;
    void (*change)(ModelConfig&);
};

class Gradient : public testing::TestWithParam<Case> {};

// The derivative by (8 (L(h) - L(-h)) - (L(2h) - L(-2h))) / 12h: truncation h^4/30 of the fifth derivative, rounding some
// 2^-53 L/h = 3e-12. The fifth derivatives through two norms and two softmaxes reach some 3e7 here, hence 1e-10.
constexpr double step = 1e-4;
constexpr double tolerance = 1e-10;

template <class Loss>
double derivative(Loss&& loss_at, double x) {
    return (8 * (loss_at(x + step) - loss_at(x - step)) - (loss_at(x + 2 * step) - loss_at(x - 2 * step))) /
           (12 * step);
}

TEST_P(Gradient, IsTheDerivativeOfTheLoss) {
    ModelConfig config = small_config();
    GetParam().change(config);
    Gpt<double> model(config, 5);
    spread_weights(model);
    const auto ids = formula_tokens(3 * 9 + 1, config.vocabulary, 2);
    const std::span all(ids);
    const Batch batch{all.first(27), all.subspan(1, 27), 3, 9};
    StepContext context;
    context.loss_weight = 1.0 / 27;
    BatchStatistics statistics(6);
    model.accumulate(context, batch, statistics);
    model.finish_gradient();
    const std::vector<double> gradient(model.gradient().begin(), model.gradient().end());

    for (const Parameter& p : model.layout().all())
        for (const std::ptrdiff_t at : {std::ptrdiff_t{0}, p.rows * p.cols / 3, p.rows * p.cols - 1}) {
            const auto i = static_cast<std::size_t>(p.offset + at / p.cols * p.stride + at % p.cols);
            const double kept = model.weights()[i];
            const auto loss_at = [&](double value) {
                model.weights()[i] = value;
                model.prepare();
                return model.loss(batch, 1) / 27;
            };
            const double slope = derivative(loss_at, kept);
            model.weights()[i] = kept;
            model.prepare();
            EXPECT_NEAR(gradient[i], slope, tolerance) << p.name << " element " << at;
        }
}

INSTANTIATE_TEST_SUITE_P(Options, Gradient,
                         testing::Values(Case{"plain", [](ModelConfig&) {}},
                                         Case{"bias", [](ModelConfig& c) { c.bias = true; }},
                                         Case{"qk_norm", [](ModelConfig& c) { c.qk_norm = QkNorm::parameter_free; }},
                                         Case{"qk_norm_learned", [](ModelConfig& c) { c.qk_norm = QkNorm::learned; }},
                                         Case{"softcap", [](ModelConfig& c) { c.softcap = 0.7; }},
                                         Case{"output_gate", [](ModelConfig& c) { c.output_gate = true; }},
                                         Case{"all",
                                              [](ModelConfig& c) {
                                                  c.bias = c.output_gate = true;
                                                  c.qk_norm = QkNorm::learned;
                                                  c.softcap = 2;
                                              }}),
                         [](const auto& of) { return std::string(of.param.name); });

// sigma's vectors move two power steps at each prepare(): once they are converged the derivative is the exact one.
TEST(GradientOfReparametrised, IsTheDerivativeOfTheLoss) {
    ModelConfig config = small_config();
    config.sigma_reparam = true;
    Gpt<double> model(config, 5);
    spread_weights(model);
    for (int i = 0; i < 300; ++i) model.prepare();
    const auto ids = formula_tokens(19, config.vocabulary, 2);
    const std::span all(ids);
    const Batch batch{all.first(18), all.subspan(1, 18), 2, 9};
    StepContext context;
    context.loss_weight = 1.0 / 18;
    BatchStatistics statistics(6);
    model.accumulate(context, batch, statistics);
    model.finish_gradient();
    const std::vector<double> gradient(model.gradient().begin(), model.gradient().end());
    for (const char* name : {"layer0.w_q", "layer0.w_q.gamma", "layer1.w_fc", "layer1.w_proj.gamma", "wte"}) {
        const Parameter& p = model.layout().at(name);
        const auto i = static_cast<std::size_t>(p.offset);
        const double kept = model.weights()[i];
        const auto loss_at = [&](double value) {
            model.weights()[i] = value;
            for (int k = 0; k < 300; ++k) model.prepare();
            return model.loss(batch, 1) / 18;
        };
        const double slope = derivative(loss_at, kept);
        model.weights()[i] = kept;
        EXPECT_NEAR(gradient[i], slope, tolerance) << name;
    }
}

// Of a model whose final gain is 0 every logit is 0: log-sum-exp is log V, so that with the z-loss every gradient of the
// logits is (1 + 2 z log V)/V per token, less 1 at the target. Its product with the final norm's output is what wte gets.
TEST(ZLoss, AddsTwiceTheLogSumExp) {
    ModelConfig config = small_config();
    const auto head_gradient = [&](double z) {
        config.z_loss = z;
        Gpt<double> model(config, 5);
        spread_weights(model);
        const Parameter& gain = model.layout().at("final_norm.gain");
        for (std::ptrdiff_t j = 0; j < gain.cols; ++j) model.weights()[static_cast<std::size_t>(gain.offset + j)] = 0;
        model.prepare();
        const std::vector<std::int32_t> ids{3, 4};
        StepContext context;
        BatchStatistics statistics(6);
        model.accumulate(context, {std::span(ids).first(1), std::span(ids).subspan(1, 1), 1, 1}, statistics);
        // The gradient of the gain: sum_v dlogit_v wte_v xhat.
        const double x = model.gradient()[static_cast<std::size_t>(gain.offset)];
        double mean = 0;
        for (int v = 0; v < 17; ++v) mean += model.weights()[static_cast<std::size_t>(v * 12)] / 17;
        const double target = model.weights()[4 * 12];
        return std::pair(x, std::pair(mean, target));
    };
    const auto [plain, w] = head_gradient(0);
    const auto [with_z, same] = head_gradient(0.1);
    const double xhat = plain / (w.first - w.second);
    EXPECT_NEAR(with_z, xhat * (w.first * (1 + 2 * 0.1 * std::log(17.0)) - w.second), 1e-12);
}

}  // namespace
}  // namespace faultline::gpt
