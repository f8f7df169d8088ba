// SPDX-License-Identifier: Apache-2.0
// Bidiagonal matrices whose leading singular values are those of W_Q, W_K and W_Q W_K^T of each head: Golub-Kahan-Lanczos with
// full orthogonalisation (Golub and Van Loan, Matrix Computations, 10.4) in binary64. The training's kernels want whole
// multiprocessors, so what counts is how long this stands on any.
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

/// Of a matrix of this width. Its error falls as exp(-4 steps sqrt(gap)), gap the distance of its leading values over them, which
/// in a random matrix, the hardest that training meets, is some width^(-2/3): so 8 width^(1/3) steps, at which the third value
/// of such a matrix is found to 2^-36 of the first (monitors_test.cpp), for every width that fits.
inline constexpr int most_lanczos_steps = 96;
[[nodiscard]] constexpr int lanczos_steps(int width) {
    int steps = 32;
    while (steps < most_lanczos_steps && steps * steps * steps < 512 * width) steps += 4;
    return steps;
}

/// Of a head's product W_Q W_K^T, whose rank is d = width / heads: in NumPy 8 d^(1/3) steps find the third value of random factors,
/// of factors with a leading direction, of W_K near W_Q and of a falling spectrum to 2^-36.9 at worst (width 768, d 64), four more to
/// 2^-49; eight more are taken.
[[nodiscard]] constexpr int head_steps(const QkSnapshot& of) {
    const int steps = lanczos_steps(of.width / of.heads) + 8, most = lanczos_steps(of.width);
    return steps < most ? steps : most;
}

/// Of one matrix: diagonal alpha_0 … , and behind it beta_0 …: alpha_j at (j, j), beta_j at (j, j + 1); the last beta is what
/// the space that was built is off an invariant one by. 0 from where it is one. A width below the steps ends there.
struct Bidiagonal {
    double alpha[most_lanczos_steps], beta[most_lanczos_steps];
};

/// Bytes of device memory for the bases.
[[nodiscard]] constexpr std::size_t lanczos_scratch(const QkSnapshot& of) {
    return static_cast<std::size_t>(of.matrices()) * 2 * static_cast<std::size_t>(lanczos_steps(of.width)) *
           static_cast<std::size_t>(of.width) * sizeof(double);
}
/// `to` [layers, width, 2 width] from the weights of training: W_Q of layer l begins at weights + l layer_step, W_K beside it, rows
/// `row` elements apart. Launches on the stream and does not wait.
void take_snapshot(const float* weights, std::ptrdiff_t layer_step, std::ptrdiff_t row, int layers, int width,
                   float* to, Stream stream);
/// out: [matrices()], a block each. Launches on the stream and does not wait; the same bits each time. WorkError where the launch
/// fails.
void lanczos(const QkSnapshot& of, char* scratch, Bidiagonal* out, Stream stream);

}  // namespace faultline::gpt::on_device
