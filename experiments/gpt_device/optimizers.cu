// SPDX-License-Identifier: Apache-2.0
#include <cfloat>

#include <faultline/gpt_device/elements.cuh>
#include <faultline/gpt_device/optimizers.hpp>

namespace faultline::gpt::on_device {
namespace {

__global__ void __launch_bounds__(256) sgd_octets(UpdateArrays in, float momentum, float weight_decay) {
    const std::size_t o = std::size_t{blockIdx.x} * 256 + threadIdx.x;
    if (o >= in.count / 8 || !in.result->finite) return;
    const std::uint8_t kind = in.kinds[o];
    const float factor = in.result->factor, rate = in.scalars->rate, decay = kind & decays ? weight_decay : 0.0f;
    const bool rounds = in.round && kind & comes_rounded;
    Octet g = load8(in.gradient + 8 * o), v = load8(in.first + 8 * o), w = load8(in.weights + 8 * o);
    bool finite = true;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        float d = rounds ? rounded_bf16(g.x[i]) : g.x[i];
        if (factor != 1.0f) d *= factor;
        v.x[i] = momentum * v.x[i] + d;
        const float update = -rate * (v.x[i] + decay * w.x[i]);
        finite &= fabsf(update) <= FLT_MAX;
        g.x[i] = update;
        w.x[i] += update;
    }
    if (!finite) in.result->update_finite = 0;
    store8(in.first + 8 * o, v);
    if (in.proposed != nullptr) return store8(in.proposed + 8 * o, g);
    store8(in.weights + 8 * o, w);
    if (in.operands != nullptr) store8(in.operands + 8 * o, w);
}

/// Element (row, column) of the stored matrix `number` of the group, and where it stands in x.
struct Place {
    std::ptrdiff_t flat;
    std::size_t x;
};
__device__ Place place_of(const MatrixGroup& g, int number, int row, int column) {
    const int part = number % g.parts, layer = number / g.parts;
    const std::size_t matrix = static_cast<std::size_t>(number) * g.rows * g.cols;
    const std::size_t at = g.transposed[part] ? static_cast<std::size_t>(column) * g.cols + row
                                              : static_cast<std::size_t>(row) * g.cols + column;
    return {g.first[part] + layer * g.layer_step + static_cast<std::ptrdiff_t>(row) * g.stride[part] + column,
            matrix + at};
}

/// Calls f(row, column of the stored matrix) for this thread's elements, so that neighbours in a row are neighbouring threads.
template <class F>
__device__ void for_elements(const MatrixGroup& g, int number, F&& f) {
    const bool transposed = g.transposed[number % g.parts];
    const int rows = transposed ? g.cols : g.rows, cols = transposed ? g.rows : g.cols;
    for (int i = blockIdx.x * 256 + threadIdx.x; i < rows * cols; i += gridDim.x * 256) f(i / cols, i % cols);
}

__global__ void __launch_bounds__(256)
    momentum_elements(MatrixGroup g, UpdateArrays in, float beta, bool nesterov, float* x, double* squares) {
    __shared__ double sums[8];
    const int number = blockIdx.y;
    if (!in.result->finite) return;
    const float factor = in.result->factor;
    double sum = 0;
    for_elements(g, number, [&](int row, int column) {
        const Place at = place_of(g, number, row, column);
        float d = in.gradient[at.flat];
        if (in.round && in.kinds[at.flat / 8] & comes_rounded) d = rounded_bf16(d);
        if (factor != 1.0f) d *= factor;
        const float m = beta * in.first[at.flat] + (1.0f - beta) * d;
        in.first[at.flat] = m;
        const float u = nesterov ? beta * m + (1.0f - beta) * d : m;
        x[at.x] = u;
        sum += static_cast<double>(u) * static_cast<double>(u);
    });
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (int w = 1; w < 8; ++w) sum += sums[w];
    squares[number * muon_blocks + blockIdx.x] = sum;
}

__global__ void __launch_bounds__(256) normalise_elements(MatrixGroup g, const double* squares, float* x) {
    const int number = blockIdx.y;
    double sum = 0;
    for (int b = 0; b < muon_blocks; ++b) sum += squares[number * muon_blocks + b];
    const float scale = 1.0f / (static_cast<float>(sqrt(sum)) + 1e-7f);  // Jordan's epsilon
    const std::size_t count = static_cast<std::size_t>(g.rows) * g.cols;
    float* to = x + number * count;
    for (std::size_t i = std::size_t{blockIdx.x} * 256 + threadIdx.x; i < count; i += std::size_t{gridDim.x} * 256)
        to[i] *= scale;
}

__global__ void __launch_bounds__(256)
    polynomial_elements(const float* gram, float* square, std::size_t count, float b, float c) {
    const std::size_t i = std::size_t{blockIdx.x} * 256 + threadIdx.x;
    if (i < count) square[i] = b * gram[i] + c * square[i];
}
__global__ void __launch_bounds__(256) advance_elements(float* x, const float* next, std::size_t count, float a) {
    const std::size_t i = std::size_t{blockIdx.x} * 256 + threadIdx.x;
    if (i < count) x[i] = a * x[i] + next[i];
}

__global__ void __launch_bounds__(256)
    apply_elements(MatrixGroup g, UpdateArrays in, float weight_decay, const float* x) {
    const int number = blockIdx.y;
    if (!in.result->finite) return;
    const float rate = in.scalars->rate * g.shape[number % g.parts], decay = in.scalars->rate * weight_decay;
    bool finite = true;
    for_elements(g, number, [&](int row, int column) {
        const Place at = place_of(g, number, row, column);
        const float before = in.weights[at.flat], update = -rate * x[at.x] - decay * before;
        finite &= fabsf(update) <= FLT_MAX;
        if (in.proposed != nullptr) {
            in.proposed[at.flat] = update;
            return;
        }
        const float w = before + update;
        in.weights[at.flat] = w;
        if (in.operands != nullptr) store1(in.operands + at.flat, w);
    });
    if (!finite) in.result->update_finite = 0;
}

unsigned blocks_of(std::size_t count) { return static_cast<unsigned>((count + 255) / 256); }
dim3 grid_of(const MatrixGroup& g) { return dim3(muon_blocks, static_cast<unsigned>(g.count())); }

}  // namespace

