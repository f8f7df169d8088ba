// SPDX-License-Identifier: Apache-2.0
#include <faultline/record/record_file.hpp>

#include <algorithm>
#include <cmath>
#include <limits>

#include <fmt/format.h>

#include <faultline/base/error.hpp>
#include <faultline/record/writer.hpp>
#include <faultline/tensor/partial_file.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline {
namespace {

std::vector<std::int64_t> shape_of(std::span<const Axis> axes) {
    std::vector<std::int64_t> shape;
    for (const Axis& axis : axes) shape.push_back(axis.size);
    return shape;
}

/// m * 2^e in double: 0 or infinity beyond its range.
double nearest_double(double mantissa, std::int64_t exponent2) {
    constexpr std::int64_t far = 5000;  // past double's range for any mantissa that is itself a double
    return std::ldexp(mantissa, static_cast<int>(std::clamp(exponent2, -far, far)));
}

}  // namespace

struct RecordFile::State {
    PartialName path;
    h5::Writer out;  // closed before the partial file is removed
};

RecordFile::RecordFile(std::unique_ptr<State> state) : state_(std::move(state)) {}
RecordFile::RecordFile(RecordFile&&) noexcept = default;
RecordFile& RecordFile::operator=(RecordFile&&) noexcept = default;
RecordFile::~RecordFile() = default;

RecordFile RecordFile::create(const std::string& path, const Manifest& manifest, const Storage& storage) {
    h5::silence();
    PartialName names(path);
    h5::Writer out = h5::Writer::create(names.partial(), names.given(), manifest, storage);
    return RecordFile(std::make_unique<State>(State{std::move(names), std::move(out)}));
}

const std::string& RecordFile::name() const { return state_->path.given(); }

void RecordFile::coordinate(const std::string& path, std::span<const std::string> labels, const About& about) {
    h5::silence();
    state_->out.coordinate(path, labels, about);
}

void RecordFile::coordinate(const std::string& path, std::span<const std::int64_t> values, const About& about) {
    h5::silence();
    state_->out.coordinate(path, Dtype::i64, std::as_bytes(values), about);
}

void RecordFile::coordinate(const std::string& path, std::span<const double> values, const About& about) {
    h5::silence();
    state_->out.coordinate(path, Dtype::f64, std::as_bytes(values), about);
}

void RecordFile::write_bytes(const std::string& path, Dtype dtype, std::span<const std::byte> bytes,
                             std::span<const Axis> axes, const About& about) {
    h5::silence();
    const h5::Handle dataset = state_->out.write(path, dtype, bytes, shape_of(axes));
    h5::attach_axes(state_->out.file, dataset, path, axes, name());
    h5::describe(dataset, about, name());
}

void RecordFile::write_strings(const std::string& path, std::span<const std::string> values, std::span<const Axis> axes,
                               const About& about) {
    h5::silence();
    const h5::Handle dataset = state_->out.write_strings(path, values, shape_of(axes));
    h5::attach_axes(state_->out.file, dataset, path, axes, name());
    h5::describe(dataset, {about.long_name, ""}, name());  // text has no units
}

void RecordFile::write_wide(const std::string& path, std::span<const double> mantissa,
                            std::span<const std::int64_t> exponent2, std::span<const Axis> axes, const About& about) {
    if (mantissa.size() != exponent2.size()) {
        throw WorkError(fmt::format("{}: dataset {}: {} mantissas and {} exponents: expected as many", name(),
                                    in_quotes(path), mantissa.size(), exponent2.size()));
    }
    std::vector<double> nearest(mantissa.size());
    for (std::size_t i = 0; i < nearest.size(); ++i) nearest[i] = nearest_double(mantissa[i], exponent2[i]);
    const std::string leaf = h5::split_path(path).second;
    write(path, std::span<const double>(nearest), axes, about);
    attribute(path, "exact", fmt::format("{}_mantissa * 2^{}_exponent2", leaf, leaf));
    write(path + "_mantissa", mantissa, axes, {about.long_name + ", mantissa", about.units});
    write(path + "_exponent2", exponent2, axes, {about.long_name + ", exponent of 2", "1"});
}

