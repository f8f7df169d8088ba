// SPDX-License-Identifier: Apache-2.0
// An identification as one JSON object, schema "faultline.identification/1".
#pragma once

#include <string>

#include <faultline/identification/identify.hpp>

namespace faultline {

/// The object, indented, with a newline at its end. The same identification gives the same bytes.
[[nodiscard]] std::string to_json(const Identification& identification);

}  // namespace faultline
