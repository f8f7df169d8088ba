// SPDX-License-Identifier: Apache-2.0
// A build without the device.
#include <faultline/agreement/matrix_rule.hpp>
#include <faultline/agreement/special_functions.hpp>
#include <faultline/base/error.hpp>

namespace faultline::agreement {
namespace {

[[noreturn]] void fail() {
    throw WorkError("device cuda: this build has no device back end: expected one configured with the preset cuda");
}

}  // namespace

MatrixFinding put_to_card(MatrixInstruction, std::span<const Rival>, const RandomStream&, int) { fail(); }
std::vector<Agreement> check_special_functions() { fail(); }

}  // namespace faultline::agreement
