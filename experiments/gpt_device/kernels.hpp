// SPDX-License-Identifier: Apache-2.0
// The parts of a transformer that are no products, on the device: what row_kernels.hpp, attention_rows.hpp and optimizer.hpp of
// experiments/gpt are on the CPU, with the same formulas and casts, fused where one reads what the other wrote. Pointers are
// device memory; functions launch on the stream and do not wait. Rows are tokens, contiguous unless a stride is named.
// Every sum has a fixed order, which depends on the shape alone: two runs give the same bits.
//
// E is the type of a product's operands: float, or Bf16, where a value is rounded to nearest even as it is written.
// WorkError where a launch fails.
#pragma once

#include <cstddef>
#include <cstdint>

#include <faultline/gpt_device/stream.hpp>

namespace faultline::gpt::on_device {

/// Numbers of a step that are not known when its graph is made.
struct StepScalars {
    float rate = 0, correction1 = 1, correction2 = 1, clip = 0;  ///< clip 0: none
    double qk_clip = 0;                                          ///< tau, 0: none
    int micro_step = 0;
};

/// Sums over tokens come in parts, at most this many of a norm's and of other rows', each a row of columns: the first of
/// `row_stride` floats is `parts`. add_partials() adds them up in order, those of several sums in one launch. A norm's are
/// as many as there are blocks at once, by their registers, on 128 of the 132 multiprocessors of an H100 or H200 (spectra may
/// stand on four), so that none runs after the others; a constant, as the order is.
[[nodiscard]] constexpr int norm_parts(int width) {
    return 128 * (width <= 256 ? 6 : width <= 512 ? 4 : width <= 768 ? 3 : 2);
}
inline constexpr int sum_slabs = 256;
struct Partials {
    const float* parts = nullptr;
    int count = 0, row_stride = 0, cols = 0;
    float* out = nullptr;  ///< [cols]
};
inline constexpr int most_partials = 12;
/// Of at most most_partials sums.
void add_partials(const Partials* sums, int count, Stream stream);

/// x[i] = wte[tokens[i]] + wpe[i mod length], all fp32; width a multiple of 8.
void embed(const std::int32_t* tokens, const float* wte, const float* wpe, int rows, int length, int width, float* x,
           Stream stream);

/// Where a norm's mean and 1/sigma are rounded to bf16 (NormStatistics).
struct StatisticsRounding {
    bool applied = false;  ///< as the forward applies them
    bool kept = false;     ///< as the backward finds them
};
/// out = x + branch (branch null: x itself is used and out may be null), then h = norm(out) gain + bias; statistics [rows, 2] =
/// mean and 1/sqrt(variance + epsilon) as norm_statistics and norm_apply. bias may be null. width: at most 2048.
template <class E>
void add_and_norm(const float* x, const E* branch, float* out, float* statistics, const float* gain, const float* bias,
                  float epsilon, StatisticsRounding rounding, int rows, int width, E* h, Stream stream);
/// out = x + branch.
template <class E>
void add(const float* x, const E* branch, float* out, int rows, int width, Stream stream);

/// dx (+)= what flows through the norm from dh; dx is assigned where `first`. dout, if not null, becomes dx as an operand.
/// What it leaves in parts [parts, norm_columns()]: the gradient of the gain, and, with `biases`, that of the norm's bias
/// behind it and then the sum of the rows of dout. Returns the number of parts, norm_parts(width) at most.
[[nodiscard]] constexpr int norm_columns(int width, bool biases) { return biases ? 3 * width : width; }
template <class E>
int norm_backward(const E* dh, const float* x, const float* statistics, const float* gain, bool biases, bool first,
                  int rows, int width, float* dx, E* dout, float* parts, Stream stream);

/// a = gelu(u). count is a multiple of 8.
template <class E>
void gelu(const E* u, std::size_t count, E* a, Stream stream);
/// da [rows, cols] becomes da gelu'(u); parts, if not null: of the sum of its rows, as sum_rows. cols a multiple of 8.
/// Returns the number of parts.
template <class E>
int gelu_backward(const E* u, int rows, int cols, E* da, float* parts, Stream stream);

/// The sum of the rows of dy in parts [parts, cols]; cols a multiple of 8. Returns the number of parts, sum_slabs at most.
template <class E>
int sum_rows(const E* dy, int rows, int cols, float* parts, Stream stream);
/// The same where cols is a norm's width, in the order in which norm_backward adds up the rows of its dout: the same bits.
/// Returns the number of parts, norm_parts(cols) at most.
template <class E>
int sum_rows_as_norm(const E* dy, int rows, int cols, float* parts, Stream stream);

/// losses[i] = cross-entropy of a row of logits in nats; with weight != 0 the logits become the gradient of
/// weight (sum of losses + z_loss sum of log-sum-exp^2).
template <class E>
void cross_entropy(E* logits, const std::int32_t* targets, int rows, int vocabulary, float weight, float z_loss,
                   double* losses, Stream stream);
/// *sum (+)= the losses, assigned where scalars->micro_step is 0; scalars null: assigned.
void sum_losses(const double* losses, int rows, const StepScalars* scalars, double* sum, Stream stream);

/// wte_gradient (in: what the head's product gave; in bf16 precision rounded here) += dx of each token; wpe_gradient = sum
/// over sequences. order: token indices sorted by id, ascending within an id; id v has [starts[v], starts[v + 1]).
void embedding_backward(const float* dx, const std::int32_t* order, const std::int32_t* starts, bool round_head,
                        int rows, int length, int width, int vocabulary, float* wte_gradient, float* wpe_gradient,
                        Stream stream);

/// Kinds of parameters, one byte for 8 elements.
inline constexpr std::uint8_t decays = 1, comes_rounded = 2;
/// Muon's, which AdamW leaves alone.
inline constexpr std::uint8_t hidden_matrix = 4;

/// total (+)= micro, rounded to bf16 where `round` and the parameter's kind is comes_rounded; assigned in micro-step 0.
void accumulate_gradient(const float* micro, const std::uint8_t* kinds, bool round, std::size_t count,
                         const StepScalars* scalars, float* total, Stream stream);

/// What a step left behind, for the host.
struct StepResult {
    double loss = 0;     ///< sum of the losses
    double squares = 0;  ///< of the gradient
    float factor = 1;    ///< of the clip
    int finite = 1;      ///< loss and gradient are: the update was applied
    int update_finite = 1;
};
/// Norm of the gradient (rounded as above), the clip's factor, and whether all is finite. sums: 2048 doubles.
void finish_gradient(const float* gradient, const std::uint8_t* kinds, bool round, std::size_t count,
                     const double* loss, const StepScalars* scalars, double* sums, StepResult* result, Stream stream);

struct AdamwSettings {
    float beta1, beta2, epsilon, weight_decay;
    float rate = 1;              ///< over the step's
    bool spares_hidden = false;  ///< octets of kind hidden_matrix
};
/// Optimizer::adamw over the flat arrays, the update added at once, or left in `proposed` where that is not null; nothing where result->finite is 0. operands, if not null,
/// get the new weights as bf16. count is a multiple of 8.
void adamw(const float* gradient, const std::uint8_t* kinds, bool round, std::size_t count,
           const AdamwSettings& settings, const StepScalars* scalars, StepResult* result, float* weights, float* first,
           float* second, Bf16* operands, float* proposed, Stream stream);

/// operands = weights as bf16.
void round_weights(const float* weights, std::size_t count, Bf16* operands, Stream stream);

/// Index of the first value that is not finite, or -1, in *at.
template <class E>
void find_non_finite(const E* values, std::size_t count, long long* at, Stream stream);

}  // namespace faultline::gpt::on_device
