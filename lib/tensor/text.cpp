// SPDX-License-Identifier: Apache-2.0
#include <faultline/tensor/text.hpp>

#include <cstdint>

#include <fmt/format.h>

namespace faultline {
namespace {

std::uint32_t code_point(std::string_view character) {
    const auto byte = [&](std::size_t i) {
        return static_cast<std::uint32_t>(static_cast<unsigned char>(character[i]));
    };
    switch (character.size()) {
        case 1:
            return byte(0);
        case 2:
            return (byte(0) & 0x1Fu) << 6 | (byte(1) & 0x3Fu);
        case 3:
            return (byte(0) & 0x0Fu) << 12 | (byte(1) & 0x3Fu) << 6 | (byte(2) & 0x3Fu);
        default:
            return (byte(0) & 0x07u) << 18 | (byte(1) & 0x3Fu) << 12 | (byte(2) & 0x3Fu) << 6 | (byte(3) & 0x3Fu);
    }
}

bool printable(std::uint32_t c) {
    const bool control = c < 0x20 || (c >= 0x7F && c <= 0x9F);
    const bool line_break = c == 0x2028 || c == 0x2029;
    const bool bidirectional =
        c == 0x200E || c == 0x200F || (c >= 0x202A && c <= 0x202E) || (c >= 0x2066 && c <= 0x2069);
    // Unicode's noncharacters: no text has them, and XML forbids two of them.
    const bool none = (c & 0xFFFE) == 0xFFFE || (c >= 0xFDD0 && c <= 0xFDEF);
    return !control && !line_break && !bidirectional && !none;
}

void append_bytes(std::string& out, std::string_view bytes) {
    for (const char c : bytes) out += fmt::format("\\x{:02x}", static_cast<unsigned char>(c));
}

}  // namespace

std::size_t utf8_character(std::string_view text) {
    if (text.empty()) return 0;
    const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
    const unsigned char lead = byte(0);
    if (lead < 0x80) return 1;
    const std::size_t length = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : 2;
    if (lead < 0xC2 || lead > 0xF4 || text.size() < length) return 0;
    // The second byte's range excludes overlong forms, surrogates and what lies above U+10FFFF.
    const unsigned char low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
    const unsigned char high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
    if (byte(1) < low || byte(1) > high) return 0;
    for (std::size_t i = 2; i < length; ++i) {
        if (byte(i) < 0x80 || byte(i) > 0xBF) return 0;
    }
    return length;
}

std::string escaped(std::string_view text, std::size_t longest) {
    std::string out;
    for (std::size_t i = 0; i < text.size();) {
        if (i >= longest) return out + "…";
        const std::size_t length = utf8_character(text.substr(i));
        const std::string_view character = text.substr(i, length == 0 ? 1 : length);
        i += character.size();
        if (character == "\n")
            out += "\\n";
        else if (character == "\t")
            out += "\\t";
        else if (character == "\\")
            out += "\\\\";
        else if (character == "\"")
            out += "\\\"";
        else if (length == 0 || !printable(code_point(character)))
            append_bytes(out, character);
        else
            out += character;
    }
    return out;
}

std::string in_quotes(std::string_view text) { return fmt::format("\"{}\"", escaped(text)); }

}  // namespace faultline
