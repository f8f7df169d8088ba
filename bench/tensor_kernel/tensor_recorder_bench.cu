// SPDX-License-Identifier: Apache-2.0
// What the recorders of the tensor-core kernels cost on a card: the plain kernel and the same with a recorder in turn, so that
// the clock, which follows the power, is the same for both; the median of the ratios of neighbouring samples, and the middle
// half of them (docs/results/tensor-kernel-forward.md).
//
//   tensor_recorder_bench [batch heads kv_heads n head_dim causal(0|1)]     default: the two shapes of the table
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include <faultline/tensor_kernel/backward_kernel.hpp>
#include <faultline/tensor_kernel/backward_recording.hpp>
#include <faultline/tensor_kernel/forward.hpp>

#include "timing.cuh"

namespace faultline::tensor_kernel {
namespace {

using T = __nv_bfloat16;
constexpr int rounds = 41;
constexpr double fractions[] = {1e-9, 0.01, 0.1, 1.0};  // the first: its kernel, and no tile

class Clock {
  public:
    Clock() {
        check(cudaEventCreate(&begin_), "making an event");
        check(cudaEventCreate(&end_), "making an event");
    }
    Clock(const Clock&) = delete;
    Clock& operator=(const Clock&) = delete;
    ~Clock() {
        (void)cudaEventDestroy(begin_);
        (void)cudaEventDestroy(end_);
    }
    template <class Launch>
    double ms(Launch&& launch) const {
        check(cudaEventRecord(begin_), "timing");
        for (int i = 0; i < calls_a_sample; ++i) launch();
        check(cudaEventRecord(end_), "timing");
        check(cudaEventSynchronize(end_), "running");
        float all = 0;
        check(cudaEventElapsedTime(&all, begin_, end_), "timing");
        return all / calls_a_sample;
    }

  private:
    cudaEvent_t begin_, end_;
};

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
    const std::size_t q_rows = std::size_t{1} * shape.batch * shape.heads * shape.n;
    const std::size_t q_count = q_rows * shape.d, k_count = q_count / shape.heads * shape.kv_heads;
    const DeviceMemory<T> q(q_count), k(k_count), v(k_count), o(q_count), dout(q_count);
    const DeviceMemory<T> dq(q_count), dk(k_count), dv(k_count);
    const DeviceMemory<float> lse(q_rows);
    const RandomStream stream(1, 2);
    const auto draw = [&](const DeviceMemory<T>& x, std::size_t count, std::uint64_t child) {
        fill<<<2048, 256>>>(x.data(), count, stream.child(child));
    };
    draw(q, q_count, 0);
    draw(k, k_count, 1);
    draw(v, k_count, 2);
    draw(dout, q_count, 3);
    ForwardCall call{.batch = shape.batch,
                     .heads = shape.heads,
                     .kv_heads = shape.kv_heads,
                     .n_q = shape.n,
                     .n_k = shape.n,
                     .head_dim = shape.d,
                     .causal = shape.causal,
                     .scale = 1 / std::sqrt(static_cast<double>(shape.d)),
                     .q = q.data(),
                     .k = k.data(),
                     .v = v.data(),
                     .o = o.data(),
                     .lse = lse.data()};
    call.q_strides = call.o_strides = contiguous(shape.heads, shape.n, shape.d);
    call.k_strides = call.v_strides = contiguous(shape.kv_heads, shape.n, shape.d);
    const ForwardKernel kernel = supported(forward_plan(), shape.d, shape.causal).kernel;
    {
        const DeviceMemory<RecordedCell> cells(RecordedShape(call).cells());
        compare(
            shape, "forward", [&] { launch_forward(call, kernel); },
            [&](double fraction) {
                launch_recorded_forward(call, kernel, {fraction, 1, cells.data()});
            });
    }
    BackwardCall back{.batch = shape.batch,
                      .heads = shape.heads,
                      .kv_heads = shape.kv_heads,
                      .n_q = shape.n,
                      .n_k = shape.n,
                      .head_dim = shape.d,
                      .causal = shape.causal,
                      .scale = call.scale,
                      .q = q.data(),
                      .k = k.data(),
                      .v = v.data(),
                      .o = o.data(),
                      .dout = dout.data(),
                      .lse = lse.data(),
                      .dq = dq.data(),
                      .dk = dk.data(),
                      .dv = dv.data()};
    back.q_strides = back.o_strides = back.dout_strides = back.dq_strides = call.q_strides;
    back.k_strides = back.v_strides = back.dk_strides = back.dv_strides = call.k_strides;
    const DeviceMemory<unsigned char> workspace(backward_workspace(back));
    back.workspace = workspace.data();
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
    std::vector<Shape> shapes = {{8, 16, 16, 4096, 128, true}, {32, 12, 12, 1024, 64, true}};
    if (argc == 7) {
        const auto number = [&](int i) { return std::atoi(argv[i]); };
        shapes = {{number(1), number(2), number(3), number(4), number(5), number(6) != 0}};
    } else if (argc != 1) {
        std::fprintf(stderr,
                     "tensor_recorder_bench: expected no argument, or batch heads kv_heads n head_dim causal\n");
        return 2;
    }
    try {
        cudaDeviceProp device{};
        check(cudaGetDeviceProperties(&device, 0), "asking the device");
        std::printf("%s\n", device.name);
        for (const Shape& shape : shapes) time_shape(shape);
    } catch (const std::exception& e) {
        std::fprintf(stderr, "tensor_recorder_bench: %s\n", e.what());
        return 1;
    }
    return 0;
}
