// SPDX-License-Identifier: Apache-2.0
// A build without the device back end.
#include <faultline/base/error.hpp>
#include <faultline/device/device.hpp>
#include <faultline/device/parts.hpp>
#include <faultline/device/truth.hpp>

namespace faultline::device {
namespace {

[[noreturn]] void fail() {
    throw WorkError("device cuda: this build has no device back end: expected one configured with the preset cuda");
}

}  // namespace

bool is_built() { return false; }
void time_parts(Parts*) { fail(); }
Info info() { fail(); }
const AttentionBackend& backend() { fail(); }
std::size_t room() { fail(); }
std::vector<GroupForward> attention_forward(std::span<const HeadGroup>, const RoundingPlan&) { fail(); }
std::vector<GroupBackward> attention_backward(std::span<const HeadGroup>, std::span<const GroupForward>,
                                              const RoundingPlan&) {
    fail();
}
Attention attention(std::span<const HeadGroup>, const RoundingPlan&) { fail(); }
void expect_room_for_truth(const TruthProblem&) { fail(); }
GroupTruth attention_truth(const TruthProblem&, const TruthOptions&, std::size_t) { fail(); }

}  // namespace faultline::device