void RecordFile::write_virtual(const std::string& path, std::span<const VirtualRow> rows, std::span<const Axis> axes,
                               const About& about) {
    h5::silence();
    const std::string what = "dataset " + in_quotes(path);
    const std::vector<std::int64_t> shape = shape_of(axes);
    const h5::Handle space = h5::space_of(shape);
    const h5::Handle properties = h5::dataset_properties();
    const double nothing = std::numeric_limits<double>::quiet_NaN();
    H5Pset_fill_value(properties, H5T_NATIVE_DOUBLE, &nothing);
    for (const VirtualRow& row : rows) {
        std::vector<hsize_t> start(shape.size(), 0), count(shape.size(), 1);
        start.front() = static_cast<hsize_t>(row.row);
        bool fits = row.block.size() + 1 == shape.size() && row.row >= 0 && row.row < shape.front() &&
                    byte_count(Dtype::u8, row.block) == byte_count(Dtype::u8, row.shape);
        for (std::size_t i = 0; fits && i < row.block.size(); ++i) {
            count[i + 1] = static_cast<hsize_t>(row.block[i]);
            fits = row.block[i] <= shape[i + 1];
        }
        if (!fits)
            throw WorkError(fmt::format("{}: {}: row {} of shape {}: expected no more than the axes {} have", name(),
                                        what, row.row, shape_text(row.shape), shape_text(shape)));
        const h5::Handle part(H5Scopy(space), H5Sclose), source = h5::space_of(row.shape);
        if (H5Sselect_hyperslab(part, H5S_SELECT_SET, start.data(), nullptr, count.data(), nullptr) < 0 ||
            H5Pset_virtual(properties, part, row.file.c_str(), row.dataset.c_str(), source) < 0)
            h5::fail_write(name(), what);
    }
    const h5::Handle type = h5::type_of(Dtype::f64);
    const h5::Handle dataset = state_->out.create_dataset(path, type, space, properties);
    h5::attach_axes(state_->out.file, dataset, path, axes, name());
    h5::describe(dataset, about, name());
}

void RecordFile::link(const std::string& path, const std::string& file) {
    h5::silence();
    const auto [group, leaf] = h5::split_path(path);
    const h5::Handle parent = h5::require_group(state_->out.file, group, name());
    if (H5Lcreate_external(file.c_str(), "/", parent, leaf.c_str(), H5P_DEFAULT, H5P_DEFAULT) < 0)
        h5::fail_write(name(), "link " + in_quotes(path));
}

void RecordFile::attribute(const std::string& object, const std::string& name, const std::string& value) {
    h5::silence();
    h5::write_attribute(state_->out.open(object, name), name, value, this->name());
}

void RecordFile::attribute(const std::string& object, const std::string& name, const char* value) {
    attribute(object, name, std::string(value));
}

void RecordFile::attribute(const std::string& object, const std::string& name, double value) {
    h5::silence();
    h5::write_attribute(state_->out.open(object, name), name, H5T_NATIVE_DOUBLE, &value, this->name());
}

void RecordFile::attribute(const std::string& object, const std::string& name, std::int64_t value) {
    h5::silence();
    h5::write_attribute(state_->out.open(object, name), name, H5T_NATIVE_INT64, &value, this->name());
}

void RecordFile::attribute(const std::string& object, const std::string& name, std::span<const std::string> values) {
    h5::silence();
    h5::write_attribute(state_->out.open(object, name), name, values, this->name());
}

void RecordFile::flush() {
    h5::silence();
    if (H5Fflush(state_->out.file, H5F_SCOPE_GLOBAL) < 0) h5::fail_write(name(), "the file");
}

void RecordFile::finish() {
    flush();
    if (!state_->out.file.reset()) h5::fail_write(name(), "the file");
}

void RecordFile::commit() {
    finish();
    state_->path.commit();
}

void RecordFile::keep_partial() {
    finish();
    state_->path.keep();
}

}  // namespace faultline
