// SPDX-License-Identifier: Apache-2.0
// Texts to train on: small, made, and with something to learn in them.
#pragma once

#include <cstddef>
#include <string>

namespace faultline::test {

/// "line 0 of a text that repeats itself.", "line 1 of …", "line 4 of …", the squares up to that of `lines` - 1.
inline std::string text_of_squares(int lines) {
    std::string all;
    for (int i = 0; i < lines; ++i) all += "line " + std::to_string(i * i) + " of a text that repeats itself.\n";
    return all;
}

/// 200,000 letters in an order that comes back.
inline std::string text_of_letters() {
    std::string all;
    for (std::size_t i = 0; i < 200000; ++i) all += "a small text that repeats "[(i * i + i / 5) % 26];
    return all;
}

}  // namespace faultline::test
