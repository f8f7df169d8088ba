// SPDX-License-Identifier: Apache-2.0
#include "paths.hpp"

namespace faultline::test {

std::filesystem::path source_dir() { return FAULTLINE_SOURCE_DIR; }
std::string program() { return FAULTLINE_PROGRAM; }

}  // namespace faultline::test
