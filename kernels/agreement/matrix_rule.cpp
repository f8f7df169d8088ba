// SPDX-License-Identifier: Apache-2.0
#include <faultline/agreement/matrix_rule.hpp>

#include <chrono>
#include <optional>

#include <faultline/base/error.hpp>
#include <faultline/tensor_core/accumulate.hpp>

namespace faultline::agreement {

std::vector<NamedInstruction> instructions_with_rules(int capability) {
    using enum MatrixInstruction;
    if (capability < 80 || capability > 90) return {};
    const std::string card = capability == 90 ? "hopper" : capability == 89 ? "ada" : "ampere";
    std::vector<NamedInstruction> all;
    const auto add = [&](MatrixInstruction instruction, const char* unit, const char* input, const char* said) {
        all.push_back({instruction, std::string(unit) + " " + said, card + "-" + unit + "-" + input});
    };
    add(mma_bf16, "mma", "bf16", "bf16");
    add(mma_fp16, "mma", "fp16", "fp16");
    add(mma_fp16_half, "mma", "fp16-f16acc", "fp16 to fp16");
    add(mma_tf32, "mma", "tf32", "tf32");
    if (capability != 90) return all;
    add(wgmma_bf16, "wgmma", "bf16", "bf16");
    add(wgmma_fp16, "wgmma", "fp16", "fp16");
    add(wgmma_fp16_half, "wgmma", "fp16-f16acc", "fp16 to fp16");
    add(wgmma_tf32, "wgmma", "tf32", "tf32");
    add(wgmma_e4m3, "wgmma", "e4m3", "e4m3");
    add(wgmma_e5m2, "wgmma", "e5m2", "e5m2");
    add(wgmma_e4m3_half, "wgmma", "e4m3-f16acc", "e4m3 to fp16");
    add(wgmma_e5m2_half, "wgmma", "e5m2-f16acc", "e5m2 to fp16");
    return all;
}

Agreement check_rule(const NamedInstruction& named, std::uint64_t seed, int tiles) {
    const std::optional<Accumulation> rule = find_accumulation(named.accumulation);
    if (!rule) throw RequestError("agreement: no accumulation " + named.accumulation);
    const Rival own{.unit = rule->unit};
    const RandomStream stream(seed, static_cast<std::uint64_t>(named.instruction));
    const auto start = std::chrono::steady_clock::now();
    const MatrixFinding found = put_to_card(named.instruction, std::span(&own, 1), stream, tiles);
    Agreement agreement;
    agreement.name = named.name;
    agreement.device_seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    for (const Tally& tally : found.tallies) {
        agreement.elements += tally.vectors;
        agreement.differing += tally.mismatches[0] + tally.zero_signs[0];
    }
    return agreement;
}

}  // namespace faultline::agreement
