// SPDX-License-Identifier: Apache-2.0
#include <faultline/plan/plan_files.hpp>

#include <algorithm>
#include <string>

#include <faultline/plan/tomlplusplus.hpp>

namespace faultline {

namespace fs = std::filesystem;

std::vector<fs::path> plan_files(const fs::path& file) {
    constexpr std::uintmax_t largest_file = 1 << 20;  // as of read_plan()
    constexpr std::size_t longest_chain = 64;
    std::vector<fs::path> files;
    for (fs::path next = file; files.size() < longest_chain;) {
        std::error_code problem;
        if (!fs::is_regular_file(next, problem) || fs::file_size(next, problem) > largest_file) break;
        const auto is_next = [&](const fs::path& other) { return fs::equivalent(other, next, problem); };
        if (std::any_of(files.begin(), files.end(), is_next)) break;
        try {
            const toml::table root = toml::parse_file(next.string());
            files.push_back(next);
            const auto base = root["base"].value<std::string>();
            if (!base || !base->ends_with(".toml")) break;
            next = next.parent_path() / *base;
        } catch (const toml::parse_error&) {
            break;
        }
    }
    return files;
}

}  // namespace faultline
