// SPDX-License-Identifier: Apache-2.0
#include <faultline/dissociation/source.hpp>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <set>

#include <fmt/format.h>

#include <faultline/base/error.hpp>
#include <faultline/corrections/correction.hpp>
#include <faultline/plan/nearest_name.hpp>
#include <faultline/plan/presets.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline {
namespace {

std::vector<std::string> split(std::string_view text, char separator) {
    std::vector<std::string> parts;
    for (std::size_t begin = 0; begin <= text.size();) {
        const std::size_t end = std::min(text.find(separator, begin), text.size());
        parts.emplace_back(text.substr(begin, end - begin));
        begin = end + 1;
    }
    return parts;
}

std::vector<int> indices(const std::string& word, std::string_view list) {
    std::vector<int> found;
    for (const std::string& item : split(list, ',')) {
        int value = -1;
        const auto [end, error] = std::from_chars(item.data(), item.data() + item.size(), value);
        if (item.empty() || error != std::errc{} || end != item.data() + item.size() || value < 0)
            throw RequestError(fmt::format("source {}: expected integers of 0 or more behind =", in_quotes(word)));
        if (std::ranges::find(found, value) != found.end())
            throw RequestError(fmt::format("source {}: {} is there twice in {}: expected it once", in_quotes(word),
                                           value, in_quotes(list)));
        found.push_back(value);
    }
    return found;
}

void untile(Schedule& s) { s.block_q = s.block_k = s.bwd_block_q = s.bwd_block_k = 0; }

/// plan:NAME[:layers=…][:heads=…][:correction=…][:exact=SITES][:untiled]
void add_plan(const std::string& word, int head_dim, const std::string& folder, Source& source) {
    const std::vector<std::string> parts = split(word, ':');
    if (parts.size() < 2) throw RequestError(fmt::format("source {}: expected plan:NAME", in_quotes(word)));
    const bool is_file = parts[1].ends_with(".toml");
    RoundingPlan chosen =
        for_head_dim(plan(is_file ? (std::filesystem::path(folder) / parts[1]).string() : parts[1]), head_dim);
    std::vector<int> layers{-1}, heads;
    std::vector<Site> repaired;
    const auto change = [&](RoundingPlan changed, std::string_view by) {
        if (changed.same_numerics(chosen))
            throw RequestError(fmt::format("source {}: {}: does nothing: plan {} is the same without it: expected none",
                                           in_quotes(word), by, in_quotes(chosen.name)));
        chosen = std::move(changed);
    };
    bool untiled = false;
    std::set<std::string> given;
    for (std::size_t i = 2; i < parts.size(); ++i) {
        const std::string& part = parts[i];
        const std::string key = part.substr(0, part.find('='));
        const bool one_at_most = key == "layers" || key == "heads" || key == "untiled";
        if (one_at_most && !given.insert(key).second)
            throw RequestError(fmt::format("source {}: {}: is there twice: expected it once", in_quotes(word), key));
        if (part.starts_with("layers=")) {
            layers = indices(word, part.substr(7));
        } else if (part.starts_with("heads=")) {
            heads = indices(word, part.substr(6));
        } else if (part.starts_with("correction=")) {
            const Correction correction = parse_correction(part.substr(11));
            if (correction.changes_function())
                throw RequestError(
                    fmt::format("source {}: correction {} changes the function: expected it among the model's settings",
                                in_quotes(word), in_quotes(correction.name)));
            change(apply(correction, chosen), part);
        } else if (part.starts_with("exact=")) {
            for (const std::string& name : split(part.substr(6), ',')) {
                const auto site = find_site(name);
                if (!site) {
                    std::vector<std::string_view> known;
                    for (const SiteInfo& s : sites()) known.push_back(s.name);
                    throw RequestError(fmt::format("source {}: site {}: {}", in_quotes(word), in_quotes(name),
                                                   expected_one_of(name, known)));
                }
                change(chosen.repaired(*site), "exact=" + name);
                repaired.push_back(*site);
            }
        } else if (part == "untiled") {
            untiled = true;
        } else {
            throw RequestError(fmt::format("source {}: {}: expected layers=, heads=, correction=, exact= or untiled",
                                           in_quotes(word), in_quotes(part)));
        }
    }
    if (untiled) {
        RoundingPlan whole = chosen;
        untile(whole.schedule);
        change(std::move(whole), "untiled");
    }
    const auto shared = std::make_shared<const RoundingPlan>(std::move(chosen));
    for (const int layer : layers) source.attention.push_back({layer, heads, shared});
    for (const Site site : repaired) source.repaired.push_back({word, site, shared});
}

}  // namespace

Source parse_source(std::string_view text, int head_dim, const std::string& folder) {
    Source source;
    source.text = std::string(text);
    if (text == "none") return source;
    for (const std::string& word : split(text, '+')) {
        if (word.starts_with("plan:"))
            add_plan(word, head_dim, folder, source);
        else
            source.faults.push_back(parse_fault(word));
    }
    return source;
}

}  // namespace faultline
