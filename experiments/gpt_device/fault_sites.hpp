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

/// A site inside the kernels on the device: in_kernel in the fast one, where delta stands in memory between two of them,
/// in_registers in the tensor cores'.
struct InsideSite {
    Site site;
    std::optional<on_device::KernelSite> in_kernel;
    tensor_kernel::AlteredSite in_registers;
    bool backward;
};
/// In the order in which the kernels come by.
inline constexpr std::array inside_sites{
    InsideSite{Site::row_max, on_device::KernelSite::row_max, tensor_kernel::AlteredSite::row_max, false},
    InsideSite{Site::p_cast, on_device::KernelSite::p_cast, tensor_kernel::AlteredSite::p_cast, false},
    InsideSite{Site::row_sum, on_device::KernelSite::row_sum, tensor_kernel::AlteredSite::row_sum, false},
    InsideSite{Site::pv_accumulate, on_device::KernelSite::pv_accumulate, tensor_kernel::AlteredSite::pv_accumulate,
               false},
    InsideSite{Site::delta, {}, tensor_kernel::AlteredSite::delta, true},
    InsideSite{Site::dp_accumulate, on_device::KernelSite::dp_accumulate, tensor_kernel::AlteredSite::dp_accumulate,
               true},
    InsideSite{Site::ds, on_device::KernelSite::ds, tensor_kernel::AlteredSite::ds, true},
    InsideSite{Site::bwd_p_cast, on_device::KernelSite::bwd_p_cast, tensor_kernel::AlteredSite::bwd_p_cast, true},
    InsideSite{Site::ds_cast, on_device::KernelSite::ds_cast, tensor_kernel::AlteredSite::ds_cast, true},
};
/// Null: it is none of the kernel's (on_tensor_cores: of theirs).
[[nodiscard]] const InsideSite* inside_site(Site site, bool on_tensor_cores);
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
/// RequestError where a fault of which a part alone is to be recorded is none that the tensor cores' kernel has for it.
void expect_scaling(const Fault& fault, Site site, Format format);
/// RequestError: of a fault at a cast in memory, which has too much of a law for it, a part alone is to be recorded.
[[noreturn]] void refuse_sample_of_cast(const Fault& fault);
/// "device cuda: fault "…": why".
[[noreturn]] void refuse(const Fault& fault, const std::string& why);

}  // namespace faultline::gpt
