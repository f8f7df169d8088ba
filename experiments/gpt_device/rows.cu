// SPDX-License-Identifier: Apache-2.0
// Norms, residual additions, GELU, embedding: a warp has a row, a lane the octets lane, lane + 32, … of it.
#include <algorithm>

#include <faultline/gpt_device/elements.cuh>

namespace faultline::gpt::on_device {
namespace {

constexpr int warps = 4;  // of a block

/// Octets of a lane, as a compile-time number so that a row stays in registers.
template <class F>
void with_octets(int width, F&& launch) {
    const int needed = (width + 255) / 256;
    if (needed <= 1) return launch(std::integral_constant<int, 1>{});
    if (needed <= 2) return launch(std::integral_constant<int, 2>{});
    if (needed <= 3) return launch(std::integral_constant<int, 3>{});
    if (needed <= 4) return launch(std::integral_constant<int, 4>{});
    launch(std::integral_constant<int, 8>{});
}

__global__ void embed_rows(const std::int32_t* tokens, const float* wte, const float* wpe, int rows, int length,
                           int width, float* x) {
    const std::size_t at = (std::size_t{blockIdx.x} * blockDim.x + threadIdx.x) * 8;
    if (at >= static_cast<std::size_t>(rows) * width) return;
    const int row = static_cast<int>(at / width), column = static_cast<int>(at % width);
    const Octet token = load8(wte + static_cast<std::size_t>(tokens[row]) * width + column);
    const Octet place = load8(wpe + static_cast<std::size_t>(row % length) * width + column);
    Octet sum;
#pragma unroll
    for (int i = 0; i < 8; ++i) sum.x[i] = token.x[i] + place.x[i];
    store8(x + at, sum);
}

template <class E, int octets>
__global__ void __launch_bounds__(32 * warps)
    add_and_norm_rows(const float* x, const E* branch, float* out, float* statistics, const float* gain,
                      const float* bias, float epsilon, StatisticsRounding rounding, int rows, int width, E* h) {
    const int row = blockIdx.x * warps + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    const std::size_t begin = static_cast<std::size_t>(row) * width;
    Octet v[octets];
    float sum = 0;
#pragma unroll
    for (int o = 0; o < octets; ++o) {
        const int column = (o * 32 + lane) * 8;
        if (column >= width) continue;
        v[o] = load8(x + begin + column);
        if (branch != nullptr) {
            const Octet b = load8(branch + begin + column);
#pragma unroll
            for (int i = 0; i < 8; ++i) v[o].x[i] += b.x[i];
            store8(out + begin + column, v[o]);
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) sum += v[o].x[i];
    }
    float mean = warp_sum(sum) / static_cast<float>(width);
    float squares = 0;
#pragma unroll
    for (int o = 0; o < octets; ++o) {
        if ((o * 32 + lane) * 8 >= width) continue;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float d = v[o].x[i] - mean;
            squares += d * d;
        }
    }
    float rstd = 1.0f / sqrtf(warp_sum(squares) / static_cast<float>(width) + epsilon);
    const float2 rounded{rounded_bf16(mean), rounded_bf16(rstd)};
    if (lane == 0) reinterpret_cast<float2*>(statistics)[row] = rounding.kept ? rounded : float2{mean, rstd};
    if (rounding.applied) mean = rounded.x, rstd = rounded.y;
#pragma unroll
    for (int o = 0; o < octets; ++o) {
        const int column = (o * 32 + lane) * 8;
        if (column >= width) continue;
        const Octet g = load8(gain + column);
#pragma unroll
        for (int i = 0; i < 8; ++i) v[o].x[i] = ((v[o].x[i] - mean) * rstd) * g.x[i];
        if (bias != nullptr) {
            const Octet b = load8(bias + column);
#pragma unroll
            for (int i = 0; i < 8; ++i) v[o].x[i] += b.x[i];
        }
        store8(h + begin + column, v[o]);
    }
}

template <class E>
__global__ void add_rows(const float* x, const E* branch, float* out, std::size_t count) {
    const std::size_t at = (std::size_t{blockIdx.x} * blockDim.x + threadIdx.x) * 8;
    if (at >= count) return;
    Octet v = load8(x + at);
    const Octet b = load8(branch + at);
#pragma unroll
    for (int i = 0; i < 8; ++i) v.x[i] += b.x[i];
    store8(out + at, v);
}

/// Eight elements as they are in memory: half the registers of an Octet where they are bf16.
template <class E>
struct Raw {
    uint4 words[sizeof(E) / 2];
    __device__ void load(const E* p) {
#pragma unroll
        for (int i = 0; i < static_cast<int>(sizeof(E) / 2); ++i) words[i] = reinterpret_cast<const uint4*>(p)[i];
    }
    [[nodiscard]] __device__ Octet value() const { return load8(reinterpret_cast<const E*>(words)); }
};

/// The rows of a block are blockIdx.x * warps + w + k * gridDim.x * warps; sums over rows are made over k in registers, over w in
/// shared memory, over blocks by add_partials: a fixed order.
template <class E, int octets, bool biases>
__global__ void __launch_bounds__(32 * warps, octets <= 3 ? 3 : 2)
    norm_backward_rows(const E* dh, const float* x, const float* statistics, const float* gain, bool first, int rows,
                       int width, float* dx, E* dout, float* parts) {
    extern __shared__ float combined[];  // [warps, width]
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Octet dgain[octets] = {}, dbias[biases ? octets : 1] = {}, dout_sum[biases ? octets : 1] = {};
    for (int row = blockIdx.x * warps + warp; row < rows; row += gridDim.x * warps) {
        const std::size_t begin = static_cast<std::size_t>(row) * width;
        const float2 s = reinterpret_cast<const float2*>(statistics)[row];
        Raw<E> raw[octets];
        Octet normed[octets], before[octets] = {};  // all loads at once, ahead of the sums over the row
        float sum = 0, dot = 0;
#pragma unroll
        for (int o = 0; o < octets; ++o) {
            const int column = (o * 32 + lane) * 8;
            if (column >= width) continue;
            raw[o].load(dh + begin + column);
            normed[o] = load8(x + begin + column);
            if (!first) before[o] = load8(dx + begin + column);
        }
#pragma unroll
        for (int o = 0; o < octets; ++o) {
            const int column = (o * 32 + lane) * 8;
            if (column >= width) continue;
            Octet g = raw[o].value();
            const Octet weight = load8(gain + column);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                normed[o].x[i] = (normed[o].x[i] - s.x) * s.y;
                dgain[o].x[i] += g.x[i] * normed[o].x[i];
                if constexpr (biases) dbias[o].x[i] += g.x[i];
                g.x[i] *= weight.x[i];
                sum += g.x[i];
                dot += g.x[i] * normed[o].x[i];
            }
        }
        const float mean = warp_sum(sum) / static_cast<float>(width);
        const float mean_dot = warp_sum(dot) / static_cast<float>(width);
#pragma unroll
        for (int o = 0; o < octets; ++o) {
            const int column = (o * 32 + lane) * 8;
            if (column >= width) continue;
            const Octet g = raw[o].value(), weight = load8(gain + column);
            Octet v = before[o];
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                v.x[i] += ((g.x[i] * weight.x[i] - mean) - normed[o].x[i] * mean_dot) * s.y;
                if constexpr (biases) dout_sum[o].x[i] += rounded_to<E>(v.x[i]);
            }
            store8(dx + begin + column, v);
            if (dout != nullptr) store8(dout + begin + column, v);
        }
    }
    const auto combine = [&](const Octet(&mine)[octets], int offset) {
        __syncthreads();
#pragma unroll
        for (int o = 0; o < octets; ++o)
            if (const int column = (o * 32 + lane) * 8; column < width)
                store8(combined + warp * width + column, mine[o]);
        __syncthreads();
        for (int column = threadIdx.x; column < width; column += blockDim.x) {
            float sum = 0;
            for (int w = 0; w < warps; ++w) sum += combined[w * width + column];
            parts[static_cast<std::size_t>(blockIdx.x) * width * (biases ? 3 : 1) + offset + column] = sum;
        }
    };
    combine(dgain, 0);
    if constexpr (biases) {
        combine(dbias, width);
        combine(dout_sum, 2 * width);
    }
}