void sgd(const UpdateArrays& arrays, float momentum, float weight_decay, Stream stream) {
    sgd_octets<<<blocks_of(arrays.count / 8), 256, 0, stream>>>(arrays, momentum, weight_decay);
    check_launch("sgd");
}

void muon_momentum(const MatrixGroup& group, const UpdateArrays& arrays, float momentum, bool nesterov, float* x,
                   double* squares, Stream stream) {
    momentum_elements<<<grid_of(group), 256, 0, stream>>>(group, arrays, momentum, nesterov, x, squares);
    check_launch("muon");
}
void muon_normalise(const MatrixGroup& group, const double* squares, float* x, Stream stream) {
    normalise_elements<<<grid_of(group), 256, 0, stream>>>(group, squares, x);
    check_launch("muon");
}
void muon_polynomial(const float* gram, float* square, std::size_t count, float b, float c, Stream stream) {
    polynomial_elements<<<blocks_of(count), 256, 0, stream>>>(gram, square, count, b, c);
    check_launch("muon");
}
void muon_advance(float* x, const float* next, std::size_t count, float a, Stream stream) {
    advance_elements<<<blocks_of(count), 256, 0, stream>>>(x, next, count, a);
    check_launch("muon");
}
void muon_apply(const MatrixGroup& group, const UpdateArrays& arrays, float weight_decay, const float* x,
                Stream stream) {
    apply_elements<<<grid_of(group), 256, 0, stream>>>(group, arrays, weight_decay, x);
    check_launch("muon");
}

}  // namespace faultline::gpt::on_device
