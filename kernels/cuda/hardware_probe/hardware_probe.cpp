// SPDX-License-Identifier: Apache-2.0
// Puts lib/tensor_core's rule to a real card. For every matrix instruction of Hopper, many millions of dot products from
// random and targeted inputs go through the tensor core and, on the same device, through fused::add; results are compared
// bit for bit. Beside the library's rule stand rivals that differ in one respect (one bit more or fewer, the zeros, the
// split of k, where a zero C stands): that those fail shows that the inputs can tell. Needs compute capability 9.0 (wgmma).
// faultline selftest --device cuda puts the rule alone to the card, on fewer vectors.
//
//   ninja -C build/cuda hardware_probe
//   build/cuda/kernels/cuda/hardware_probe/hardware_probe [tiles per instruction and pattern, default 8192; a tile is 512 dot
//                    products, and some patterns take four times as many] [seed, default 1]
// Exit status: 0 all agree, 1 the library's rule disagrees with the card somewhere, or there is no such card, or it fails,
// which a sentence on standard error says; 2 a wrong request.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <vector>

#include <cuda_runtime_api.h>

#include <faultline/agreement/matrix_rule.hpp>
#include <faultline/base/error.hpp>
#include <faultline/tensor_core/accumulate.hpp>

namespace faultline::agreement {
namespace {

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
    const int zero = fused::zero_exponent(unit.output);
    return {{"the library's rule", {unit}},
            {"one fraction bit more", with([](MatrixUnit& u) { ++u.fraction_bits; })},
            {"one fraction bit fewer", with([](MatrixUnit& u) { --u.fraction_bits; })},
            {"k in two halves", with([](MatrixUnit& u) { u.terms /= 2; })},
            {"zeros at their format's minimum", with([](MatrixUnit& u) { u.zero = ZeroOperand::at_minimum; })},
            {"zeros at fp32's minimum", with([](MatrixUnit& u) { u.zero = ZeroOperand::at_fp32_minimum; })},
            {"zero C at its smallest normal", {unit, Split::in_order, Start::in_first, zero + 7}},
            {"zero C one exponent higher", {unit, Split::in_order, Start::in_first, zero + 1}},
            {"zero C one exponent lower", {unit, Split::in_order, Start::in_first, zero - 1}},
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
bool run(MatrixInstruction instruction, const char* title, std::uint64_t seed, int id, int tiles,
         const std::vector<NamedRival>& named) {
    std::vector<Rival> rivals;
    for (const NamedRival& r : named) rivals.push_back(r.rival);
    const auto [tallies, examples] =
        put_to_card(instruction, rivals, RandomStream(seed, static_cast<std::uint64_t>(id)), tiles);
    unsigned long long vectors = 0, bad = 0;
    for (const Tally& tally : tallies) {
        vectors += tally.vectors;
        bad += tally.mismatches[0] + tally.zero_signs[0];
    }
    std::printf("\n%s: %llu dot products, %llu differ\n%-33s", title, vectors, bad, "mismatches / signs of zero");
    for (int p = 0; p < pattern_count; ++p) std::printf(" %14s", name(static_cast<Pattern>(p)));
    std::printf("\n");
    for (std::size_t v = 0; v < rivals.size(); ++v) {
        std::printf("%-33s", named[v].name.c_str());
        for (const Tally& tally : tallies) {
            const std::string zeros = tally.zero_signs[v] != 0 ? "/" + std::to_string(tally.zero_signs[v]) : "";
            std::printf(" %14s", (std::to_string(tally.mismatches[v]) + zeros).c_str());
        }
        std::printf("\n");
    }
    for (int p = 0; p < pattern_count; ++p)
        for (int n = 0; n < std::min(examples[static_cast<std::size_t>(p)].met, max_examples); ++n)
            print(static_cast<Pattern>(p), examples[static_cast<std::size_t>(p)].list[n]);
    std::fflush(stdout);
    return bad == 0;
}

}  // namespace
}  // namespace faultline::agreement

namespace {

int run_all(int argc, char** argv) {
    using namespace faultline;
    using namespace faultline::agreement;
    const int tiles = argc > 1 ? std::atoi(argv[1]) : 8192;
    const std::uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 0) : 1;
    if (tiles < 1) {
        std::fprintf(stderr, "hardware_probe: tiles is %s: expected a positive number\n", argv[1]);
        return 2;
    }
    cudaDeviceProp device{};
    if (cudaGetDeviceProperties(&device, 0) != cudaSuccess || device.major != 9) {
        std::fprintf(stderr, "hardware_probe: there is no device of compute capability 9.0: expected one\n");
        return 1;
    }
    std::printf("%s, compute capability %d.%d\n", device.name, device.major, device.minor);
    int id = 0;
    bool held = true;
    for (const NamedInstruction& named : instructions_with_rules(90))
        held &= run(named.instruction, named.accumulation.c_str(), seed, id++, tiles,
                    rivals_of(find_accumulation(named.accumulation)->unit));
    // Not in the library's list: no unit of its own stands behind these on Hopper.
    run(MatrixInstruction::mma_e4m3, "mma.m16n8k32.e4m3 on Hopper", seed, id++, tiles, fp8_mma_rivals());
    run(MatrixInstruction::mma_e5m2, "mma.m16n8k32.e5m2 on Hopper", seed, id++, tiles, fp8_mma_rivals());
    std::printf("\n%s\n",
                held ? "The library's rule holds on this card." : "The library's rule does NOT hold on this card.");
    return held ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
    try {
        return run_all(argc, argv);
    } catch (const std::exception& error) {
        std::fprintf(stderr, "hardware_probe: %s\n", error.what());
        return 1;
    }
}
