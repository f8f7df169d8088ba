// SPDX-License-Identifier: Apache-2.0
// TFLOP/s of the tensor-core backward on a card, variant by variant, on standard normal inputs, all of its kernels counted. A
// backward is counted as 2.5 forwards, a causal call as half of a full one: 5 batch heads n^2 head_dim
// (docs/results/tensor-kernel-backward.md; torch_attention.py counts and times PyTorch's back ends alike).
//
//   tensor_backward_bench [batch heads kv_heads n head_dim causal(0|1)]     default: the shapes of the table
#include <cstdio>
#include <string>
#include <vector>

#include <faultline/tensor_kernel/backward_recording.hpp>

#include "inputs.cuh"

namespace faultline::tensor_kernel {
namespace {

struct Case {
    std::string name;
    BackwardKernel kernel;
    bool deterministic = false;
    double recorded = 0;  ///< fraction of the tiles; 0: no recorder
};

template <class T>
void time_shape(const Shape& shape, const std::vector<Case>& cases) {
    BackwardInputs<T> inputs(shape);
    BackwardCall& call = inputs.call;
    constexpr bool is_e4m3 = std::is_same_v<T, __nv_fp8_e4m3>;
    constexpr Element element = std::is_same_v<T, __half> ? Element::fp16 : is_e4m3 ? Element::e4m3 : Element::bf16;
    const ForwardKernel forward = supported(forward_plan(element), shape.d, shape.causal).kernel;
    ForwardCall& forward_call = inputs.forward.call;
    const DeviceMemory<unsigned char> forward_memory(forward_workspace(forward_call, forward));
    forward_call.workspace = forward_memory.data();
    launch_forward(forward_call, forward);
    const double flops = 10.0 * inputs.forward.q_rows * shape.n * shape.d / (shape.causal ? 2 : 1);
    for (const Case& c : cases) {
        call.deterministic = c.deterministic;
        double ms = 0;
        if (c.recorded > 0) {
            if constexpr (element == Element::bf16) {
                const DeviceMemory<RecordedCell> cells(RecordedBackwardShape(call).cells());
                ms = median_ms([&] { launch_recorded_backward(call, c.kernel, {c.recorded, 1, cells.data()}); });
            }
        } else {
            ms = median_ms([&] { launch_backward(call, c.kernel); });
        }
        std::printf("B%d H%d/%d N%d d%d %s %s  backward %-32s %8.3f ms %7.1f TFLOP/s\n", shape.batch, shape.heads,
                    shape.kv_heads, shape.n, shape.d, shape.causal ? "causal" : "full",
                    is_e4m3                    ? "e4m3"
                    : element == Element::fp16 ? "fp16"
                                               : "bf16",
                    c.name.c_str(), ms, flops / ms * 1e-9);
        std::fflush(stdout);
    }
}

std::vector<Case> every_variant() {
    const auto of = [](std::string name, const auto& change) {
        RoundingPlan plan = backward_plan(128);
        change(plan);
        const BackwardSupport support = supported_backward(plan, 128, true);
        if (!support) throw RequestError(name + ": " + support.why);
        return Case{std::move(name), support.kernel};
    };
    std::vector<Case> cases{of("fused", [](RoundingPlan&) {})};
    cases.push_back(cases.front());
    cases.back().name = "fused, deterministic dq";
    cases.back().deterministic = true;
    for (const double fraction : {0.01, 1.0}) {
        cases.push_back(cases.front());
        cases.back().name = fraction < 1 ? "fused, 1% of key tiles recorded" : "fused, every tile recorded";
        cases.back().recorded = fraction;
    }
    cases.push_back(of("unfused", [](RoundingPlan& p) { p.schedule.bwd_argument = ArgumentForm::unfused; }));
    cases.push_back(of("ds scaled before its cast", [](RoundingPlan& p) { p.schedule.ds_scale = DsScale::before; }));
    cases.push_back(of("delta of fp32 O", [](RoundingPlan& p) { p.schedule.delta_from = DeltaFrom::o_unrounded; }));
    cases.push_back(of("delta of P and dP", [](RoundingPlan& p) { p.schedule.delta_from = DeltaFrom::p_dp; }));
    cases.push_back(of("zero sum, weighted", [](RoundingPlan& p) { p.schedule.zero_sum = ZeroSum::weighted; }));
    cases.push_back(of("fp32 O and zero sum, weighted", [](RoundingPlan& p) {
        p.schedule.delta_from = DeltaFrom::o_unrounded;
        p.schedule.zero_sum = ZeroSum::weighted;
    }));
    cases.push_back(
        of("correctly rounded exp2", [](RoundingPlan& p) { p.schedule.functions = Functions::correctly_rounded; }));
    cases.push_back(
        of("fused, by mma (fa2)", [](RoundingPlan& p) { p = backward_plan(128, Element::bf16, Unit::mma); }));
    return cases;
}

}  // namespace
}  // namespace faultline::tensor_kernel

int main(int argc, char** argv) {
    using namespace faultline::tensor_kernel;
    return run_benchmark("tensor_backward_bench", argc, argv, [](const Shape& shape) {
        time_shape<__nv_bfloat16>(shape, every_variant());
        for (const Element element : {Element::fp16, Element::e4m3}) {
            const Case fused{"fused", supported_backward(backward_plan(128, element), 128, true).kernel};
            element == Element::fp16 ? time_shape<__half>(shape, {fused}) : time_shape<__nv_fp8_e4m3>(shape, {fused});
        }
    });
}
