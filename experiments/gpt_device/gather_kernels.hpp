// SPDX-License-Identifier: Apache-2.0
// The receiving end of a word that another rank sets (gather.hpp). Private to this folder.
#pragma once

#include <cstdint>

#include <faultline/gpt_device/stream.hpp>

namespace faultline::gpt::on_device {

/// Takes back each of words[0, count) but words[but], once it is 1: it becomes 0, and what the rank that set it had written before is
/// seen by whatever follows on the stream (an acquire pattern of system scope, PTX ISA, memory consistency model). Waits as long as one is
/// not set. WorkError where the launch fails.
void take_words(std::uint32_t* words, int count, int but, Stream stream);

}  // namespace faultline::gpt::on_device