struct AllPartials {
    Partials of[most_partials];
};
/// out[c] = sum over n of parts[n, c]: thread y has n = y, y + 32, …, then the 32 sums in order. A block has 32 columns of one.
__global__ void __launch_bounds__(1024) add_partials_columns(const __grid_constant__ AllPartials all) {
    __shared__ float sums[32][33];
    int block = blockIdx.x, s = 0;
    while (block >= (all.of[s].cols + 31) / 32) block -= (all.of[s++].cols + 31) / 32;
    const Partials& p = all.of[s];
    const int column = block * 32 + threadIdx.x;
    float sum = 0;
    if (column < p.cols)
        for (int n = threadIdx.y; n < p.count; n += 32)
            sum += p.parts[static_cast<std::size_t>(n) * p.row_stride + column];
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y != 0 || column >= p.cols) return;
    sum = 0;
    for (int y = 0; y < 32; ++y) sum += sums[y][threadIdx.x];
    p.out[column] = sum;
}

/// A block of `count` warps has 256 columns of the rows that `row(row, column)` gives, every gridDim.y-th group of `count` rows;
/// their sum over these rows into parts.
template <int count = 8, class Row>
__device__ void sum_slab(int rows, int cols, float* parts, Row&& row_of) {
    __shared__ float sums[count][256];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, column = blockIdx.x * 256 + lane * 8;
    Octet sum{};
    if (column < cols)
#pragma unroll 2
        for (int row = blockIdx.y * count + warp; row < rows; row += gridDim.y * count) {
            const Octet v = row_of(row, column);
#pragma unroll
            for (int i = 0; i < 8; ++i) sum.x[i] += v.x[i];
        }
    if (parts == nullptr) return;
    store8(&sums[warp][lane * 8], sum);
    __syncthreads();
    for (int i = threadIdx.x; i < min(256, cols - static_cast<int>(blockIdx.x) * 256); i += 32 * count) {
        float total = 0;
        for (int w = 0; w < count; ++w) total += sums[w][i];
        parts[static_cast<std::size_t>(blockIdx.y) * cols + blockIdx.x * 256 + i] = total;
    }
}
/// A block has the rows, and adds them up in the order, of a block of norm_backward_rows.
template <class E>
__global__ void __launch_bounds__(32 * warps) sum_rows_of_norm(const E* dy, int rows, int cols, float* parts) {
    sum_slab<warps>(rows, cols, parts,
                    [&](int row, int column) { return load8(dy + static_cast<std::size_t>(row) * cols + column); });
}
template <class E>
__global__ void __launch_bounds__(256) sum_rows_slabs(const E* dy, int rows, int cols, float* parts) {
    sum_slab(rows, cols, parts,
             [&](int row, int column) { return load8(dy + static_cast<std::size_t>(row) * cols + column); });
}

