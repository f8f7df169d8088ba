// SPDX-License-Identifier: Apache-2.0
#include <faultline/plan/storage.hpp>

#include <algorithm>
#include <array>

namespace faultline {
namespace {

/// A unit of bf16 inputs as it is with fp16 inputs: what tells the two is the range and the bits of a and b
/// (lib/tensor_core/catalogue.cpp: one row each, the same terms and fraction bits).
void take_fp16(Accumulation& accumulation) {
    static const MatrixUnit from = find_accumulation("hopper-mma-bf16")->unit,
                            to = find_accumulation("hopper-mma-fp16")->unit;
    MatrixUnit& unit = accumulation.unit;
    if (accumulation.kind != Accumulation::Kind::fused || unit.a_min_exponent != from.a_min_exponent ||
        unit.b_min_exponent != from.b_min_exponent || unit.input_fraction_bits != from.input_fraction_bits)
        return;
    unit.a_min_exponent = to.a_min_exponent;
    unit.b_min_exponent = to.b_min_exponent;
    unit.input_fraction_bits = to.input_fraction_bits;
}

}  // namespace

std::string suffix(const StorageFormats& storage) {
    return std::string(storage.fp16 ? "-fp16" : "") + (storage.fp32_outputs ? "-fp32-out" : "");
}

RoundingPlan stored_as(const RoundingPlan& plan, const StorageFormats& storage) {
    constexpr std::array outputs{Site::o_cast, Site::dq_cast, Site::dk_cast, Site::dv_cast, Site::kv_group_reduce};
    RoundingPlan stored = plan;
    for (const Site site : plan.rounding_sites()) {
        Rule rule = plan[site];
        if (storage.fp16) {
            if (rule.format == bf16) rule.format = fp16;
            take_fp16(rule.accumulation);
        }
        if (storage.fp32_outputs && std::find(outputs.begin(), outputs.end(), site) != outputs.end() &&
            !is_exact(rule.format) && rule.format.precision < fp32.precision) {
            rule.format = fp32;
            rule.rounding = Rounding::nearest_even;
        }
        stored.set(site, rule);
    }
    if (stored.same_numerics(plan)) return plan;
    // Of two only what changes something is named: a kernel with fp32 registers and fp8 inputs has no bf16.
    const bool by_fp16 = storage.fp16 && !stored_as(plan, {false, storage.fp32_outputs}).same_numerics(stored),
               by_outputs = storage.fp32_outputs && !stored_as(plan, {storage.fp16, false}).same_numerics(stored);
    stored.name += suffix({by_fp16, by_outputs});
    if (by_fp16) stored.description += "; fp16 where it has bf16";
    if (by_outputs) stored.description += "; outputs in fp32";
    return stored;
}

}  // namespace faultline
