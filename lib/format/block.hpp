// SPDX-License-Identifier: Apache-2.0
// Block-scaled formats: a row is cut into blocks, every block shares one scale, and the elements are small floats.
//   mx*   OCP Microscaling Formats (MX) 1.0: blocks of 32, scale e8m0 (a power of two 2^(code-127), code 255 is NaN)
//   nvfp4 NVIDIA, "Pretraining large language models with NVFP4" (arXiv 2509.25149, appendix on quantisation): blocks of
//         16 e2m1 elements, scale e4m3, and one float scale per tensor
#pragma once

#include <faultline/format/bulk.hpp>
#include <faultline/format/format.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

namespace faultline {

/// The format of a block's scale.
enum class ScaleKind : unsigned char {
    e8m0,         ///< power of two
    e4m3_tensor,  ///< e4m3, times one float per tensor
};

/// How the e8m0 exponent follows from the largest magnitude in the block. Clamped to [-127, 127].
enum class ScaleRule : unsigned char {
    floor,     ///< floor(log2 amax) - emax of the element: OCP MX 1.0, section 6.3. The largest elements may saturate:
               ///< with e4m3, 957 beside 960 becomes 896.
    round_up,  ///< ceil(log2(amax / max_finite of the element)): the smallest power of two with which nothing saturates
};

struct BlockFormat {
    Format element;
    int block_size;  ///< elements of a row that share a scale; the last block of a row may be shorter
    ScaleKind scale;
    ScaleRule rule = ScaleRule::floor;  ///< of e8m0 scales alone

    friend constexpr bool operator==(const BlockFormat&, const BlockFormat&) = default;
};

inline constexpr BlockFormat mxfp8_e5m2{e5m2, 32, ScaleKind::e8m0};
inline constexpr BlockFormat mxfp8_e4m3{e4m3, 32, ScaleKind::e8m0};
inline constexpr BlockFormat mxfp6_e3m2{e3m2, 32, ScaleKind::e8m0};
inline constexpr BlockFormat mxfp6_e2m3{e2m3, 32, ScaleKind::e8m0};
inline constexpr BlockFormat mxfp4{e2m1, 32, ScaleKind::e8m0};
inline constexpr BlockFormat nvfp4{e2m1, 16, ScaleKind::e4m3_tensor};

[[nodiscard]] FAULTLINE_HD constexpr BlockFormat with_rule(BlockFormat f, ScaleRule rule) {
    f.rule = rule;
    return f;
}

struct NamedBlockFormat {
    std::string_view name;
    BlockFormat format;
};

/// mxfp8_e5m2 mxfp8_e4m3 mxfp6_e3m2 mxfp6_e2m3 mxfp4 nvfp4, under the names of the constants.
[[nodiscard]] std::span<const NamedBlockFormat> all_block_formats();
[[nodiscard]] std::optional<BlockFormat> find_block_format(std::string_view name);

/// The e8m0 code of a block whose largest magnitude is amax >= 0. 255 (NaN) where amax is infinite or NaN; 0, the
/// smallest scale, for a block of zeros.
[[nodiscard]] FAULTLINE_HD constexpr std::uint8_t e8m0_scale(double amax, Format element, ScaleRule rule) {
    const auto magnitude = detail::bits_as<std::uint64_t>(amax) & ~detail::sign_bit64;
    if (magnitude >= detail::infinity64) return 255;
    if (magnitude == 0) return 0;
    const int exponent = detail::split(magnitude).exponent;
    int scale = exponent - element.emax;
    if (rule == ScaleRule::round_up) {
        // amax <= max_finite * 2^scale? Both sides as significands in [1, 2): the powers of two have cancelled.
        const double amax_significand =
            static_cast<double>(detail::split(magnitude).significand) * detail::power_of_two(-52);
        const double max_significand = max_finite(element) * detail::power_of_two(-element.emax);
        if (amax_significand > max_significand) ++scale;
    }
    return static_cast<std::uint8_t>((scale < -127 ? -127 : scale > 127 ? 127 : scale) + 127);
}

/// 2^(code-127); NaN for 255.
[[nodiscard]] FAULTLINE_HD constexpr double decode_e8m0(std::uint8_t code) {
    return code == 255 ? detail::bits_as<double>(detail::quiet_nan64) : detail::power_of_two(code - 127);
}

/// Rows in a block-scaled format. value = element * block scale * tensor_scale.
struct QuantisedRows {
    BlockFormat format;
    std::size_t row_length = 0;
    std::vector<std::uint8_t> elements;  ///< [row, column], one code in each byte (not packed)
    std::vector<std::uint8_t> scales;    ///< [row, block], ceil(row_length / block_size) blocks in a row
    float tensor_scale = 1;              ///< 1 unless ScaleKind::e4m3_tensor
};

/// values: [row, column], row_length columns, contiguous. Elements are rounded with `mode`, the element at position i with
/// stochastic_bits(stream, first_counter + i). A block that holds an infinity or a NaN becomes NaN as a whole through its
/// scale (MX 1.0 leaves it to the implementation); in nvfp4 such a value is left out of the tensor's amax. A block of
/// zeros stays zeros, signs kept. Errors: std::invalid_argument where row_length is 0 or does not divide values.size().
[[nodiscard]] QuantisedRows quantise(std::span<const float> values, std::size_t row_length, BlockFormat f,
                                     Rounding mode = Rounding::nearest_even, RandomStream stream = {},
                                     std::uint64_t first_counter = 0);

/// The values of the rows, [row, column]. Products are computed in binary64 and rounded once to float.
[[nodiscard]] std::vector<float> dequantise(const QuantisedRows& rows);

/// values = dequantise(quantise(values, ...)), in place.
void round_blocks(std::span<float> values, std::size_t row_length, BlockFormat f,
                  Rounding mode = Rounding::nearest_even, RandomStream stream = {}, std::uint64_t first_counter = 0);

}  // namespace faultline
