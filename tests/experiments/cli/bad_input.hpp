// SPDX-License-Identifier: Apache-2.0
// Wrong requests to `faultline attribute`.
#pragma once

#include <string>
#include <vector>

#include "support.hpp"

namespace faultline::test {

/// The sentence in which attribute refuses the file with more options, with an output asked for; refused() checks the rest.
inline std::string refusal(const Folder& folder, const std::string& file,
                           const std::vector<std::string>& options = {}) {
    std::vector<std::string> words{file, "-o", folder / "out.h5"};
    words.insert(words.end(), options.begin(), options.end());
    return refused("attribute", words, &folder);
}

}  // namespace faultline::test
