// SPDX-License-Identifier: Apache-2.0
// Where faults stand on the device: in the registers of which kernel, or in memory and in which type. Private to this folder.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <vector>

#include <faultline/gpt_device/fault_kernels.hpp>
#include <faultline/injectors/fault.hpp>
#include <faultline/plan/plan.hpp>
#include <faultline/tensor_kernel/altering.hpp>

namespace faultline::gpt {

/// A site of the fast kernel that is in registers on the device.
struct InsideSite {
    Site site;
    on_device::KernelSite in_kernel;
    bool backward;
};
/// In the order in which its kernels come by.
inline constexpr std::array inside_sites{
    InsideSite{Site::row_max, on_device::KernelSite::row_max, false},
    InsideSite{Site::p_cast, on_device::KernelSite::p_cast, false},
    InsideSite{Site::row_sum, on_device::KernelSite::row_sum, false},
    InsideSite{Site::pv_accumulate, on_device::KernelSite::pv_accumulate, false},
    InsideSite{Site::dp_accumulate, on_device::KernelSite::dp_accumulate, true},
    InsideSite{Site::ds, on_device::KernelSite::ds, true},
    InsideSite{Site::bwd_p_cast, on_device::KernelSite::bwd_p_cast, true},
    InsideSite{Site::ds_cast, on_device::KernelSite::ds_cast, true},
};
/// Null: it is none.
[[nodiscard]] const InsideSite* inside_site(Site site);
/// Where it stands in the tensor cores' kernels; nothing: it does not.
[[nodiscard]] std::optional<tensor_kernel::AlteredSite> altered_site(Site site);
/// o, dq, dk or dv as they are cast: in memory.
[[nodiscard]] bool is_cast_in_memory(Site site);

/// Whether the fault's size is a part of its tile's rms.
[[nodiscard]] bool law_needs_rms(const Fault& fault);
/// Whether what stands at a site of the model is in the type of products' operands.
[[nodiscard]] bool holds_operands(ModelSite site);
/// ModelAt::part of the values that stand there.
[[nodiscard]] std::vector<int> parts_at(ModelSite site);

/// RequestError where a fault whose values stand in memory as bf16 is held in more than that; `what` stands there.
void expect_held_in_bf16(const Fault& fault, std::string_view what);
/// RequestError where the tensor cores' kernel of this plan does not have the fault at this site in its registers.
void expect_in_registers(const Fault& fault, Site site, const RoundingPlan& plan, int head_dim, bool is_bf16);
/// "device cuda: fault "…": why".
[[noreturn]] void refuse(const Fault& fault, const std::string& why);

}  // namespace faultline::gpt
