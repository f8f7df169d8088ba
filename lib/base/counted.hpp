// SPDX-License-Identifier: Apache-2.0
// "1 query", "3 queries": a count with its noun, for people.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace faultline {

[[nodiscard]] inline std::string counted(std::int64_t count, std::string_view one, std::string_view more) {
    return std::to_string(count).append(" ").append(count == 1 ? one : more);
}

}  // namespace faultline
