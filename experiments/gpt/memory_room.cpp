// SPDX-License-Identifier: Apache-2.0
#include <faultline/gpt/memory_room.hpp>

#include <sys/resource.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>

#include <fmt/format.h>

#include <faultline/base/error.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline::gpt {
namespace {

constexpr std::uint64_t none = std::numeric_limits<std::uint64_t>::max();

std::optional<std::uint64_t> number_in(std::string_view words) {
    const std::size_t first = words.find_first_not_of(" \t");
    if (first == std::string_view::npos) return std::nullopt;
    std::uint64_t value = 0;
    const auto [end, error] = std::from_chars(words.data() + first, words.data() + words.size(), value);
    if (error != std::errc() || end == words.data() + first) return std::nullopt;
    return value;
}

/// The number behind a word at the beginning of a line ("MemAvailable:   123 kB", "inactive_file 123").
std::optional<std::uint64_t> field(const std::string& path, std::string_view name) {
    std::ifstream in(path);
    for (std::string line; std::getline(in, line);)
        if (line.starts_with(name) && line.size() > name.size() &&
            (line[name.size()] == ' ' || line[name.size()] == '\t'))
            return number_in(std::string_view(line).substr(name.size()));
    return std::nullopt;
}

std::optional<std::uint64_t> number_of(const std::string& path) {
    std::ifstream in(path);
    std::string line;
    return std::getline(in, line) ? number_in(line) : std::nullopt;  // "max" of version 2: no limit
}

/// What one control group leaves. Files' pages that are cached are used memory to it, and given back when it needs them.
std::uint64_t left_in_group(const std::string& limit, const std::string& used, const std::string& stat,
                            std::string_view prefix) {
    const auto most = number_of(limit), now = number_of(used);
    if (!most || !now) return none;
    const std::uint64_t cached = field(stat, std::string(prefix) + "inactive_file").value_or(0) +
                                 field(stat, std::string(prefix) + "active_file").value_or(0);
    const std::uint64_t held = *now - std::min(cached, *now);
    return *most - std::min(held, *most);
}

/// The least over a group and those that it is in; `path` as /proc/self/cgroup has it. In a container it is often a path of the
/// host's, and the group's files stand at the root.
template <class Left>
std::uint64_t least_upwards(const std::string& root, std::string path, const Left& left) {
    std::uint64_t least = left(root);
    while (path.size() > 1) {
        least = std::min(least, left(root + path));
        path.resize(path.rfind('/'));
    }
    return least;
}

std::uint64_t left_in_groups(const MemoryFiles& files) {
    std::uint64_t least = none;
    std::ifstream in(files.proc + "/self/cgroup");
    for (std::string line; std::getline(in, line);) {  // hierarchy:controllers:path
        const std::size_t first = line.find(':'), second = line.find(':', first + 1);
        if (first == std::string::npos || second == std::string::npos) continue;
        const std::string controllers = line.substr(first + 1, second - first - 1), path = line.substr(second + 1);
        if (controllers.empty())
            least = std::min(least, least_upwards(files.cgroup, path, [](const std::string& group) {
                                 return left_in_group(group + "/memory.max", group + "/memory.current",
                                                      group + "/memory.stat", "");
                             }));
        else if ((controllers + ",").find("memory,") != std::string::npos)
            least =
                std::min(least, least_upwards(files.cgroup + "/memory", path, [](const std::string& group) {
                             return left_in_group(group + "/memory.limit_in_bytes", group + "/memory.usage_in_bytes",
                                                  group + "/memory.stat", "total_");
                         }));
    }
    return least;
}

std::uint64_t left_of_addresses(const MemoryFiles& files) {
    rlimit limit{};
    if (getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return none;
    const std::uint64_t used = field(files.proc + "/self/status", "VmSize:").value_or(0) << 10;
    return limit.rlim_cur - std::min<std::uint64_t>(used, limit.rlim_cur);
}

std::uint64_t said_by_environment() {
    const char* const text = std::getenv("FAULTLINE_MEMORY_MIB");
    if (text == nullptr || *text == 0) return none;
    const std::string_view words(text);
    std::uint64_t mib = 0;
    const auto [end, error] = std::from_chars(words.data(), words.data() + words.size(), mib);
    if (error != std::errc() || end != words.data() + words.size() || mib < 1 || mib > (std::uint64_t{1} << 40))
        throw RequestError("FAULTLINE_MEMORY_MIB: " + in_quotes(words) +
                           ": expected the MiB of memory that a run may use, 1 or more");
    return mib << 20;
}

}  // namespace

MemoryRoom memory_room(const MemoryFiles& files) {
    MemoryRoom room{none, "that can be addressed"};
    const auto limit = [&](std::uint64_t bytes, const char* of) {
        if (bytes < room.bytes) room = {bytes, of};
    };
    if (const auto kib = field(files.proc + "/meminfo", "MemAvailable:")) limit(*kib << 10, "that are free");
    limit(left_in_groups(files), "that the limit of its control group leaves");
    limit(left_of_addresses(files), "that its limit of addresses (ulimit -v) leaves");
    limit(said_by_environment(), "that FAULTLINE_MEMORY_MIB allows");
    return room;
}

std::string size_text(std::uint64_t bytes) {
    const auto size = static_cast<double>(bytes);
    return bytes < (std::uint64_t{1} << 30) ? fmt::format("{:.1f} MiB", size * 0x1p-20)
                                            : fmt::format("{:.2f} GiB", size * 0x1p-30);
}

}  // namespace faultline::gpt
