// SPDX-License-Identifier: Apache-2.0
// How a rank ends that cannot be taken apart in order: a card that waits for the sums of a rank that is gone waits for ever, and so
// does whoever frees its memory, destroys its graphs or ends its communicator.
#pragma once

#include <functional>
#include <string>

#include <faultline/ranks/ranks.hpp>

namespace faultline {

/// Says the line on standard error where this rank has the word, tells the others that it is gone, and ends the process with the
/// status, without destructors: the only place that does. What is to be kept has been closed before. `last`: it waits until the
/// others are gone, some seconds at most, for they may have memory of this process open, while it has none of theirs.
[[noreturn]] void end_at_once(Ranks& ranks, const std::string& line, int status, bool last = false) noexcept;

/// Does work that waits for the other ranks by ways of its own and cannot be called off, as joining the ranks' cards. Where another
/// rank is lost meanwhile, the process ends at once with status 1. Nobody else uses `ranks` until it returns.
void watched(Ranks& ranks, const std::function<void()>& work);

}  // namespace faultline
