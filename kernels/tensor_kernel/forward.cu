// SPDX-License-Identifier: Apache-2.0
#include <faultline/tensor_kernel/forward.hpp>

#include <stdexcept>

#include <faultline/tensor_kernel/group_memory.cuh>
#include <faultline/tensor_kernel/no_pairs.hpp>
#include <faultline/tensor_kernel/recording.hpp>
#include <faultline/tensor_kernel/request.cuh>

namespace faultline::tensor_kernel {

/// forward_launch.cuh, in forward_bf16.cu and forward_fp16.cu.
template <class T>
void launch_forward_of(const ForwardCall& call, const ForwardKernel& kernel, cudaStream_t stream);
/// forward_e4m3.cu.
void launch_e4m3(const ForwardCall& call, const ForwardKernel& kernel, cudaStream_t stream);
/// forward_mma.cu.
void launch_mma_of(const ForwardCall& call, const ForwardKernel& kernel, cudaStream_t stream);
/// forward_state.cu, forward_mma_state.cu.
void launch_state(const ForwardCall& call, const ForwardKernel& kernel, cudaStream_t stream);
void launch_mma_state(const ForwardCall& call, const ForwardKernel& kernel, cudaStream_t stream);
/// forward_recorded.cu.
void launch_recorded_of(const ForwardCall& call, const ForwardKernel& kernel, const ForwardRecorder& recorder,
                        cudaStream_t stream);

namespace {

void expect_shapes(const ForwardCall& call) {
    const bool positive =
        call.batch > 0 && call.heads > 0 && call.kv_heads > 0 && call.n_q > 0 && call.n_k > 0 && call.scale > 0;
    if (!positive || call.heads % call.kv_heads != 0 || (call.head_dim != 64 && call.head_dim != 128))
        throw std::invalid_argument(
            "tensor_kernel: sizes must be positive, heads a multiple of kv_heads, head_dim 64 or 128");
}

template <class T>
RecordedForward run(std::span<const HeadGroup> groups, const ForwardKernel& kernel, const ForwardRecorder* recorder) {
    auto call = call_of<ForwardCall>(groups);
    using Views = std::vector<MatrixView<const double>>;
    const DeviceMemory<T> q(stored<T>(groups.size(), [&](std::size_t g) { return groups[g].q; })),
        k(stored<T>(groups.size(), [&](std::size_t g) { return Views{groups[g].k}; })),
        v(stored<T>(groups.size(), [&](std::size_t g) { return Views{groups[g].v}; }));
    const std::size_t rows = static_cast<std::size_t>(call.heads) * call.n_q, elements = rows * call.head_dim;
    using Out = std::conditional_t<std::is_same_v<T, __nv_fp8_e4m3>, __nv_bfloat16, T>;
    const DeviceMemory<Out> o(elements);
    const DeviceMemory<float> o_unrounded(elements), lse(rows);
    call.q = q.data();
    call.k = k.data();
    call.v = v.data();
    call.o = o.data();
    call.o_unrounded = o_unrounded.data();
    call.lse = lse.data();
    const DeviceMemory<unsigned char> workspace(forward_workspace(call, kernel));
    call.workspace = workspace.data();
    RecordedForward result;
    if (recorder != nullptr) {
        const DeviceMemory<RecordedCell> cells(std::vector<RecordedCell>(RecordedShape(call).cells()));
        ForwardRecorder here = *recorder;
        here.cells = cells.data();
        launch_recorded_forward(call, kernel, here);
        check(cudaDeviceSynchronize(), "running the tensor-core forward");
        result.cells = cells.host();
        result.statistics = recorded_statistics(call, here, result.cells);
    } else {
        launch_forward(call, kernel);
        check(cudaDeviceSynchronize(), "running the tensor-core forward");
    }
    const std::vector<Out> host_o = o.host();
    const std::vector<float> host_unrounded = o_unrounded.host(), host_lse = lse.host();
    result.groups.resize(groups.size());
    const Out* next_o = host_o.data();
    const float *next_unrounded = host_unrounded.data(), *next_lse = host_lse.data();
    for (GroupForward& g : result.groups)
        for (std::size_t h = 0; h < groups.front().q.size(); ++h) {
            HeadForward& head = g.heads.emplace_back();
            head.o = next_matrix(next_o, call.n_q, call.head_dim);
            head.o_unrounded = next_matrix(next_unrounded, call.n_q, call.head_dim);
            head.lse.assign(next_lse, next_lse + call.n_q);
            next_lse += call.n_q;
        }
    return result;
}

RecordedForward run_plan(std::span<const HeadGroup> groups, const RoundingPlan& plan, std::optional<Unit> unit,
                         const ForwardRecorder* recorder) {
    expect_alike(groups);
    const HeadGroup& first = groups.front();
    if (!unit && capability() != 90) unit = Unit::mma;
    const ForwardSupport support = supported(plan, static_cast<int>(first.k.cols), first.causal, unit);
    if (!support) throw RequestError("plan " + plan.name + ": " + support.why);
    if (support.kernel.element == Element::bf16) return run<__nv_bfloat16>(groups, support.kernel, recorder);
    if (support.kernel.element == Element::e4m3) return run<__nv_fp8_e4m3>(groups, support.kernel, recorder);
    return run<__half>(groups, support.kernel, recorder);
}

}  // namespace

bool is_built() { return true; }

void launch_forward(const ForwardCall& call, const ForwardKernel& kernel, void* stream) {
    if (!has_no_pairs(call)) expect_shapes(call);
    expect_device(kernel.unit);
    if (has_no_pairs(call)) return write_without_pairs(call, stream);
    const auto cuda_stream = static_cast<cudaStream_t>(stream);
    if (kernel.variant.state)
        return (kernel.unit == Unit::mma ? launch_mma_state : launch_state)(call, kernel, cuda_stream);
    if (kernel.element == Element::e4m3) return launch_e4m3(call, kernel, cuda_stream);
    if (kernel.unit == Unit::mma) return launch_mma_of(call, kernel, cuda_stream);
    if (kernel.element == Element::bf16) return launch_forward_of<__nv_bfloat16>(call, kernel, cuda_stream);
    launch_forward_of<__half>(call, kernel, cuda_stream);
}

void launch_recorded_forward(const ForwardCall& call, const ForwardKernel& kernel, const ForwardRecorder& recorder,
                             void* stream) {
    if (!has_no_pairs(call)) expect_shapes(call);
    expect_device(kernel.unit);
    if (!has_recorder(kernel))
        throw RequestError("device cuda: the tensor-core forward " + kernel.name +
                           " has no recorder: expected fused, subtract_then_scale or stable_max by wgmma in bf16");
    if (has_no_pairs(call) || sample::threshold(recorder.fraction) == 0) return launch_forward(call, kernel, stream);
    launch_recorded_of(call, kernel, recorder, static_cast<cudaStream_t>(stream));
}

std::vector<GroupForward> attention_forward(std::span<const HeadGroup> groups, const RoundingPlan& plan,
                                            std::optional<Unit> unit) {
    return run_plan(groups, plan, unit, nullptr).groups;
}

RecordedForward recorded_forward(std::span<const HeadGroup> groups, const RoundingPlan& plan, double fraction,
                                 std::uint32_t seed) {
    const ForwardRecorder recorder{fraction, seed, nullptr};
    return run_plan(groups, plan, Unit::wgmma, &recorder);
}

}  // namespace faultline::tensor_kernel
