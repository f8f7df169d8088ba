// SPDX-License-Identifier: Apache-2.0
#include <faultline/tensor_kernel/backward_altering.cuh>
#include <faultline/tensor_kernel/request.cuh>

namespace faultline::tensor_kernel {

/// backward_bf16.cu, backward_fp16.cu.
extern template void run_backward<__nv_bfloat16, 64, Fused>(const BackwardCall&, const BackwardWorkspace&, ZeroSum,
                                                            const NoBackwardRecorder::Arguments&, cudaStream_t);
extern template void run_backward<__nv_bfloat16, 128, Fused>(const BackwardCall&, const BackwardWorkspace&, ZeroSum,
                                                             const NoBackwardRecorder::Arguments&, cudaStream_t);
extern template void run_backward<__half, 64, Fused>(const BackwardCall&, const BackwardWorkspace&, ZeroSum,
                                                     const NoBackwardRecorder::Arguments&, cudaStream_t);
extern template void run_backward<__half, 128, Fused>(const BackwardCall&, const BackwardWorkspace&, ZeroSum,
                                                      const NoBackwardRecorder::Arguments&, cudaStream_t);
/// backward_altered_fp16.cu.
extern template void run_altered<__half, 64>(const BackwardCall&, const BackwardWorkspace&, ZeroSum, const Alterations&,
                                             cudaStream_t);
extern template void run_altered<__half, 128>(const BackwardCall&, const BackwardWorkspace&, ZeroSum,
                                              const Alterations&, cudaStream_t);

namespace {

/// delta [batch * heads, n_padded] of one head and batch element a block. Its sums are those of the first key tile's warps.
__global__ void __launch_bounds__(256)
    alter_delta(const __grid_constant__ Alterations all, float* delta, int heads, int n_q, int n_padded, int k_tiles) {
    const int head = blockIdx.x % heads, batch = blockIdx.x / heads, batches = gridDim.x / heads;
    AlteredOfThread sums;
    for (int row = threadIdx.x; row < n_q; row += 256) {
        float x[1] = {delta[static_cast<std::size_t>(blockIdx.x) * n_padded + row]};
        alter(
            all, AlteredSite::delta, head, batch, 0, 1, x,
            [&](int, int& i, int& j) {
                i = row;
                j = 0;
                return true;
            },
            sums);
        delta[static_cast<std::size_t>(blockIdx.x) * n_padded + row] = x[0];
    }
    const std::size_t first = (static_cast<std::size_t>(head) * batches + batch) * k_tiles;
    const int warp = threadIdx.x / 32;
    keep_sums(all, sums, first * 8 + warp);
    for (int f = 0; f < all.count; ++f)
        for (int i = 8 + threadIdx.x; i < k_tiles * 8; i += 256) all.at[f].sums[first * 8 + i] = {};
}

/// Those of `all` that stand at delta, or the others.
Alterations part_of(const Alterations& all, bool at_delta) {
    Alterations part;
    for (int f = 0; f < all.count; ++f)
        if ((all.at[f].site == AlteredSite::delta) == at_delta) part.at[part.count++] = all.at[f];
    return part;
}

template <class T, int d>
void run(const BackwardCall& call, const BackwardKernel& kernel, const Alterations& all, cudaStream_t stream) {
    const Alterations of_delta = part_of(all, true), others = part_of(all, false);
    launch_steps<T, d>(call, kernel, stream, [&](const BackwardWorkspace& at) {
        if (of_delta.count > 0) {
            alter_delta<<<call.batch * call.heads, 256, 0, stream>>>(of_delta, at.delta, call.heads, call.n_q,
                                                                     at.n_padded, (call.n_k + 127) / 128);
            check(cudaGetLastError(), "launching the faults of delta");
        }
        if (others.count > 0)
            run_altered<T, d>(call, at, kernel.zero_sum, others, stream);
        else
            run_backward<T, d, Fused>(call, at, kernel.zero_sum, {}, stream);
    });
}

}  // namespace

void launch_altered_backward(const BackwardCall& call, const BackwardKernel& kernel, const Alterations& alterations,
                             void* stream) {
    expect_altered(call, kernel, true);
    const bool half = kernel.element == Element::fp16;
    expect_device(kernel.unit);
    const auto cuda_stream = static_cast<cudaStream_t>(stream);
    if (call.head_dim == 64)
        half ? run<__half, 64>(call, kernel, alterations, cuda_stream)
             : run<__nv_bfloat16, 64>(call, kernel, alterations, cuda_stream);
    else
        half ? run<__half, 128>(call, kernel, alterations, cuda_stream)
             : run<__nv_bfloat16, 128>(call, kernel, alterations, cuda_stream);
}

}  // namespace faultline::tensor_kernel
