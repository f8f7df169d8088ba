// SPDX-License-Identifier: Apache-2.0
#include <faultline/tensor_kernel/scaling.hpp>

#include <cmath>

namespace faultline::tensor_kernel {

namespace {

/// Whether the law is a factor of the head, and with either sign a positive one of `bits` bits.
bool is_factor(const Alteration& change, int bits) {
    const auto has_bits = [&](double x) {
        int exponent = 0;
        const double whole = std::ldexp(std::frexp(x, &exponent), bits);
        return x > 0 && std::trunc(whole) == whole;
    };
    return change.size == Alteration::Size::of_value && change.sign_of == Alteration::Sign::one &&
           has_bits(1 + change.magnitude) && has_bits(1 - change.magnitude);
}

}  // namespace

bool is_scaling(const Alteration& change) {
    return is_factor(change, fp32.precision) && change.hold != Alteration::Hold::stochastic &&
           (is_exact(change.format) || change.format == fp32);
}

bool is_scaling_of_bf16(const Alteration& change) {
    return is_factor(change, fp32.precision - bf16.precision) && change.hold == Alteration::Hold::nearest &&
           change.format == bf16;
}

}  // namespace faultline::tensor_kernel
