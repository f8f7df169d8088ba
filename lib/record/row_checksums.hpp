// SPDX-License-Identifier: Apache-2.0
// By what a damaged step of a run is recognised: steps/checksum over (step, series), a CRC-32 of each series' row, written
// after the rows and before the step's number.
//
// Not HDF5's Fletcher32 filter: a step is written into the chunk that holds the steps before it, and the filter's sum is of
// the whole chunk. Whoever reads between the two halves of such a write gets an error in place of the steps (HDF5 reads
// metadata again then, not data), and a run that is killed there has lost all steps of the chunk. Rows only ever add up.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace faultline::h5 {

inline constexpr const char* checksum_path = "steps/checksum";
inline constexpr const char* checksum_series = "series";  ///< its axis, and its attribute: their names, "step" first

/// CRC-32 (ISO 3309, as zlib's crc32 has it) of the bytes as they lie in the file.
[[nodiscard]] std::uint32_t crc32_of(std::span<const std::byte> bytes);

/// What steps/checksum of a run holds.
struct RowChecksums {
    std::vector<std::string> series;
    std::int64_t steps = 0;             ///< whose rows are known to be complete
    std::vector<std::uint32_t> values;  ///< [steps, series]

    /// Of rows [first, …) of dataset `path` ("steps/NAME"), those of complete steps. RequestError where one of them is not
    /// what was written. Datasets that are no series, and rows beyond `steps`, are not looked at.
    void expect(const std::string& path, std::int64_t first, std::span<const std::byte> rows, std::size_t row_bytes,
                const std::string& file_name) const;
};

}  // namespace faultline::h5
