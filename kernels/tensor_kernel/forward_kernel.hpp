// SPDX-License-Identifier: Apache-2.0
// Which plans the tensor-core forward runs, and as which of its kernels.
#pragma once

#include <string>

#include <faultline/plan/plan.hpp>
#include <faultline/tensor_kernel/forward_variant.hpp>

namespace faultline::tensor_kernel {

/// Element type of q, k, v, p and o.
enum class Element : unsigned char { bf16, fp16 };

/// A forward as the device runs it: what is compiled in, and the numbers that are not.
struct ForwardKernel {
    std::string name;  ///< "fused", "unfused", "subtract_then_scale", "polynomial", "stable_max", "rounded_row_sum"
    Element element = Element::bf16;
    ForwardVariant variant;
    double stable_beta = 7, stable_tolerance = 1e-3;  ///< as in Schedule, where the variant is stable
};

struct ForwardSupport {
    ForwardKernel kernel;  ///< where why is empty
    std::string why;       ///< a sentence: the first field that the kernels do not have, and what they have
    [[nodiscard]] explicit operator bool() const { return why.empty(); }
};

/// Whether the kernels run this plan's forward for heads of this size (64 or 128; q, k and v alike). The kernels are preset
/// fa3 for bf16 or fp16 with key tiles of 128, and from there one of the variants; block_q is free, because the rows of a
/// query tile do not depend on each other. What they return is then what kernels/cpu returns for the plan, bit for bit, but
/// for subnormal p (forward.hpp says how far).
[[nodiscard]] ForwardSupport supported(const RoundingPlan& plan, int head_dim, bool causal);

/// Preset fa3 as the kernels run it: key tiles of 128 for both head sizes, with and without mask.
[[nodiscard]] RoundingPlan forward_plan(Element element = Element::bf16);

}  // namespace faultline::tensor_kernel
