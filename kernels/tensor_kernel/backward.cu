// SPDX-License-Identifier: Apache-2.0
#include <faultline/tensor_kernel/backward.hpp>

#include <stdexcept>

#include <faultline/tensor_kernel/backward_recording.hpp>
#include <faultline/tensor_kernel/backward_workspace.hpp>
#include <faultline/tensor_kernel/group_memory.cuh>
#include <faultline/tensor_kernel/no_pairs.hpp>
#include <faultline/tensor_kernel/request.cuh>

namespace faultline::tensor_kernel {

/// backward_launch.cuh, in backward_bf16.cu and backward_fp16.cu.
template <class T, int d>
void launch_backward_of(const BackwardCall& call, const BackwardKernel& kernel, cudaStream_t stream);
/// backward_e4m3.cu.
void launch_e4m3_backward(const BackwardCall& call, const BackwardKernel& kernel, cudaStream_t stream);
/// backward_mma.cu.
void launch_mma_backward_of(const BackwardCall& call, const BackwardKernel& kernel, cudaStream_t stream);

namespace {

/// `launch` launches the call. T: of q, k and v, E of the others.
template <class T, class E, class Launch>
std::vector<GroupBackward> run(std::span<const HeadGroup> groups, std::span<const GroupForward> forwards,
                               const Launch& launch) {
    auto call = call_of<BackwardCall>(groups);
    call.deterministic = true;
    call.dout_strides = call.dq_strides = call.q_strides;
    call.dk_strides = call.dv_strides = call.k_strides;
    using Views = std::vector<MatrixView<const double>>;
    const DeviceMemory<T> q(stored<T>(groups.size(), [&](std::size_t g) { return groups[g].q; })),
        k(stored<T>(groups.size(), [&](std::size_t g) { return Views{groups[g].k}; })),
        v(stored<T>(groups.size(), [&](std::size_t g) { return Views{groups[g].v}; }));
    const DeviceMemory<E> dout(stored<E>(groups.size(), [&](std::size_t g) { return groups[g].dout; })),
        o(stored<E>(groups.size(), [&](std::size_t g) {
            Views views;
            for (const HeadForward& head : forwards[g].heads) views.push_back(head.o.view());
            return views;
        }));
    std::vector<float> host_lse, host_unrounded;
    for (const GroupForward& forward : forwards)
        for (const HeadForward& head : forward.heads) {
            host_lse.insert(host_lse.end(), head.lse.begin(), head.lse.end());
            host_unrounded.insert(host_unrounded.end(), head.o_unrounded.values.begin(), head.o_unrounded.values.end());
        }
    const DeviceMemory<float> lse(host_lse), o_unrounded(host_unrounded);
    const std::size_t query_elements = static_cast<std::size_t>(call.heads) * static_cast<std::size_t>(call.n_q) *
                                       static_cast<std::size_t>(call.head_dim);
    const std::size_t key_elements = static_cast<std::size_t>(call.kv_heads) * static_cast<std::size_t>(call.n_k) *
                                     static_cast<std::size_t>(call.head_dim);
    const DeviceMemory<E> dq(query_elements), dk(key_elements), dv(key_elements);
    const DeviceMemory<unsigned char> workspace(
        backward_workspace(call, std::is_same_v<T, E> ? Element::bf16 : Element::e4m3));
    call.q = q.data();
    call.k = k.data();
    call.v = v.data();
    call.o = o.data();
    call.o_unrounded = o_unrounded.data();
    call.dout = dout.data();
    call.lse = lse.data();
    call.dq = dq.data();
    call.dk = dk.data();
    call.dv = dv.data();
    call.workspace = workspace.data();
    launch(call);
    check(cudaDeviceSynchronize(), "running the tensor-core backward");

    const std::vector<E> host_dq = dq.host(), host_dk = dk.host(), host_dv = dv.host();
    const E *next_dq = host_dq.data(), *next_dk = host_dk.data(), *next_dv = host_dv.data();
    std::vector<GroupBackward> out(groups.size());
    for (GroupBackward& g : out) {
        for (std::size_t h = 0; h < groups.front().q.size(); ++h)
            g.dq.push_back(next_matrix(next_dq, call.n_q, call.head_dim));
        g.dk = next_matrix(next_dk, call.n_k, call.head_dim);
        g.dv = next_matrix(next_dv, call.n_k, call.head_dim);
    }
    return out;
}

}  // namespace

std::size_t backward_workspace(const BackwardCall& call, Element element) { return workspace_bytes(call, element); }

void launch_backward(const BackwardCall& call, const BackwardKernel& kernel, void* stream) {
    if (!has_no_pairs(call)) expect_backward(call, kernel);
    expect_device(kernel.unit);
    if (has_no_pairs(call)) return write_without_pairs(call, stream);
    const auto cuda_stream = static_cast<cudaStream_t>(stream);
    if (kernel.unit == Unit::mma) return launch_mma_backward_of(call, kernel, cuda_stream);
    if (kernel.element == Element::e4m3) return launch_e4m3_backward(call, kernel, cuda_stream);
    const bool small = call.head_dim == 64;
    if (kernel.element == Element::bf16)
        return small ? launch_backward_of<__nv_bfloat16, 64>(call, kernel, cuda_stream)
                     : launch_backward_of<__nv_bfloat16, 128>(call, kernel, cuda_stream);
    small ? launch_backward_of<__half, 64>(call, kernel, cuda_stream)
          : launch_backward_of<__half, 128>(call, kernel, cuda_stream);
}

namespace {

BackwardKernel kernel_for(std::span<const HeadGroup> groups, std::span<const GroupForward> forwards,
                          const RoundingPlan& plan) {
    expect_alike(groups);
    if (forwards.size() != groups.size()) throw std::invalid_argument("tensor_kernel: one forward for each head group");
    for (std::size_t g = 0; g < groups.size(); ++g)
        if (groups[g].dout.size() != groups[g].q.size() || forwards[g].heads.size() != groups[g].q.size())
            throw std::invalid_argument("tensor_kernel: one dO and one forward for each query head");
    const BackwardSupport support =
        supported_backward(plan, static_cast<int>(groups.front().k.cols), groups.front().causal);
    if (!support) throw RequestError("plan " + plan.name + " on the tensor cores: " + support.why);
    return support.kernel;
}

}  // namespace

std::vector<GroupBackward> attention_backward(std::span<const HeadGroup> groups, std::span<const GroupForward> forwards,
                                              const RoundingPlan& plan) {
    const BackwardKernel kernel = kernel_for(groups, forwards, plan);
    const auto launch = [&](const BackwardCall& call) { launch_backward(call, kernel); };
    if (kernel.element == Element::e4m3) return run<__nv_fp8_e4m3, __nv_bfloat16>(groups, forwards, launch);
    return kernel.element == Element::bf16 ? run<__nv_bfloat16, __nv_bfloat16>(groups, forwards, launch)
                                           : run<__half, __half>(groups, forwards, launch);
}

RecordedBackward recorded_backward(std::span<const HeadGroup> groups, std::span<const GroupForward> forwards,
                                   const RoundingPlan& plan, double fraction, std::uint32_t seed) {
    const BackwardKernel kernel = kernel_for(groups, forwards, plan);
    RecordedBackward out;
    out.groups = run<__nv_bfloat16, __nv_bfloat16>(groups, forwards, [&](const BackwardCall& call) {
        const DeviceMemory<RecordedCell> cells(std::vector<RecordedCell>(RecordedBackwardShape(call).cells()));
        const BackwardRecorder recorder{fraction, seed, cells.data()};
        launch_recorded_backward(call, kernel, recorder);
        out.statistics = recorded_statistics(call, recorder, cells.host());
    });
    return out;
}

}  // namespace faultline::tensor_kernel
