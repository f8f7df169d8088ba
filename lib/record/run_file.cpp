// SPDX-License-Identifier: Apache-2.0
#include <faultline/record/run_file.hpp>

#include <algorithm>
#include <cstring>
#include <limits>
#include <optional>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <unistd.h>

#include <faultline/base/error.hpp>
#include <faultline/record/writer.hpp>
#include <faultline/tensor/partial_file.hpp>
#include <faultline/tensor/tensor.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline {
namespace {

constexpr std::int64_t chunk_bytes = 8 << 10;  // a flush writes a whole chunk of every series, so they are small
constexpr const char* step_path = "steps/step";

/// A descriptor that holds a shared lock while the run lives: readers, which lock shared too, may come; a second writer
/// or mend_run may not. HDF5 itself gives its lock up when SWMR begins.
class SharedLock {
  public:
    SharedLock() = default;
    explicit SharedLock(const std::string& path) : descriptor_(::open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
        if (descriptor_ >= 0) (void)::flock(descriptor_, LOCK_SH | LOCK_NB);
    }
    SharedLock(SharedLock&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}
    SharedLock& operator=(SharedLock&& other) noexcept {
        std::swap(descriptor_, other.descriptor_);
        return *this;
    }
    ~SharedLock() {
        if (descriptor_ >= 0) ::close(descriptor_);
    }

  private:
    int descriptor_ = -1;
};

struct Column {
    std::string path;
    Dtype dtype;
    std::vector<std::int64_t> row_shape;
    std::vector<std::byte> row;  // this step's values
    h5::Handle dataset, type;
};

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
Column create_column(const h5::Writer& out, const std::string& path, Dtype dtype, std::vector<std::int64_t> row_shape) {
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
    const h5::Handle space(H5Screate_simple(static_cast<int>(now.size()), now.data(), most.data()), H5Sclose);
    const h5::Handle properties(H5Pcreate(H5P_DATASET_CREATE), H5Pclose);
    H5Pset_chunk(properties, static_cast<int>(chunk.size()), chunk.data());
    Column column{path,
                  dtype,
                  std::move(row_shape),
                  std::vector<std::byte>(static_cast<std::size_t>(*row_bytes)),
                  {},
                  h5::type_of(dtype)};
    clear(column);
    // A reader that pads a series which is a step behind the others pads with what "not set" is.
    if (dtype == Dtype::f64 || dtype == Dtype::f32) H5Pset_fill_value(properties, column.type, column.row.data());
    column.dataset = out.create_dataset(path, column.type, space, properties);
    if (!h5::encoding_of(dtype).empty()) {
        h5::write_attribute(column.dataset, "encoding", std::string(h5::encoding_of(dtype)), out.name);
    }
    return column;
}

void append(const h5::Writer& out, Column& column, std::int64_t step_index) {
    std::vector<hsize_t> extent{static_cast<hsize_t>(step_index) + 1}, start{static_cast<hsize_t>(step_index)},
        count{1};
    for (const std::int64_t size : column.row_shape) {
        extent.push_back(static_cast<hsize_t>(size));
        start.push_back(0);
        count.push_back(static_cast<hsize_t>(size));
    }
    const std::string what = fmt::format("step {} of {}", step_index, in_quotes(column.path));
    if (H5Dset_extent(column.dataset, extent.data()) < 0) h5::fail_write(out.name, what);
    const h5::Handle file_space(H5Dget_space(column.dataset), H5Sclose);
    const h5::Handle row_space(H5Screate_simple(static_cast<int>(count.size()), count.data(), nullptr), H5Sclose);
    if (H5Sselect_hyperslab(file_space, H5S_SELECT_SET, start.data(), nullptr, count.data(), nullptr) < 0 ||
        H5Dwrite(column.dataset, column.type, row_space, file_space, H5P_DEFAULT, column.row.data()) < 0) {
        h5::fail_write(out.name, what);
    }
}

}  // namespace

struct RunFile::State {
    std::optional<PartialName> path;  // until start()
    std::string final_name;
    SharedLock alive;
    h5::Writer out;
    std::vector<Column> columns;
    std::optional<Column> step;
    std::int64_t steps = 0;
    bool writing = false;  // within end_step(); still set afterwards if it threw

    ~State() {
        if (!writing) return;
        // The disk refused: what is on it is a prefix of HDF5's ordered writes, readable as after a kill. Closing would
        // write an end of file that the file does not reach, so nothing is closed (h5::silence() keeps HDF5 from doing
        // it at exit).
        for (Column& column : columns) column.dataset.release();
        if (step) step->dataset.release();
        out.file.release();
    }

    void expect_not_started(const std::string& what) const {
        if (!path)
            throw WorkError(fmt::format("{}: {}: the run has started: expected it before start()", out.name, what));
    }
};

RunFile::RunFile(std::unique_ptr<State> state) : state_(std::move(state)) {}
RunFile::RunFile(RunFile&&) noexcept = default;
RunFile& RunFile::operator=(RunFile&&) noexcept = default;
RunFile::~RunFile() = default;

RunFile RunFile::create(const std::string& path, const Manifest& manifest) {
    h5::silence();
    PartialName names(path);
    auto state = std::make_unique<State>();
    state->out = h5::Writer::create(names.partial(), names.given(), manifest, {});
    state->final_name = names.final_name();
    state->path = std::move(names);
    state->step = create_column(state->out, step_path, Dtype::i64, {});
    h5::make_scale(state->step->dataset, "step", state->out.name);
    h5::describe(state->step->dataset, {"optimizer step", "1"}, state->out.name);
    return RunFile(std::move(state));
}

