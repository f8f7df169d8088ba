// SPDX-License-Identifier: Apache-2.0
// Reading HDF5 files of ours, also one that is being written, or whose writer was killed.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <faultline/record/axes.hpp>
#include <faultline/record/manifest.hpp>
#include <faultline/tensor/tensor.hpp>

namespace faultline {

class RecordReader {
  public:
    /// RequestError when the file is missing, not HDF5, or exclusively locked.
    explicit RecordReader(const std::string& path);
    RecordReader(RecordReader&&) noexcept;
    RecordReader& operator=(RecordReader&&) noexcept;
    ~RecordReader();

    [[nodiscard]] const std::string& name() const;  ///< path as given, escaped
    /// Root attributes; what is absent stays empty. RequestError where they claim a file of ours that it cannot be: a kind
    /// whose schema is another, a schema_version that is newer than this build, or none.
    [[nodiscard]] Manifest manifest() const;
    /// Paths of all datasets ("layer0/outputs/dq"), without those that only name a dimension, in order of creation
    /// (by name in files that do not keep it).
    /// Only what lies in this file: links to other files are not followed.
    [[nodiscard]] std::vector<std::string> datasets() const;
    [[nodiscard]] bool contains(const std::string& path) const;
    /// Numbers, with their dtype by type and `encoding`. RequestError when it is missing, is not numeric, keeps its data
    /// outside the file, or claims more data than the file can hold; of a run's series also when a complete step is not
    /// what was written (row_checksums.hpp; a file of before there were checksums is read without).
    [[nodiscard]] Tensor read(const std::string& path) const;
    /// The same of rows [first, …) of a run's series that were read otherwise, row_bytes each. RequestError.
    void expect_intact(const std::string& path, std::int64_t first, std::span<const std::byte> rows,
                       std::size_t row_bytes) const;
    [[nodiscard]] std::vector<std::string> read_strings(const std::string& path) const;
    /// Names ("" without one) and sizes of the dimensions.
    [[nodiscard]] std::vector<Axis> axes(const std::string& path) const;
    /// Names of an object's attributes, and one of them as text (numbers are printed); nothing when it is absent or
    /// neither text nor a number.
    [[nodiscard]] std::vector<std::string> attributes(const std::string& object) const;
    [[nodiscard]] std::optional<std::string> attribute(const std::string& object, const std::string& name) const;
    /// A list of texts; empty when it is absent or no such list.
    [[nodiscard]] std::vector<std::string> texts(const std::string& object, const std::string& name) const;

  private:
    struct State;
    std::unique_ptr<State> state_;
};

}  // namespace faultline
