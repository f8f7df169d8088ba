// SPDX-License-Identifier: Apache-2.0
#include <faultline/tensor_kernel/altering.hpp>

namespace faultline::tensor_kernel {
namespace {

constexpr int tile = 128, warps = 8;  // rows or keys of a block, and the warps that hold them

std::size_t slots(int heads, int batch, int rows) {
    return static_cast<std::size_t>(heads) * static_cast<std::size_t>(batch) *
           static_cast<std::size_t>((rows + tile - 1) / tile) * warps;
}

}  // namespace

std::size_t altered_sums(const ForwardCall& call) { return slots(call.heads, call.batch, call.n_q); }
std::size_t altered_sums(const BackwardCall& call) { return slots(call.heads, call.batch, call.n_k); }

}  // namespace faultline::tensor_kernel
