// SPDX-License-Identifier: Apache-2.0
// SGD with momentum and Muon on the device, as Optimizer of experiments/gpt has them, in fp32. AdamW is in kernels.hpp.
#pragma once

#include <faultline/gpt/optimizer.hpp>
#include <faultline/gpt/parameters.hpp>
#include <faultline/gpt_device/kernels.hpp>
#include <faultline/gpt_device/products.hpp>

namespace faultline::gpt::on_device {

/// What an update reads and writes: the flat arrays, and the numbers of the step. `round`: as adamw's.
struct UpdateArrays {
    const float* gradient;
    const std::uint8_t* kinds;
    bool round;
    std::size_t count;
    const StepScalars* scalars;
    StepResult* result;
    float *weights, *first;
    Bf16* operands;             ///< may be null
    float* proposed = nullptr;  ///< not null: the update is left here, and the weights stay
};

/// v <- momentum v + g, w <- w - rate (v + decay w); nothing where result->finite is 0.
void sgd(const UpdateArrays& arrays, float momentum, float weight_decay, Stream stream);

/// Hidden matrices of one shape, [rows, cols] with rows <= cols once the tall ones are transposed: `parts` of each layer.
struct MatrixGroup {
    std::ptrdiff_t first[5] = {};  ///< offset in layer 0
    int stride[5] = {};            ///< of a row in memory
    bool transposed[5] = {};
    float shape[5] = {};  ///< sqrt(max(1, out/in)): of the update
    int parts = 0, layers = 0, rows = 0, cols = 0;
    std::ptrdiff_t layer_step = 0;
    [[nodiscard]] int count() const { return parts * layers; }
};

/// Muon of the hidden matrices: all of one shape go through the Newton-Schulz steps together, as batches of products.
class Muon {
  public:
    Muon(const ParameterLayout& layout, const ModelConfig& model, const OptimizerConfig& config);
    /// Of the memory that update() needs.
    [[nodiscard]] std::size_t scratch_bytes() const;
    /// m <- beta m + (1 - beta) g; w <- w - rate shape orthogonal(beta m + (1 - beta) g) - rate decay w. Nothing where
    /// result->finite is 0.
    void update(const UpdateArrays& arrays, Products& products, char* scratch, Stream stream) const;

  private:
    MatrixGroup groups_[2];  ///< [width, width] and [width, 4 width]
    OptimizerConfig config_;
};

/// The pieces of it, matrix after matrix in `x`: the momentum, with partial sums of squares (muon_blocks doubles a matrix);
/// x over its norm; square <- b gram + c square; x <- a x + next; and the update.
inline constexpr int muon_blocks = 64;
void muon_momentum(const MatrixGroup& group, const UpdateArrays& arrays, float momentum, bool nesterov, float* x,
                   double* squares, Stream stream);
void muon_normalise(const MatrixGroup& group, const double* squares, float* x, Stream stream);
void muon_polynomial(const float* gram, float* square, std::size_t count, float b, float c, Stream stream);
void muon_advance(float* x, const float* next, std::size_t count, float a, Stream stream);
void muon_apply(const MatrixGroup& group, const UpdateArrays& arrays, float weight_decay, const float* x,
                Stream stream);

}  // namespace faultline::gpt::on_device
