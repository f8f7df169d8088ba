// SPDX-License-Identifier: Apache-2.0
// The element types that tensor files hold, and what each file format calls them.
// Names: safetensors `Dtype` (huggingface/safetensors, README "Format"), numpy.lib.format (NEP 1), ml_dtypes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>

namespace faultline {

/// e5m2 has infinities and NaNs as IEEE 754 would (OCP 8-bit floating point, E5M2); e4m3 is the OCP E4M3 without
/// infinities, largest value 448, called float8_e4m3fn by ml_dtypes and PyTorch.
enum class Dtype { f64, f32, f16, bf16, e5m2, e4m3, i64, i32, i16, i8, u8, u16, u32, u64, boolean };
inline constexpr int dtype_count = 15;

/// Bytes per element: 1, 2, 4 or 8.
[[nodiscard]] std::size_t width(Dtype);
/// What messages and tables print: "float32", "bfloat16", "float8_e4m3fn", "bool" (ml_dtypes' and numpy's names).
[[nodiscard]] std::string_view print_name(Dtype);
/// "F32", "BF16", "F8_E4M3", "BOOL".
[[nodiscard]] std::string_view safetensors_name(Dtype);
/// The dtype of that safetensors name; nothing for a name that is not ours (F4, F6_E2M3, …). F8_E8M0, a scale's exponent in a
/// byte (OCP MX 1.0), is u8: its codes.
[[nodiscard]] std::optional<Dtype> dtype_from_safetensors(std::string_view name);
/// The dtype of that print name.
[[nodiscard]] std::optional<Dtype> dtype_from_print_name(std::string_view name);
/// "F64, F32, …": the expectation in messages about an unknown name.
[[nodiscard]] std::string known_safetensors_names();

/// The dtype that a C++ type is stored as. bf16, f16 and fp8 have no C++ type here: they travel as their bits.
template <class T>
[[nodiscard]] constexpr Dtype dtype_of() {
    using U = std::remove_cv_t<T>;
    if constexpr (std::is_same_v<U, double>)
        return Dtype::f64;
    else if constexpr (std::is_same_v<U, float>)
        return Dtype::f32;
    else if constexpr (std::is_same_v<U, bool>)
        return Dtype::boolean;
    else {
        static_assert(std::is_integral_v<U>, "no tensor dtype stores this type");
        constexpr bool is_signed = std::is_signed_v<U>;
        if constexpr (sizeof(U) == 8)
            return is_signed ? Dtype::i64 : Dtype::u64;
        else if constexpr (sizeof(U) == 4)
            return is_signed ? Dtype::i32 : Dtype::u32;
        else if constexpr (sizeof(U) == 2)
            return is_signed ? Dtype::i16 : Dtype::u16;
        else
            return is_signed ? Dtype::i8 : Dtype::u8;
    }
}

}  // namespace faultline
