// SPDX-License-Identifier: Apache-2.0
// Puts lib/tensor_core's rule to a real card. For every matrix instruction of Hopper, many millions of dot products from
// random and targeted inputs go through the tensor core and, on the same device, through fused::add; results are compared
// bit for bit. Beside the library's rule stand rivals that differ in one respect (one bit more or fewer, the zeros, the
// split of k, where a zero C stands): that those fail shows that the inputs can tell. Needs compute capability 9.0 (wgmma:
// sm_90a).
//
//   nvcc -std=c++20 -O3 -gencode=arch=compute_90a,code=sm_90a -I BUILD/include
//        kernels/cuda/hardware_probe/hardware_probe.cu lib/tensor_core/catalogue.cpp -o hardware_probe
//   ./hardware_probe [tiles per instruction and pattern, default 8192; a tile is 512 dot products, and
//                    some patterns take four times as many] [seed, default 1]
// Exit status: 0 all agree, 1 the library's rule disagrees with the card somewhere, 2 no such card.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include <cuda_runtime.h>

#include <faultline/tensor_core/accumulate.hpp>
#include <faultline/tensor_core/fused_add.hpp>

#include "inputs.cuh"
#include "instructions.cuh"

namespace faultline::probe {
namespace {

constexpr int words = 8;  // of 4 bytes in a row of A and a column of B
constexpr int rows = 64, columns = 8;
constexpr int max_rivals = 12;
constexpr int max_examples = 6;  // of each pattern

/// Order in which one instruction's products enter successive fused adds of unit.terms.
enum class Split { in_order, low_pairs_first };

/// Where C enters: the first fused add, or an fp32 addition (nearest even) after the last, which began from zero.
enum class Start { in_first, added_last };

struct Rival {
    MatrixUnit unit;
    Split split = Split::in_order;
    Start start = Start::in_first;
    int zero_exponent = zero_accumulator_exponent;
};

struct Rivals {
    Rival list[max_rivals];
    int count;
};

struct Tally {
    unsigned long long vectors;
    unsigned long long mismatches[max_rivals];
    unsigned long long zero_signs[max_rivals];  // +0 against -0, counted apart from mismatches
};

/// One mismatch of the first rival, the library's rule.
struct Example {
    std::uint32_t c, card, rule;
    std::uint32_t a[words], b[words];
};

/// The first few of one pattern.
struct Examples {
    int met;  // stops at max_examples + the threads that looked at once
    Example list[max_examples];
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
    for (int first = 0; first < depth; first += rival.unit.terms) {
        const int count = min(rival.unit.terms, depth - first);
        c = fused::add(
            rival.unit, [&](int i) { return operand<I>(a, position(first + i)); },
            [&](int i) { return operand<I>(b, position(first + i)); }, count, c, rival.zero_exponent);
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
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
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

void check(cudaError_t status) {
    if (status == cudaSuccess) return;
    std::fprintf(stderr, "hardware_probe: CUDA: %s\n", cudaGetErrorString(status));
    std::exit(2);
}

struct NamedRival {
    std::string name;
    Rival rival;
};

std::vector<NamedRival> rivals_of(const MatrixUnit& unit) {
    const auto with = [&](auto change) {
        Rival r{unit};
        change(r.unit);
        return r;
    };
    return {{"the library's rule", {unit}},
            {"one fraction bit more", with([](MatrixUnit& u) { ++u.fraction_bits; })},
            {"one fraction bit fewer", with([](MatrixUnit& u) { --u.fraction_bits; })},
            {"k in two halves", with([](MatrixUnit& u) { u.terms /= 2; })},
            {"zeros at their format's minimum", with([](MatrixUnit& u) { u.zero = ZeroOperand::at_minimum; })},
            {"zeros at fp32's minimum", with([](MatrixUnit& u) { u.zero = ZeroOperand::at_fp32_minimum; })},
            {"zero C at -126", {unit, Split::in_order, Start::in_first, -126}},
            {"zero C at -132", {unit, Split::in_order, Start::in_first, -132}},
            {"zero C at -134", {unit, Split::in_order, Start::in_first, -134}},
            {"zero C takes no part", {unit, Split::in_order, Start::in_first, -200}}};
}

/// mma.sync on fp8 is compiled for Hopper as conversions to fp16, two fp16 instructions and an addition (cutlass issue
/// 1986). What nvcc 13.0 makes of it, read from the machine code: HMMA.16816 of the lower two bytes of every register,
/// beginning from zero; HMMA.16816 of the upper two, on its result; FADD of C. The other rivals are guesses it beats.
std::vector<NamedRival> fp8_mma_rivals() {
    const MatrixUnit half = find_accumulation("hopper-mma-fp16")->unit;
    return {{"low pairs, high pairs, then C", {half, Split::low_pairs_first, Start::added_last}},
            {"halves of k, then C", {half, Split::in_order, Start::added_last}},
            {"two fp16 adds, halves of k", {half}},
            {"two fp16 adds, low pairs first", {half, Split::low_pairs_first}},
            {"one add of 32, e4m3", {find_accumulation("blackwell-tcgen05-e4m3")->unit}},
            {"one add of 32, e5m2", {find_accumulation("blackwell-tcgen05-e5m2")->unit}},
            {"e8m13, 13 bits, e4m3", {find_accumulation("hopper-wgmma-e4m3")->unit}}};
}

void print(Pattern p, const Example& e) {
    std::printf("  e.g. %s: c=%08x card=%08x rule=%08x\n    a=", name(p), e.c, e.card, e.rule);
    for (const std::uint32_t w : e.a) std::printf("%08x ", w);
    std::printf("\n    b=");
    for (const std::uint32_t w : e.b) std::printf("%08x ", w);
    std::printf("\n");
}

/// One instruction: its table, and whether the library's rule held everywhere.
template <class I>
bool run(const char* instruction, std::uint64_t seed, int id, int tiles, const std::vector<NamedRival>& named) {
    Rivals rivals{};
    for (const NamedRival& r : named) rivals.list[rivals.count++] = r.rival;
    std::vector<Tally> tallies(pattern_count);
    std::vector<Examples> examples(pattern_count);
    const std::size_t tally_bytes = sizeof(Tally) * pattern_count, example_bytes = sizeof(Examples) * pattern_count;
    Tally* device_tallies;
    Examples* device_examples;
    check(cudaMalloc(&device_tallies, tally_bytes));
    check(cudaMalloc(&device_examples, example_bytes));
    check(cudaMemset(device_tallies, 0, tally_bytes));
    check(cudaMemset(device_examples, 0, example_bytes));
    probe<I><<<dim3(tiles < 1024 ? tiles : 1024, pattern_count), 128>>>(RandomStream(seed, id), rivals, tiles,
                                                                        device_tallies, device_examples);
    check(cudaGetLastError());
    check(cudaDeviceSynchronize());
    check(cudaMemcpy(tallies.data(), device_tallies, tally_bytes, cudaMemcpyDeviceToHost));
    check(cudaMemcpy(examples.data(), device_examples, example_bytes, cudaMemcpyDeviceToHost));
    check(cudaFree(device_tallies));
    check(cudaFree(device_examples));

    unsigned long long vectors = 0, bad = 0;
    for (int p = 0; p < pattern_count; ++p) {
        vectors += tallies[p].vectors;
        bad += tallies[p].mismatches[0] + tallies[p].zero_signs[0];
    }
    std::printf("\n%s: %llu dot products, %llu differ\n%-33s", instruction, vectors, bad, "mismatches / signs of zero");
    for (int p = 0; p < pattern_count; ++p) std::printf(" %14s", name(static_cast<Pattern>(p)));
    std::printf("\n");
    for (int v = 0; v < rivals.count; ++v) {
        std::printf("%-33s", named[v].name.c_str());
        for (int p = 0; p < pattern_count; ++p) {
            const std::string zeros = tallies[p].zero_signs[v] ? "/" + std::to_string(tallies[p].zero_signs[v]) : "";
            std::printf(" %14s", (std::to_string(tallies[p].mismatches[v]) + zeros).c_str());
        }
        std::printf("\n");
    }
    for (int p = 0; p < pattern_count; ++p)
        for (int n = 0; n < std::min(examples[p].met, max_examples); ++n)
            print(static_cast<Pattern>(p), examples[p].list[n]);
    std::fflush(stdout);
    return bad == 0;
}

}  // namespace
}  // namespace faultline::probe

int main(int argc, char** argv) {
    using namespace faultline;
    using namespace faultline::probe;
    const int tiles = argc > 1 ? std::atoi(argv[1]) : 8192;
    const std::uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 0) : 1;
    cudaDeviceProp device{};
    if (cudaGetDeviceProperties(&device, 0) != cudaSuccess || device.major != 9) {
        std::fprintf(stderr, "hardware_probe: no device of compute capability 9.0\n");
        return 2;
    }
    if (tiles < 1) {
        std::fprintf(stderr, "hardware_probe: tiles is %s: expected a positive number\n", argv[1]);
        return 2;
    }
    std::printf("%s, compute capability %d.%d\n", device.name, device.major, device.minor);
    int id = 0;
    bool held = true;
    const auto unit = [](const char* wanted) { return rivals_of(find_accumulation(wanted)->unit); };
    held &= run<MmaBf16>("hopper-mma-bf16", seed, id++, tiles, unit("hopper-mma-bf16"));
    held &= run<MmaFp16>("hopper-mma-fp16", seed, id++, tiles, unit("hopper-mma-fp16"));
    held &= run<MmaFp16Half>("hopper-mma-fp16-f16acc", seed, id++, tiles, unit("hopper-mma-fp16-f16acc"));
    held &= run<MmaTf32>("hopper-mma-tf32", seed, id++, tiles, unit("hopper-mma-tf32"));
    held &= run<WgmmaBf16>("hopper-wgmma-bf16", seed, id++, tiles, unit("hopper-wgmma-bf16"));
    held &= run<WgmmaFp16>("hopper-wgmma-fp16", seed, id++, tiles, unit("hopper-wgmma-fp16"));
    held &= run<WgmmaFp16Half>("hopper-wgmma-fp16-f16acc", seed, id++, tiles, unit("hopper-wgmma-fp16-f16acc"));
    held &= run<WgmmaTf32>("hopper-wgmma-tf32", seed, id++, tiles, unit("hopper-wgmma-tf32"));
    held &= run<WgmmaE4m3>("hopper-wgmma-e4m3", seed, id++, tiles, unit("hopper-wgmma-e4m3"));
    held &= run<WgmmaE5m2>("hopper-wgmma-e5m2", seed, id++, tiles, unit("hopper-wgmma-e5m2"));
    held &= run<WgmmaE4m3Half>("hopper-wgmma-e4m3-f16acc", seed, id++, tiles, unit("hopper-wgmma-e4m3-f16acc"));
    held &= run<WgmmaE5m2Half>("hopper-wgmma-e5m2-f16acc", seed, id++, tiles, unit("hopper-wgmma-e5m2-f16acc"));
    // Not in the library's list: no unit of its own stands behind these on Hopper.
    run<MmaE4m3>("mma.m16n8k32.e4m3 on Hopper", seed, id++, tiles, fp8_mma_rivals());
    run<MmaE5m2>("mma.m16n8k32.e5m2 on Hopper", seed, id++, tiles, fp8_mma_rivals());
    std::printf("\n%s\n",
                held ? "The library's rule holds on this card." : "The library's rule does NOT hold on this card.");
    return held ? 0 : 1;
}
