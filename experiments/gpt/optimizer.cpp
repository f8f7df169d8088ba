// SPDX-License-Identifier: Apache-2.0
#include <faultline/gpt/optimizer.hpp>

#include <algorithm>
#include <cmath>
#include <numbers>

#include <faultline/base/clones.hpp>
#include <faultline/gemm/gemm.hpp>

namespace faultline::gpt {
namespace {

struct AdamFactors {
    float beta1, beta2, correction1, correction2, epsilon, rate, decay;
};

/// One row of a parameter; float throughout, as PyTorch's fp32 AdamW.
FAULTLINE_CLONES void adamw_row(const float* w, const float* g, float* m, float* v, float* update, std::ptrdiff_t n,
                                const AdamFactors& f) {
    for (std::ptrdiff_t j = 0; j < n; ++j) {
        m[j] = f.beta1 * m[j] + (1.0F - f.beta1) * g[j];
        v[j] = f.beta2 * v[j] + (1.0F - f.beta2) * (g[j] * g[j]);
        const float step = (m[j] * f.correction1) / (std::sqrt(v[j] * f.correction2) + f.epsilon);
        update[j] = -f.rate * (step + f.decay * w[j]);
    }
}

template <class F>
void for_rows(const Parameter& p, F&& f) {
    for (std::ptrdiff_t i = 0; i < p.rows; ++i) f(static_cast<std::size_t>(p.offset + i * p.stride));
}

}  // namespace

Optimizer::Optimizer(const OptimizerConfig& config, const ParameterLayout& layout) : config_(config), layout_(layout) {
    reset();
}

void Optimizer::reset() {
    const auto size = static_cast<std::size_t>(layout_.size());
    state_.first.assign(size, 0.0F);
    state_.second.assign(config_.kind == OptimizerKind::sgd ? 0 : size, 0.0F);
    state_.steps = 0;
}

void Optimizer::adamw(const Parameter& p, std::span<const float> weights, std::span<const float> gradient,
                      double learning_rate, std::span<float> update) {
    const auto t = static_cast<double>(state_.steps);
    const AdamFactors f{static_cast<float>(config_.beta1),
                        static_cast<float>(config_.beta2),
                        static_cast<float>(1 / (1 - std::pow(config_.beta1, t))),
                        static_cast<float>(1 / (1 - std::pow(config_.beta2, t))),
                        static_cast<float>(config_.epsilon),
                        static_cast<float>(learning_rate),
                        p.is_matrix() ? static_cast<float>(config_.weight_decay) : 0.0F};
    for_rows(p, [&](std::size_t at) {
        adamw_row(&weights[at], &gradient[at], &state_.first[at], &state_.second[at], &update[at], p.cols, f);
    });
}

/// The update has the size that an orthogonal matrix scaled by sqrt(max(1, rows/cols)) has (Jordan's scale; our matrices
/// are [in, out], PyTorch's [out, in], hence cols/rows here).
void Optimizer::muon(const Parameter& p, std::span<const float> weights, std::span<const float> gradient,
                     double learning_rate, std::span<float> update) {
    const auto beta = static_cast<float>(config_.momentum);
    const MatrixView<float> out = p.of(update);
    for_rows(p, [&](std::size_t at) {
        for (std::size_t j = at; j < at + static_cast<std::size_t>(p.cols); ++j) {
            float& m = state_.first[j];
            m = beta * m + (1.0F - beta) * gradient[j];
            update[j] = config_.nesterov ? beta * m + (1.0F - beta) * gradient[j] : m;
        }
    });
    orthogonalise(out, config_.newton_schulz_steps);
    const double shape = std::sqrt(std::max(1.0, static_cast<double>(p.cols) / static_cast<double>(p.rows)));
    const auto rate = static_cast<float>(learning_rate * shape);
    const auto decay = static_cast<float>(learning_rate * config_.weight_decay);
    for_rows(p, [&](std::size_t at) {
        for (std::size_t j = at; j < at + static_cast<std::size_t>(p.cols); ++j)
            update[j] = -rate * update[j] - decay * weights[j];
    });
}

void Optimizer::sgd(const Parameter& p, std::span<const float> weights, std::span<const float> gradient,
                    double learning_rate, std::span<float> update) {
    const auto momentum = static_cast<float>(config_.momentum), rate = static_cast<float>(learning_rate);
    const float decay = p.is_matrix() ? static_cast<float>(config_.weight_decay) : 0.0F;
    for_rows(p, [&](std::size_t at) {
        for (std::size_t j = at; j < at + static_cast<std::size_t>(p.cols); ++j) {
            float& v = state_.first[j];
            v = momentum * v + gradient[j];
            update[j] = -rate * (v + decay * weights[j]);
        }
    });
}

void Optimizer::propose(std::span<const float> weights, std::span<const float> gradient, double learning_rate,
                        std::span<float> update) {
    ++state_.steps;
    for (const Parameter& p : layout_.all()) {
        const bool hidden_matrix = p.is_matrix() && p.role != Role::embedding;
        if (config_.kind == OptimizerKind::sgd)
            sgd(p, weights, gradient, learning_rate, update);
        else if (config_.kind == OptimizerKind::muon && hidden_matrix)
            muon(p, weights, gradient, learning_rate, update);
        else
            adamw(p, weights, gradient,
                  learning_rate * (config_.kind == OptimizerKind::muon ? config_.adamw_rate : 1.0), update);
    }
}

void orthogonalise(MatrixView<float> x, int steps) {
    constexpr float a = 3.4445F, b = -4.7750F, c = 2.0315F;
    const bool tall = x.rows > x.cols;  // the products are of the smaller side
    const std::ptrdiff_t rows = tall ? x.cols : x.rows, cols = tall ? x.rows : x.cols;
    const auto size = [](std::ptrdiff_t r, std::ptrdiff_t k) { return static_cast<std::size_t>(r * k); };
    std::vector<float> y(size(rows, cols)), next(y.size()), gram(size(rows, rows)), square(gram.size());
    double squares = 0;
    for (std::ptrdiff_t i = 0; i < x.rows; ++i)
        for (std::ptrdiff_t j = 0; j < x.cols; ++j)
            squares += static_cast<double>(x(i, j)) * static_cast<double>(x(i, j));
    const float scale = 1.0F / (static_cast<float>(std::sqrt(squares)) + 1e-7F);  // Jordan's epsilon
    const MatrixView<float> whole(y.data(), rows, cols);
    for (std::ptrdiff_t i = 0; i < rows; ++i)
        for (std::ptrdiff_t j = 0; j < cols; ++j) whole(i, j) = (tall ? x(j, i) : x(i, j)) * scale;
    const MatrixView<float> g(gram.data(), rows, rows), s(square.data(), rows, rows), n(next.data(), rows, cols);
    for (int step = 0; step < steps; ++step) {
        const MatrixView<const float> from(y.data(), rows, cols);
        gemm(Transpose::no, from, Transpose::yes, from, g);
        gemm(Transpose::no, MatrixView<const float>(g), Transpose::no, MatrixView<const float>(g), s);
        for (std::size_t i = 0; i < gram.size(); ++i) square[i] = b * gram[i] + c * square[i];
        gemm(Transpose::no, MatrixView<const float>(s), Transpose::no, from, n);
        for (std::size_t i = 0; i < y.size(); ++i) y[i] = a * y[i] + next[i];
    }
    for (std::ptrdiff_t i = 0; i < rows; ++i)
        for (std::ptrdiff_t j = 0; j < cols; ++j) (tall ? x(j, i) : x(i, j)) = whole(i, j);
}

FAULTLINE_CLONES double norm_of(std::span<const float> gradient) {
    // Eight sums, element i to sum i mod 8, joined in order: fixed, and as fast as memory.
    double sums[8] = {};
    std::size_t i = 0;
    for (; i + 8 <= gradient.size(); i += 8)
        for (std::size_t l = 0; l < 8; ++l)
            sums[l] += static_cast<double>(gradient[i + l]) * static_cast<double>(gradient[i + l]);
    for (std::size_t l = 0; i < gradient.size(); ++i, ++l)
        sums[l] += static_cast<double>(gradient[i]) * static_cast<double>(gradient[i]);
    double total = 0;
    for (const double sum : sums) total += sum;
    return std::sqrt(total);
}

double learning_rate(const ScheduleConfig& schedule, std::int64_t step, std::int64_t steps) {
    if (step < schedule.warmup)
        return schedule.learning_rate * static_cast<double>(step + 1) / static_cast<double>(schedule.warmup);
    if (!schedule.cosine) return schedule.learning_rate;
    const double span = static_cast<double>(std::max<std::int64_t>(1, steps - schedule.warmup));
    const double done = std::min(1.0, static_cast<double>(step - schedule.warmup) / span);
    return schedule.final_rate +
           0.5 * (1 + std::cos(std::numbers::pi * done)) * (schedule.learning_rate - schedule.final_rate);
}

}  // namespace faultline::gpt
