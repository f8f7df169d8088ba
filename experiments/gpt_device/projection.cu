// SPDX-License-Identifier: Apache-2.0
// A matrix has a cluster of eight blocks, each an eighth of its rows; what they add up goes through memory, in the blocks' order,
// so that all of them have the same bits and go the same way. The block B [width, W] stands in the shared memory of each.
#include <faultline/gpt_device/projection.hpp>

#include <cuda_runtime_api.h>

#include <faultline/base/error.hpp>
#include <faultline/gpt_device/projection_algebra.cuh>

namespace faultline::gpt::on_device {
namespace {

constexpr double tolerance = 1e-6;  // LeadingDirections::update's, and its bound on the iterations
constexpr int most_iterations = 200;

struct Task {
    QkMatrices where;
    const float* weights;
    float* update;
    const StepResult* result;
    double *blocks, *partials;
    RemovedEnergy* energies;
    Sides sides;
    bool shrinks;
};

/// Doubles of a matrix's partial results: sums of each block of the team, and [W, width] of each.
__host__ __device__ constexpr std::size_t partials_of(int block_width, int width) {
    return std::size_t{team} * (2 * most_sums + static_cast<std::size_t>(block_width) * width);
}
std::size_t shared_bytes(int k, int block_width, int width) {
    const auto doubles = static_cast<std::size_t>(2 * block_width + k) * width +
                         static_cast<std::size_t>(2 * block_width) * ((width + team - 1) / team);
    return doubles * sizeof(double);
}

template <int K>
__global__ void __cluster_dims__(team, 1, 1) __launch_bounds__(threads) follow_and_project(Task task) {
    constexpr int W = K + 3, gram = W * (W + 1) / 2;
    extern __shared__ double shared[];
    __shared__ Room s;
    if (task.result->finite == 0 || task.result->update_finite == 0) return;  // all of a cluster
    const int n = task.where.width, matrix = blockIdx.x / team, part = blockIdx.x % team;
    const int first_row = part * n / team, rows = (part + 1) * n / team - first_row;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const std::ptrdiff_t stride = task.where.stride;
    const std::ptrdiff_t at =
        task.where.first + (matrix / 2) * task.where.layer_step + (matrix % 2) * n + first_row * stride;
    const float* const w = task.weights + at;
    double *b = shared, *back = b + W * n, *v = back + W * n, *image = v + K * n,
           *u = image + W * ((n + team - 1) / team);
    double* const state = task.blocks + static_cast<std::size_t>(matrix) * W * n;
    double* const sums = task.partials + matrix * partials_of(W, n);
    double* const other_sums = sums + team * most_sums;
    double* const backs = other_sums + team * most_sums;
    for (int i = threadIdx.x; i < W * n; i += threads) b[i] = state[i];
    __syncthreads();
    // rows of x times columns of `of`: to[row * stride_of_to + c].
    const auto times = [&](const float* x, const double* of, auto columns, double* to, int step) {
        constexpr int count = decltype(columns)::value;
        for (int i = warp; i < rows; i += warps) {
            double acc[count] = {};
            for (int j = lane; j < n; j += 32) {
                const auto value = static_cast<double>(x[i * stride + j]);
#pragma unroll
                for (int c = 0; c < count; ++c) acc[c] = fma(value, of[c * n + j], acc[c]);
            }
#pragma unroll
            for (int c = 0; c < count; ++c) {
                acc[c] = warp_sum(acc[c]);
                if (lane == 0) to[i * step + c] = acc[c];
            }
        }
        __syncthreads();
    };
    // This block's part of x^T u, columns of u: backs[part, c, column].
    const auto transposed_times = [&](const float* x, auto columns) {
        constexpr int count = decltype(columns)::value;
        for (int j = threadIdx.x; j < n; j += threads) {
            double acc[count] = {};
            for (int i = 0; i < rows; ++i) {
                const auto value = static_cast<double>(x[i * stride + j]);
#pragma unroll
                for (int c = 0; c < count; ++c) acc[c] = fma(value, u[i * W + c], acc[c]);
            }
            for (int c = 0; c < count; ++c) backs[(part * W + c) * n + j] = acc[c];
        }
        cg::this_cluster().sync();
    };
    const auto joined = [&](int c, int j) {
        double x = 0;
        for (int p = 0; p < team; ++p) x += backs[(p * W + c) * n + j];
        return x;
    };
    const std::integral_constant<int, W> all{};
    const std::integral_constant<int, K> leading{};
    for (int iteration = 1;; ++iteration) {
        // Rayleigh-Ritz on the right block: W B = U S R^T, from the Gram matrix of W B.
        times(w, b, all, image, W);
        double g[gram] = {};
        for (int i = threadIdx.x; i < rows; i += threads)
#pragma unroll
            for (int c = 0; c < W; ++c)
#pragma unroll
                for (int d = c; d < W; ++d)
                    g[triangle<W>(c, d)] = fma(image[i * W + c], image[i * W + d], g[triangle<W>(c, d)]);
        sum_of_block(g, s);
        sum_of_team<gram>(sums, part, s);
        matrix_of_sums<W>(s.sum, s);
        if (warp == 0) eigenvectors<W>(s);
        __syncthreads();
        for (int i = threadIdx.x; i < rows * W; i += threads) {
            const int c = i % W, from = i / W * W;
            double x = 0;
            for (int d = 0; d < W; ++d) x = fma(image[from + d], s.r[d][s.order[c]], x);
            u[i] = s.sigma[c] > 0 ? x / s.sigma[c] : 0;
        }
        __syncthreads();
        transposed_times(w, all);
        double left[K + gram] = {};  // squares of what is left of W^T u - sigma v; the Gram matrix of W^T U
        for (int j = threadIdx.x; j < n; j += threads) {
            double column[W];
#pragma unroll
            for (int c = 0; c < W; ++c) back[c * n + j] = column[c] = joined(c, j);
#pragma unroll
            for (int c = 0; c < K; ++c) {
                double x = 0;
                for (int d = 0; d < W; ++d) x = fma(b[d * n + j], s.r[d][s.order[c]], x);
                v[c * n + j] = x;
                const double apart = column[c] - s.sigma[c] * x;
                left[c] = fma(apart, apart, left[c]);
            }
#pragma unroll
            for (int c = 0; c < W; ++c)
#pragma unroll
                for (int d = c; d < W; ++d)
                    left[K + triangle<W>(c, d)] = fma(column[c], column[d], left[K + triangle<W>(c, d)]);
        }
        sum_of_block(left, s);
        double residual = 0;
        for (int c = 0; c < K && s.sigma[0] > 0; ++c) residual = fmax(residual, ::sqrt(s.sum[c]) / s.sigma[0]);
        matrix_of_sums<W>(s.sum + K, s);
        if (threadIdx.x == 0) factor<W>(s);
        __syncthreads();
        for (int j = threadIdx.x; j < n; j += threads)
            for (int c = 0; c < W; ++c) {
                double x = back[c * n + j] * s.scale[c];
                for (int d = 0; d < c; ++d) x -= s.lower[c][d] * b[d * n + j];
                b[c * n + j] = x * s.lower[c][c];
            }
        __syncthreads();
        if (!(residual > tolerance) || iteration >= most_iterations) break;
    }
    if (part == 0)
        for (int i = threadIdx.x; i < W * n; i += threads) state[i] = b[i];

    float* const d = task.update + at;
    const bool by_left = task.sides == Sides::left || task.sides == Sides::either;
    times(d, v, leading, image, W);  // D V
    double m[K * K + 2] = {};        // U^T D V, |D V|^2, |D|^2
    for (int i = threadIdx.x; i < rows; i += threads)
        for (int c = 0; c < K; ++c) {
            m[K * K] = fma(image[i * W + c], image[i * W + c], m[K * K]);
            for (int e = 0; e < K; ++e) m[c * K + e] = fma(u[i * W + c], image[i * W + e], m[c * K + e]);
        }
    for (int i = warp; i < rows; i += warps)
        for (int j = lane; j < n; j += 32) {
            const auto x = static_cast<double>(d[i * stride + j]);
            m[K * K + 1] = fma(x, x, m[K * K + 1]);
        }
    sum_of_block(m, s);
    sum_of_team<K * K + 2>(other_sums, part, s);
    double along[K][K], of_both = 0;
    for (int c = 0; c < K; ++c)
        for (int e = 0; e < K; ++e) {
            along[c][e] = s.sum[c * K + e];
            of_both = fma(along[c][e], along[c][e], of_both);
        }
    const double of_right = s.sum[K * K], of_update = s.sum[K * K + 1];
    double of_left = 0;
    if (by_left) {
        transposed_times(d, leading);  // D^T U, into `back`
        double squares[1] = {};
        for (int j = threadIdx.x; j < n; j += threads)
            for (int c = 0; c < K; ++c) {
                back[c * n + j] = joined(c, j);
                squares[0] = fma(back[c * n + j], back[c * n + j], squares[0]);
            }
        sum_of_block(squares, s);
        of_left = s.sum[0];
    }
    const double of_part = task.sides == Sides::both    ? of_both
                           : task.sides == Sides::right ? of_right
                           : task.sides == Sides::left  ? of_left
                                                        : of_left + of_right - of_both;
    const double kept = of_update > 0 ? ::sqrt(fmax(0.0, 1 - of_part / of_update)) : 1.0;
    double after[2] = {};  // |D'|^2, |D - D'|^2
    for (int i = warp; i < rows; i += warps) {
        double by_v[K], by_a[K];  // the part's row: by_v V^T + by_a (D^T U)^T
        for (int c = 0; c < K; ++c) {
            double across = 0;  // U U^T D V
            for (int e = 0; e < K; ++e) across = fma(u[i * W + e], along[e][c], across);
            by_v[c] = task.sides == Sides::both    ? across
                      : task.sides == Sides::right ? image[i * W + c]
                      : task.sides == Sides::left  ? 0
                                                   : image[i * W + c] - across;
            by_a[c] = by_left ? u[i * W + c] : 0;
        }
        for (int j = lane; j < n; j += 32) {
            const auto x = static_cast<double>(d[i * stride + j]);
            double taken = 0;
            for (int c = 0; c < K; ++c) {
                taken = fma(by_v[c], v[c * n + j], taken);
                if (by_left) taken = fma(by_a[c], back[c * n + j], taken);
            }
            const double next = task.shrinks ? x * kept : x - taken;
            after[0] = fma(next, next, after[0]);
            after[1] = fma(x - next, x - next, after[1]);
            d[i * stride + j] = static_cast<float>(next);
        }
    }
    sum_of_block(after, s);
    sum_of_team<2>(sums, part, s);
    if (part == 0 && threadIdx.x == 0)
        task.energies[matrix] = {of_update, of_part, of_update - s.sum[0], s.sum[1], 0.0};
}

template <int K>
void launch(const Task& task, Stream stream) {
    const std::size_t bytes = shared_bytes(K, K + 3, task.where.width);
    if (cudaFuncSetAttribute(follow_and_project<K>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(bytes)) != cudaSuccess)
        throw WorkError("device cuda: a projection has no room in shared memory");
    follow_and_project<K><<<2 * task.where.layers * team, threads, bytes, stream>>>(task);
}

}  // namespace

bool has_projection(const Projection& wanted, int width) {
    constexpr std::size_t shared_at_most = 200 << 10;  // of 227 KiB, with Room beside it
    return wanted.k >= 1 && wanted.k <= 4 && wanted.extra == 3 && width >= most_width &&
           shared_bytes(wanted.k, wanted.k + 3, width) <= shared_at_most;
}

ProjectionMemory::ProjectionMemory(const Projection& wanted, int layers, int width) {
    const auto matrices = static_cast<std::size_t>(2 * layers);
    const int block_width = wanted.k + wanted.extra;
    const auto room = [&](std::size_t asked) {
        const std::size_t at = bytes;
        bytes += (asked + 255) / 256 * 256;
        return at;
    };
    block_bytes = matrices * static_cast<std::size_t>(block_width) * static_cast<std::size_t>(width) * sizeof(double);
    energy_bytes = matrices * sizeof(RemovedEnergy);
    blocks = room(block_bytes);
    partials = room(matrices * partials_of(block_width, width) * sizeof(double));
    energies = room(energy_bytes);
}

void project(const Projection& wanted, const QkMatrices& where, const float* weights, float* update,
             const StepResult* result, char* memory, Stream stream) {
    const ProjectionMemory parts(wanted, where.layers, where.width);
    const Task task{where,
                    weights,
                    update,
                    result,
                    reinterpret_cast<double*>(memory + parts.blocks),
                    reinterpret_cast<double*>(memory + parts.partials),
                    reinterpret_cast<RemovedEnergy*>(memory + parts.energies),
                    wanted.sides,
                    wanted.shrinks};
    switch (wanted.k) {
        case 1:
            launch<1>(task, stream);
            break;
        case 2:
            launch<2>(task, stream);
            break;
        case 3:
            launch<3>(task, stream);
            break;
        default:
            launch<4>(task, stream);
    }
    check_launch("a projection");
}

}  // namespace faultline::gpt::on_device
