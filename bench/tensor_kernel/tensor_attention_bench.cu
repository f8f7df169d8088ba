// SPDX-License-Identifier: Apache-2.0
// TFLOP/s of the tensor-core forward on a card, variant by variant, on standard normal inputs. FLOPs of a causal call are
// counted as 2 batch heads n^2 head_dim, half of a full one's (docs/results/tensor-kernel-forward.md; torch_attention.py
// counts and times PyTorch's back ends alike).
//
//   tensor_attention_bench [batch heads kv_heads n head_dim causal(0|1)]     default: the two shapes of the table
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include <faultline/tensor_kernel/forward.hpp>
#include <faultline/tensor_kernel/recording.hpp>

#include "timing.cuh"

namespace faultline::tensor_kernel {
namespace {

template <class T>
void time_shape(const Shape& shape, const std::vector<ForwardKernel>& kernels) {
    const std::size_t q_rows = std::size_t{1} * shape.batch * shape.heads * shape.n;
    const std::size_t q_count = q_rows * shape.d, k_count = q_count / shape.heads * shape.kv_heads;
    const DeviceMemory<T> q(q_count), k(k_count), v(k_count);
    const DeviceMemory<__nv_bfloat16> o(q_count);  // 16 bits in every case
    const DeviceMemory<float> lse(q_rows);
    const RandomStream stream(1, 2);
    fill<<<2048, 256>>>(q.data(), q_count, stream.child(0));
    fill<<<2048, 256>>>(k.data(), k_count, stream.child(1));
    fill<<<2048, 256>>>(v.data(), k_count, stream.child(2));
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
    const DeviceMemory<unsigned char> workspace(forward_workspace(call, kernels.front()));
    call.workspace = workspace.data();
    const double flops = 4.0 * q_rows * shape.n * shape.d / (shape.causal ? 2 : 1);
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
    for (const double fraction : {0.0, 1e-9, 0.01, 0.1, 1.0}) {  // the second: its kernel, and no tile
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
    using namespace faultline;
    using namespace faultline::tensor_kernel;
    std::vector<Shape> shapes = {{8, 16, 16, 4096, 128, true}, {32, 12, 12, 1024, 64, true}};
    if (argc == 7) {
        const auto number = [&](int i) { return std::atoi(argv[i]); };
        shapes = {{number(1), number(2), number(3), number(4), number(5), number(6) != 0}};
    } else if (argc != 1) {
        std::fprintf(stderr,
                     "tensor_attention_bench: expected no argument, or batch heads kv_heads n head_dim causal\n");
        return 2;
    }
    try {
        cudaDeviceProp device{};
        check(cudaGetDeviceProperties(&device, 0), "asking the device");
        std::printf("%s\n", device.name);
        const ForwardKernel half = supported(forward_plan(Element::fp16), 128, true).kernel;
        const ForwardKernel bytes = supported(forward_plan(Element::e4m3), 128, true).kernel;
        for (const Shape& shape : shapes) {
            time_shape<__nv_bfloat16>(shape, every_variant());
            time_shape<__half>(shape, {half});
            time_shape<__nv_fp8_e4m3>(shape, {bytes});
        }
    } catch (const std::exception& e) {
        std::fprintf(stderr, "tensor_attention_bench: %s\n", e.what());
        return 1;
    }
    return 0;
}
