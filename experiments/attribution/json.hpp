// SPDX-License-Identifier: Apache-2.0
// An attribution as one JSON object, schema "faultline.attribution/1" (DESIGN of the command line; docs/ has every key).
// A number that a double cannot hold (1e-3012, infinity, NaN) is a string in scientific notation, "inf" or "nan"; what is
// undefined (t of a single row, unexplained with some of the sites) is null.
#pragma once

#include <string>

#include <faultline/attribution/attribution.hpp>

namespace faultline {

/// The object, indented, with a newline at its end. The same attribution gives the same bytes.
[[nodiscard]] std::string to_json(const Attribution& attribution);

}  // namespace faultline
