// SPDX-License-Identifier: Apache-2.0
#include <faultline/record/row_checksums.hpp>

#include <algorithm>

#include <fmt/format.h>
#include <zlib.h>

#include <faultline/base/error.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline::h5 {

std::uint32_t crc32_of(std::span<const std::byte> bytes) {
    const uLong nothing = crc32_z(0, nullptr, 0);
    return static_cast<std::uint32_t>(
        crc32_z(nothing, reinterpret_cast<const Bytef*>(bytes.data()), static_cast<z_size_t>(bytes.size())));
}

void RowChecksums::expect(const std::string& path, std::int64_t first, std::span<const std::byte> rows,
                          std::size_t row_bytes, const std::string& file_name) const {
    constexpr std::string_view group = "steps/";
    if (row_bytes == 0 || !path.starts_with(group)) return;
    const auto found = std::ranges::find(series, path.substr(group.size()));
    if (found == series.end()) return;
    const auto column = static_cast<std::size_t>(found - series.begin());
    for (std::size_t at = 0; at + row_bytes <= rows.size() && first < steps; at += row_bytes, ++first) {
        const std::uint32_t is = crc32_of(rows.subspan(at, row_bytes));
        const std::uint32_t was = values[static_cast<std::size_t>(first) * series.size() + column];
        if (is == was) continue;
        throw RequestError(fmt::format(
            "{}: dataset {}: index {} of the steps is damaged, its CRC-32 is {:08x}: expected {:08x}, as {} "
            "has it",
            file_name, in_quotes(path), first, is, was, checksum_path));
    }
}

}  // namespace faultline::h5
