// SPDX-License-Identifier: Apache-2.0
// Functions, and not definitions on every command line, so that a compiler cache knows a test again in another folder.
#pragma once

#include <filesystem>
#include <string>

namespace faultline::test {

/// The top of the sources that the tests were built from.
[[nodiscard]] std::filesystem::path source_dir();
/// The program that was built with the tests.
[[nodiscard]] std::string program();

}  // namespace faultline::test
