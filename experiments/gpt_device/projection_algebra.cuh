// SPDX-License-Identifier: Apache-2.0
// Small matrices of a projection (projection.cu): sums over a block of threads and over the blocks of a cluster, eigenvectors of a
// Gram matrix, its Cholesky factor; in binary64, in the shared memory of each block, which all blocks of a cluster fill with the
// same bits.
#pragma once

#include <cooperative_groups.h>

#include <faultline/gpt_device/elements.cuh>

namespace faultline::gpt::on_device {
namespace {

namespace cg = cooperative_groups;

constexpr int team = 8;  // blocks of a cluster: what every device of compute capability 9.0 has
constexpr int threads = 512, warps = threads / 32;
constexpr int most_width = 7;  // of the block: k up to 4, extra 3
constexpr int most_sums = 32;  // of a block's partial sums: a triangle of 7 and 4 residuals

struct Room {
    double warp[warps][most_sums], sum[most_sums];
    double g[most_width + 1][most_width + 1], r[most_width + 1][most_width + 1];  // even: a row and column of zeros
    double sigma[most_width], lower[most_width][most_width], scale[most_width];
    int order[most_width];
};

/// to.sum[i] = the block's sum of v[i].
template <int N>
__device__ void sum_of_block(double (&v)[N], Room& to) {
    static_assert(N <= most_sums);
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] = warp_sum(v[i]);
    __syncthreads();
    if (threadIdx.x % 32 == 0)
#pragma unroll
        for (int i = 0; i < N; ++i) to.warp[threadIdx.x / 32][i] = v[i];
    __syncthreads();
    if (threadIdx.x < N) {
        double s = 0;
        for (int w = 0; w < warps; ++w) s += to.warp[w][threadIdx.x];
        to.sum[threadIdx.x] = s;
    }
    __syncthreads();
}

/// to.sum[i] of all blocks of the team together, in each.
template <int N>
__device__ void sum_of_team(double* partials, int part, Room& to) {
    if (threadIdx.x < N) partials[part * most_sums + threadIdx.x] = to.sum[threadIdx.x];
    cg::this_cluster().sync();
    if (threadIdx.x < N) {
        double s = 0;
        for (int p = 0; p < team; ++p) s += partials[p * most_sums + threadIdx.x];
        to.sum[threadIdx.x] = s;
    }
    __syncthreads();
}

/// Place of (c, d), c <= d, in a triangle of W columns.
template <int W>
__device__ constexpr int triangle(int c, int d) {
    return c * W - c * (c - 1) / 2 + d - c;
}

/// g = R diag R^T by Jacobi's rotations, disjoint ones at a time (Golub and Van Loan, 8.5.5); by one warp. Eigenvalues stay on g's
/// diagonal, order says which is the largest, the next, …
template <int W>
__device__ void eigenvectors(Room& s) {
    constexpr int even = W + W % 2, pairs = even / 2;
    const int lane = threadIdx.x;
    for (int i = lane; i < even * even; i += 32) s.r[i / even][i % even] = i / even == i % even ? 1 : 0;
    __syncwarp();
    for (int sweep = 0; sweep < 20; ++sweep) {
        bool turned = false;
        for (int round = 0; round < even - 1; ++round) {
            // The circle: the last stays, the others move on.
            const auto first = [&](int t) { return t == 0 ? even - 1 : (round + t) % (even - 1); };
            const auto second = [&](int t) { return t == 0 ? round : (round + even - 1 - t) % (even - 1); };
            double cosine = 1, sine = 0;
            if (lane < pairs) {
                const int p = first(lane), q = second(lane);
                const double off = s.g[p][q], a = s.g[p][p], b = s.g[q][q];
                if (fabs(off) > 1e-15 * ::sqrt(fabs(a * b))) {
                    const double theta = (b - a) / (2 * off);
                    const double t = (theta >= 0 ? 1.0 : -1.0) / (fabs(theta) + ::sqrt(fma(theta, theta, 1.0)));
                    cosine = 1 / ::sqrt(fma(t, t, 1.0));
                    sine = t * cosine;
                    turned = true;
                }
            }
            const auto rotate = [](double c, double n, double& x, double& y) {
                const double x0 = x, y0 = y;
                x = c * x0 - n * y0;
                y = n * x0 + c * y0;
            };
            __syncwarp();
            for (int base = 0; base < pairs * even; base += 32) {  // columns of g and r
                const int task = base + lane, t = task % pairs, i = task / pairs;
                const double c = __shfl_sync(0xffffffffu, cosine, t), n = __shfl_sync(0xffffffffu, sine, t);
                if (task >= pairs * even) continue;
                rotate(c, n, s.g[i][first(t)], s.g[i][second(t)]);
                rotate(c, n, s.r[i][first(t)], s.r[i][second(t)]);
            }
            __syncwarp();
            for (int base = 0; base < pairs * even; base += 32) {  // rows of g
                const int task = base + lane, t = task % pairs, i = task / pairs;
                const double c = __shfl_sync(0xffffffffu, cosine, t), n = __shfl_sync(0xffffffffu, sine, t);
                if (task >= pairs * even) continue;
                rotate(c, n, s.g[first(t)][i], s.g[second(t)][i]);
            }
            __syncwarp();
        }
        if (__ballot_sync(0xffffffffu, turned) == 0) break;
    }
    if (lane < W) s.order[lane] = lane;  // where they are no numbers
    __syncwarp();
    if (lane < W) {
        int before = 0;
        for (int i = 0; i < W; ++i) before += s.g[i][i] > s.g[lane][lane] || (s.g[i][i] == s.g[lane][lane] && i < lane);
        s.order[before] = lane;
        s.sigma[before] = ::sqrt(fmax(s.g[lane][lane], 0.0));
    }
    __syncwarp();
}

/// to.g from a triangle of sums, with a border of zeros.
template <int W>
__device__ void matrix_of_sums(const double* sums, Room& to) {
    constexpr int even = W + W % 2;
    for (int i = threadIdx.x; i < even * even; i += threads) {
        const int c = min(i / even, i % even), d = max(i / even, i % even);
        to.g[i / even][i % even] = d < W ? sums[triangle<W>(c, d)] : 0;
    }
    __syncthreads();
}

/// The factor of the Gram matrix of columns that are scaled to 1: 1/L on the diagonal of `lower`, 0 where there is no direction.
template <int W>
__device__ void factor(Room& s) {
    constexpr double none = 1e-14;
    for (int c = 0; c < W; ++c) s.scale[c] = s.g[c][c] > 0 ? 1 / ::sqrt(s.g[c][c]) : 0;
    for (int c = 0; c < W; ++c)
        for (int d = 0; d <= c; ++d) {
            double x = s.g[c][d] * s.scale[c] * s.scale[d];
            for (int e = 0; e < d; ++e) x -= s.lower[c][e] * s.lower[d][e];
            s.lower[c][d] = d < c ? x * s.lower[d][d] : x > none ? 1 / ::sqrt(x) : 0;
        }
}

}  // namespace
}  // namespace faultline::gpt::on_device
