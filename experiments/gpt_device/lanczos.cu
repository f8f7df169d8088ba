// SPDX-License-Identifier: Apache-2.0
#include <faultline/gpt_device/elements.cuh>
#include <faultline/gpt_device/lanczos.hpp>

namespace faultline::gpt::on_device {
namespace {

constexpr int threads = 1024, warps = threads / 32;

/// Of the block's values, the same bits in every thread.
__device__ double block_total(double x, double* sums) {
    x = warp_sum(x);
    __syncthreads();
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
    __syncthreads();
    double total = 0;
    for (int w = 0; w < warps; ++w) total += sums[w];
    return total;
}

struct Block {
    int width;
    std::size_t stride;     ///< of a row of the weights
    double *sums, *middle;  ///< in shared memory: warps; threads

    /// y = W x: a warp has four rows at a time, so that their loads are on the way together.
    __device__ void multiply(const float* w, int inner, const double* x, double* y) const {
        constexpr int at_once = 4;
        for (int row = threadIdx.x / 32 * at_once; row < width; row += warps * at_once) {
            double sum[at_once] = {};
#pragma unroll 4
            for (int c = threadIdx.x % 32; c < inner; c += 32) {
                const double of_x = x[c];
#pragma unroll
                for (int r = 0; r < at_once; ++r)
                    sum[r] += static_cast<double>(w[min(row + r, width - 1) * stride + c]) * of_x;
            }
#pragma unroll
            for (int r = 0; r < at_once; ++r) {
                sum[r] = warp_sum(sum[r]);
                if (threadIdx.x % 32 == 0 && row + r < width) y[row + r] = sum[r];
            }
        }
        __syncthreads();
    }
    /// y = W^T x: threads have a column, and every rows_at_once-th row of it.
    __device__ void multiply_transposed(const float* w, int outer, const double* x, double* y) const {
        const int rows_at_once = max(1, threads / outer);
        for (int first = 0; first < outer; first += threads) {
            const int column = first + threadIdx.x % min(outer, threads), part = threadIdx.x / min(outer, threads);
            double sum = 0;
            if (column < outer && part < rows_at_once) {
#pragma unroll 16
                for (int row = part; row < width; row += rows_at_once)
                    sum += static_cast<double>(w[row * stride + column]) * x[row];
            }
            __syncthreads();
            middle[threadIdx.x] = sum;
            __syncthreads();
            if (part == 0 && column < outer) {
                for (int p = 1; p < rows_at_once; ++p) sum += middle[p * outer + column];
                y[column] = sum;
            }
            __syncthreads();
        }
    }
    /// x -= coefficient before, the neighbour in the recurrence; then x -= basis basis^T x, basis [count, width]: after the
    /// first what the second takes off is rounding, so that once is enough.
    __device__ void orthogonalise(double* x, const double* before, double coefficient, const double* basis,
                                  int count) const {
        if (before != nullptr)
            for (int i = threadIdx.x; i < width; i += threads) x[i] -= coefficient * before[i];
        __syncthreads();
        for (int b = threadIdx.x / 32; b < count; b += warps) {
            double sum = 0;
#pragma unroll 8
            for (int i = threadIdx.x % 32; i < width; i += 32)
                sum += basis[static_cast<std::size_t>(b) * width + i] * x[i];
            sum = warp_sum(sum);
            if (threadIdx.x % 32 == 0) middle[b] = sum;
        }
        __syncthreads();
        for (int i = threadIdx.x; i < width; i += threads) {
            double sum = x[i];
#pragma unroll 16
            for (int b = 0; b < count; ++b) sum -= middle[b] * basis[static_cast<std::size_t>(b) * width + i];
            x[i] = sum;
        }
        __syncthreads();
    }
    [[nodiscard]] __device__ double norm(const double* x) const {
        double sum = 0;
        for (int i = threadIdx.x; i < width; i += threads) sum += x[i] * x[i];
        return sqrt(block_total(sum, sums));
    }
    /// x over its norm becomes the next of the basis.
    __device__ void append(double* x, double norm, double* basis, int at) const {
        for (int i = threadIdx.x; i < width; i += threads) {
            x[i] /= norm;
            basis[static_cast<std::size_t>(at) * width + i] = x[i];
        }
        __syncthreads();
    }
};

/// A number of (-1, 1), of nobody's choice, for each element.
__device__ double any(unsigned i) {
    unsigned x = i * 2654435761u + 12345u;
    x ^= x >> 16;
    x *= 2246822519u;
    x ^= x >> 13;
    x *= 3266489917u;
    x ^= x >> 16;
    return static_cast<double>(x) * 0x1p-31 - 1.0;
}

/// Of W_Q and W_K, and of a head's product.
struct Steps {
    int of_weight, of_head;
};

/// shared: sums, middle, t, v, u of the block.
__device__ void bidiagonalise(const QkSnapshot& of, int matrix, Steps most, double* shared, double* bases,
                              Bidiagonal& to) {
    const int layer = matrix / (2 + of.heads), part = matrix % (2 + of.heads);
    const int d = of.width / of.heads;
    double *sums = shared, *middle = sums + warps, *t = middle + threads, *v = t + of.width, *u = v + of.width;
    const Block block{of.width, static_cast<std::size_t>(2) * of.width, sums, middle};
    const float* weights = of.weights + static_cast<std::size_t>(layer) * of.width * 2 * of.width;
    const float* q = part < 2 ? weights + part * of.width : weights + (part - 2) * d;
    const float* k = weights + of.width + (part - 2) * d;  // of a head
    const auto apply = [&](const float* first, const float* second, const double* x, double* y) {
        block.multiply_transposed(second, d, x, t);
        block.multiply(first, d, t, y);
    };
    double* right = bases + static_cast<std::size_t>(matrix) * 2 * most.of_weight * of.width;
    double* left = right + static_cast<std::size_t>(most.of_weight) * of.width;
    for (int i = threadIdx.x; i < most_lanczos_steps; i += threads) to.alpha[i] = to.beta[i] = 0;
    for (int i = threadIdx.x; i < of.width; i += threads) v[i] = any(i);
    __syncthreads();
    block.append(v, block.norm(v), right, 0);
    const int steps = min(part < 2 ? most.of_weight : most.of_head, of.width);
    double largest = 0, beta = 0;
    constexpr double nothing = 1e-13;  // of the largest: what rounding leaves of a vector that is in the space
    for (int j = 0; j < steps; ++j) {
        if (part < 2)
            block.multiply(q, of.width, v, u);
        else
            apply(q, k, v, u);
        const auto vector_of = [&](double* basis, int at) { return basis + static_cast<std::size_t>(at) * of.width; };
        block.orthogonalise(u, j > 0 ? vector_of(left, j - 1) : nullptr, beta, left, j);
        const double alpha = block.norm(u);
        largest = fmax(largest, alpha);
        const bool ends = !(alpha > nothing * largest);
        if (threadIdx.x == 0 && (!ends || alpha != alpha)) to.alpha[j] = alpha;
        if (ends) return;
        block.append(u, alpha, left, j);
        if (part < 2)
            block.multiply_transposed(q, of.width, u, v);
        else
            apply(k, q, u, v);
        block.orthogonalise(v, vector_of(right, j), alpha, right, j + 1);
        beta = block.norm(v);
        largest = fmax(largest, beta);
        const bool closed = !(beta > nothing * largest);
        if (threadIdx.x == 0 && !closed) to.beta[j] = beta;
        if (closed || j + 1 == steps) return;
        block.append(v, beta, right, j + 1);
    }
}

/// A block has a matrix.
__global__ void __launch_bounds__(threads)
    bidiagonalise_all(QkSnapshot of, Steps most, double* bases, Bidiagonal* out) {
    extern __shared__ double shared[];
    bidiagonalise(of, blockIdx.x, most, shared, bases, out[blockIdx.x]);
}

/// A block has a row of W_Q and W_K of a layer.
__global__ void copy_rows(const float* weights, std::ptrdiff_t layer_step, std::ptrdiff_t row, int width, float* to) {
    const float* from = weights + blockIdx.y * layer_step + blockIdx.x * row;
    to += (blockIdx.y * static_cast<std::size_t>(width) + blockIdx.x) * 2 * width;
    for (int c = threadIdx.x * 4; c < 2 * width; c += blockDim.x * 4)
        *reinterpret_cast<float4*>(to + c) = *reinterpret_cast<const float4*>(from + c);
}

}  // namespace

void take_snapshot(const float* weights, std::ptrdiff_t layer_step, std::ptrdiff_t row, int layers, int width,
                   float* to, Stream stream) {
    copy_rows<<<dim3(width, layers), 128, 0, stream>>>(weights, layer_step, row, width, to);
    check_launch("the weights of the spectra");
}

void lanczos(const QkSnapshot& of, char* scratch, Bidiagonal* out, Stream stream) {
    const int bytes = static_cast<int>(sizeof(double)) * (warps + threads + 3 * of.width);
    if (cudaFuncSetAttribute(bidiagonalise_all, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes) != cudaSuccess)
        check_launch("shared memory of the spectra");
    bidiagonalise_all<<<of.matrices(), threads, bytes, stream>>>(of, Steps{lanczos_steps(of.width), head_steps(of)},
                                                                 reinterpret_cast<double*>(scratch), out);
    check_launch("spectra");
}

}  // namespace faultline::gpt::on_device
