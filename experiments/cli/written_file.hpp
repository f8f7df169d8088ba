// SPDX-License-Identifier: Apache-2.0
// Files that a command writes beside what it prints: refused before the work where they may not be written, whole at its end.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <faultline/cli/command.hpp>
#include <faultline/tensor/partial_file.hpp>

namespace faultline::cli {

/// RequestError where the file that the setting `key` names is one that the command reads, or exists and `force` is not
/// given. Nothing where `path` is empty.
void expect_writable(const Settings& settings, std::string_view key, const std::string& path, bool force);

/// The same of files that are written beside that of the setting `key`, and are there already; or are no file.
void expect_writable_beside(const Settings& settings, std::string_view key, const std::vector<std::string>& there,
                            bool force);

/// A text file that a setting names; where it names none, nothing happens.
class WrittenText {
  public:
    /// Opened now, so that a disk that refuses is known before the work. Without commit() nothing is left.
    WrittenText(const Invocation& call, std::string_view key, const std::string& path);
    void commit(std::string_view text);
    /// Ends as NAME.partial, and leaves the file that is there.
    void keep_partial(std::string_view text);

  private:
    std::optional<PartialFile> file_;
};

}  // namespace faultline::cli
