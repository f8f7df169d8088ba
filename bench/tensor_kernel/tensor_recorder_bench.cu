// SPDX-License-Identifier: Apache-2.0
// What the recorders of the tensor-core kernels cost on a card: the plain kernel and the same with a recorder in turn, so that
// the clock, which follows the power, is the same for both; the median of the ratios of neighbouring samples, and the middle
// half of them (docs/results/tensor-kernel-forward.md).
//
//   tensor_recorder_bench [batch heads kv_heads n head_dim causal(0|1)]     default: the two shapes of the table
#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include <faultline/tensor_kernel/backward_kernel.hpp>
#include <faultline/tensor_kernel/backward_recording.hpp>
#include <faultline/tensor_kernel/forward.hpp>

#include "inputs.cuh"

namespace faultline::tensor_kernel {
namespace {

using T = __nv_bfloat16;
constexpr int rounds = 41;
constexpr double fractions[] = {1e-9, 0.01, 0.1, 1.0};  // the first: no tile, so the plain kernel

/// plain() and recorded(fraction) launch.
template <class Plain, class Recorded>
void compare(const Shape& shape, const char* pass, Plain&& plain, Recorded&& recorded) {
    const Clock clock;
    for (const double fraction : fractions) {
        std::vector<double> without, with, ratios;
        for (int round = -3; round < rounds; ++round) {
            const double before = clock.ms(plain), own = clock.ms([&] { recorded(fraction); }), after = clock.ms(plain);
            if (round < 0) continue;
            without.push_back((before + after) / 2);
            with.push_back(own);
            ratios.push_back(own / without.back());
        }
        for (std::vector<double>* of : {&without, &with, &ratios}) std::ranges::sort(*of);
        std::printf(
            "B%d H%d/%d N%d d%d %s bf16 %s  recorder on %g: %.4f ms, without %.4f ms, %.4f times (middle half %.4f to "
            "%.4f)\n",
            shape.batch, shape.heads, shape.kv_heads, shape.n, shape.d, shape.causal ? "causal" : "full", pass,
            fraction, with[rounds / 2], without[rounds / 2], ratios[rounds / 2], ratios[rounds / 4],
            ratios[3 * rounds / 4]);
        std::fflush(stdout);
    }
}

void time_shape(const Shape& shape) {
    BackwardInputs<T> inputs(shape);
    ForwardCall call = inputs.forward.call;
    call.o_unrounded = nullptr;
    BackwardCall& back = inputs.call;
    const ForwardKernel kernel = supported(forward_plan(), shape.d, shape.causal).kernel;
    {
        const DeviceMemory<RecordedCell> cells(RecordedShape(call).cells());
        compare(
            shape, "forward", [&] { launch_forward(call, kernel); },
            [&](double fraction) {
                launch_recorded_forward(call, kernel, {fraction, 1, cells.data()});
            });
    }
    const BackwardKernel backward = supported_backward(backward_plan(shape.d), shape.d, shape.causal).kernel;
    const DeviceMemory<RecordedCell> cells(RecordedBackwardShape(back).cells());
    compare(
        shape, "backward", [&] { launch_backward(back, backward); },
        [&](double fraction) {
            launch_recorded_backward(back, backward, {fraction, 1, cells.data()});
        });
}

}  // namespace
}  // namespace faultline::tensor_kernel

int main(int argc, char** argv) {
    using namespace faultline::tensor_kernel;
    return run_benchmark("tensor_recorder_bench", argc, argv, time_shape);
}
