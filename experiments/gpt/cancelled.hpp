// SPDX-License-Identifier: Apache-2.0
// How a pass is left that nobody wants the end of: a step may take hours, and an interrupt is not to wait for it.
#pragma once

#include <functional>

namespace faultline::gpt {

/// Thrown out of a pass that is to end before its time; whoever asked for the pass catches it.
struct PassCancelled {};
/// Asked between pieces of work that take milliseconds, from several threads; null: never.
using Cancelled = std::function<bool()>;
inline void expect_not(const Cancelled* cancelled) {
    if (cancelled != nullptr && (*cancelled)()) throw PassCancelled{};
}

}  // namespace faultline::gpt
