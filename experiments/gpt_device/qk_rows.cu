// SPDX-License-Identifier: Apache-2.0
// A block has a head of a sequence and up to 256 tokens of it; the octets of a row lie in neighbouring lanes, as many as the
// next power of two.
#include <algorithm>

#include <faultline/gpt_device/elements.cuh>
#include <faultline/gpt_device/qk_rows.hpp>

namespace faultline::gpt::on_device {
namespace {

constexpr int threads = 256, tokens_of_block = 256, most_columns = 128;

template <int lanes, class T>
__device__ T over_lanes(T x) {
#pragma unroll
    for (int step = lanes / 2; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}

template <class E>
struct Arguments {
    QkRows<E> in;
    E *q, *k;  ///< hats, or gradients
    std::size_t out_stride;
    QkGains gains;
    double* rms;
    float* partials;
    std::size_t layer_step;  ///< where there are several: blockIdx.z
    int length, heads, head_dim, sequences;
    float epsilon;
};

/// 1 / rms of a row from its octets.
template <int lanes>
__device__ float inverse_rms(const Octet& x, int head_dim, float epsilon, float& squares) {
    squares = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) squares += x.x[i] * x.x[i];
    squares = over_lanes<lanes>(squares);
    return 1.0f / sqrtf(squares / static_cast<float>(head_dim) + epsilon);
}

template <class E>
__device__ void store_normed(Octet x, float inverse, const float* gain, int column, E* to) {
#pragma unroll
    for (int i = 0; i < 8; ++i) x.x[i] *= inverse;
    if (gain != nullptr) {
        const Octet g = load8(gain + column);
#pragma unroll
        for (int i = 0; i < 8; ++i) x.x[i] *= g.x[i];
    }
    store8(to, x);
}

template <class E, int lanes>
__global__ void __launch_bounds__(threads) look_at_rows(Arguments<E> in) {
    __shared__ double sums[threads / 32][2];
    const int group = threadIdx.x / lanes, column = threadIdx.x % lanes * 8, head = blockIdx.y % in.heads;
    const std::size_t sequence = blockIdx.y / in.heads, layer = blockIdx.z * in.layer_step;
    const int end = min(in.length, static_cast<int>(blockIdx.x + 1) * tokens_of_block);
    double q_sum = 0, k_sum = 0;
    for (int first = blockIdx.x * tokens_of_block; first < end;
         first += threads / lanes) {  // whole warps stay together
        const int token = first + group;
        const bool inside = token < end && column < in.head_dim;
        const std::size_t row = sequence * in.length + token;
        const std::size_t at = head * in.head_dim + column;
        Octet q{}, k{};
        if (inside) {
            q = load8(in.in.q + layer + row * in.in.stride + at);
            k = load8(in.in.k + layer + row * in.in.stride + at);
        }
        float q_squares, k_squares;
        const float q_inverse = inverse_rms<lanes>(q, in.head_dim, in.epsilon, q_squares);
        const float k_inverse = inverse_rms<lanes>(k, in.head_dim, in.epsilon, k_squares);
        if (in.rms != nullptr && inside && column == 0) {
            q_sum += sqrt(static_cast<double>(q_squares) / in.head_dim);
            k_sum += sqrt(static_cast<double>(k_squares) / in.head_dim);
        }
        if (in.q == nullptr || !inside) continue;
        store_normed(q, q_inverse, in.gains.q, column, in.q + row * in.out_stride + at);
        store_normed(k, k_inverse, in.gains.k, column, in.k + row * in.out_stride + at);
    }
    if (in.rms == nullptr) return;
    q_sum = warp_sum(q_sum);
    k_sum = warp_sum(k_sum);
    if (threadIdx.x % 32 == 0) {
        sums[threadIdx.x / 32][0] = q_sum;
        sums[threadIdx.x / 32][1] = k_sum;
    }
    __syncthreads();
    if (threadIdx.x >= 2) return;
    double total = 0;
    for (int w = 0; w < threads / 32; ++w) total += sums[w][threadIdx.x];
    const std::size_t slot = static_cast<std::size_t>(blockIdx.z) * gridDim.y + blockIdx.y;
    in.rms[2 * (slot * gridDim.x + blockIdx.x) + threadIdx.x] = total;
}

/// dy becomes inverse (g - n mean(g n)), n = x inverse, g = dy gain; dgain += dy n.
template <class E, int lanes>
__device__ void backward_row(const Octet& x, float inverse, const float* gain, int column, int head_dim, bool inside,
                             E* gradient, Octet& dgain) {
    Octet g{}, n;
    if (inside) g = load8(gradient);
    float dot = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        n.x[i] = x.x[i] * inverse;
        dgain.x[i] += g.x[i] * n.x[i];
    }
    if (gain != nullptr && inside) {
        const Octet weight = load8(gain + column);
#pragma unroll
        for (int i = 0; i < 8; ++i) g.x[i] *= weight.x[i];
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) dot += g.x[i] * n.x[i];
    const float mean = over_lanes<lanes>(dot) / static_cast<float>(head_dim);
#pragma unroll
    for (int i = 0; i < 8; ++i) g.x[i] = (g.x[i] - n.x[i] * mean) * inverse;
    if (inside) store8(gradient, g);
}

/// A block has a head and every gridDim.x-th piece of 256 tokens of all sequences.
template <class E, int lanes>
__global__ void __launch_bounds__(threads) backward_rows(Arguments<E> in) {
    __shared__ float sums[threads / lanes][2 * lanes * 8];
    const int group = threadIdx.x / lanes, column = threadIdx.x % lanes * 8, head = blockIdx.y;
    const int pieces = (in.length + tokens_of_block - 1) / tokens_of_block;
    const std::size_t at = head * in.head_dim + column;
    Octet q_gain{}, k_gain{};
    for (int piece = blockIdx.x; piece < pieces * in.sequences; piece += gridDim.x) {
        const std::size_t sequence = piece / pieces;
        const int begin = piece % pieces * tokens_of_block, end = min(in.length, begin + tokens_of_block);
        for (int first = begin; first < end; first += threads / lanes) {
            const int token = first + group;
            const bool inside = token < end && column < in.head_dim;
            const std::size_t row = sequence * in.length + token;
            Octet q{}, k{};
            if (inside) {
                q = load8(in.in.q + row * in.in.stride + at);
                k = load8(in.in.k + row * in.in.stride + at);
            }
            float ignored;
            const float q_inverse = inverse_rms<lanes>(q, in.head_dim, in.epsilon, ignored);
            const float k_inverse = inverse_rms<lanes>(k, in.head_dim, in.epsilon, ignored);
            backward_row<E, lanes>(q, q_inverse, in.gains.q, column, in.head_dim, inside,
                                   in.q + row * in.out_stride + at, q_gain);
            backward_row<E, lanes>(k, k_inverse, in.gains.k, column, in.head_dim, inside,
                                   in.k + row * in.out_stride + at, k_gain);
        }
    }
    if (in.partials == nullptr) return;
    store8(&sums[group][column], q_gain);
    store8(&sums[group][lanes * 8 + column], k_gain);
    __syncthreads();
    for (int c = threadIdx.x; c < 2 * in.head_dim; c += threads) {
        const int from = c < in.head_dim ? c : lanes * 8 + c - in.head_dim;
        float total = 0;
        for (int g = 0; g < threads / lanes; ++g) total += sums[g][from];
        in.partials[(static_cast<std::size_t>(blockIdx.x) * in.heads + head) * 2 * in.head_dim + c] = total;
    }
}

/// out[c] = sum over n of partials[n, c], in order: a warp a column.
__global__ void __launch_bounds__(threads) add_gains(const float* partials, int count, int cols, float* out) {
    const int column = blockIdx.x * (threads / 32) + threadIdx.x / 32;
    if (column >= cols) return;
    float sum = 0;
    for (int n = threadIdx.x % 32; n < count; n += 32) sum += partials[static_cast<std::size_t>(n) * cols + column];
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) out[column] = sum;
}

