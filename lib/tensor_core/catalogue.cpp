// SPDX-License-Identifier: Apache-2.0
// The accumulations that have names.
#include <array>
#include <ostream>
#include <string>

#include <faultline/base/error.hpp>
#include <faultline/tensor_core/accumulate.hpp>

namespace faultline {
namespace {

constexpr std::string_view model = "arXiv:2511.10909 (MMA-Sim)";
constexpr std::string_view hopper =
    "arXiv:2511.10909 (MMA-Sim); measured on an NVIDIA H200, docs/results/tensor-core-rule.md";
constexpr std::string_view blackwell = "arXiv:2511.10909 (MMA-Sim); DeepGEMM issue 176";
constexpr std::string_view ieee = "IEEE 754";

// Operand formats: smallest normal exponent, and the fraction bits an input is cut to (tf32 is read from an fp32 register).
struct Input {
    int min_exponent;
    int input_fraction_bits = 0;
};
constexpr Input fp16{-14}, bf16{-126}, tf32{-126, 10}, e4m3{-6}, e5m2{-14};

constexpr Accumulation fused(int terms, int fraction_bits, Input in, OutputFormat output = OutputFormat::f32_rz) {
    return {Accumulation::Kind::fused,
            {terms, fraction_bits, output, in.min_exponent, in.min_exponent, in.input_fraction_bits}};
}
constexpr Accumulation plain(Accumulation::Kind kind) { return {kind, {}}; }

using enum OutputFormat;
using Kind = Accumulation::Kind;

constexpr std::array table = std::to_array<NamedAccumulation>({
    {"exact", plain(Kind::exact), "binary64, in the order of k", ieee},
    {"fp32-sequential", plain(Kind::sequential), "fp32 multiply, then fp32 add, in the order of k", ieee},
    {"fp32-fma", plain(Kind::fma), "fp32 fused multiply-add, in the order of k", ieee},
    {"fp32-pairwise", plain(Kind::pairwise), "fp32 products added as a tree of neighbours", ieee},

    {"volta-mma-fp16", fused(4, 23, fp16), "mma.m8n8k4", model},
    {"volta-mma-fp16-f16acc", fused(4, 23, fp16, f16_rne), "mma.m8n8k4, fp16 accumulator", model},
    {"turing-mma-fp16", fused(8, 24, fp16), "mma.m16n8k8", model},
    {"turing-mma-fp16-f16acc", fused(8, 24, fp16, f16_rne), "mma.m16n8k8, fp16 accumulator", model},

    {"ampere-mma-fp16", fused(8, 24, fp16), "mma.m16n8k16 as two halves of k", model},
    {"ampere-mma-fp16-f16acc", fused(8, 24, fp16, f16_rne), "mma.m16n8k16 as two halves of k, fp16 accumulator", model},
    {"ampere-mma-bf16", fused(8, 24, bf16), "mma.m16n8k16 as two halves of k", model},
    {"ampere-mma-tf32", fused(4, 24, tf32), "mma.m16n8k8 as two halves of k", model},

    {"ada-mma-fp16", fused(8, 24, fp16), "mma.m16n8k16 as two halves of k", model},
    {"ada-mma-fp16-f16acc", fused(8, 24, fp16, f16_rne), "mma.m16n8k16 as two halves of k, fp16 accumulator", model},
    {"ada-mma-bf16", fused(8, 24, bf16), "mma.m16n8k16 as two halves of k", model},
    {"ada-mma-tf32", fused(4, 24, tf32), "mma.m16n8k8 as two halves of k", model},
    {"ada-mma-e4m3", fused(16, 13, e4m3, e8m13_rz), "mma.m16n8k32 as two halves of k, 13 fraction bits", model},
    {"ada-mma-e5m2", fused(16, 13, e5m2, e8m13_rz), "mma.m16n8k32 as two halves of k, 13 fraction bits", model},
    {"ada-mma-e4m3-f16acc", fused(16, 13, e4m3, f16_rne), "mma.m16n8k32 as two halves of k, fp16 accumulator", model},
    {"ada-mma-e5m2-f16acc", fused(16, 13, e5m2, f16_rne), "mma.m16n8k32 as two halves of k, fp16 accumulator", model},

    {"hopper-mma-fp16", fused(16, 25, fp16), "mma.m16n8k16", hopper},
    {"hopper-mma-fp16-f16acc", fused(16, 25, fp16, f16_rne), "mma.m16n8k16, fp16 accumulator", hopper},
    {"hopper-mma-bf16", fused(16, 25, bf16), "mma.m16n8k16", hopper},
    {"hopper-mma-tf32", fused(8, 25, tf32), "mma.m16n8k8", hopper},
    {"hopper-wgmma-fp16", fused(16, 25, fp16), "wgmma.m64nNk16", hopper},
    {"hopper-wgmma-fp16-f16acc", fused(16, 25, fp16, f16_rne), "wgmma.m64nNk16, fp16 accumulator", hopper},
    {"hopper-wgmma-bf16", fused(16, 25, bf16), "wgmma.m64nNk16", hopper},
    {"hopper-wgmma-tf32", fused(8, 25, tf32), "wgmma.m64nNk8", hopper},
    {"hopper-wgmma-e4m3", fused(32, 13, e4m3, e8m13_rz), "wgmma.m64nNk32, 13 fraction bits", hopper},
    {"hopper-wgmma-e5m2", fused(32, 13, e5m2, e8m13_rz), "wgmma.m64nNk32, 13 fraction bits", hopper},
    {"hopper-wgmma-e4m3-f16acc", fused(32, 13, e4m3, f16_rne), "wgmma.m64nNk32, fp16 accumulator", hopper},
    {"hopper-wgmma-e5m2-f16acc", fused(32, 13, e5m2, f16_rne), "wgmma.m64nNk32, fp16 accumulator", hopper},

    {"blackwell-mma-fp16", fused(16, 25, fp16), "mma.m16n8k16", model},
    {"blackwell-mma-fp16-f16acc", fused(16, 25, fp16, f16_rne), "mma.m16n8k16, fp16 accumulator", model},
    {"blackwell-mma-bf16", fused(16, 25, bf16), "mma.m16n8k16", model},
    {"blackwell-mma-tf32", fused(8, 25, tf32), "mma.m16n8k8", model},
    {"blackwell-tcgen05-fp16", fused(16, 25, fp16), "tcgen05.mma kind::f16, k = 16", blackwell},
    {"blackwell-tcgen05-fp16-f16acc", fused(16, 25, fp16, f16_rne), "tcgen05.mma kind::f16, fp16 accumulator", model},
    {"blackwell-tcgen05-bf16", fused(16, 25, bf16), "tcgen05.mma kind::f16, k = 16", blackwell},
    {"blackwell-tcgen05-tf32", fused(8, 25, tf32), "tcgen05.mma kind::tf32, k = 8", blackwell},
    {"blackwell-tcgen05-e4m3", fused(32, 25, e4m3), "tcgen05.mma kind::f8f6f4, k = 32", blackwell},
    {"blackwell-tcgen05-e5m2", fused(32, 25, e5m2), "tcgen05.mma kind::f8f6f4, k = 32", blackwell},
    {"rtx-blackwell-mma-e4m3", fused(32, 25, e4m3), "mma.m16n8k32 kind::f8f6f4", model},
    {"rtx-blackwell-mma-e5m2", fused(32, 25, e5m2), "mma.m16n8k32 kind::f8f6f4", model},
});

std::string_view spelling(ZeroOperand zero) {
    switch (zero) {
        case ZeroOperand::ignored:
            return "ignored";
        case ZeroOperand::at_minimum:
            return "at_minimum";
        case ZeroOperand::at_fp32_minimum:
            return "at_fp32_minimum";
    }
    return "?";
}

std::string_view spelling(OutputFormat output) {
    switch (output) {
        case f32_rz:
            return "f32_rz";
        case e8m13_rz:
            return "e8m13_rz";
        case f16_rne:
            return "f16_rne";
    }
    return "?";
}

void require(bool holds, std::string_view field, int value, std::string_view expected) {
    if (holds) return;
    throw RequestError("matrix unit: " + std::string(field) + " is " + std::to_string(value) + ": expected " +
                       std::string(expected));
}

}  // namespace

std::span<const NamedAccumulation> accumulations() { return table; }

std::optional<Accumulation> find_accumulation(std::string_view wanted) {
    for (const NamedAccumulation& entry : table)
        if (entry.name == wanted) return entry.accumulation;
    return std::nullopt;
}

std::string name(const Accumulation& accumulation) {
    for (const NamedAccumulation& entry : table) {
        const bool same_kind = entry.accumulation.kind == accumulation.kind;
        if (same_kind && (accumulation.kind != Kind::fused || entry.accumulation.unit == accumulation.unit))
            return std::string(entry.name);
    }
    const MatrixUnit& u = accumulation.unit;
    return "fused(terms=" + std::to_string(u.terms) + ", fraction_bits=" + std::to_string(u.fraction_bits) +
           ", output=" + std::string(spelling(u.output)) + ", a_min=" + std::to_string(u.a_min_exponent) +
           ", b_min=" + std::to_string(u.b_min_exponent) + ", input_bits=" + std::to_string(u.input_fraction_bits) +
           ", zero=" + std::string(spelling(u.zero)) + ")";
}

std::ostream& operator<<(std::ostream& out, const Accumulation& accumulation) { return out << name(accumulation); }

void validate(const Accumulation& accumulation) {
    if (accumulation.kind != Kind::fused) return;
    const MatrixUnit& u = accumulation.unit;
    // 1024 terms below 2^42 and the accumulator stay below 2^53: sums are exact in binary64 and in int64.
    require(u.terms >= 1 && u.terms <= 1024, "terms", u.terms, "1 to 1024 products per fused add");
    require(u.fraction_bits >= 1 && u.fraction_bits <= 40, "fraction_bits", u.fraction_bits, "1 to 40");
    require(u.a_min_exponent >= -1022 && u.a_min_exponent <= 0, "a_min_exponent", u.a_min_exponent, "-1022 to 0");
    require(u.b_min_exponent >= -1022 && u.b_min_exponent <= 0, "b_min_exponent", u.b_min_exponent, "-1022 to 0");
    require(u.input_fraction_bits >= 0 && u.input_fraction_bits <= 52, "input_fraction_bits", u.input_fraction_bits,
            "0 (operands as they are) to 52");
}

}  // namespace faultline