/// GELU is x sigmoid(w), w = 2 sqrt(2/pi) (x + 0.044715 x^3), by fused multiply-adds: without them the arithmetic would take
/// longer than the memory. w here, and dw/dx.
constexpr float gelu_linear = 1.59576912160573071175978423973752f, gelu_cubic = 0.044715f * gelu_linear;
__device__ float gelu_argument(float x, float x2) { return x * fmaf(gelu_cubic, x2, gelu_linear); }
__device__ float gelu_argument_slope(float x2) { return fmaf(3.0f * gelu_cubic, x2, gelu_linear); }

template <class E>
__global__ void gelu_elements(const E* u, std::size_t count, E* a) {
    const std::size_t at = (std::size_t{blockIdx.x} * blockDim.x + threadIdx.x) * 8;
    if (at >= count) return;
    Octet v = load8(u + at);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float x = v.x[i];
        v.x[i] = x * sigmoid_for<E>(gelu_argument(x, x * x));
    }
    store8(a + at, v);
}

template <class E>
__global__ void __launch_bounds__(256) gelu_backward_slabs(const E* u, int rows, int cols, E* da, float* parts) {
    sum_slab(rows, cols, parts, [&](int row, int column) {
        const std::size_t at = static_cast<std::size_t>(row) * cols + column;
        const Octet v = load8(u + at);
        Octet d = load8(da + at);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float x = v.x[i], x2 = x * x, s = sigmoid_for<E>(gelu_argument(x, x2));
            const float slope = fmaf(x * fmaf(-s, s, s), gelu_argument_slope(x2), s);
            d.x[i] = rounded_to<E>(d.x[i] * slope);
        }
        store8(da + at, d);
        return d;
    });
}

unsigned blocks_of(std::size_t octets, unsigned threads) {
    return static_cast<unsigned>((octets + threads - 1) / threads);
}

}  // namespace

void embed(const std::int32_t* tokens, const float* wte, const float* wpe, int rows, int length, int width, float* x,
           Stream stream) {
    const std::size_t octets = static_cast<std::size_t>(rows) * width / 8;
    embed_rows<<<blocks_of(octets, 256), 256, 0, stream>>>(tokens, wte, wpe, rows, length, width, x);
    check_launch("embed");
}

