// SPDX-License-Identifier: Apache-2.0
// AdamW, Muon, SGD with momentum: from a gradient to the update that is added to the weights. Updates are formed first and
// applied afterwards, so that a hook can change them in between.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include <faultline/gpt/parameters.hpp>

namespace faultline::gpt {

enum class OptimizerKind : unsigned char {
    adamw,  ///< Loshchilov and Hutter, arXiv 1711.05101, bias-corrected moments, decay times the learning rate
    muon,   ///< Jordan 2024: the momentum of a matrix, orthogonalised; AdamW for embeddings and vectors
    sgd,    ///< v <- momentum v + g, w <- w - lr v
};

struct OptimizerConfig {
    OptimizerKind kind = OptimizerKind::adamw;
    double beta1 = 0.9, beta2 = 0.95;
    double epsilon = 1e-8;
    double weight_decay = 0;  ///< of matrices
    double momentum = 0.9;    ///< of SGD; Muon's default is 0.95
    bool nesterov = true;     ///< of Muon
    int newton_schulz_steps = 5;
    double adamw_rate = 1;  ///< Muon: AdamW's learning rate for the rest, over Muon's
};

class Optimizer {
  public:
    Optimizer(const OptimizerConfig& config, const ParameterLayout& layout);
    /// update = what is to be added to the weights for this (already clipped) gradient.
    void propose(std::span<const float> weights, std::span<const float> gradient, double learning_rate,
                 std::span<float> update);
    /// Moments and step count to zero.
    void reset();

    /// For a checkpoint.
    struct State {
        std::vector<float> first, second;  ///< moments; second is empty for SGD
        std::int64_t steps = 0;
    };
    [[nodiscard]] const State& state() const { return state_; }
    /// Sizes must be those of state().
    void restore(State state) { state_ = std::move(state); }

  private:
    void adamw(const Parameter& p, std::span<const float> weights, std::span<const float> gradient,
               double learning_rate, std::span<float> update);
    void muon(const Parameter& p, std::span<const float> weights, std::span<const float> gradient, double learning_rate,
              std::span<float> update);
    void sgd(const Parameter& p, std::span<const float> weights, std::span<const float> gradient, double learning_rate,
             std::span<float> update);

    OptimizerConfig config_;
    const ParameterLayout& layout_;
    State state_;
};

/// X <- an approximation of U V^T where X = U S V^T, singular values to within [0.7, 1.2]: Newton-Schulz steps
/// a X + (b X X^T + c (X X^T)^2) X, (a, b, c) = (3.4445, -4.7750, 2.0315), after X over its Frobenius norm (Jordan 2024,
/// "Muon: an optimizer for hidden layers in neural networks"). Any shape; float products in the order of lib/gemm.
void orthogonalise(MatrixView<float> x, int steps);

/// Euclidean norm of the gradient; parameters in order, elements in order, in double.
[[nodiscard]] double norm_of(std::span<const float> gradient);

struct ScheduleConfig {
    double learning_rate = 3e-3;  ///< after warm-up
    std::int64_t warmup = 500;    ///< steps of linear rise: step s (from 0) has (s+1)/warmup of it
    bool cosine = false;          ///< falls to `final_rate` at step `steps`, else constant
    double final_rate = 0;
};

/// The learning rate of a step, counted from 0, of a run of `steps` steps.
[[nodiscard]] double learning_rate(const ScheduleConfig& schedule, std::int64_t step, std::int64_t steps);

}  // namespace faultline::gpt
