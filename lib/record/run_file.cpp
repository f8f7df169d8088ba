// SPDX-License-Identifier: Apache-2.0
#include <faultline/record/run_file.hpp>

#include <algorithm>
#include <cstring>
#include <optional>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <unistd.h>

#include <faultline/base/error.hpp>
#include <faultline/record/column.hpp>
#include <faultline/record/open_file.hpp>
#include <faultline/record/past_run.hpp>
#include <faultline/record/row_checksums.hpp>
#include <faultline/record/writer.hpp>
#include <faultline/tensor/partial_file.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline {
namespace {

using h5::Column;

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

/// Whether nobody writes or reads the file: its exclusive lock can be had. True of one that cannot be opened: whoever opens
/// it next has a better sentence for that.
bool nobody_has(const std::string& path) {
    const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    const bool free = descriptor < 0 || ::flock(descriptor, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK;
    if (descriptor >= 0) ::close(descriptor);
    return free;
}

void expect_nobody(const std::string& path, const std::string& name) {
    if (nobody_has(path)) return;
    throw WorkError(fmt::format("{}: is being written or read: expected nobody to have it open", name));
}

}  // namespace

struct RunFile::State {
    std::optional<PartialName> path;  // until start()
    std::string final_name;
    SharedLock alive;
    h5::Writer out;
    std::vector<Column> columns;
    std::optional<Column> step;
    std::optional<Column> checksum;  // from start() on
    std::optional<PastRun> past;     // until start(), of a run that goes on
    std::int64_t steps = 0;
    std::optional<std::int64_t> last_step;
    bool writing = false;  // within end_step(); still set afterwards if it threw

    ~State() {
        if (!writing) return;
        // The disk refused: what is on it is a prefix of HDF5's ordered writes, readable as after a kill. Closing would
        // write an end of file that the file does not reach, so nothing is closed (h5::silence() keeps HDF5 from doing
        // it at exit).
        for (Column& column : columns) column.dataset.release();
        if (step) step->dataset.release();
        if (checksum) checksum->dataset.release();
        out.file.release();
    }

