// SPDX-License-Identifier: Apache-2.0
// One series of a run file on the HDF5 level: a dataset that grows by a row a step.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <faultline/record/h5.hpp>
#include <faultline/record/writer.hpp>
#include <faultline/tensor/dtype.hpp>

namespace faultline::h5 {

struct Column {
    std::string path;
    Dtype dtype;
    std::vector<std::int64_t> row_shape;
    std::vector<std::byte> row;  ///< this step's values
    Handle dataset, type;
};

/// An empty dataset over (step, row_shape…), chunked along the steps. WorkError.
[[nodiscard]] Column create_column(const Writer& out, const std::string& path, Dtype dtype,
                                   std::vector<std::int64_t> row_shape);
/// Sets the row to what a step that is not set has: NaN where there is one, else 0.
void clear(Column& column);
/// Makes the row the dataset's row `index`, its last. WorkError.
void append(const Writer& out, Column& column, std::int64_t index);
/// Rows [first, first + count) of a dataset over (step, row_shape…), to or from memory. False where HDF5 fails.
[[nodiscard]] bool read_rows(const Column& column, hid_t dataset, std::int64_t first, std::int64_t count,
                             std::byte* to);
[[nodiscard]] bool write_rows(const Column& column, std::int64_t first, std::int64_t count, const std::byte* from);

}  // namespace faultline::h5
