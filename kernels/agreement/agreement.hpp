// SPDX-License-Identifier: Apache-2.0
// What a comparison of a card with what the library says of it found.
#pragma once

#include <cstdint>
#include <string>

namespace faultline::agreement {

/// A row of a table.
struct Agreement {
    std::string name;
    std::uint64_t elements = 0;
    std::uint64_t differing = 0;  ///< in any bit, or beyond a bound where the name says that there is one
    double cpu_seconds = 0;       ///< of the processor's side, where it has one of its own
    double device_seconds = 0;
};

}  // namespace faultline::agreement
