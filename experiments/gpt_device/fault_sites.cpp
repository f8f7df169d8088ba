// SPDX-License-Identifier: Apache-2.0
#include <faultline/gpt_device/fault_sites.hpp>

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include <faultline/base/error.hpp>
#include <faultline/injectors/apply.hpp>
#include <faultline/tensor_kernel/backward_kernel.hpp>
#include <faultline/tensor_kernel/forward_kernel.hpp>
#include <faultline/tensor_kernel/scaling.hpp>

namespace faultline::gpt {
namespace {

bool within_bf16(Format f) { return f.rounds && f.precision <= 8 && f.emax <= 127 && f.emin >= -126; }

}  // namespace

const InsideSite* inside_site(Site site, bool on_tensor_cores) {
    const auto* found = std::ranges::find(inside_sites, site, &InsideSite::site);
    return found == inside_sites.end() || !(on_tensor_cores || found->in_kernel) ? nullptr : found;
}

bool law_needs_rms(const Fault& fault) {
    return fault.law != Law::multiplicative && fault.unit == Fault::Unit::relative && !fault.by_value;
}

bool holds_operands(ModelSite site) {
    switch (site) {
        case ModelSite::layer_norm_statistics:
        case ModelSite::residual_add:
        case ModelSite::optimizer_update:
            return false;
        default:
            return true;
    }
}

bool is_cast_in_memory(Site site) {
    return site == Site::o_cast || site == Site::dq_cast || site == Site::dk_cast || site == Site::dv_cast;
}

std::vector<int> parts_at(ModelSite site) {
    if (site == ModelSite::residual_add) return {0, 1};
    return {site == ModelSite::attention_projection ? 0 : 1};
}

void expect_held_in_bf16(const Fault& fault, std::string_view what) {
    if (fault.hold == Hold::exact || !within_bf16(fault.format.value_or(bf16)))
        refuse(fault,
               fmt::format("{} stands in memory as bf16: expected hold=stochastic or nearest, and no format that "
                           "has more numbers",
                           what));
}

void expect_in_registers(const Fault& fault, Site site, const RoundingPlan& plan, int head_dim, bool is_bf16) {
    if (law_needs_rms(fault))
        refuse(
            fault,
            "is a part of a tile's rms, which the tensor cores' kernel does not know when the tile comes by: expected a size "
            "of the value (multiplicative, shape=value, ulp), or attention fast");
    const tensor_kernel::ForwardKernel forward = tensor_kernel::supported(plan, head_dim, true).kernel;
    const tensor_kernel::BackwardKernel backward = tensor_kernel::supported_backward(plan, head_dim, true).kernel;
    const bool wgmma =
        inside_site(site, true)->backward
            ? backward.unit == tensor_kernel::Unit::wgmma && backward.variant == tensor_kernel::BackwardVariant{}
            : forward.unit == tensor_kernel::Unit::wgmma && forward.variant == tensor_kernel::ForwardVariant{};
    if (!wgmma)
        refuse(fault,
               fmt::format("plan {} runs a kernel that is not compiled with faults: expected fa3's, by wgmma with a "
                           "fused argument (attention tensor), or attention fast",
                           plan.name));
    if (is_bf16 && (site == Site::p_cast || site == Site::bwd_p_cast || site == Site::ds_cast) &&
        (fault.hold == Hold::exact || !within_bf16(fault.format.value_or(bf16))))
        refuse(fault,
               fmt::format("{} is an operand in bf16: expected hold=stochastic or nearest, and no format that has more "
                           "numbers",
                           name(site)));
}

void expect_scaling(const Fault& fault, Site site, Format format) {
    if (site == Site::delta) refuse(fault, "record=sample: delta, which stands in memory, is recorded whole");
    const bool of_bf16 = site == Site::p_cast || site == Site::bwd_p_cast || site == Site::ds_cast;
    const Alteration change = alteration_of(fault, {}, format);
    if (of_bf16 ? tensor_kernel::is_scaling_of_bf16(change) : tensor_kernel::is_scaling(change)) return;
    const int bits = of_bf16 ? fp32.precision - bf16.precision : fp32.precision;
    refuse(fault,
           fmt::format("record=sample: expected a multiplication that fp32 makes: multiplicative, or shape=value "
                       "with one sign for a head, hold=nearest, and a magnitude between -1 and 1 such as {}, that 1 "
                       "plus or minus it has {} bits",
                       std::ldexp(std::nearbyint(std::ldexp(fault.magnitude, bits - 1)), 1 - bits), bits));
}

void refuse_sample_of_cast(const Fault& fault) {
    refuse(fault,
           "record=sample: expected one sign for a head, and a size of the value or of the rms (fixed, per_head, "
           "random_step, flip, multiplicative), held in bf16");
}

void refuse(const Fault& fault, const std::string& why) {
    throw RequestError(fmt::format("device cuda: fault \"{}\": {}", to_string(fault), why));
}

}  // namespace faultline::gpt