    static std::unique_ptr<State> make(const std::string& path, const Manifest& manifest);
    [[nodiscard]] std::vector<std::string> series_names() const;
    void create_checksum();
    void copy_past();
    /// The checksum of column `index`, the step numbers' 0, in the checksums' row.
    void sum(std::size_t index, std::span<const std::byte> row) {
        const std::uint32_t crc = h5::crc32_of(row);
        std::memcpy(checksum->row.data() + index * sizeof crc, &crc, sizeof crc);
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
    // Readers keep the file that they opened; a run at work would go on writing into one that no name leads to.
    if (h5::says_being_written(path)) expect_nobody(path, escaped(path, path.size()));
    return RunFile(State::make(path, manifest));
}

RunFile RunFile::resume(const std::string& path, std::int64_t last_step, const std::function<void(Manifest&)>& change) {
    h5::silence();
    expect_nobody(path, escaped(path, path.size()));
    PastRun past(path, last_step);
    Manifest manifest = past.manifest();
    if (change) change(manifest);
    auto state = State::make(path, manifest);
    state->steps = past.steps();
    state->last_step = past.last_step();
    state->past = std::move(past);
    return RunFile(std::move(state));
}

std::unique_ptr<RunFile::State> RunFile::State::make(const std::string& path, const Manifest& manifest) {
    PartialName names(path);
    auto state = std::make_unique<State>();
    state->out = h5::Writer::create(names.partial(), names.given(), manifest, {});
    state->final_name = names.final_name();
    state->path = std::move(names);
    state->step = h5::create_column(state->out, step_path, Dtype::i64, {});
    h5::make_scale(state->step->dataset, "step", state->out.name);
    h5::describe(state->step->dataset, {"optimizer step", "1"}, state->out.name);
    return state;
}

std::vector<std::string> RunFile::State::series_names() const {
    std::vector<std::string> names{"step"};
    for (const Column& column : columns) names.push_back(h5::split_path(column.path).second);
    return names;
}

void RunFile::State::copy_past() {
    std::vector<std::vector<std::uint32_t>> by_series{{}};
    for (const Column& column : columns) by_series.push_back(past->copy_to(out, column));
    by_series.front() = past->copy_to(out, *step);
    past->expect_all_declared();
    past->expect_checksums_of(series_names());
    std::vector<std::uint32_t> rows;  // [step, series]
    for (std::size_t i = 0; i < static_cast<std::size_t>(steps); ++i)
        for (const std::vector<std::uint32_t>& sums : by_series) rows.push_back(sums[i]);
    if (steps > 0 && !h5::write_rows(*checksum, 0, steps, std::as_bytes(std::span(rows)).data()))
        h5::fail_write(out.name, in_quotes(h5::checksum_path));
}

void RunFile::State::create_checksum() {
    const std::vector<std::string> names = series_names();
    const auto count = static_cast<std::int64_t>(names.size());
    checksum = h5::create_column(out, h5::checksum_path, Dtype::u32, {count});
    const std::vector<Axis> axes{{"step", 0}, {h5::checksum_series, count}};
    h5::attach_axes(out.file, checksum->dataset, h5::checksum_path, axes, out.name);
    h5::describe(checksum->dataset, {"CRC-32 of the bytes of the series' step", "1"}, out.name);
    h5::write_attribute(checksum->dataset, h5::checksum_series, names, out.name);
}

void RunFile::coordinate(const std::string& path, std::span<const std::string> labels, const About& about) {
    h5::silence();
    state_->expect_not_started(in_quotes(path));
    if (state_->past) state_->past->expect_labels(path, labels);
    state_->out.coordinate(path, labels, about);
}

void RunFile::coordinate(const std::string& path, std::span<const std::int64_t> values, const About& about) {
    h5::silence();
    state_->expect_not_started(in_quotes(path));
    if (state_->past) state_->past->expect_values(path, Dtype::i64, std::as_bytes(values));
    state_->out.coordinate(path, Dtype::i64, std::as_bytes(values), about);
}

void RunFile::coordinate(const std::string& path, std::span<const double> values, const About& about) {
    h5::silence();
    state_->expect_not_started(in_quotes(path));
    if (state_->past) state_->past->expect_values(path, Dtype::f64, std::as_bytes(values));
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
    Column column = h5::create_column(state_->out, path, dtype, std::move(shape));
    h5::attach_axes(state_->out.file, column.dataset, path, all, state_->out.name);
    h5::describe(column.dataset, about, state_->out.name);
    state_->columns.push_back(std::move(column));
    return {state_->columns.size() - 1};
}

void RunFile::start() {
    h5::silence();
    state_->expect_not_started("start()");
    const std::string what = "the file";
    state_->create_checksum();
    if (state_->past) {
        state_->copy_past();
        state_->past.reset();
    }
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
    std::size_t index = 0;
    for (Column& column : state_->columns) {
        state_->sum(++index, column.row);
        h5::append(state_->out, column, state_->steps);
        if (H5Dflush(column.dataset) < 0) h5::fail_write(state_->out.name, in_quotes(column.path));
        h5::clear(column);
    }
    std::memcpy(state_->step->row.data(), &step, sizeof step);
    state_->sum(0, state_->step->row);
    h5::append(state_->out, *state_->checksum, state_->steps);
    if (H5Dflush(state_->checksum->dataset) < 0) h5::fail_write(state_->out.name, in_quotes(h5::checksum_path));
    h5::append(state_->out, *state_->step, state_->steps);
    if (H5Dflush(state_->step->dataset) < 0) h5::fail_write(state_->out.name, in_quotes(step_path));
    ++state_->steps;
    state_->last_step = step;
    state_->writing = false;
}

std::int64_t RunFile::steps() const { return state_->steps; }
std::optional<std::int64_t> RunFile::last_step() const { return state_->last_step; }

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
    state_->checksum.reset();
    if (!state_->out.file.reset()) h5::fail_write(state_->out.name, "the file");
    state_->alive = SharedLock();
}

void mend_run(const std::string& path) {
    h5::silence();
    const std::string name = escaped(path, path.size());
    if (H5Fis_hdf5(path.c_str()) <= 0) h5::fail_read(name, "the file", "an HDF5 file");
    expect_nobody(path, name);
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
