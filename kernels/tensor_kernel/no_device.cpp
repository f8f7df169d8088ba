// SPDX-License-Identifier: Apache-2.0
// A build without the tensor-core kernel.
#include <faultline/base/error.hpp>
#include <faultline/tensor_kernel/forward.hpp>

namespace faultline::tensor_kernel {
namespace {

[[noreturn]] void fail() {
    throw WorkError("device cuda: this build has no tensor-core kernel: expected one configured with the preset cuda");
}

}  // namespace

bool is_built() { return false; }
void launch_forward(const ForwardCall&, const ForwardKernel&, void*) { fail(); }
std::vector<GroupForward> attention_forward(std::span<const HeadGroup>, const RoundingPlan&) { fail(); }

}  // namespace faultline::tensor_kernel
