// SPDX-License-Identifier: Apache-2.0
#include <faultline/tensor_kernel/scaling.hpp>

namespace faultline::tensor_kernel {

bool is_scaling(const Alteration& change) {
    const auto of_fp32 = [](double x) { return x > 0 && static_cast<double>(static_cast<float>(x)) == x; };
    const bool in_fp32 = is_exact(change.format) || change.format == fp32;
    return change.size == Alteration::Size::of_value && change.sign_of == Alteration::Sign::one &&
           change.hold != Alteration::Hold::stochastic && in_fp32 && of_fp32(1 + change.magnitude) &&
           of_fp32(1 - change.magnitude);
}

}  // namespace faultline::tensor_kernel
