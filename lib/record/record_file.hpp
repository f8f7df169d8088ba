// SPDX-License-Identifier: Apache-2.0
// An HDF5 file written once and whole (kind attribution, dissociation, capture): it is PATH.partial until commit().
// Layout: root attributes are the manifest; datasets have units, long_name and named dimensions, so that h5dump, h5py
// and xarray (h5netcdf, netCDF4) open them. bf16 is uint16 with encoding = "bfloat16", fp8 uint8 likewise.
//
// Not for several threads at once; compression uses its own threads inside a call.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <faultline/record/axes.hpp>
#include <faultline/record/manifest.hpp>
#include <faultline/record/storage.hpp>
#include <faultline/tensor/tensor.hpp>

namespace faultline {

class RecordFile {
  public:
    /// RequestError when the path cannot name a file (PartialName), WorkError when the disk refuses.
    static RecordFile create(const std::string& path, const Manifest& manifest, const Storage& storage = {});
    RecordFile(RecordFile&&) noexcept;
    RecordFile& operator=(RecordFile&&) noexcept;
    ~RecordFile();  ///< without commit() nothing is left

    /// Coordinates of a dimension: `path` is GROUP/NAME, and NAME can then be used as an axis in GROUP and below it.
    /// To be written before the datasets that use it.
    void coordinate(const std::string& path, std::span<const std::string> labels, const About& about = {});
    void coordinate(const std::string& path, std::span<const std::int64_t> values, const About& about = {});
    void coordinate(const std::string& path, std::span<const double> values, const About& about = {});

    /// A dataset of row-major values, as many as the axes' sizes multiply to; no axes: a scalar. Groups on the way are
    /// made. An axis without coordinates needs no declaration. WorkError when the path is taken, sizes disagree, or the
    /// disk refuses.
    template <class T>
    void write(const std::string& path, std::span<const T> values, std::span<const Axis> axes,
               const About& about = {}) {
        write_bytes(path, dtype_of<T>(), std::as_bytes(values), axes, about);
    }
    template <class T>
    void write(const std::string& path, const std::vector<T>& values, const std::vector<Axis>& axes,
               const About& about = {}) {
        write(path, std::span<const T>(values), std::span<const Axis>(axes), about);
    }
    /// Elements of any dtype as their bytes, little-endian.
    void write_bytes(const std::string& path, Dtype dtype, std::span<const std::byte> bytes, std::span<const Axis> axes,
                     const About& about = {});
    /// Text, one per element.
    void write_strings(const std::string& path, std::span<const std::string> values, std::span<const Axis> axes,
                       const About& about = {});
    /// Reals whose exponent may lie beyond double: x = mantissa * 2^exponent2. Three datasets: `path` holds the nearest
    /// doubles (0 or infinity where x is out of their range: fit for most plots and never silently wrong beside the
    /// others), `path`_mantissa and `path`_exponent2 hold x exactly. Two numbers and not text, so that
    /// log10|x| = log10|mantissa| + exponent2 * log10(2) is one line for an array.
    void write_wide(const std::string& path, std::span<const double> mantissa, std::span<const std::int64_t> exponent2,
                    std::span<const Axis> axes, const About& about = {});

    /// Where the values of a virtual dataset's first index stand: dataset `dataset` of `file`.
    struct VirtualRow {
        std::int64_t row = 0;  ///< in this file's dataset
        std::string file;      ///< relative to this file's folder
        std::string dataset;
        std::vector<std::int64_t> shape;  ///< which it has there
        std::vector<std::int64_t> block;  ///< which it takes here, over the axes behind the row: as many elements
    };
    /// A dataset of doubles over (row, axes…) whose values stay in other files (HDF5's virtual layout, from 1.10 on): row r
    /// holds what stands there, from index 0 of every axis. NaN where that is smaller, where no row is named, and where the
    /// file is not there when somebody reads. WorkError when the path is taken or a row has more than the axes.
    void write_virtual(const std::string& path, std::span<const VirtualRow> rows, std::span<const Axis> axes,
                       const About& about = {});

    /// `path` stands for the root of another file, an external link of HDF5; `file` is read relative to this file's folder.
    /// It need not exist yet. WorkError when the path is taken.
    void link(const std::string& path, const std::string& file);

    /// Attributes of an object written before ("" or "/" is the root). A NaN is written as a NaN.
    void attribute(const std::string& object, const std::string& name, const std::string& value);
    void attribute(const std::string& object, const std::string& name, const char* value);
    void attribute(const std::string& object, const std::string& name, double value);
    void attribute(const std::string& object, const std::string& name, std::int64_t value);
    void attribute(const std::string& object, const std::string& name, std::span<const std::string> values);

    /// What has been written stands on the disk: a process that is killed later, and not in the midst of a write, leaves it in
    /// PATH.partial, which can be read after `h5clear -s PATH.partial` (HDF5 has the file marked as being written). WorkError when
    /// the disk refuses.
    void flush();
    /// Writes what is left, closes, and gives the file its name. WorkError when the disk refuses; then nothing is left.
    void commit();
    /// The same, but the file stays PATH.partial, for good, and what PATH names is left alone.
    void keep_partial();
    /// The name given, for messages.
    [[nodiscard]] const std::string& name() const;

  private:
    void finish();
    struct State;
    explicit RecordFile(std::unique_ptr<State> state);
    std::unique_ptr<State> state_;
};

}  // namespace faultline
