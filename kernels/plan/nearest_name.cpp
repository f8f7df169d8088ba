// SPDX-License-Identifier: Apache-2.0
#include <faultline/plan/nearest_name.hpp>

#include <algorithm>
#include <array>
#include <vector>

#include <faultline/tensor/text.hpp>

namespace faultline {
namespace {

constexpr std::size_t longest_list = 12;

/// Optimal string alignment distance; three rows of the table are alive at a time.
std::size_t edits(std::string_view a, std::string_view b) {
    std::array<std::vector<std::size_t>, 3> rows;
    for (auto& row : rows) row.resize(b.size() + 1);
    for (std::size_t j = 0; j <= b.size(); ++j) rows[0][j] = j;
    for (std::size_t i = 1; i <= a.size(); ++i) {
        const auto& before = rows[(i + 1) % 3];  // row i - 2
        const auto& above = rows[(i - 1) % 3];
        auto& row = rows[i % 3];
        row[0] = i;
        for (std::size_t j = 1; j <= b.size(); ++j) {
            row[j] = std::min({above[j] + 1, row[j - 1] + 1, above[j - 1] + (a[i - 1] != b[j - 1])});
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
                row[j] = std::min(row[j], before[j - 2] + 1);
        }
    }
    return rows[a.size() % 3][b.size()];
}

}  // namespace

std::string_view nearest_name(std::string_view wanted, std::span<const std::string_view> candidates) {
    constexpr std::size_t longest_name = 64;  // no name of ours is longer; the distance is quadratic
    if (wanted.size() > longest_name) return {};
    std::string_view nearest;
    std::size_t fewest = 0;
    for (const std::string_view candidate : candidates) {
        const std::size_t count = edits(wanted, candidate);
        if (count > (std::max(wanted.size(), candidate.size()) + 2) / 3) continue;
        if (!nearest.empty() && count >= fewest) continue;
        nearest = candidate;
        fewest = count;
    }
    return nearest;
}

std::string expected_one_of(std::string_view wanted, std::span<const std::string_view> candidates) {
    const std::string_view nearest = nearest_name(wanted, candidates);
    const std::string hint = nearest.empty() ? "" : "did you mean " + in_quotes(nearest) + "?";
    if (!hint.empty() && candidates.size() > longest_list) return "expected a known name (" + hint + ")";
    std::string text = candidates.size() == 1 ? "expected " : "expected one of ";
    for (std::size_t i = 0; i < candidates.size(); ++i) (text += i == 0 ? "" : ", ") += escaped(candidates[i]);
    return hint.empty() ? text : text + " (" + hint + ")";
}

}  // namespace faultline
