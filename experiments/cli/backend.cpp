// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <faultline/cli/command.hpp>
#include <faultline/cli/terminal.hpp>
#include <faultline/device/device.hpp>
#include <faultline/device/refusals.hpp>

namespace faultline::cli {

const AttentionBackend& backend_of(const Invocation& call) {
    if (call.common.device != "cuda") return cpu_backend();
    const device::Info info = device::info();
    const AttentionBackend& backend = device::backend();
    if (call.talks())
        remark(fmt::format("{}, compute capability {}.{}: plans and truth run there, in at most {} of its {}",
                           info.name, info.major, info.minor, device::memory_text(device::room()),
                           device::memory_text(info.memory)));
    return backend;
}

void expect_device(const Invocation& call) {
    if (call.common.device == "cuda") (void)device::info();
}

}  // namespace faultline::cli
