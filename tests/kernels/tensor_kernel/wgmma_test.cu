// SPDX-License-Identifier: Apache-2.0
// Every form of wgmma and of bulk copy that the kernels use, against sums of small integers, which are exact in any order.
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include <faultline/tensor_kernel/device_memory.cuh>
#include <faultline/tensor_kernel/hopper.cuh>
#include <faultline/tensor_kernel/tensor_map.cuh>
#include <faultline/tensor_kernel/wgmma.cuh>

#include "on_hopper.hpp"

namespace faultline::tensor_kernel {
namespace {

enum class Operand { k_major, mn_major, registers };
constexpr int m = 64, depth = 128;

template <class T, int n, Operand a_form, Operand b_form>
__global__ void __launch_bounds__(128) multiply(const __grid_constant__ CUtensorMap a_map,
                                                const __grid_constant__ CUtensorMap b_map, const T* a, float* d) {
    extern __shared__ std::uint8_t memory[];
    std::uint8_t* base = memory + (1024 - shared_address(memory) % 1024) % 1024;
    T* a_tile = reinterpret_cast<T*>(base);
    T* b_tile = a_tile + m * depth;
    __shared__ Barrier full;
    if (threadIdx.x == 0) {
        full.init(1);
        fence_barrier_init();
        full.arrive_expect(sizeof(T) * (m + n) * depth);
        load_tile(a_tile, &a_map, full, 0, 0, 0);
        load_tile(b_tile, &b_map, full, 0, 0, 0);
    }
    __syncthreads();
    full.wait(0);
    float acc[n / 2];
    for (float& x : acc) x = -1;
    const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    std::uint32_t words[depth / 16][4];
    for (int i = 0; i < depth / 16; ++i)
        for (int w = 0; w < 4; ++w)
            words[i][w] =
                *reinterpret_cast<const std::uint32_t*>(a + (row + w % 2 * 8) * depth + 16 * i + 2 * t + w / 2 * 8);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < depth / 16; ++i) {
        const T* a_panel = a_tile + (a_form == Operand::k_major ? i / 4 * m * 64 : 0);
        const T* b_panel = b_tile + (b_form == Operand::k_major ? i / 4 * n * 64 : 0);
        const std::uint64_t a_desc = a_form == Operand::mn_major ? mn_major(a_panel, 0) + i * mn_major_step
                                                                 : k_major(a_panel) + i % 4 * k_major_step;
        const std::uint64_t b_desc = b_form == Operand::mn_major
                                         ? mn_major(b_panel, depth * 64 * sizeof(T)) + i * mn_major_step
                                         : k_major(b_panel) + i % 4 * k_major_step;
        constexpr int a_mn = a_form == Operand::mn_major, b_mn = b_form == Operand::mn_major;
        if constexpr (a_form == Operand::registers)
            Wgmma<T, n>::template rs<b_mn>(acc, words[i], b_desc, i > 0);
        else
            Wgmma<T, n>::template ss<a_mn, b_mn>(acc, a_desc, b_desc, i > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
    keep(acc);
    for (int j = 0; j < n / 2; ++j) d[(row + j % 4 / 2 * 8) * n + j / 4 * 8 + 2 * t + j % 2] = acc[j];
}

template <class T>
constexpr CUtensorMapDataType map_type() {
    return std::is_same_v<T, __half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
}

/// [rows][columns], as panels of 64 columns.
template <class T>
CUtensorMap panels(const T* data, int rows, int columns) {
    const std::uint64_t sizes[] = {64, static_cast<std::uint64_t>(rows), static_cast<std::uint64_t>(columns / 64)};
    const std::uint64_t strides[] = {columns * sizeof(T), 128};
    const std::uint32_t box[] = {64, static_cast<std::uint32_t>(rows), static_cast<std::uint32_t>(columns / 64)};
    return tensor_map(map_type<T>(), data, sizes, strides, box);
}

template <class T, int n, Operand a_form, Operand b_form>
void expect_product() {
    std::vector<int> a(m * depth), b(n * depth);  // [row][k], both
    std::uint32_t state = 1;
    const auto draw = [&] { return static_cast<int>((state = state * 1664525u + 1013904223u) >> 24) % 17 - 8; };
    for (int& x : a) x = draw();
    for (int& x : b) x = draw();
    const auto stored = [](const std::vector<int>& x, int rows, bool transposed) {
        std::vector<T> y(x.size());
        for (int i = 0; i < rows; ++i)
            for (int k = 0; k < depth; ++k)
                y[transposed ? k * rows + i : i * depth + k] = static_cast<T>(static_cast<float>(x[i * depth + k]));
        return y;
    };
    const bool a_mn = a_form == Operand::mn_major, b_mn = b_form == Operand::mn_major;
    const DeviceMemory<T> da(stored(a, m, a_mn)), db(stored(b, n, b_mn));
    const DeviceMemory<float> dd(std::vector<float>(m * n, -7));
    const CUtensorMap a_map = a_mn ? panels(da.data(), depth, m) : panels(da.data(), m, depth);
    const CUtensorMap b_map = b_mn ? panels(db.data(), depth, n) : panels(db.data(), n, depth);
    const auto kernel = multiply<T, n, a_form, b_form>;
    const int bytes = 1024 + static_cast<int>(sizeof(T)) * (m + n) * depth;
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "setting shared memory");
    kernel<<<1, 128, bytes>>>(a_map, b_map, da.data(), dd.data());
    check(cudaGetLastError(), "launching");
    check(cudaDeviceSynchronize(), "running");
    const std::vector<float> d = dd.host();
    int wrong = 0;
    for (int i = 0; i < m; ++i)
        for (int j = 0; j < n; ++j) {
            int sum = 0;
            for (int k = 0; k < depth; ++k) sum += a[i * depth + k] * b[j * depth + k];
            wrong += d[i * n + j] != static_cast<float>(sum);
        }
    EXPECT_EQ(wrong, 0) << "of " << m * n;
}

template <class T, int n>
void expect_products() {
    using enum Operand;
    {
        SCOPED_TRACE("k, k");
        expect_product<T, n, k_major, k_major>();
    }
    {
        SCOPED_TRACE("k, mn");
        expect_product<T, n, k_major, mn_major>();
    }
    {
        SCOPED_TRACE("mn, k");
        expect_product<T, n, mn_major, k_major>();
    }
    {
        SCOPED_TRACE("mn, mn");
        expect_product<T, n, mn_major, mn_major>();
    }
    {
        SCOPED_TRACE("registers, k");
        expect_product<T, n, registers, k_major>();
    }
    {
        SCOPED_TRACE("registers, mn");
        expect_product<T, n, registers, mn_major>();
    }
}

TEST(Wgmma, EveryLayoutOf64Columns) {
    NEEDS_HOPPER();
    expect_products<__nv_bfloat16, 64>();
}
TEST(Wgmma, EveryLayoutOf128Columns) {
    NEEDS_HOPPER();
    expect_products<__nv_bfloat16, 128>();
}
TEST(Wgmma, EveryLayoutOf256Columns) {
    NEEDS_HOPPER();
    expect_products<__nv_bfloat16, 256>();
}
TEST(Wgmma, EveryLayoutInHalf) {
    NEEDS_HOPPER();
    expect_products<__half, 128>();
}

constexpr int copied_rows = 64, copied_columns = 32;  // 128 bytes of fp32
/// A box out of one tensor, added to and stored into others, at an offset that hangs over the edge.
__global__ void copy_box(const __grid_constant__ CUtensorMap from, const __grid_constant__ CUtensorMap to,
                         const __grid_constant__ CUtensorMap sum, float* flat) {
    __shared__ alignas(1024) float box[copied_rows * copied_columns];
    __shared__ Barrier full;
    full.init(1);
    fence_barrier_init();
    full.arrive_expect(sizeof box);
    load_tile(box, &from, full, 0, 40, 1, 0);
    full.wait(0);
    store_tile(&to, box, 0, 40, 1, 0);
    add_tile(&sum, box, 0, 40, 1, 0);
    add_floats(flat, box, sizeof box);
    store_commit();
    store_wait();
}

TEST(BulkCopies, LoadStoreAndAddABoxOverTheEdge) {
    NEEDS_HOPPER();
    constexpr int rows = 80, heads = 2;
    std::vector<float> x(heads * rows * copied_columns);
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i + 1);
    for (const auto swizzle : {CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_SWIZZLE_128B}) {
        const DeviceMemory<float> from(x), to(std::vector<float>(x.size(), -1)),
            sum(std::vector<float>(x.size(), 1000)), flat(std::vector<float>(copied_rows * copied_columns, 5));
        const std::uint64_t sizes[] = {copied_columns, rows, heads, 1};
        const std::uint64_t row = copied_columns * sizeof(float);
        const std::uint64_t strides[] = {row, row * rows, row * rows * heads};
        const std::uint32_t box[] = {copied_columns, copied_rows, 1, 1};
        const auto map = [&](const DeviceMemory<float>& b) {
            return tensor_map(CU_TENSOR_MAP_DATA_TYPE_FLOAT32, b.data(), sizes, strides, box, swizzle);
        };
        copy_box<<<1, 1>>>(map(from), map(to), map(sum), flat.data());
        check(cudaGetLastError(), "launching");
        check(cudaDeviceSynchronize(), "running");
        const std::vector<float> stored = to.host(), added = sum.host();
        const std::vector<float> filled = flat.host();
        for (std::size_t i = 0; i < x.size(); ++i) {
            const bool inside = i >= (rows + 40) * copied_columns;
            ASSERT_EQ(stored[i], inside ? x[i] : -1) << i;
            ASSERT_EQ(added[i], inside ? x[i] + 1000 : 1000) << i;
        }
        if (swizzle != CU_TENSOR_MAP_SWIZZLE_NONE) continue;
        for (std::size_t i = 0; i < filled.size(); ++i) {
            const std::size_t row_read = 40 + i / copied_columns;  // rows past the edge arrive as zeros
            const float wanted = row_read < rows ? x[(rows + row_read) * copied_columns + i % copied_columns] : 0;
            ASSERT_EQ(filled[i], wanted + 5) << i;
        }
    }
}

}  // namespace
}  // namespace faultline::tensor_kernel
