// SPDX-License-Identifier: Apache-2.0
#include <faultline/device/refusals.hpp>

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <system_error>
#include <vector>

#include <faultline/base/error.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline::device {
namespace {

std::size_t mib_rounded_up(std::size_t bytes) { return (bytes + (std::size_t{1} << 20) - 1) >> 20; }

}  // namespace

std::string no_room(std::string_view plan, std::size_t needed, std::size_t tape, std::size_t room) {
    std::string text = "device cuda: plan \"";
    text += plan;
    text += "\": a run needs " + std::to_string(mib_rounded_up(needed)) + " MiB";
    if (tape > 0) text += ", " + std::to_string(mib_rounded_up(tape)) + " of them for what is recorded,";
    return text + " and " + std::to_string(room >> 20) +
           " MiB are free: expected a shorter sequence, or smaller tiles (block_q, block_k) of the plan";
}

std::string no_room_for_truth(std::ptrdiff_t keys, std::size_t needed, std::size_t room) {
    return "device cuda: truth: rows of " + std::to_string(keys) + " keys need " +
           std::to_string(mib_rounded_up(needed)) + " MiB, one at a time, and " + std::to_string(room >> 20) +
           " MiB are free: expected a shorter sequence, or more memory";
}

std::size_t memory_limit() {
    const char* const text = std::getenv("FAULTLINE_DEVICE_MIB");
    if (text == nullptr || *text == 0) return SIZE_MAX;
    const std::string_view words(text);
    long long mib = 0;
    const auto [end, error] = std::from_chars(words.data(), words.data() + words.size(), mib);
    if (error != std::errc() || end != words.data() + words.size() || mib < 1 || mib > (1LL << 40))
        throw RequestError("FAULTLINE_DEVICE_MIB: " + in_quotes(words) +
                           ": expected the MiB of the card's memory that may be used, 1 to 1099511627776");
    return static_cast<std::size_t>(mib) << 20;
}

std::string architectures_of(std::string_view list) {
    std::vector<std::string> words;
    bool later = false;
    while (!list.empty()) {
        const std::string_view one = list.substr(0, list.find(','));
        list.remove_prefix(std::min(list.size(), one.size() + 1));
        const std::size_t digits = one.find_first_not_of("0123456789");
        const std::string number(one.substr(0, digits));
        if (number.size() < 2) continue;
        const bool only = digits != std::string_view::npos && one[digits] == 'a';
        const std::string major = number.substr(0, number.size() - 1), minor(1, number.back());
        std::string word = major + "." + (minor == "0" && !only ? "x" : minor + (only ? "" : " and later of it"));
        if (std::ranges::find(words, word) == words.end()) words.push_back(std::move(word));
        later = later || (!only && one.find("-real") == std::string_view::npos);
    }
    if (later) words.push_back("later ones");
    std::string text;
    for (std::size_t i = 0; i < words.size(); ++i)
        text += (i == 0 ? "" : i + 1 == words.size() ? " and " : ", ") + words[i];
    return text;
}

std::string no_code(std::string_view card, int major, int minor, std::string_view architectures) {
    std::string text = "device cuda: ";
    text += card;
    return text + " has compute capability " + std::to_string(major) + "." + std::to_string(minor) +
           ", and this build has code for " + architectures_of(architectures) +
           ": expected such a card, or a build with CMAKE_CUDA_ARCHITECTURES for this one";
}

std::string memory_text(std::size_t bytes) {
    const std::size_t mib = bytes >> 20;
    return mib < 10 * 1024 ? std::to_string(mib) + " MiB" : std::to_string(mib >> 10) + " GiB";
}

}  // namespace faultline::device
