// SPDX-License-Identifier: Apache-2.0
// The cards of several ranks: that each has its own, and waiting for one's own while the others work on what it waits for. Private to
// this folder.
#pragma once

#include <functional>

#include <faultline/gpt_device/stream.hpp>
#include <faultline/ranks/ranks.hpp>

namespace faultline::gpt::on_device {

/// RequestError, on all ranks, where two of them have the same card.
void expect_a_card_each(Ranks& ranks);

/// Waits for the stream; PeerLost where meanwhile another rank is gone: what is on the stream might never end then, and is not called
/// off. `look` is called every 10 ms, and may throw. WorkError where the device fails.
void wait(Stream stream, const Ranks& ranks, const std::function<void()>& look);

}  // namespace faultline::gpt::on_device
