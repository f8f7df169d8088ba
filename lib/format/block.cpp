// SPDX-License-Identifier: Apache-2.0
#include <faultline/format/block.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

namespace faultline {
namespace {

constexpr std::array<NamedBlockFormat, 6> block_formats{{
    {"mxfp8_e5m2", mxfp8_e5m2},
    {"mxfp8_e4m3", mxfp8_e4m3},
    {"mxfp6_e3m2", mxfp6_e3m2},
    {"mxfp6_e2m3", mxfp6_e2m3},
    {"mxfp4", mxfp4},
    {"nvfp4", nvfp4},
}};

constexpr float nan_float = std::numeric_limits<float>::quiet_NaN();
constexpr std::uint8_t e4m3_nan = 0x7F;

/// Largest magnitude; NaN if there is a NaN or an infinity.
double block_amax(std::span<const float> block) {
    float amax = 0;
    for (const float x : block) {
        if (!std::isfinite(x)) return static_cast<double>(nan_float);
        amax = std::max(amax, std::fabs(x));
    }
    return static_cast<double>(amax);
}

/// The scale of the whole tensor (arXiv 2509.25149): amax / (max of e4m3 * max of e2m1), so that the largest block scale
/// is the largest e4m3. 1 for a tensor of zeros; never 0, which an amax near the smallest float would give.
float nvfp4_tensor_scale(std::span<const float> values, Format element) {
    float amax = 0;
    for (const float x : values) {
        if (std::isfinite(x)) amax = std::max(amax, std::fabs(x));
    }
    if (amax == 0) return 1;
    const double scale = static_cast<double>(amax) / (max_finite(e4m3) * max_finite(element));
    return std::max(static_cast<float>(scale), std::numeric_limits<float>::min());
}

struct BlockScale {
    std::uint8_t code;
    double value;  ///< what elements are multiplied with when read, the tensor's scale included
};

BlockScale block_scale(std::span<const float> block, const BlockFormat& f, float tensor_scale) {
    const double amax = block_amax(block);
    if (f.scale == ScaleKind::e8m0) {
        const std::uint8_t code = e8m0_scale(amax, f.element, f.rule);
        return {code, decode_e8m0(code)};
    }
    if (std::isnan(amax)) return {e4m3_nan, static_cast<double>(nan_float)};
    const double wanted = amax / max_finite(f.element) / static_cast<double>(tensor_scale);
    const auto code = static_cast<std::uint8_t>(encode(wanted, e4m3));
    return {code, decode(code, e4m3) * static_cast<double>(tensor_scale)};
}

void check_rows(std::size_t count, std::size_t row_length) {
    if (row_length == 0 || count % row_length != 0) {
        throw std::invalid_argument("quantise: row_length is " + std::to_string(row_length) +
                                    ": expected a divisor of the number of values, " + std::to_string(count));
    }
}

/// Calls visit(first, length) for each block of each row.
template <class Visit>
void for_each_block(std::size_t count, std::size_t row_length, std::size_t block_size, Visit&& visit) {
    for (std::size_t row = 0; row < count; row += row_length) {
        for (std::size_t column = 0; column < row_length; column += block_size) {
            visit(row + column, std::min(block_size, row_length - column));
        }
    }
}

}  // namespace

std::span<const NamedBlockFormat> all_block_formats() { return block_formats; }

std::optional<BlockFormat> find_block_format(std::string_view name) {
    for (const NamedBlockFormat& known : block_formats) {
        if (known.name == name) return known.format;
    }
    return std::nullopt;
}

QuantisedRows quantise(std::span<const float> values, std::size_t row_length, BlockFormat f, Rounding mode,
                       RandomStream stream, std::uint64_t first_counter) {
    check_rows(values.size(), row_length);
    QuantisedRows rows{.format = f, .row_length = row_length, .elements = {}, .scales = {}};
    rows.elements.resize(values.size());
    const auto block_size = static_cast<std::size_t>(f.block_size);
    rows.scales.reserve(values.size() / row_length * ((row_length + block_size - 1) / block_size));
    if (f.scale == ScaleKind::e4m3_tensor) rows.tensor_scale = nvfp4_tensor_scale(values, f.element);

    // The quotient is formed in binary64, where it is exact for power-of-two scales, so that each element is rounded once.
    std::vector<double> scaled(block_size);
    for_each_block(values.size(), row_length, block_size, [&](std::size_t first, std::size_t length) {
        const BlockScale scale = block_scale(values.subspan(first, length), f, rows.tensor_scale);
        rows.scales.push_back(scale.code);
        // Under a scale of zero or NaN the element does not matter to the value; it is a zero that keeps the sign.
        const bool usable = scale.value > 0;
        for (std::size_t i = 0; i < length; ++i) {
            const auto x = static_cast<double>(values[first + i]);
            scaled[i] = usable ? x / scale.value : std::copysign(0.0, x);
        }
        const std::span<double> block(scaled.data(), length);
        round_bulk(block, f.element, mode, stream, first_counter + first);
        for (std::size_t i = 0; i < length; ++i) {
            rows.elements[first + i] = static_cast<std::uint8_t>(encode(block[i], f.element));
        }
    });
    return rows;
}

std::vector<float> dequantise(const QuantisedRows& rows) {
    check_rows(rows.elements.size(), rows.row_length);
    std::vector<float> values(rows.elements.size());
    std::size_t block = 0;
    const BlockFormat& f = rows.format;
    for_each_block(values.size(), rows.row_length, static_cast<std::size_t>(f.block_size),
                   [&](std::size_t first, std::size_t length) {
                       const std::uint8_t code = rows.scales.at(block++);
                       const double scale = (f.scale == ScaleKind::e8m0 ? decode_e8m0(code) : decode(code, e4m3)) *
                                            static_cast<double>(rows.tensor_scale);
                       for (std::size_t i = first; i < first + length; ++i) {
                           values[i] = static_cast<float>(decode(rows.elements[i], f.element) * scale);
                       }
                   });
    return values;
}

void round_blocks(std::span<float> values, std::size_t row_length, BlockFormat f, Rounding mode, RandomStream stream,
                  std::uint64_t first_counter) {
    const std::vector<float> rounded = dequantise(quantise(values, row_length, f, mode, stream, first_counter));
    std::copy(rounded.begin(), rounded.end(), values.begin());
}

}  // namespace faultline
