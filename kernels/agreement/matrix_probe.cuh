// SPDX-License-Identifier: Apache-2.0
// The kernel that puts a matrix instruction beside its rule and rivals.
#pragma once

#include <cstdint>

#include <faultline/agreement/card_memory.cuh>
#include <faultline/agreement/matrix_inputs.cuh>
#include <faultline/agreement/matrix_rule.hpp>
#include <faultline/tensor_core/fused_add.hpp>

namespace faultline::agreement {

constexpr int rows = 64, columns = 8;

struct Rivals {
    Rival list[max_rivals];
    int count;
};

/// Word w of row or column `line`.
template <class I>
__device__ std::uint32_t pack(Pattern pattern, const RandomStream& tile, int which, int line, int w) {
    constexpr Storage input = I::input;
    constexpr int per_word = 32 / input.register_bits, depth = words * per_word;
    std::uint32_t word = 0;
    for (int i = 0; i < per_word; ++i)
        word |= element(input, pattern, tile, which, line, w * per_word + i, depth) << (i * input.register_bits);
    return word;
}

template <class I>
__device__ double operand(const std::uint32_t* line, int k) {
    constexpr Storage input = I::input;
    constexpr int bits = input.register_bits, per_word = 32 / bits;
    const std::uint32_t word = line[k / per_word];
    return decode(input, bits == 32 ? word : word >> (k % per_word * bits) & ((1u << (bits % 32)) - 1));
}

/// What `rival` says of one dot product, as bits of the accumulator's format.
template <class I>
__device__ std::uint32_t predict(const Rival& rival, const std::uint32_t* a, const std::uint32_t* b, double before) {
    constexpr int depth = words * 32 / I::input.register_bits;
    const auto position = [&](int i) {
        if (rival.split == Split::in_order) return i;
        const int half = i / (depth / 2), j = i % (depth / 2);
        return j / 2 * 4 + j % 2 + half * 2;
    };
    double c = rival.start == Start::in_first ? before : 0.0;
    const int zero_exponent =
        rival.zero_exponent == Rival::of_the_unit ? fused::zero_exponent(rival.unit.output) : rival.zero_exponent;
    for (int first = 0; first < depth; first += rival.unit.terms) {
        const int count = min(rival.unit.terms, depth - first);
        c = fused::add(
            rival.unit, [&](int i) { return operand<I>(a, position(first + i)); },
            [&](int i) { return operand<I>(b, position(first + i)); }, count, c, zero_exponent);
    }
    if (rival.start == Start::added_last)
        c = static_cast<double>(__fadd_rn(static_cast<float>(before), static_cast<float>(c)));
    const std::uint64_t bits = fused::bits_of(c);
    if (!I::half_accumulator) return __float_as_uint(__double2float_rz(c)) | (c != c ? 0x7FFFFFFFu : 0u);
    if (c != c) return 0x7FFF;
    const std::uint32_t sign = bits >> 63 << 15;
    const double magnitude = fabs(c);
    if (magnitude > 65504.0) return sign | 0x7C00;
    if (magnitude < 0x1p-14) return sign | static_cast<std::uint32_t>(magnitude * 0x1p24);
    return sign | static_cast<std::uint32_t>((bits >> 42) - (std::uint64_t{1023 - 15} << 10) & 0x7FFF);
}

template <class I>
__global__ void __launch_bounds__(128)
    probe(RandomStream stream, Rivals rivals, int tiles, Tally* tallies, Examples* examples) {
    __shared__ std::uint32_t a[rows][words];
    __shared__ std::uint32_t b[columns][words];
    __shared__ alignas(128) std::uint32_t b_cores[2][columns][4];  // as wgmma reads it
    const Pattern pattern = static_cast<Pattern>(blockIdx.y);
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    constexpr Storage result = I::half_accumulator ? fp16 : fp32;
    Tally tally{};
    for (int n = blockIdx.x; n < tiles * weight(pattern); n += gridDim.x) {
        const RandomStream tile = stream.child(blockIdx.y).child(static_cast<std::uint64_t>(n));
        for (int i = threadIdx.x; i < rows * words; i += 128)
            a[i / words][i % words] = pack<I>(pattern, tile, 0, i / words, i % words);
        for (int i = threadIdx.x; i < columns * words; i += 128) {
            const std::uint32_t word = pack<I>(pattern, tile, 1, i / words, i % words);
            b[i / words][i % words] = word;
            b_cores[i % words / 4][i / words][i % 4] = word;
        }
#if __CUDA_ARCH__ >= 900  // wgmma reads B from shared memory
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
        __syncthreads();

        const int row0 = warp * 16 + g;
        const Fragments f{{a[row0][t], a[row0 + 8][t], a[row0][t + 4], a[row0 + 8][t + 4]},
                          {b[g][t], b[g][t + 4]},
                          descriptor(b_cores)};
        std::uint32_t before[4], card[4];
        for (int i = 0; i < 4; ++i) {
            const int row = row0 + i / 2 * 8, col = 2 * t + i % 2;
            before[i] = accumulator(result, pattern, tile, row, col, operand<I>(a[row], 0) * operand<I>(b[col], 0));
        }
        if constexpr (I::half_accumulator) {
            std::uint32_t c[2] = {before[0] | before[1] << 16, before[2] | before[3] << 16};
            I::run(f, c);
            for (int i = 0; i < 4; ++i) card[i] = c[i / 2] >> (i % 2 * 16) & 0xFFFF;
        } else {
            for (int i = 0; i < 4; ++i) card[i] = before[i];
            I::run(f, card);
        }

        for (int i = 0; i < 4; ++i) {
            const int row = row0 + i / 2 * 8, col = 2 * t + i % 2;
            ++tally.vectors;
            for (int v = 0; v < rivals.count; ++v) {
                const std::uint32_t rule = predict<I>(rivals.list[v], a[row], b[col], decode(result, before[i]));
                if (rule == card[i]) continue;
                if (((rule | card[i]) & ((1u << (result.bits - 1)) - 1)) == 0) {
                    ++tally.zero_signs[v];
                    continue;
                }
                ++tally.mismatches[v];
                Examples& all = examples[blockIdx.y];
                if (v != 0 || atomicAdd(&all.met, 0) >= max_examples) continue;
                const int place = atomicAdd(&all.met, 1);
                if (place < max_examples) {
                    Example& example = all.list[place];
                    example.c = before[i];
                    example.card = card[i];
                    example.rule = rule;
                    for (int w = 0; w < words; ++w) {
                        example.a[w] = a[row][w];
                        example.b[w] = b[col][w];
                    }
                }
            }
        }
        __syncthreads();
    }
    Tally& total = tallies[blockIdx.y];
    atomicAdd(&total.vectors, tally.vectors);
    for (int v = 0; v < rivals.count; ++v) {
        atomicAdd(&total.mismatches[v], tally.mismatches[v]);
        atomicAdd(&total.zero_signs[v], tally.zero_signs[v]);
    }
}

template <class I>
MatrixFinding put(const Rivals& rivals, const RandomStream& stream, int tiles) {
    MatrixFinding found{std::vector<Tally>(pattern_count), std::vector<Examples>(pattern_count)};
    const Cleared<Tally> tallies(pattern_count);
    const Cleared<Examples> examples(pattern_count);
    probe<I><<<dim3(tiles < 1024 ? tiles : 1024, pattern_count), 128>>>(stream, rivals, tiles, tallies.data(),
                                                                        examples.data());
    check_cuda(cudaGetLastError(), "starting the kernel");
    check_cuda(cudaDeviceSynchronize(), "running the kernel");
    tallies.fetch(found.tallies.data());
    examples.fetch(found.examples.data());
    return found;
}

/// Of the instructions of mma.sync that compute capability 8.0 has, in matrix_mma.cu.
MatrixFinding put_mma(MatrixInstruction instruction, const Rivals& rivals, const RandomStream& stream, int tiles);

}  // namespace faultline::agreement