template <class F>
void with_lanes(int head_dim, F&& run) {
    if (head_dim <= 8) return run(std::integral_constant<int, 1>{});
    if (head_dim <= 16) return run(std::integral_constant<int, 2>{});
    if (head_dim <= 32) return run(std::integral_constant<int, 4>{});
    if (head_dim <= 64) return run(std::integral_constant<int, 8>{});
    static_assert(most_columns == 16 * 8);
    run(std::integral_constant<int, 16>{});
}

template <class E>
Arguments<E> arguments(const QkRows<E>& rows, const AttentionShape& shape, float epsilon, const QkGains& gains, E* q,
                       E* k, std::size_t stride) {
    return {rows,           q,           k,      stride, gains, nullptr, nullptr, 0, shape.length, shape.heads,
            shape.head_dim, shape.batch, epsilon};
}

}  // namespace

template <class E>
void qk_rows(const QkRows<E>& rows, const AttentionShape& shape, float epsilon, const QkGains& gains, E* q_hat,
             E* k_hat, std::size_t hat_stride, double* rms, Stream stream) {
    Arguments<E> in = arguments(rows, shape, epsilon, gains, q_hat, k_hat, hat_stride);
    in.rms = rms;
    const dim3 grid(rms_parts(shape.length), shape.batch * shape.heads);
    with_lanes(shape.head_dim, [&](auto lanes) { look_at_rows<E, lanes><<<grid, threads, 0, stream>>>(in); });
    check_launch("rows of q and k");
}

