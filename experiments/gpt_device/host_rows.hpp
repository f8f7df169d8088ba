// SPDX-License-Identifier: Apache-2.0
// Rows of tokens between the device's memory, in the type of products' operands, and the host's, in fp32. Private to this folder.
#pragma once

#include <cstddef>
#include <vector>

#include <faultline/gpt_device/stream.hpp>

namespace faultline::gpt::on_device {

/// [rows, columns] from rows `stride` elements apart; E: Bf16 or float. Waits. WorkError.
template <class E>
[[nodiscard]] std::vector<float> fetch_rows(const E* from, std::size_t rows, std::size_t columns, std::size_t stride,
                                            Stream stream);
/// Back, rounded to E (nearest even). What `from` holds may be gone when it returns.
template <class E>
void store_rows(const std::vector<float>& from, std::size_t rows, std::size_t columns, E* to, std::size_t stride,
                Stream stream);

}  // namespace faultline::gpt::on_device
