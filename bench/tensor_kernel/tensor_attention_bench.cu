// SPDX-License-Identifier: Apache-2.0
// TFLOP/s of the tensor-core forward on a card, variant by variant, on standard normal inputs. FLOPs of a causal call are
// counted as 2 batch heads n^2 head_dim, half of a full one's (docs/results/tensor-kernel-forward.md; torch_attention.py
// counts and times PyTorch's back ends alike).
//
//   tensor_attention_bench [batch heads kv_heads n head_dim causal(0|1)]     default: the two shapes of the table
#include <cstdio>
#include <string>
#include <vector>

#include <faultline/tensor_kernel/forward.hpp>
#include <faultline/tensor_kernel/recording.hpp>

#include "inputs.cuh"

namespace faultline::tensor_kernel {
namespace {

template <class T>
void time_shape(const Shape& shape, const std::vector<ForwardKernel>& kernels) {
    ForwardInputs<T> inputs(shape);
    ForwardCall& call = inputs.call;
    const DeviceMemory<unsigned char> workspace(forward_workspace(call, kernels.front()));
    call.workspace = workspace.data();
    const double flops = 4.0 * inputs.q_rows * shape.n * shape.d / (shape.causal ? 2 : 1);
    const auto print = [&](const std::string& name, double ms) {
        std::printf("B%d H%d/%d N%d d%d %s %s  %-28s %8.3f ms %7.1f TFLOP/s\n", shape.batch, shape.heads,
                    shape.kv_heads, shape.n, shape.d, shape.causal ? "causal" : "full",
                    std::is_same_v<T, __half> ? "fp16"
                    : sizeof(T) == 1          ? "e4m3"
                                              : "bf16",
                    name.c_str(), ms, flops / ms * 1e-9);
        std::fflush(stdout);
    };
    for (const ForwardKernel& kernel : kernels) print(kernel.name, median_ms([&] { launch_forward(call, kernel); }));
    const ForwardKernel& plain = kernels.front();
    if (!has_recorder(plain)) return;
    const DeviceMemory<RecordedCell> cells(RecordedShape(call).cells());
    for (const double fraction : {0.0, 1e-9, 0.01, 0.1, 1.0}) {  // the second: no tile
        const ForwardRecorder recorder{fraction, 1, cells.data()};
        char number[16];
        std::snprintf(number, sizeof number, "%g", fraction);
        print(plain.name + ", records " + number, median_ms([&] { launch_recorded_forward(call, plain, recorder); }));
    }
    print(plain.name + " again", median_ms([&] { launch_forward(call, plain); }));
}

std::vector<ForwardKernel> every_variant() {
    std::vector<RoundingPlan> plans(6, forward_plan());
    plans[1].schedule.argument = ArgumentForm::unfused;
    plans[2].schedule.argument = ArgumentForm::subtract_then_scale;
    plans[3].schedule.exp_poly_every = plans[3].schedule.exp_poly_count = 1;
    plans[3].schedule.exp_poly_skip = 0;
    plans[4].schedule.max_policy = MaxPolicy::stable;
    plans[4].set(Site::row_max, Rule{fp32});
    plans[5].schedule.row_sum_adds = RowSumAdds::rounded;
    std::vector<ForwardKernel> kernels;
    for (const RoundingPlan& plan : plans) kernels.push_back(supported(plan, 128, true).kernel);
    ForwardKernel by_mma = supported(forward_plan(Element::bf16, Unit::mma, 64), 64, true, Unit::mma).kernel;
    by_mma.name += " by mma";
    kernels.push_back(by_mma);
    return kernels;
}

}  // namespace
}  // namespace faultline::tensor_kernel

int main(int argc, char** argv) {
    using namespace faultline::tensor_kernel;
    return run_benchmark("tensor_attention_bench", argc, argv, [](const Shape& shape) {
        time_shape<__nv_bfloat16>(shape, every_variant());
        time_shape<__half>(shape, {supported(forward_plan(Element::fp16), 128, true).kernel});
        time_shape<__nv_fp8_e4m3>(shape, {supported(forward_plan(Element::e4m3), 128, true).kernel});
    });
}
