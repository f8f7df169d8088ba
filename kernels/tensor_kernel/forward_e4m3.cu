// SPDX-License-Identifier: Apache-2.0
// The forward of preset fa3-fp8: q, k, v and p in e4m3, o in bf16.
#include <faultline/tensor_kernel/forward_launch.cuh>
#include <faultline/tensor_kernel/transposed_values.cuh>

namespace faultline::tensor_kernel {
namespace {

using T = __nv_fp8_e4m3;

/// [batch, heads, rows, columns] of bytes as five dimensions, as head_map(); one copy moves a box of the inner two.
CUtensorMap byte_map(const void* base, const Strides& strides, int batch, int heads, int rows, int columns,
                     int box_rows, int box_columns) {
    const auto size = [](std::int64_t n) { return static_cast<std::uint64_t>(n); };
    const std::uint64_t sizes[] = {size(columns), size(rows), 1, size(heads), size(batch)};
    const std::uint64_t steps[] = {size(strides.row), size(strides.head), size(strides.head), size(strides.batch)};
    const std::uint32_t box[] = {static_cast<std::uint32_t>(box_columns), static_cast<std::uint32_t>(box_rows), 1, 1,
                                 1};
    return tensor_map(CU_TENSOR_MAP_DATA_TYPE_UINT8, base, sizes, steps, box,
                      box_columns == 64 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B);
}

template <int d>
void launch_of(const ForwardCall& call, const ForwardKernel& kernel, cudaStream_t stream) {
    using Tiles = ForwardTiles<T, d, 2, 4>;
    const int n_padded = (call.n_k + 127) / 128 * 128;
    auto* const transposed = static_cast<std::uint8_t*>(call.workspace);
    transpose_values<<<dim3(n_padded / 128, d / 64, call.batch * call.kv_heads), 256, 0, stream>>>(
        static_cast<const std::uint8_t*>(call.v), call.v_strides.row, call.v_strides.head, call.v_strides.batch,
        call.kv_heads, call.n_k, d, n_padded, transposed);
    check(cudaGetLastError(), "launching the transposition of v");
    ForwardArguments<T> in{};
    in.q = byte_map(call.q, call.q_strides, call.batch, call.heads, call.n_q, d, Tiles::block_q, d);
    in.k = byte_map(call.k, call.k_strides, call.batch, call.kv_heads, call.n_k, d, Tiles::block_k, d);
    in.v = byte_map(transposed, contiguous(call.kv_heads, d, n_padded), call.batch, call.kv_heads, d, n_padded, d,
                    Tiles::block_k);
    in.q_descale = call.q_descale;
    in.k_descale = call.k_descale;
    in.v_descale = call.v_descale;
    launch_filled<T, Tiles, UpTo256, NoRecorder>(in, call, kernel, {}, stream);
}

}  // namespace

void launch_e4m3(const ForwardCall& call, const ForwardKernel& kernel, cudaStream_t stream) {
    if (kernel.unit != Unit::wgmma || kernel.variant != UpTo256::value)
        throw std::invalid_argument("tensor_kernel: not one of the kernels that supported() names");
    const auto whole = [](const Strides& s) { return (s.row | s.head | s.batch) % 16 == 0; };
    if (call.workspace == nullptr || !whole(call.q_strides) || !whole(call.k_strides) || !whole(call.v_strides))
        throw std::invalid_argument(
            "tensor_kernel: the forward in e4m3 needs its workspace, and rows, heads and batch elements that are multiples of "
            "16 elements apart");
    if (call.head_dim == 64) return launch_of<64>(call, kernel, stream);
    launch_of<128>(call, kernel, stream);
}

}  // namespace faultline::tensor_kernel
