// SPDX-License-Identifier: Apache-2.0
// The two ends of a step: cross-entropy with its gradient, and from gradients to the next weights.
#include <algorithm>

#include <cfloat>
#include <type_traits>

#include <faultline/gpt_device/elements.cuh>
#include <faultline/gpt_device/exchange_kernels.hpp>

namespace faultline::gpt::on_device {
namespace {

/// Waits until at most `outstanding` of the groups of copies that this thread began are on their way.
template <int outstanding>
__device__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(outstanding) : "memory");
}

/// Of the block's values, in every thread: join(join(…)) over warps in order. `room`: 32 floats.
template <int threads, class F>
__device__ float over_block(float x, float* room, F&& join) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x = join(x, __shfl_xor_sync(0xffffffffu, x, step));
    __syncthreads();
    if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = x;
    __syncthreads();
    x = room[0];
    for (int w = 1; w < threads / 32; ++w) x = join(x, room[w]);
    return x;
}

/// A block has a row, which it goes over three times: for the largest, the sum of exp(x - largest), the gradient. Where `held`,
/// from shared memory, where each thread has copied what it reads; else from memory, at best the second-level cache. A logit that
/// is not finite gives NaN, as in cross_entropy of row_kernels.hpp.
template <class E, bool held, int threads>
__global__ void __launch_bounds__(threads, 2048 / threads < 32 ? 2048 / threads : 32)
    cross_entropy_rows(E* logits, const std::int32_t* targets, int vocabulary, float weight, float z_loss,
                       double* losses) {
    extern __shared__ uint4 kept[];
    __shared__ float room[threads / 32], at_target;
    E* row = logits + static_cast<std::size_t>(blockIdx.x) * vocabulary;
    const E* const source = held ? reinterpret_cast<const E*>(kept) : row;
    const int target = targets[blockIdx.x];
    constexpr int stride = threads * 8;
    const int half = ((vocabulary + stride - 1) / stride + 1) / 2 * stride;
    const auto octets = [&](int begin, int end, auto&& use) {
        for (int j = begin + threadIdx.x * 8; j < end; j += stride) use(j);
    };
    if constexpr (held) {
        const auto copy = [&](int j) {
            const auto to = static_cast<unsigned>(__cvta_generic_to_shared(reinterpret_cast<E*>(kept) + j));
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(row + j) : "memory");
        };
        octets(0, min(half, vocabulary), copy);
        asm volatile("cp.async.commit_group;" ::: "memory");
        octets(half, vocabulary, copy);
        asm volatile("cp.async.commit_group;" ::: "memory");
    }
    float largest = -INFINITY;
    bool finite = true;
    const auto find_largest = [&](int j) {
        const Octet v = load8(source + j);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            finite &= fabsf(v.x[i]) <= FLT_MAX;
            largest = fmaxf(largest, v.x[i]);
        }
    };
    if constexpr (held) wait_for_copies<1>();
    octets(0, min(half, vocabulary), find_largest);
    if constexpr (held) wait_for_copies<0>();
    octets(half, vocabulary, find_largest);
    if (threadIdx.x == 0) at_target = value_of(row[target]);
    finite = __syncthreads_and(finite);
    largest = over_block<threads>(largest, room, [](float a, float b) { return fmaxf(a, b); });
    float sum = 0;
    octets(0, vocabulary, [&](int j) {
        const Octet v = load8(source + j);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum += exp_for<E>(v.x[i] - largest);
    });
    sum = over_block<threads>(sum, room, [](float a, float b) { return a + b; });
    const float lse = finite ? largest + logf(sum) : NAN;
    if (threadIdx.x == 0) losses[blockIdx.x] = static_cast<double>(lse) - static_cast<double>(at_target);
    if (weight == 0) return;
    const float factor =
        static_cast<float>(static_cast<double>(weight) * (1 + 2.0 * static_cast<double>(z_loss) * lse)) / sum;
    octets(0, vocabulary, [&](int j) {
        Octet v = load8(source + j);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            v.x[i] = exp_for<E>(v.x[i] - largest) * factor;
            if (j + i == target) v.x[i] -= weight;
        }
        store8(row + j, v);
    });
}

/// Sum of a block's values in a fixed order; the result in thread 0.
__device__ double block_sum(double x) {
    __shared__ double sums[32];
    x = warp_sum(x);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
    __syncthreads();
    if (threadIdx.x < 32) x = warp_sum(threadIdx.x < blockDim.x / 32 ? sums[threadIdx.x] : 0.0);
    __syncthreads();
    return x;
}

