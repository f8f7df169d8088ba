// SPDX-License-Identifier: Apache-2.0
// Bidiagonal matrices whose leading singular values are those of W_Q, W_K and W_Q W_K^T of each head: Golub-Kahan-Lanczos with
// full orthogonalisation (Golub and Van Loan, Matrix Computations, 10.4) in binary64, a block of threads for each matrix. The
// training's kernels want whole multiprocessors, so what counts is how long a block stands on one.
#pragma once

#include <cstddef>

#include <faultline/gpt_device/stream.hpp>

namespace faultline::gpt::on_device {

/// The weights of all layers, [layers, width, 2 width] fp32: W_Q's columns, then W_K's, heads side by side.
struct QkSnapshot {
    const float* weights;
    int layers, width, heads;
    /// Of a layer W_Q, W_K and the heads' products, in this order.
    [[nodiscard]] constexpr int matrices() const { return layers * (2 + heads); }
};

/// So many that the third value of a random matrix, whose leading values lie closest together, is found to 2^-36 of the first at
/// every width that fits. (48 were tried: at width 256 they leave 2^-36, at 768 and 1280 up to 2^-12.)
inline constexpr int lanczos_steps = 80;

/// Of one matrix: diagonal alpha_0 … , and behind it beta_0 …: alpha_j at (j, j), beta_j at (j, j + 1); the last beta is what
/// the space that was built is off an invariant one by. 0 from where it is one. A width below lanczos_steps ends there.
struct Bidiagonal {
    double alpha[lanczos_steps], beta[lanczos_steps];
};

/// Bytes of device memory for the bases.
[[nodiscard]] constexpr std::size_t lanczos_scratch(const QkSnapshot& of) {
    return static_cast<std::size_t>(of.matrices()) * 2 * lanczos_steps * static_cast<std::size_t>(of.width) *
           sizeof(double);
}
/// out: [matrices()]. Launches on the stream and does not wait; the same bits each time. WorkError where the launch fails.
void lanczos(const QkSnapshot& of, char* scratch, Bidiagonal* out, Stream stream);

}  // namespace faultline::gpt::on_device
