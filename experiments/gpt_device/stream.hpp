// SPDX-License-Identifier: Apache-2.0
// A stream and a bf16 for code that the host's compiler reads.
#pragma once

#include <cstdint>

struct CUstream_st;

namespace faultline::gpt::on_device {

using Stream = CUstream_st*;

/// A bf16 in memory.
struct Bf16 {
    std::uint16_t bits;
};

}  // namespace faultline::gpt::on_device
