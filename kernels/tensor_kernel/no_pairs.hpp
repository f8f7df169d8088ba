// SPDX-License-Identifier: Apache-2.0
// Calls without a pair of query and key, n_q = 0 or n_k = 0. The kernels' maps and grids have no such form; what is to be written
// is known without them, and is what kernels/cpu returns.
#pragma once

#include <faultline/tensor_kernel/backward.hpp>
#include <faultline/tensor_kernel/forward.hpp>

namespace faultline::tensor_kernel {

template <class Call>
[[nodiscard]] bool has_no_pairs(const Call& call) {
    return call.n_q >= 0 && call.n_k >= 0 && (call.n_q == 0 || call.n_k == 0);
}

/// Without keys: o and o_unrounded 0, lse +inf, `largest` -inf. Without queries there is nothing to write. stream: cudaStream_t; does
/// not wait. std::invalid_argument where other sizes do not fit.
void write_without_pairs(const ForwardCall& call, void* stream);
/// Without keys dq is 0, without queries dk, dv and zero_sums.
void write_without_pairs(const BackwardCall& call, void* stream);

}  // namespace faultline::tensor_kernel
