// SPDX-License-Identifier: Apache-2.0
// What holds for every reader, whatever its input: it returns a value or throws a RequestError whose sentence names the
// file and says what was expected, in printable text. Anything else stops the fuzzer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <string>
#include <string_view>

#include <faultline/base/error.hpp>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace faultline::fuzz {

inline constexpr const char* file_name = "fuzzed";

inline void require(bool holds, const char* what, std::string_view said = {}) {
    if (holds) return;
    std::fprintf(stderr, "does not hold: %s: %s\n", what, std::string(said).c_str());
    std::abort();
}

/// Runs the reader; true when it accepted the input.
template <class Read>
bool accepts(Read&& read) {
    try {
        read();
        return true;
    } catch (const RequestError& error) {
        const std::string_view sentence = error.what();
        require(sentence.starts_with(file_name), "the sentence begins with the file's name", sentence);
        require(sentence.find("expected") != std::string_view::npos, "the sentence says what was expected", sentence);
        for (const char c : sentence) {
            require(static_cast<unsigned char>(c) >= 0x20 && c != 0x7F, "the sentence holds no control character",
                    sentence);
        }
        return false;
    }
}

}  // namespace faultline::fuzz
