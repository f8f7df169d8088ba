// SPDX-License-Identifier: Apache-2.0
// The cards of several ranks: how many these are, and waiting for one's own while the others work on what it waits for. Private to
// this folder.
#pragma once

#include <functional>

#include <faultline/gpt_device/stream.hpp>
#include <faultline/ranks/ranks.hpp>

namespace faultline::gpt::on_device {

/// How many cards the ranks have. RequestError, on all of them, where two have the same one and `may_share` is false.
[[nodiscard]] int cards_of(Ranks& ranks, bool may_share);

/// Whether nothing is left to do on it, or the device has failed.
[[nodiscard]] bool idle(Stream stream) noexcept;

/// Waits for the stream; PeerLost where meanwhile another rank is gone: what is on the stream might never end then, and is not called
/// off. `look` is called every 10 ms, and may throw. WorkError where the device fails.
void wait(Stream stream, const Ranks& ranks, const std::function<void()>& look);

}  // namespace faultline::gpt::on_device
