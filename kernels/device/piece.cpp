// SPDX-License-Identifier: Apache-2.0
#include <faultline/device/piece.hpp>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include <faultline/format/narrow.hpp>

namespace faultline::device {

std::size_t store_piece(PieceType& type, const double* from, std::size_t left, unsigned char* slot, std::size_t bytes) {
    if (type == PieceType::bf16) {
        const std::size_t n = std::min(left, bytes / sizeof(std::uint16_t));
        if (narrow_to_bf16(from, n, reinterpret_cast<std::uint16_t*>(slot))) return n;
        type = PieceType::fp32;
    }
    if (type == PieceType::fp32) {
        const std::size_t n = std::min(left, bytes / sizeof(float));
        if (narrow_to_fp32(from, n, reinterpret_cast<float*>(slot))) return n;
        type = PieceType::fp64;
    }
    const std::size_t n = std::min(left, bytes / sizeof(double));
    std::memcpy(slot, from, n * sizeof(double));
    return n;
}

}  // namespace faultline::device
