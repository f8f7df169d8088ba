// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <faultline/cli/command.hpp>
#include <faultline/cli/terminal.hpp>
#include <faultline/device/device.hpp>
#include <faultline/device/refusals.hpp>
#include <faultline/tensor/partial_file.hpp>

namespace faultline::cli {
namespace {

/// A name that cannot be written under is wrong on every machine: it is said before a device is asked for.
void expect_output(const Invocation& call) {
    if (!call.common.output.empty()) PartialName(call.common.output).abandon();
}

}  // namespace

const AttentionBackend& backend_of(const Invocation& call) {
    if (call.common.device != "cuda") return cpu_backend();
    expect_output(call);
    const device::Info info = device::info();
    const AttentionBackend& backend = device::backend();
    if (call.talks())
        remark(fmt::format("{}, compute capability {}.{}: plans and truth run there, in at most {} of its {}",
                           info.name, info.major, info.minor, device::memory_text(device::room()),
                           device::memory_text(info.memory)));
    return backend;
}

void expect_device(const Invocation& call) {
    if (call.common.device != "cuda") return;
    expect_output(call);
    (void)device::info();
}

}  // namespace faultline::cli