template <class E>
void add_and_norm(const float* x, const E* branch, float* out, float* statistics, const float* gain, const float* bias,
                  float epsilon, StatisticsRounding rounding, int rows, int width, E* h, Stream stream) {
    with_octets(width, [&](auto octets) {
        add_and_norm_rows<E, octets><<<(rows + warps - 1) / warps, 32 * warps, 0, stream>>>(
            x, branch, out, statistics, gain, bias, epsilon, rounding, rows, width, h);
    });
    check_launch("add_and_norm");
}

template <class E>
void add(const float* x, const E* branch, float* out, int rows, int width, Stream stream) {
    const std::size_t count = static_cast<std::size_t>(rows) * width;
    add_rows<<<blocks_of(count / 8, 256), 256, 0, stream>>>(x, branch, out, count);
    check_launch("add");
}

template <class E>
int norm_backward(const E* dh, const float* x, const float* statistics, const float* gain, bool biases, bool first,
                  int rows, int width, float* dx, E* dout, float* parts, Stream stream) {
    const int blocks = std::min((rows + warps - 1) / warps, norm_parts(width));
    const std::size_t shared = static_cast<std::size_t>(warps) * width * sizeof(float);
    with_octets(width, [&](auto octets) {
        if (biases)
            norm_backward_rows<E, octets, true>
                <<<blocks, 32 * warps, shared, stream>>>(dh, x, statistics, gain, first, rows, width, dx, dout, parts);
        else
            norm_backward_rows<E, octets, false>
                <<<blocks, 32 * warps, shared, stream>>>(dh, x, statistics, gain, first, rows, width, dx, dout, parts);
    });
    check_launch("norm_backward");
    return blocks;
}

template <class E>
void gelu(const E* u, std::size_t count, E* a, Stream stream) {
    gelu_elements<<<blocks_of(count / 8, 256), 256, 0, stream>>>(u, count, a);
    check_launch("gelu");
}

namespace {
dim3 slabs_of(int rows, int cols) { return dim3((cols + 255) / 256, std::min(sum_slabs, (rows + 7) / 8)); }
}  // namespace

template <class E>
int gelu_backward(const E* u, int rows, int cols, E* da, float* parts, Stream stream) {
    gelu_backward_slabs<<<slabs_of(rows, cols), 256, 0, stream>>>(u, rows, cols, da, parts);
    check_launch("gelu_backward");
    return static_cast<int>(slabs_of(rows, cols).y);
}
template <class E>
int sum_rows(const E* dy, int rows, int cols, float* parts, Stream stream) {
    sum_rows_slabs<<<slabs_of(rows, cols), 256, 0, stream>>>(dy, rows, cols, parts);
    check_launch("sum_rows");
    return static_cast<int>(slabs_of(rows, cols).y);
}

template <class E>
int sum_rows_as_norm(const E* dy, int rows, int cols, float* parts, Stream stream) {
    const int blocks = std::min((rows + warps - 1) / warps, norm_parts(cols));
    sum_rows_of_norm<<<dim3((cols + 255) / 256, blocks), 32 * warps, 0, stream>>>(dy, rows, cols, parts);
    check_launch("sum_rows_as_norm");
    return blocks;
}

void add_partials(const Partials* sums, int count, Stream stream) {
    if (count == 0) return;
    AllPartials all{};
    unsigned blocks = 0;
    for (int s = 0; s < count; ++s) {
        all.of[s] = sums[s];
        blocks += static_cast<unsigned>((sums[s].cols + 31) / 32);
    }
    add_partials_columns<<<blocks, dim3(32, 32), 0, stream>>>(all);
    check_launch("add_partials");
}

#define FAULTLINE_FOR(E)                                                                                             \
    template void add_and_norm(const float*, const E*, float*, float*, const float*, const float*, float,            \
                               StatisticsRounding, int, int, E*, Stream);                                            \
    template void add(const float*, const E*, float*, int, int, Stream);                                             \
    template int norm_backward(const E*, const float*, const float*, const float*, bool, bool, int, int, float*, E*, \
                               float*, Stream);                                                                      \
    template void gelu(const E*, std::size_t, E*, Stream);                                                           \
    template int gelu_backward(const E*, int, int, E*, float*, Stream);                                              \
    template int sum_rows(const E*, int, int, float*, Stream);                                                       \
    template int sum_rows_as_norm(const E*, int, int, float*, Stream);
FAULTLINE_FOR(float)
FAULTLINE_FOR(Bf16)
#undef FAULTLINE_FOR

}  // namespace faultline::gpt::on_device
