// SPDX-License-Identifier: Apache-2.0
// A build without the tensor-core kernel.
#include <faultline/base/error.hpp>
#include <faultline/tensor_kernel/altering.hpp>
#include <faultline/tensor_kernel/backward_recording.hpp>
#include <faultline/tensor_kernel/backward_workspace.hpp>
#include <faultline/tensor_kernel/forward.hpp>
#include <faultline/tensor_kernel/recording.hpp>
#include <faultline/tensor_kernel/row_statistics.hpp>
#include <faultline/tensor_kernel/scaling.hpp>

namespace faultline::tensor_kernel {
namespace {

[[noreturn]] void fail() {
    throw WorkError("device cuda: this build has no tensor-core kernel: expected one configured with the preset cuda");
}

}  // namespace

bool is_built() { return false; }
void launch_forward(const ForwardCall&, const ForwardKernel&, void*) { fail(); }
void launch_row_statistics(const RowStatisticsCall&, void*) { fail(); }
void launch_recorded_forward(const ForwardCall&, const ForwardKernel&, const ForwardRecorder&, void*) { fail(); }
RecordedForward recorded_forward(std::span<const HeadGroup>, const RoundingPlan&, double, std::uint32_t) { fail(); }
std::vector<GroupForward> attention_forward(std::span<const HeadGroup>, const RoundingPlan&, std::optional<Unit>) {
    fail();
}
std::size_t backward_workspace(const BackwardCall& call, Element element) { return workspace_bytes(call, element); }
void launch_backward(const BackwardCall&, const BackwardKernel&, void*) { fail(); }
RecordedBackward recorded_backward(std::span<const HeadGroup>, std::span<const GroupForward>, const RoundingPlan&,
                                   double, std::uint32_t) {
    fail();
}
void launch_recorded_backward(const BackwardCall&, const BackwardKernel&, const BackwardRecorder&, void*) { fail(); }
void launch_altered_forward(const ForwardCall&, const ForwardKernel&, const Alterations&, void*) { fail(); }
void launch_altered_backward(const BackwardCall&, const BackwardKernel&, const Alterations&, void*) { fail(); }
void launch_scaled_forward(const ForwardCall&, const ForwardKernel&, const Alterations&, void*) { fail(); }
void launch_scaled_backward(const BackwardCall&, const BackwardKernel&, const Alterations&, void*) { fail(); }
std::vector<GroupBackward> attention_backward(std::span<const HeadGroup>, std::span<const GroupForward>,
                                              const RoundingPlan&) {
    fail();
}

}  // namespace faultline::tensor_kernel
