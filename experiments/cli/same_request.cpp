// SPDX-License-Identifier: Apache-2.0
#include <faultline/cli/same_request.hpp>

#include <algorithm>
#include <array>
#include <string_view>

#include <fmt/format.h>

#include <faultline/base/error.hpp>
#include <faultline/gpt/fingerprint.hpp>
#include <faultline/ranks/sums.hpp>

namespace faultline::cli {
namespace {

constexpr std::array<std::string_view, 9> own{"data",  "replay", "output", "resume", "ranks",
                                              "force", "json",   "quiet",  "threads"};

constexpr char between = '\0';  // keys and values are texts of settings and plans

std::string packed(const AgreedOn& all) {
    std::string text;
    for (const auto& [key, value] : all) text += key + between + value + between;
    return text;
}

AgreedOn unpacked(const std::string& text) {
    AgreedOn all;
    auto next = [&, at = std::size_t{0}]() mutable {
        const std::size_t end = std::min(text.find(between, at), text.size());
        std::string part = text.substr(at, end - at);
        at = end + 1;
        return part;
    };
    for (auto count = std::ranges::count(text, between); count > 1; count -= 2) {
        std::string key = next();
        all.emplace_back(std::move(key), next());
    }
    return all;
}

std::string value_of(const AgreedOn& all, const std::string& key) {
    const auto found = std::ranges::find(all, key, &AgreedOn::value_type::first);
    return found == all.end() ? "none" : found->second;
}

/// How two values that differ are named: as they are, where they are short.
std::string difference(std::size_t rank, const std::string& value, const std::string& of_first) {
    constexpr std::size_t longest = 60;  // a plan has a page
    if (value.size() > longest || of_first.size() > longest)
        return fmt::format("is not on rank {} what it is on rank 0", rank);
    return fmt::format("is {} on rank {} and {} on rank 0", value, rank, of_first);
}

}  // namespace

std::span<const std::string_view> settings_of_a_rank() { return own; }

AgreedOn agreed_on(const Invocation& call, const gpt::TrainConfig& config) {
    AgreedOn all;
    const std::string text = call.settings.print();
    for (std::size_t at = text.find('\n') + 1; at < text.size();) {  // behind [train], KEY = VALUE a line
        const std::size_t end = text.find('\n', at), equals = text.find(" = ", at);
        const std::string key = text.substr(at, equals - at);
        if (std::ranges::find(own, key) == own.end())
            all.emplace_back("--" + key, text.substr(equals + 3, end - equals - 3));
        at = end + 1;
    }
    for (const auto& [key, value] : gpt::fingerprint(config)) all.emplace_back(key, value);
    return all;
}

void expect_same(Ranks* ranks, const AgreedOn& mine) {
    if (ranks == nullptr) return;
    settle(ranks, nullptr);  // a rank that failed says that in place of what it has
    const std::vector<std::string> all = all_texts(ranks, packed(mine));
    const AgreedOn first = unpacked(all.front());
    for (std::size_t rank = 1; rank < all.size(); ++rank) {
        if (all[rank] == all.front()) continue;
        const AgreedOn other = unpacked(all[rank]);
        for (const AgreedOn* keys : {&first, &other})
            for (const auto& [key, ignored] : *keys)
                if (const std::string a = value_of(first, key), b = value_of(other, key); a != b)
                    throw RequestError(
                        fmt::format("{}: {}: expected the same on all ranks", key, difference(rank, b, a)));
    }
}

}  // namespace faultline::cli
