// SPDX-License-Identifier: Apache-2.0
// What the backward keeps between its steps, and where in BackwardCall::workspace it lies.
#pragma once

#include <cstddef>

#include <faultline/tensor_kernel/backward.hpp>

namespace faultline::tensor_kernel {

struct BackwardWorkspace {
    int q_tiles, n_padded;    ///< query tiles of a head; their rows
    float* dq = nullptr;      ///< [batch * heads, n_padded, head_dim] fp32, in the order of the accumulators
    float* lse = nullptr;     ///< [batch * heads, n_padded]
    float* delta = nullptr;   ///< the same
    float* factor = nullptr;  ///< the same, as the next: of a projection
    int* largest = nullptr;
    int* turn = nullptr;  ///< [batch * heads, q_tiles]
    std::size_t bytes;    ///< of all of it

    explicit BackwardWorkspace(const BackwardCall& call) {
        const int block_q = call.head_dim == 64 ? 128 : 64;  // BackwardTiles
        q_tiles = (call.n_q + block_q - 1) / block_q;
        n_padded = q_tiles * block_q;
        const std::size_t heads = static_cast<std::size_t>(call.batch) * static_cast<std::size_t>(call.heads);
        const std::size_t rows = heads * static_cast<std::size_t>(n_padded);
        turns_ = heads * static_cast<std::size_t>(q_tiles);
        bytes = rows * (static_cast<std::size_t>(call.head_dim) + 4) * sizeof(float) + turn_bytes();
        if (call.workspace == nullptr) return;
        dq = static_cast<float*>(call.workspace);
        lse = dq + rows * static_cast<std::size_t>(call.head_dim);
        delta = lse + rows;
        factor = delta + rows;
        largest = reinterpret_cast<int*>(factor + rows);
        turn = largest + rows;
    }
    [[nodiscard]] std::size_t turn_bytes() const { return turns_ * sizeof(int); }

  private:
    std::size_t turns_;
};

}  // namespace faultline::tensor_kernel
