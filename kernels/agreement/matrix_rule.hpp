// SPDX-License-Identifier: Apache-2.0
// A card's matrix instructions beside lib/tensor_core's rule, bit for bit, on random and targeted inputs: what the rule says of
// them is computed on the same card by fused::add. In a build without CUDA the function is there and says so.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <faultline/agreement/agreement.hpp>
#include <faultline/base/host_device.hpp>
#include <faultline/random/random_stream.hpp>
#include <faultline/tensor_core/fused_add.hpp>

namespace faultline::agreement {

constexpr int words = 8;  // of 4 bytes in a row of A and a column of B
constexpr int max_rivals = 12;
constexpr int max_examples = 6;  // of each pattern

/// What a tile's numbers look like.
enum class Pattern : int {
    any_bits,     ///< every encoding alike, NaN and infinities included
    finite_bits,  ///< every finite encoding alike
    attention,    ///< exponents within a few of each other, as in real tiles
    wide,         ///< exponents spread over 40 (or all that the format has)
    cancelling,   ///< the second half of k undoes the first but for one small product; or C undoes the first product
    subnormals,   ///< half the operands subnormal, their partners large
    zeros,        ///< three operands of four are zero, their partners large, the rest small
    c_dominates,  ///< C above every product
    c_tiny,       ///< C below every product: subnormal, zero, or up to 2^40 smaller
    range_ends,   ///< sums near the overflow and near the underflow of the result
    specials,     ///< a few infinities and NaN among ordinary numbers
    underflow,  ///< products between 2^-165 and 2^-115, C zero or subnormal: where a zero C has a say in the alignment
    payloads,   ///< NaN with few payload bits, of which tf32 may read none, among ordinary numbers and zeros
    half_ties,  ///< sums beside odd multiples of 2^-25, half of fp16's smallest number, most of C zero
    count
};
constexpr int pattern_count = static_cast<int>(Pattern::count);

inline const char* name(Pattern p) {
    constexpr const char* names[] = {"any_bits",  "finite",    "attention",  "wide",     "cancel",
                                     "subnormal", "zeros",     "c_dominant", "c_tiny",   "ranges",
                                     "specials",  "underflow", "payloads",   "half_ties"};
    return names[static_cast<int>(p)];
}

/// How many times the usual number of tiles: more where the first run on a card found the rule wrong.
FAULTLINE_HD constexpr int weight(Pattern p) { return p >= Pattern::underflow || p == Pattern::range_ends ? 4 : 1; }

/// Order in which one instruction's products enter successive fused adds of unit.terms.
enum class Split { in_order, low_pairs_first };

/// Where C enters: the first fused add, or an fp32 addition (nearest even) after the last, which began from zero.
enum class Start { in_first, added_last };

struct Rival {
    static constexpr int of_the_unit = 1000;  // fused::zero_exponent
    MatrixUnit unit;
    Split split = Split::in_order;
    Start start = Start::in_first;
    int zero_exponent = of_the_unit;  ///< where a C of zero stands, -200 or more
};

struct Tally {
    unsigned long long vectors;
    unsigned long long mismatches[max_rivals];
    unsigned long long zero_signs[max_rivals];  // +0 against -0, counted apart from mismatches
};

/// One mismatch of the first rival.
struct Example {
    std::uint32_t c, card, rule;
    std::uint32_t a[words], b[words];
};

/// The first few of one pattern.
struct Examples {
    int met;  // stops at max_examples + the threads that looked at once
    Example list[max_examples];
};

/// The instructions, by wgmma on compute capability 9.0 alone; of fp8 by mma from 8.9 on.
enum class MatrixInstruction : unsigned char {
    mma_bf16,
    mma_fp16,
    mma_fp16_half,  ///< fp16 accumulator, as all with _half
    mma_tf32,
    wgmma_bf16,
    wgmma_fp16,
    wgmma_fp16_half,
    wgmma_tf32,
    wgmma_e4m3,
    wgmma_e5m2,
    wgmma_e4m3_half,
    wgmma_e5m2_half,
    mma_e4m3,
    mma_e5m2
};

/// By pattern.
struct MatrixFinding {
    std::vector<Tally> tallies;
    std::vector<Examples> examples;
};

/// Puts `tiles` tiles of 512 dot products of each pattern (of some four times as many: weight()) through the instruction on the
/// device in use, and through each rival; stream: what they are drawn from. WorkError where the device fails or has not the
/// instruction.
[[nodiscard]] MatrixFinding put_to_card(MatrixInstruction instruction, std::span<const Rival> rivals,
                                        const RandomStream& stream, int tiles);

/// An instruction with the rule that lib/tensor_core has for it.
struct NamedInstruction {
    MatrixInstruction instruction;
    std::string name;          ///< "wgmma bf16"
    std::string accumulation;  ///< find_accumulation's
};
/// Those that a card of this compute capability (90: 9.0) has, and a rule for: none beyond 9.0.
[[nodiscard]] std::vector<NamedInstruction> instructions_with_rules(int capability);

/// Some 850,000 dot products of every pattern (tiles = 64) through the instruction and its rule; signs of zero count.
[[nodiscard]] Agreement check_rule(const NamedInstruction& named, std::uint64_t seed, int tiles = 64);

}  // namespace faultline::agreement
