// SPDX-License-Identifier: Apache-2.0
#include <faultline/tensor_kernel/backward_launch.cuh>
#include <faultline/tensor_kernel/backward_recording.hpp>
#include <faultline/tensor_kernel/no_pairs.hpp>
#include <faultline/tensor_kernel/request.cuh>

namespace faultline::tensor_kernel {
namespace {

template <int d, class Variant>
void run(const BackwardCall& call, const BackwardKernel& kernel, const BackwardRecorder& recorder,
         cudaStream_t stream) {
    using T = __nv_bfloat16;
    using Rec = BackwardTileRecorder<T, BackwardTiles<T, d>, Variant>;
    const RecordedBackwardShape shape(call);
    typename Rec::Arguments recording{};
    recording.cells = recorder.cells;
    recording.threshold = sample::threshold(recorder.fraction);
    recording.seed = recorder.seed;
    recording.q_steps = shape.q_steps;
    recording.key_groups = shape.key_groups;
    launch_steps<T, d>(call, kernel, stream, [&](const BackwardWorkspace& at) {
        run_backward<T, d, Variant, Rec>(call, at, kernel.zero_sum, recording, stream);
    });
}

/// Whether a key tile is looked at. Where none is, the plain kernel runs: in the kernel with the recorder, which has no list of
/// its tiles then, each block would ask for itself (docs/results/tensor-kernel-backward.md has what that costs).
bool draws_any(const BackwardCall& call, const BackwardRecorder& recorder) {
    const std::uint64_t threshold = sample::threshold(recorder.fraction);
    for (int head = 0; head < call.batch * call.kv_heads; ++head)
        for (int tile = 0; tile < (call.n_k + 127) / 128; ++tile)
            if (sample::key_tile_bits(recorder.seed, head, tile) < threshold) return true;
    return false;
}

}  // namespace

void launch_recorded_backward(const BackwardCall& call, const BackwardKernel& kernel, const BackwardRecorder& recorder,
                              void* stream) {
    const bool without_pairs = has_no_pairs(call);
    if (!without_pairs) expect_backward(call, kernel);
    const bool fused = kernel.variant == Fused::value, projected = kernel.variant == Projected::value;
    if (kernel.unit != Unit::wgmma || kernel.element != Element::bf16 || (!fused && !projected))
        throw std::invalid_argument(
            "tensor_kernel: the backward is recorded by wgmma in bf16, variants fused and projected");
    expect_device(kernel.unit);
    if (without_pairs) return write_without_pairs(call, stream);
    if (!draws_any(call, recorder)) return launch_backward(call, kernel, stream);
    const auto cuda_stream = static_cast<cudaStream_t>(stream);
    if (call.head_dim == 64)
        fused ? run<64, Fused>(call, kernel, recorder, cuda_stream)
              : run<64, Projected>(call, kernel, recorder, cuda_stream);
    else
        fused ? run<128, Fused>(call, kernel, recorder, cuda_stream)
              : run<128, Projected>(call, kernel, recorder, cuda_stream);
}

}  // namespace faultline::tensor_kernel