void RunFile::coordinate(const std::string& path, std::span<const std::string> labels, const About& about) {
    h5::silence();
    state_->expect_not_started(in_quotes(path));
    state_->out.coordinate(path, labels, about);
}

void RunFile::coordinate(const std::string& path, std::span<const std::int64_t> values, const About& about) {
    h5::silence();
    state_->expect_not_started(in_quotes(path));
    state_->out.coordinate(path, Dtype::i64, std::as_bytes(values), about);
}

void RunFile::coordinate(const std::string& path, std::span<const double> values, const About& about) {
    h5::silence();
    state_->expect_not_started(in_quotes(path));
    state_->out.coordinate(path, Dtype::f64, std::as_bytes(values), about);
}

void RunFile::attribute(const std::string& object, const std::string& name, const std::string& value) {
    h5::silence();
    state_->expect_not_started(fmt::format("attribute {}", in_quotes(name)));
    h5::write_attribute(state_->out.open(object, name), name, value, state_->out.name);
}

RunFile::Series RunFile::series(const std::string& name, Dtype dtype, std::span<const Axis> axes, const About& about) {
    h5::silence();
    state_->expect_not_started(fmt::format("series {}", in_quotes(name)));
    std::vector<std::int64_t> shape;
    std::vector<Axis> all{{"step", 0}};
    for (const Axis& axis : axes) {
        shape.push_back(axis.size);
        all.push_back(axis);
    }
    const std::string path = "steps/" + name;
    Column column = create_column(state_->out, path, dtype, std::move(shape));
    h5::attach_axes(state_->out.file, column.dataset, path, all, state_->out.name);
    h5::describe(column.dataset, about, state_->out.name);
    state_->columns.push_back(std::move(column));
    return {state_->columns.size() - 1};
}

void RunFile::start() {
    h5::silence();
    state_->expect_not_started("start()");
    const std::string what = "the file";
    if (H5Fflush(state_->out.file, H5F_SCOPE_GLOBAL) < 0) h5::fail_write(state_->out.name, what);
    if (H5Fstart_swmr_write(state_->out.file) < 0) h5::fail_write(state_->out.name, what);
    state_->alive = SharedLock(state_->path->partial());
    state_->path->commit(false);  // durable byte by byte, as it grows
    state_->path.reset();
}

void RunFile::set_bytes(Series series, Dtype dtype, std::span<const std::byte> bytes) {
    Column& column = state_->columns.at(series.index);
    if (dtype != column.dtype && !(width(dtype) == width(column.dtype) && !h5::encoding_of(column.dtype).empty())) {
        throw WorkError(fmt::format("{}: series {}: values are {}: expected {}", state_->out.name,
                                    in_quotes(column.path), print_name(dtype), print_name(column.dtype)));
    }
    if (bytes.size() != column.row.size()) {
        throw WorkError(fmt::format("{}: series {}: {} values: expected as many as shape {} has", state_->out.name,
                                    in_quotes(column.path), bytes.size() / width(dtype), shape_text(column.row_shape)));
    }
    std::copy(bytes.begin(), bytes.end(), column.row.begin());
}

void RunFile::end_step(std::int64_t step) {
    h5::silence();
    if (state_->path) throw WorkError(fmt::format("{}: step {}: expected start() before it", state_->out.name, step));
    if (state_->writing)
        throw WorkError(fmt::format("{}: step {}: expected no step after one that failed", state_->out.name, step));
    state_->writing = true;
    for (Column& column : state_->columns) {
        append(state_->out, column, state_->steps);
        if (H5Dflush(column.dataset) < 0) h5::fail_write(state_->out.name, in_quotes(column.path));
        clear(column);
    }
    std::memcpy(state_->step->row.data(), &step, sizeof step);
    append(state_->out, *state_->step, state_->steps);
    if (H5Dflush(state_->step->dataset) < 0) h5::fail_write(state_->out.name, in_quotes(step_path));
    ++state_->steps;
    state_->writing = false;
}

std::int64_t RunFile::steps() const { return state_->steps; }

void RunFile::close() {
    h5::silence();
    if (state_->path || state_->writing) {
        throw WorkError(
            fmt::format("{}: close(): expected start() before it and no step that failed", state_->out.name));
    }
    for (Column& column : state_->columns) {
        if (!column.dataset.reset()) h5::fail_write(state_->out.name, in_quotes(column.path));
    }
    state_->step.reset();
    if (!state_->out.file.reset()) h5::fail_write(state_->out.name, "the file");
    state_->alive = SharedLock();
}

void mend_run(const std::string& path) {
    h5::silence();
    const std::string name = escaped(path, path.size());
    if (H5Fis_hdf5(path.c_str()) <= 0) h5::fail_read(name, "the file", "an HDF5 file");
    const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    const bool free = descriptor >= 0 && (::flock(descriptor, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK);
    if (descriptor >= 0) ::close(descriptor);
    if (!free) throw WorkError(fmt::format("{}: is being written or read: expected nobody to have it open", name));
    // What HDF5's own h5clear does with --status and --increment=0: the properties have no functions of their own. While
    // SWMR lasts, the end of the allocated space in the superblock is stale, and readers without SWMR believe it.
    const h5::Handle access(H5Pcreate(H5P_FILE_ACCESS), H5Pclose);
    const bool yes = true;
    h5::Handle file;
    if (H5Pset(access, "clear_status_flags", &yes) >= 0 && H5Pset(access, "skip_eof_check", &yes) >= 0) {
        file = h5::Handle(H5Fopen(path.c_str(), H5F_ACC_RDWR, access), H5Fclose);
    }
    if (!file.valid() || H5Fincrement_filesize(file, 0) < 0 || !file.reset()) h5::fail_write(name, "the file's status");
}

}  // namespace faultline