template <class E>
void rms_of_layers(const QkRows<E>& first, std::size_t layer_step, int layers, const AttentionShape& shape, double* rms,
                   Stream stream) {
    Arguments<E> in = arguments<E>(first, shape, 0, {}, nullptr, nullptr, 0);
    in.rms = rms;
    in.layer_step = layer_step;
    const dim3 grid(rms_parts(shape.length), shape.batch * shape.heads, layers);
    with_lanes(shape.head_dim, [&](auto lanes) { look_at_rows<E, lanes><<<grid, threads, 0, stream>>>(in); });
    check_launch("rows of q and k");
}

template <class E>
void qk_norm_backward(const QkRows<E>& rows, const AttentionShape& shape, float epsilon, const QkGains& gains, E* dq,
                      E* dk, std::size_t stride, float* gradient, float* partials, Stream stream) {
    constexpr int most_blocks = 256;  // of a head: partials has 2 head_dim floats for each
    Arguments<E> in = arguments(rows, shape, epsilon, gains, dq, dk, stride);
    in.partials = gradient != nullptr ? partials : nullptr;
    const int blocks = std::min(most_blocks, shape.batch * rms_parts(shape.length));
    with_lanes(shape.head_dim,
               [&](auto lanes) { backward_rows<E, lanes><<<dim3(blocks, shape.heads), threads, 0, stream>>>(in); });
    check_launch("QK norm's backward");
    if (gradient == nullptr) return;
    const int cols = 2 * shape.head_dim;
    add_gains<<<(cols + threads / 32 - 1) / (threads / 32), threads, 0, stream>>>(partials, blocks * shape.heads, cols,
                                                                                  gradient);
    check_launch("QK norm's backward");
}

#define FAULTLINE_FOR(E)                                                                                       \
    template void qk_rows(const QkRows<E>&, const AttentionShape&, float, const QkGains&, E*, E*, std::size_t, \
                          double*, Stream);                                                                    \
    template void rms_of_layers(const QkRows<E>&, std::size_t, int, const AttentionShape&, double*, Stream);   \
    template void qk_norm_backward(const QkRows<E>&, const AttentionShape&, float, const QkGains&, E*, E*,     \
                                   std::size_t, float*, float*, Stream);
FAULTLINE_FOR(float)
FAULTLINE_FOR(Bf16)
#undef FAULTLINE_FOR

}  // namespace faultline::gpt::on_device
