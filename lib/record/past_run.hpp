// SPDX-License-Identifier: Apache-2.0
// The steps of a run file that a run goes on from.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include <faultline/record/column.hpp>
#include <faultline/record/manifest.hpp>
#include <faultline/record/record_reader.hpp>

namespace faultline {

class PastRun {
  public:
    /// The completed steps up to the number `last_step`. RequestError when the file is no run.
    PastRun(const std::string& path, std::int64_t last_step);

    [[nodiscard]] Manifest manifest() const { return reader_.manifest(); }
    [[nodiscard]] std::int64_t steps() const { return steps_; }
    [[nodiscard]] std::optional<std::int64_t> last_step() const { return last_step_; }

    /// RequestError when the run has other coordinates there, or none.
    void expect_labels(const std::string& path, std::span<const std::string> labels);
    void expect_values(const std::string& path, Dtype dtype, std::span<const std::byte> bytes);
    /// The series' steps, to a column of that path that has none, and the CRC-32 of each. RequestError when the run has no
    /// such series, or a step of it is not what was written.
    [[nodiscard]] std::vector<std::uint32_t> copy_to(const h5::Writer& out, const h5::Column& column);
    /// RequestError when the run has checksums, and of other series; those of before there were any have none.
    void expect_checksums_of(const std::vector<std::string>& series) const;
    /// RequestError when the run has what was not among the above; its checksums are made anew.
    void expect_all_declared() const;

  private:
    [[noreturn]] void fail(const std::string& path, const std::string& what, const std::string& expected) const;
    void declare(const std::string& path);

    RecordReader reader_;
    h5::Handle file_;
    std::int64_t steps_ = 0;
    std::optional<std::int64_t> last_step_;
    std::set<std::string> declared_;
};

}  // namespace faultline