__global__ void __launch_bounds__(1024)
    sum_losses_rows(const double* losses, int rows, const StepScalars* scalars, double* sum) {
    double mine = 0;
    for (int i = threadIdx.x; i < rows; i += 1024) mine += losses[i];
    mine = block_sum(mine);
    if (threadIdx.x == 0) *sum = scalars == nullptr || scalars->micro_step == 0 ? mine : *sum + mine;
}

/// A block has 256 columns of eight ids, or of one (ids few): of an id with `many` tokens or more its warps add up every eighth
/// each and then these sums in order, of the others a warp adds up the tokens of one.
template <int ids>
__global__ void __launch_bounds__(256)
    embedding_rows(const float* dx, const std::int32_t* order, const std::int32_t* starts, bool round_head, int width,
                   int vocabulary, float* gradient) {
    constexpr int warps = 8, many = 32;
    __shared__ float sums[warps][256];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, column = blockIdx.y * 256 + lane * 8;
    const bool inside = column < width;
    const auto sum_of = [&](int id, int first, int step) {
        Octet sum{};
        if (inside)
#pragma unroll 8
            for (int t = starts[id] + first; t < starts[id + 1]; t += step) {
                const Octet v = load8(dx + static_cast<std::size_t>(order[t]) * width + column);
#pragma unroll
                for (int i = 0; i < 8; ++i) sum.x[i] += v.x[i];
            }
        return sum;
    };
    const auto store = [&](int id, const Octet& sum) {
        if (!inside) return;
        float* at = gradient + static_cast<std::size_t>(id) * width + column;
        Octet head = load8(at);
#pragma unroll
        for (int i = 0; i < 8; ++i) head.x[i] = sum.x[i] + (round_head ? rounded_bf16(head.x[i]) : head.x[i]);
        store8(at, head);
    };
    for (int i = 0; i < ids; ++i) {
        const int id = blockIdx.x * ids + i;
        if (id >= vocabulary) break;
        if (ids > 1 && starts[id + 1] - starts[id] < many) {
            if (warp == i) store(id, sum_of(id, 0, 1));
            continue;
        }
        store8(&sums[warp][lane * 8], sum_of(id, warp, warps));
        __syncthreads();
        if (warp == 0) {
            Octet sum{};
            for (int w = 0; w < warps; ++w) {
                const Octet v = load8(&sums[w][lane * 8]);
#pragma unroll
                for (int k = 0; k < 8; ++k) sum.x[k] += v.x[k];
            }
            store(id, sum);
        }
        __syncthreads();
    }
}

__global__ void position_rows(const float* dx, int rows, int length, int width, float* gradient) {
    const std::size_t at = (std::size_t{blockIdx.x} * blockDim.x + threadIdx.x) * 8;
    const std::size_t sequence = static_cast<std::size_t>(length) * width;
    if (at >= sequence) return;
    Octet sum{};
    for (int b = 0; b < rows / length; ++b) {
        const Octet v = load8(dx + b * sequence + at);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum.x[i] += v.x[i];
    }
    store8(gradient + at, sum);
}

__device__ void round_if(Octet& v, bool round, std::uint8_t kind) {
    if (!round || !(kind & comes_rounded)) return;
#pragma unroll
    for (int i = 0; i < 8; ++i) v.x[i] = rounded_bf16(v.x[i]);
}

__global__ void accumulate_octets(const float* micro, const std::uint8_t* kinds, bool round, std::size_t octets,
                                  const StepScalars* scalars, float* total) {
    const std::size_t o = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (o >= octets) return;
    Octet v = load8(micro + 8 * o);
    round_if(v, round, kinds[o]);
    if (scalars->micro_step > 0) {
        const Octet before = load8(total + 8 * o);
#pragma unroll
        for (int i = 0; i < 8; ++i) v.x[i] = before.x[i] + v.x[i];
    }
    store8(total + 8 * o, v);
}

constexpr int norm_blocks = 1056;

