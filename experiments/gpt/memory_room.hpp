// SPDX-License-Identifier: Apache-2.0
// How much memory this process may still take, by whoever says least.
#pragma once

#include <cstdint>
#include <string>

namespace faultline::gpt {

struct MemoryRoom {
    std::uint64_t bytes = 0;
    std::string of;  ///< "that are free", "that its control group leaves": behind a size
};

/// Where the system says it; for tests, folders of files like its own.
struct MemoryFiles {
    std::string proc = "/proc", cgroup = "/sys/fs/cgroup";
};

/// The least of: MemAvailable (proc(5); swap is not counted, for a run that is swapped never ends); what the limits of the
/// process's control groups leave, versions 1 and 2, the cache of files that can be given back not counted as used; what
/// RLIMIT_AS leaves; and FAULTLINE_MEMORY_MIB in the environment. What cannot be read sets no limit. RequestError where the
/// variable is no whole number of MiB from 1 on.
[[nodiscard]] MemoryRoom memory_room(const MemoryFiles& files = {});

/// "64.0 MiB", or "1.50 GiB" from 1 GiB on.
[[nodiscard]] std::string size_text(std::uint64_t bytes);

}  // namespace faultline::gpt
