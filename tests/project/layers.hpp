// SPDX-License-Identifier: Apache-2.0
// What CONTRIBUTING.md says of the tree, as something that can be checked: which folder may include which, and the
// licence line. Works on text alone, so it needs no build and sees files of back ends that this build leaves out.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace faultline::project {

/// One line of a source file (or CMakeLists.txt) that breaks a rule of the tree.
struct Violation {
    std::filesystem::path file;  ///< relative to the root of the tree
    int line = 0;                ///< from 1; 0 where the rule concerns the file as a whole
    std::string reason;          ///< one sentence

    [[nodiscard]] std::string text() const;
};

/// Includes in sources, and faultline:: targets named in CMakeLists.txt files, that run against
///     lib <- kernels <- injectors, probes <- experiments,
/// against the order of the folders within lib, into a folder that does not exist, or around a cycle of folders within
/// one layer. `root` is the root of the tree; tests/, bench/ and notebooks/ may include anything and are not looked at.
[[nodiscard]] std::vector<Violation> layer_violations(const std::filesystem::path& root);

/// Source files, scripts, CMake files and presets without the line `SPDX-License-Identifier: Apache-2.0` among their
/// first three lines, as a comment and in exactly this spelling.
[[nodiscard]] std::vector<Violation> licence_violations(const std::filesystem::path& root);

}  // namespace faultline::project
