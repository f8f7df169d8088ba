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

constexpr std::array<std::string_view, 4> output_names{"o", "dq", "dk", "dv"};
constexpr std::array output_casts{Site::o_cast, Site::dq_cast, Site::dk_cast, Site::dv_cast};

struct StoredType {
    OutputStorage storage;
    std::string_view name, long_name;
    const Format* format;
};
constexpr std::array stored_types{StoredType{OutputStorage::bf16, "bf16", "bfloat16", &bf16},
                                  StoredType{OutputStorage::fp16, "fp16", "float16", &fp16},
                                  StoredType{OutputStorage::fp32, "fp32", "float32", &fp32}};
const StoredType* type_of(OutputStorage storage) {
    for (const StoredType& type : stored_types)
        if (type.storage == storage) return &type;
    return nullptr;
}

/// What an output cast is where the file has the output in `wanted`.
Rule stored_in(Rule rule, const Format& wanted) {
    if (is_exact(rule.format)) return rule;
    const bool wider = wanted == fp32 && rule.format.precision < fp32.precision;
    const bool other = wanted != fp32 && (rule.format == bf16 || rule.format == fp16);
    if (rule.format == wanted || !(wider || other)) return rule;
    rule.format = wanted;
    if (wider) rule.rounding = Rounding::nearest_even;
    return rule;
}

/// stored_as(), under the plan's own name.
RoundingPlan rounded_as(const RoundingPlan& plan, const StorageFormats& storage) {
    RoundingPlan stored = plan;
    if (storage.fp16)
        for (const Site site : plan.rounding_sites()) {
            Rule rule = plan[site];
            if (rule.format == bf16) rule.format = fp16;
            take_fp16(rule.accumulation);
            stored.set(site, rule);
        }
    for (std::size_t o = 0; o < output_casts.size(); ++o)
        if (const StoredType* type = type_of(storage.outputs[o]); type != nullptr)
            stored.set(output_casts[o], stored_in(stored[output_casts[o]], *type->format));
    // What grouped heads' dk and dv are rounded to last, one rule of both.
    if (storage.outputs[2] == OutputStorage::fp32 || storage.outputs[3] == OutputStorage::fp32)
        stored.set(Site::kv_group_reduce, stored_in(stored[Site::kv_group_reduce], fp32));
    else if (const StoredType* type = type_of(storage.outputs[2]);
             type != nullptr && storage.outputs[2] == storage.outputs[3])
        stored.set(Site::kv_group_reduce, stored_in(stored[Site::kv_group_reduce], *type->format));
    return stored;
}

}  // namespace

StorageFormats StorageFormats::wide(bool fp16) {
    StorageFormats storage{fp16, {}};
    storage.outputs.fill(OutputStorage::fp32);
    return storage;
}

std::string suffix(const StorageFormats& storage) {
    std::string out = storage.fp16 ? "-fp16" : "";
    if (storage.fp32_outputs()) return out + "-fp32-out";
    for (std::size_t o = 0; o < output_names.size(); ++o)
        if (const StoredType* type = type_of(storage.outputs[o]); type != nullptr)
            out.append("-").append(type->name).append("-").append(output_names[o]);
    return out;
}

std::optional<StorageFormats> find_storage(std::string_view text) {
    const std::string whole(text);
    for (const bool fp16 : {true, false}) {
        std::string rest = whole;
        if (fp16 && !rest.starts_with("-fp16")) continue;
        if (fp16) rest.erase(0, 5);
        if (rest == "-fp32-out") return StorageFormats::wide(fp16);
        StorageFormats storage{fp16, {}};
        for (std::size_t o = 0; o < output_names.size(); ++o)
            for (const StoredType& type : stored_types) {
                const std::string part = std::string("-").append(type.name).append("-").append(output_names[o]);
                // "-fp32-d" is no output: a name ends, or goes on with "-".
                if (!rest.starts_with(part) || (rest.size() > part.size() && rest[part.size()] != '-')) continue;
                storage.outputs[o] = type.storage;
                rest.erase(0, part.size());
                break;
            }
        if (rest.empty() && storage != StorageFormats{}) return storage;
    }
    return std::nullopt;
}

std::string described(const StorageFormats& storage) {
    std::string out = storage.fp16 ? "its tensors are float16" : "";
    if (storage.fp32_outputs()) return out.append(out.empty() ? "its outputs are float32" : ", its outputs float32");
    for (std::size_t o = 0; o < output_names.size(); ++o)
        if (const StoredType* type = type_of(storage.outputs[o]); type != nullptr)
            out.append(out.empty() ? "its " : ", its ").append(output_names[o]).append(" is ").append(type->long_name);
    return out;
}

RoundingPlan stored_as(const RoundingPlan& plan, const StorageFormats& storage) {
    RoundingPlan stored = rounded_as(plan, storage);
    if (stored.same_numerics(plan)) return plan;
    // Only what changes something is named: a kernel with fp32 registers and fp8 inputs has no bf16.
    const auto same = [&](const StorageFormats& other) { return rounded_as(plan, other).same_numerics(stored); };
    StorageFormats named = storage;
    if (named.fp16 && same({false, named.outputs})) named.fp16 = false;
    if (same({named.fp16, {}})) named.outputs = {};
    for (std::size_t o = 0; o < output_casts.size() && !named.fp32_outputs(); ++o) {
        StorageFormats without = named;
        without.outputs[o] = OutputStorage::tensors;
        if (same(without)) named = without;
    }
    stored.name += suffix(named);
    if (named.fp16) stored.description += "; fp16 where it has bf16";
    if (named.fp32_outputs())
        stored.description += "; outputs in fp32";
    else if (const std::string outputs = described({false, named.outputs}); !outputs.empty())
        stored.description += "; " + outputs;
    return stored;
}

}  // namespace faultline
