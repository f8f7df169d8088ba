// SPDX-License-Identifier: Apache-2.0
#include <faultline/record/column.hpp>

#include <algorithm>
#include <cstring>
#include <limits>

#include <fmt/format.h>

#include <faultline/base/error.hpp>
#include <faultline/tensor/tensor.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline::h5 {
namespace {

constexpr std::int64_t chunk_bytes = 8 << 10;  // a flush writes a whole chunk of every series, so they are small

}  // namespace

/// What a step that is not set has: NaN where there is one.
void clear(Column& column) {
    std::fill(column.row.begin(), column.row.end(), std::byte{0});
    const auto fill = [&](auto nan) {
        for (std::size_t at = 0; at < column.row.size(); at += sizeof nan)
            std::memcpy(column.row.data() + at, &nan, sizeof nan);
    };
    if (column.dtype == Dtype::f64)
        fill(std::numeric_limits<double>::quiet_NaN());
    else if (column.dtype == Dtype::f32)
        fill(std::numeric_limits<float>::quiet_NaN());
    else if (column.dtype == Dtype::f16)
        fill(std::uint16_t{0x7E00});  // the quiet NaNs of these encodings
    else if (column.dtype == Dtype::bf16)
        fill(std::uint16_t{0x7FC0});
    else if (column.dtype == Dtype::e5m2)
        fill(std::uint8_t{0x7E});
    else if (column.dtype == Dtype::e4m3)
        fill(std::uint8_t{0x7F});
}

/// An empty dataset over (step, row_shape…), chunked along the steps.
Column create_column(const Writer& out, const std::string& path, Dtype dtype, std::vector<std::int64_t> row_shape) {
    const auto row_bytes = byte_count(dtype, row_shape);
    if (!row_bytes || *row_bytes == 0) {
        throw WorkError(fmt::format("{}: series {}: shape {}: expected at least one value per step", out.name,
                                    in_quotes(path), shape_text(row_shape)));
    }
    std::vector<hsize_t> now{0}, most{H5S_UNLIMITED};
    std::vector<hsize_t> chunk{
        static_cast<hsize_t>(std::max<std::int64_t>(chunk_bytes / static_cast<std::int64_t>(*row_bytes), 1))};
    for (const std::int64_t extent : row_shape) {
        now.push_back(static_cast<hsize_t>(extent));
        most.push_back(static_cast<hsize_t>(extent));
        chunk.push_back(static_cast<hsize_t>(extent));
    }
    const Handle space(H5Screate_simple(static_cast<int>(now.size()), now.data(), most.data()), H5Sclose);
    const Handle properties = dataset_properties();
    H5Pset_chunk(properties, static_cast<int>(chunk.size()), chunk.data());
    Column column{
        path, dtype,         std::move(row_shape), std::vector<std::byte>(static_cast<std::size_t>(*row_bytes)),
        {},   type_of(dtype)};
    clear(column);
    // A reader that pads a series which is a step behind the others pads with what "not set" is.
    if (dtype == Dtype::f64 || dtype == Dtype::f32) H5Pset_fill_value(properties, column.type, column.row.data());
    column.dataset = out.create_dataset(path, column.type, space, properties);
    if (!encoding_of(dtype).empty()) {
        write_attribute(column.dataset, "encoding", std::string(encoding_of(dtype)), out.name);
    }
    return column;
}

namespace {

/// Memory and file dataspaces of those rows.
std::pair<Handle, Handle> spaces_of_rows(const Column& column, hid_t dataset, std::int64_t first, std::int64_t count) {
    std::vector<hsize_t> start{static_cast<hsize_t>(first)}, size{static_cast<hsize_t>(count)};
    for (const std::int64_t extent : column.row_shape) {
        start.push_back(0);
        size.push_back(static_cast<hsize_t>(extent));
    }
    Handle memory(H5Screate_simple(static_cast<int>(size.size()), size.data(), nullptr), H5Sclose);
    Handle file(H5Dget_space(dataset), H5Sclose);
    if (H5Sselect_hyperslab(file, H5S_SELECT_SET, start.data(), nullptr, size.data(), nullptr) < 0) file = {};
    return {std::move(memory), std::move(file)};
}

}  // namespace

bool read_rows(const Column& column, hid_t dataset, std::int64_t first, std::int64_t count, std::byte* to) {
    const auto [memory, file] = spaces_of_rows(column, dataset, first, count);
    return file.valid() && H5Dread(dataset, column.type, memory, file, H5P_DEFAULT, to) >= 0;
}

bool write_rows(const Column& column, std::int64_t first, std::int64_t count, const std::byte* from) {
    std::vector<hsize_t> extent{static_cast<hsize_t>(first + count)};
    for (const std::int64_t size : column.row_shape) extent.push_back(static_cast<hsize_t>(size));
    if (H5Dset_extent(column.dataset, extent.data()) < 0) return false;
    const auto [memory, file] = spaces_of_rows(column, column.dataset, first, count);
    return file.valid() && H5Dwrite(column.dataset, column.type, memory, file, H5P_DEFAULT, from) >= 0;
}

void append(const Writer& out, Column& column, std::int64_t index) {
    if (!write_rows(column, index, 1, column.row.data()))
        fail_write(out.name, fmt::format("step {} of {}", index, in_quotes(column.path)));
}

}  // namespace faultline::h5
