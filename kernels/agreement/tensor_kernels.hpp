// SPDX-License-Identifier: Apache-2.0
// The tensor-core kernels on the card at hand beside the emulation of the same plans.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <faultline/agreement/agreement.hpp>
#include <faultline/tensor_kernel/forward_kernel.hpp>

namespace faultline::agreement {

/// A kernel of kernels/tensor_kernel, for head sizes 64 and 128.
struct TensorCase {
    enum class Kind : unsigned char { forward, backward, grouped_backward };
    Kind kind = Kind::forward;
    tensor_kernel::Element element = tensor_kernel::Element::bf16;
    tensor_kernel::Unit unit = tensor_kernel::Unit::wgmma;
    std::string name;
};
/// Those that a card of this compute capability (90: 9.0) has whose plans are its own: the plans' products are those of 9.0, so
/// that of other cards there are none.
[[nodiscard]] std::vector<TensorCase> tensor_cases(int capability);

/// Heads of `queries` and of 200 by 333, causal and not, through the kernel on the device and through kernels/cpu on `threads`
/// threads. A forward's o, o before its cast and lse, and a backward's dq, dk and dv of one query head for each key head
/// (deterministic) differ where a value does. Of a grouped backward, whose dk and dv are summed over query heads in another
/// order than the emulation's (tensor_kernel/backward.hpp), those count that lie beyond the bounds that the plan's roundings
/// have about the gradients in binary64 (backward_bound.hpp). WorkError as the kernels.
[[nodiscard]] Agreement check_tensor_kernel(const TensorCase& one, int threads, std::uint64_t seed,
                                            std::ptrdiff_t queries = 777);

}  // namespace faultline::agreement
