// SPDX-License-Identifier: Apache-2.0
#include <faultline/record/past_run.hpp>

#include <algorithm>
#include <cstring>

#include <fmt/format.h>

#include <faultline/base/error.hpp>
#include <faultline/record/open_file.hpp>
#include <faultline/record/row_checksums.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline {
namespace {

constexpr std::size_t block_bytes = 4 << 20;  // copied at once

}  // namespace

PastRun::PastRun(const std::string& path, std::int64_t last_step) : reader_(path), file_(h5::open_for_reading(path)) {
    const std::string kind = reader_.manifest().kind;
    if (kind != "run")
        throw RequestError(fmt::format("{}: kind is {}: expected \"run\"", reader_.name(), in_quotes(kind)));
    const Tensor step = reader_.read("steps/step");
    if (step.dtype != Dtype::i64 || step.shape.size() != 1)
        fail("steps/step", fmt::format("is {} {}", print_name(step.dtype), shape_text(step.shape)),
             "the steps' numbers as int64");
    for (std::int64_t i = 0; i < step.shape[0]; ++i, ++steps_) {
        std::int64_t number = 0;
        std::memcpy(&number, step.bytes.data() + static_cast<std::size_t>(i) * sizeof number, sizeof number);
        if (number > last_step) break;
        last_step_ = number;
    }
}

void PastRun::fail(const std::string& path, const std::string& what, const std::string& expected) const {
    throw RequestError(fmt::format("{}: dataset {}: {}: expected {}", reader_.name(), in_quotes(path), what, expected));
}

void PastRun::declare(const std::string& path) {
    if (!reader_.contains(path)) fail(path, "is not in the run", "the declarations that the run began with");
    declared_.insert(path);
}

void PastRun::expect_labels(const std::string& path, std::span<const std::string> labels) {
    declare(path);
    const std::vector<std::string> there = reader_.read_strings(path);
    if (!std::equal(there.begin(), there.end(), labels.begin(), labels.end()))
        fail(path, "has other values", "the coordinates that the run began with");
}

void PastRun::expect_values(const std::string& path, Dtype dtype, std::span<const std::byte> bytes) {
    declare(path);
    const Tensor there = reader_.read(path);
    if (there.dtype != dtype || !std::equal(there.bytes.begin(), there.bytes.end(), bytes.begin(), bytes.end()))
        fail(path, "has other values", "the coordinates that the run began with");
}

std::vector<std::uint32_t> PastRun::copy_to(const h5::Writer& out, const h5::Column& column) {
    declare(column.path);
    const h5::Handle dataset(H5Dopen2(file_, column.path.c_str(), H5P_DEFAULT), H5Dclose);
    if (!dataset.valid()) h5::fail_read(reader_.name(), in_quotes(column.path), "a whole run");
    std::vector<std::int64_t> shape;
    for (const Axis& axis : reader_.axes(column.path)) shape.push_back(axis.size);
    const h5::Handle type(H5Dget_type(dataset), H5Tclose);
    const bool alike = H5Tequal(type, column.type) > 0 && shape.size() == column.row_shape.size() + 1 &&
                       std::equal(column.row_shape.begin(), column.row_shape.end(), shape.begin() + 1) &&
                       reader_.attribute(column.path, "encoding").value_or("") == h5::encoding_of(column.dtype);
    if (!alike)
        fail(column.path, "is of another type or shape",
             fmt::format("{} over (step, {})", print_name(column.dtype), shape_text(column.row_shape)));
    if (shape[0] < steps_)
        fail(column.path, fmt::format("has {} steps", shape[0]), fmt::format("{}, as steps/step has", steps_));
    const auto block = static_cast<std::int64_t>(std::max<std::size_t>(block_bytes / column.row.size(), 1));
    std::vector<std::uint32_t> sums;
    std::vector<std::byte> rows(static_cast<std::size_t>(std::min(block, steps_)) * column.row.size());
    for (std::int64_t first = 0; first < steps_; first += block) {
        const std::int64_t count = std::min(block, steps_ - first);
        if (!h5::read_rows(column, dataset, first, count, rows.data()))
            h5::fail_read(reader_.name(), fmt::format("dataset {}", in_quotes(column.path)), "a whole run");
        const std::size_t each = column.row.size();
        const std::span<const std::byte> these(rows.data(), static_cast<std::size_t>(count) * each);
        reader_.expect_intact(column.path, first, these, each);
        for (std::size_t at = 0; at < these.size(); at += each) sums.push_back(h5::crc32_of(these.subspan(at, each)));
        if (!h5::write_rows(column, first, count, rows.data())) h5::fail_write(out.name, in_quotes(column.path));
    }
    return sums;
}

void PastRun::expect_checksums_of(const std::vector<std::string>& series) const {
    if (reader_.contains(h5::checksum_path) && reader_.texts(h5::checksum_path, h5::checksum_series) != series)
        fail(h5::checksum_path, "is of other series", "the series that the run began with");
}

void PastRun::expect_all_declared() const {
    for (const std::string& path : reader_.datasets())
        if (path != h5::checksum_path && !declared_.contains(path))
            fail(path, "is in the run and was not declared", "the declarations that the run began with");
}

}  // namespace faultline
