// SPDX-License-Identifier: Apache-2.0
// What is said where a card cannot be used, as text: without a card, for tests.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace faultline::device {

/// A run of the plan takes `needed` bytes, `tape` of them for what its instrument sees, and `room` may be used. In MiB, what is
/// needed rounded up and what there is down.
[[nodiscard]] std::string no_room(std::string_view plan, std::size_t needed, std::size_t tape, std::size_t room);

/// Truth of rows of `keys` keys takes `needed` bytes at least, and `room` may be used.
[[nodiscard]] std::string no_room_for_truth(std::ptrdiff_t keys, std::size_t needed, std::size_t room);

/// What FAULTLINE_DEVICE_MIB says, in bytes; SIZE_MAX where it is not set or empty. RequestError, which names it, where it is no
/// whole number of MiB from 1 on.
[[nodiscard]] std::size_t memory_limit();

/// The architectures of a build, in CMake's words with commas (80-real,90a-real), for people: "8.x and 9.0". Code for 8.0 runs on
/// every 8.x, that of an architecture with `a` on it alone, and where PTX is kept (without -real) on every later card.
[[nodiscard]] std::string architectures_of(std::string_view list);
/// A card that the build has no code for.
[[nodiscard]] std::string no_code(std::string_view card, int major, int minor, std::string_view architectures);

/// "64 MiB", or "118 GiB" from 10 GiB on.
[[nodiscard]] std::string memory_text(std::size_t bytes);

}  // namespace faultline::device
