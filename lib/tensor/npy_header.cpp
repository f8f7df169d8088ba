// SPDX-License-Identifier: Apache-2.0
#include <faultline/tensor/npy_header.hpp>

#include <array>
#include <cstring>
#include <limits>
#include <set>
#include <string_view>

#include <fmt/format.h>

#include <faultline/base/error.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline::detail {
namespace {

constexpr std::string_view magic = "\x93NUMPY";
constexpr std::uint64_t longest_header = 65536;  // version 1's limit; numpy itself reads 10,000 characters unasked
constexpr std::size_t most_dimensions = 64;      // numpy 2's NPY_MAXDIMS

[[noreturn]] void refuse(const Input& in, std::string_view field, const std::string& found, std::string_view expected) {
    throw RequestError(fmt::format("{}: {}: {}: expected {}", in.name(), field, found, expected));
}

/// Just the literals that numpy writes there: strings, True, False, tuples of integers.
class Dictionary {
  public:
    Dictionary(const Input& in, std::string_view text) : in_(in), text_(text) {}

    NpyHeader parse() {
        NpyHeader header;
        std::set<std::string, std::less<>> seen;
        require('{');
        while (!accept('}')) {
            const std::string key = string();
            require(':');
            if (!seen.insert(key).second)
                refuse(in_, "header", fmt::format("key {} occurs twice", in_quotes(key)), "every key once");
            if (key == "descr")
                header.descr = descr();
            else if (key == "fortran_order")
                header.fortran_order = boolean();
            else if (key == "shape")
                header.shape = shape();
            else
                refuse(in_, "header", fmt::format("key {}", in_quotes(key)), "descr, fortran_order and shape");
            if (!accept(',')) {
                require('}');
                break;
            }
        }
        skip_space();
        if (at_ != text_.size()) bad("nothing after the dictionary");
        for (const char* key : {"descr", "fortran_order", "shape"}) {
            if (!seen.contains(key))
                refuse(in_, "header", fmt::format("{} is missing", key), "descr, fortran_order and shape");
        }
        return header;
    }

  private:
    [[noreturn]] void bad(std::string_view expected) const {
        refuse(in_, "header", fmt::format("is not numpy's dictionary (at byte {} of it)", at_), expected);
    }

    void skip_space() {
        while (at_ < text_.size() && std::string_view(" \t\r\n").find(text_[at_]) != std::string_view::npos) ++at_;
    }

    bool accept(char c) {
        skip_space();
        if (at_ == text_.size() || text_[at_] != c) return false;
        ++at_;
        return true;
    }

    void require(char c) {
        if (!accept(c)) bad(fmt::format("\"{}\"", c));
    }

    bool accept_word(std::string_view word) {
        skip_space();
        if (text_.substr(at_, word.size()) != word) return false;
        at_ += word.size();
        return true;
    }

    std::string string() {
        skip_space();
        const char quote = at_ < text_.size() ? text_[at_] : '\0';
        if (quote != '\'' && quote != '"') bad("a string");
        const std::size_t end = text_.find(quote, at_ + 1);
        if (end == std::string_view::npos) bad("a closing quote");
        const std::string value(text_.substr(at_ + 1, end - at_ - 1));
        at_ = end + 1;
        return value;
    }

    std::string descr() {
        skip_space();
        if (at_ < text_.size() && text_[at_] == '[') {
            refuse(in_, "descr", "is a structured type", "one plain numeric type, such as '<f4'");
        }
        return string();
    }

    bool boolean() {
        if (accept_word("True")) return true;
        if (accept_word("False")) return false;
        bad("True or False");
    }

    std::vector<std::int64_t> shape() {
        std::vector<std::int64_t> out;
        require('(');
        while (!accept(')')) {
            if (out.size() == most_dimensions) {
                refuse(in_, "shape", fmt::format("has more than {} dimensions", most_dimensions), "fewer");
            }
            out.push_back(integer());
            (void)accept_word("L");  // Python 2 wrote long integers so
            if (accept(',')) continue;
            require(')');
            break;
        }
        return out;
    }

    std::int64_t integer() {
        skip_space();
        const std::size_t first = at_;
        std::int64_t value = 0;
        for (; at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9'; ++at_) {
            const int digit = text_[at_] - '0';
            if (value > (std::numeric_limits<std::int64_t>::max() - digit) / 10) {
                refuse(in_, "shape", "holds a number of 2^63 or more", "non-negative integers below 2^63");
            }
            value = value * 10 + digit;
        }
        if (at_ == first) bad("a non-negative integer");
        return value;
    }

    const Input& in_;
    std::string_view text_;
    std::size_t at_ = 0;
};

}  // namespace

NpyHeader read_npy_header(const Input& in) {
    constexpr std::uint64_t fixed = 10;  // magic, version, and the shorter of the two length fields
    if (in.size() < fixed)
        refuse(in, "magic", fmt::format("the file has {} bytes", in.size()), "a .npy file, at least 10");
    std::array<std::byte, 12> start{};
    in.read(0, std::span(start).first(fixed));
    if (std::memcmp(start.data(), magic.data(), magic.size()) != 0) {
        refuse(in, "magic", "is not that of a .npy file", "\"\\x93NUMPY\"");
    }
    const auto major = std::to_integer<int>(start[6]);
    const auto minor = std::to_integer<int>(start[7]);
    if (major < 1 || major > 3 || minor != 0) {
        refuse(in, "version", fmt::format("{}.{}", major, minor), "1.0, 2.0 or 3.0");
    }
    const std::uint64_t length_end = major == 1 ? 10 : 12;
    if (in.size() < length_end) refuse(in, "header length", "the file ends in it", "a .npy file");
    in.read(0, std::span(start).first(length_end));
    std::uint64_t length = 0;
    std::memcpy(&length, start.data() + 8, length_end - 8);
    if (length > in.size() - length_end || length > longest_header) {
        refuse(in, "header length", fmt::format("{} bytes", length),
               length > in.size() - length_end
                   ? fmt::format("at most the {} bytes that follow it in the file", in.size() - length_end)
                   : fmt::format("at most {}", longest_header));
    }
    std::string text(static_cast<std::size_t>(length), '\0');
    in.read(length_end, std::as_writable_bytes(std::span(text)));
    NpyHeader header = Dictionary(in, text).parse();
    header.data_start = length_end + length;
    return header;
}

}  // namespace faultline::detail
