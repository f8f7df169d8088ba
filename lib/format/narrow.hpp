// SPDX-License-Identifier: Apache-2.0
// Doubles whose values a smaller format holds, stored as that and back: what travels between the host and a device is a half
// or a quarter as long then.
#pragma once

#include <cstddef>
#include <cstdint>

namespace faultline {

/// Stores from[0..count) as bf16 (the upper half of a float's bits), or as float. False where one of them is not such a number
/// bit for bit, signs of zeros and NaNs included; what `to` holds then is undefined.
[[nodiscard]] bool narrow_to_bf16(const double* from, std::size_t count, std::uint16_t* to);
[[nodiscard]] bool narrow_to_fp32(const double* from, std::size_t count, float* to);
/// The doubles that narrow_to_fp32 was given.
void widen(const float* from, std::size_t count, double* to);

}  // namespace faultline
