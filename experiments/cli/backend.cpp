// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <faultline/cli/command.hpp>
#include <faultline/cli/terminal.hpp>
#include <faultline/device/device.hpp>

namespace faultline::cli {

const AttentionBackend& backend_of(const Invocation& call) {
    if (call.common.device != "cuda") return cpu_backend();
    const device::Info info = device::info();
    const AttentionBackend& backend = device::backend();
    if (call.talks())
        remark(
            fmt::format("{}, compute capability {}.{}: plans and truth run there, in at most {:.0f} of its {:.0f} GiB",
                        info.name, info.major, info.minor, static_cast<double>(device::room()) * 0x1p-30,
                        static_cast<double>(info.memory) * 0x1p-30));
    return backend;
}

}  // namespace faultline::cli