__global__ void __launch_bounds__(256)
    squares_of(const float* gradient, const std::uint8_t* kinds, bool round, std::size_t octets, double* sums) {
    double sum = 0;
    for (std::size_t o = std::size_t{blockIdx.x} * 256 + threadIdx.x; o < octets; o += std::size_t{norm_blocks} * 256) {
        Octet v = load8(gradient + 8 * o);
        round_if(v, round, kinds[o]);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum += static_cast<double>(v.x[i]) * static_cast<double>(v.x[i]);
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

/// The same, of a sum: the blocks and the order are those of squares_of, and so the bits are those of one rank's gradient.
__global__ void __launch_bounds__(256) squares_of_sum(GatheredParts parts, float* gradient, const std::uint8_t* kinds,
                                                      bool round, std::size_t octets, double* sums) {
    double sum = 0;
    for (std::size_t o = std::size_t{blockIdx.x} * 256 + threadIdx.x; o < octets; o += std::size_t{norm_blocks} * 256) {
        const std::uint8_t kind = round ? kinds[o] : std::uint8_t{0};
        Octet own = load8(gradient + 8 * o), total{};
        round_if(own, round, kind);
        const char* other = parts.others;
        for (int r = 0; r < parts.ranks; ++r) {
            Octet v = own;
            if (r != parts.rank) {
                v = load8(reinterpret_cast<const float*>(other) + 8 * o);
                round_if(v, round, kind);
                other += parts.bytes;
            }
#pragma unroll
            for (int i = 0; i < 8; ++i) total.x[i] = r == 0 ? v.x[i] : total.x[i] + v.x[i];
        }
        store8(gradient + 8 * o, total);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum += static_cast<double>(total.x[i]) * static_cast<double>(total.x[i]);
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(1024)
    finish_squares(const double* sums, const double* loss, const StepScalars* scalars, StepResult* result) {
    double sum = 0;
    for (int i = threadIdx.x; i < norm_blocks; i += 1024) sum += sums[i];
    sum = block_sum(sum);
    if (threadIdx.x != 0) return;
    const double norm = sqrt(sum), limit = scalars->clip;
    result->loss = *loss;
    result->squares = sum;
    result->finite = isfinite(*loss) && isfinite(norm);
    result->update_finite = 1;
    // PyTorch's clip_grad_norm_, as Trainer::clip.
    result->factor = limit > 0 && !(norm <= limit) ? static_cast<float>(limit / (norm + 1e-6)) : 1.0f;
}

__global__ void __launch_bounds__(256)
    adamw_octets(const float* gradient, const std::uint8_t* kinds, bool round, std::size_t octets, AdamwSettings s,
                 const StepScalars* scalars, StepResult* result, float* weights, float* first, float* second,
                 Bf16* operands, float* proposed) {
    const std::size_t o = std::size_t{blockIdx.x} * 256 + threadIdx.x;
    if (o >= octets || !result->finite) return;
    const std::uint8_t kind = kinds[o];
    if (s.spares_hidden && kind & hidden_matrix) return;
    const float factor = result->factor, rate = scalars->rate * s.rate, correction1 = scalars->correction1,
                correction2 = scalars->correction2, decay = kind & decays ? s.weight_decay : 0.0f;
    Octet g = load8(gradient + 8 * o), m = load8(first + 8 * o), v = load8(second + 8 * o), w = load8(weights + 8 * o);
    round_if(g, round, kind);
    bool finite = true;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float d = factor == 1.0f ? g.x[i] : g.x[i] * factor;
        m.x[i] = s.beta1 * m.x[i] + (1.0f - s.beta1) * d;
        v.x[i] = s.beta2 * v.x[i] + (1.0f - s.beta2) * (d * d);
        const float step = (m.x[i] * correction1) / (sqrtf(v.x[i] * correction2) + s.epsilon);
        const float update = -rate * (step + decay * w.x[i]);
        finite &= fabsf(update) <= FLT_MAX;
        g.x[i] = update;
        w.x[i] += update;
    }
    if (!finite) result->update_finite = 0;
    store8(first + 8 * o, m);
    store8(second + 8 * o, v);
    if (proposed != nullptr) return store8(proposed + 8 * o, g);
    store8(weights + 8 * o, w);
    if (operands != nullptr) store8(operands + 8 * o, w);
}

__global__ void round_octets(const float* weights, std::size_t octets, Bf16* operands) {
    const std::size_t o = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (o < octets) store8(operands + 8 * o, load8(weights + 8 * o));
}

template <class E>
__global__ void find_values(const E* values, std::size_t count, unsigned long long* at) {
    const std::size_t step = std::size_t{gridDim.x} * blockDim.x;
    for (std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step)
        if (!(fabsf(value_of(values[i])) <= FLT_MAX)) atomicMin(at, static_cast<unsigned long long>(i));
}

unsigned blocks_of(std::size_t octets) { return static_cast<unsigned>((octets + 255) / 256); }

}  // namespace

template <class E>
void cross_entropy(E* logits, const std::int32_t* targets, int rows, int vocabulary, float weight, float z_loss,
                   double* losses, Stream stream) {
    // Two rows at a time in the 227 KiB of a multiprocessor; rows of a few KiB stay in caches anyhow.
    const std::size_t bytes = static_cast<std::size_t>(vocabulary) * sizeof(E);
    constexpr std::size_t least = 16 << 10, most = 110 << 10;
    if (std::is_same_v<E, Bf16> && bytes >= least && bytes <= most) {
        if (cudaFuncSetAttribute(cross_entropy_rows<Bf16, true, 1024>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 static_cast<int>(bytes)) != cudaSuccess)
            check_launch("shared memory of the cross-entropy");
        cross_entropy_rows<Bf16, true, 1024><<<rows, 1024, bytes, stream>>>(reinterpret_cast<Bf16*>(logits), targets,
                                                                            vocabulary, weight, z_loss, losses);
    } else if (vocabulary <= 1024) {
        cross_entropy_rows<E, false, 64><<<rows, 64, 0, stream>>>(logits, targets, vocabulary, weight, z_loss, losses);
    } else {
        cross_entropy_rows<E, false, 512>
            <<<rows, 512, 0, stream>>>(logits, targets, vocabulary, weight, z_loss, losses);
    }
    check_launch("cross_entropy");
}
template void cross_entropy(float*, const std::int32_t*, int, int, float, float, double*, Stream);
template void cross_entropy(Bf16*, const std::int32_t*, int, int, float, float, double*, Stream);

void sum_losses(const double* losses, int rows, const StepScalars* scalars, double* sum, Stream stream) {
    sum_losses_rows<<<1, 1024, 0, stream>>>(losses, rows, scalars, sum);
    check_launch("sum_losses");
}

void embedding_backward(const float* dx, const std::int32_t* order, const std::int32_t* starts, bool round_head,
                        int rows, int length, int width, int vocabulary, float* wte_gradient, float* wpe_gradient,
                        Stream stream) {
    const auto columns = static_cast<unsigned>((width + 255) / 256);
    if (vocabulary <= 4096)
        embedding_rows<1><<<dim3(vocabulary, columns), 256, 0, stream>>>(dx, order, starts, round_head, width,
                                                                         vocabulary, wte_gradient);
    else
        embedding_rows<8><<<dim3((vocabulary + 7) / 8, columns), 256, 0, stream>>>(dx, order, starts, round_head, width,
                                                                                   vocabulary, wte_gradient);
    position_rows<<<blocks_of(static_cast<std::size_t>(length) * width / 8), 256, 0, stream>>>(dx, rows, length, width,
                                                                                               wpe_gradient);
    check_launch("embedding_backward");
}

void accumulate_gradient(const float* micro, const std::uint8_t* kinds, bool round, std::size_t count,
                         const StepScalars* scalars, float* total, Stream stream) {
    accumulate_octets<<<blocks_of(count / 8), 256, 0, stream>>>(micro, kinds, round, count / 8, scalars, total);
    check_launch("accumulate_gradient");
}

void finish_gradient(const float* gradient, const std::uint8_t* kinds, bool round, std::size_t count,
                     const double* loss, const StepScalars* scalars, double* sums, StepResult* result, Stream stream) {
    squares_of<<<norm_blocks, 256, 0, stream>>>(gradient, kinds, round, count / 8, sums);
    finish_squares<<<1, 1024, 0, stream>>>(sums, loss, scalars, result);
    check_launch("finish_gradient");
}

void finish_gathered_gradient(const GatheredParts& parts, float* gradient, const std::uint8_t* kinds, bool round,
                              std::size_t count, const double* loss, const StepScalars* scalars, double* sums,
                              StepResult* result, Stream stream) {
    squares_of_sum<<<norm_blocks, 256, 0, stream>>>(parts, gradient, kinds, round, count / 8, sums);
    finish_squares<<<1, 1024, 0, stream>>>(sums, loss, scalars, result);
    check_launch("finish_gathered_gradient");
}

void adamw(const float* gradient, const std::uint8_t* kinds, bool round, std::size_t count,
           const AdamwSettings& settings, const StepScalars* scalars, StepResult* result, float* weights, float* first,
           float* second, Bf16* operands, float* proposed, Stream stream) {
    adamw_octets<<<blocks_of(count / 8), 256, 0, stream>>>(gradient, kinds, round, count / 8, settings, scalars, result,
                                                           weights, first, second, operands, proposed);
    check_launch("adamw");
}

void round_weights(const float* weights, std::size_t count, Bf16* operands, Stream stream) {
    round_octets<<<blocks_of(count / 8), 256, 0, stream>>>(weights, count / 8, operands);
    check_launch("round_weights");
}

template <class E>
void find_non_finite(const E* values, std::size_t count, long long* at, Stream stream) {
    cudaMemsetAsync(at, 0xff, sizeof *at, stream);  // -1; as an unsigned number the largest
    find_values<<<1056, 256, 0, stream>>>(values, count, reinterpret_cast<unsigned long long*>(at));
    check_launch("find_non_finite");
}
template void find_non_finite(const float*, std::size_t, long long*, Stream);
template void find_non_finite(const Bf16*, std::size_t, long long*, Stream);

}  // namespace faultline::gpt::on_device
