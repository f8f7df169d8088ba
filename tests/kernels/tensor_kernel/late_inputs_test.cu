// SPDX-License-Identifier: Apache-2.0
// The forward's recorder may begin while the kernel before it in the stream still runs (programmatic dependent launch). That
// kernel writes q, k, v here, as late as it can: it lets the next one begin at once, waits a millisecond, and writes then. What
// the recorder and the plain kernel beside it read must be what was written.
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <vector>

#include <faultline/tensor_kernel/backward_recording.hpp>
#include <faultline/tensor_kernel/device_memory.cuh>
#include <faultline/tensor_kernel/hopper.cuh>
#include <faultline/tensor_kernel/recording.hpp>

#include "on_hopper.hpp"

namespace faultline::tensor_kernel {
namespace {

using T = __nv_bfloat16;

/// 16 blocks, which leave most multiprocessors to what may begin beside them. count: of 4 bytes.
__global__ void write_late(std::uint32_t* to, const std::uint32_t* from, std::size_t count, long long nanoseconds) {
    let_dependents_begin();
    long long start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - start < nanoseconds);
    for (std::size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += std::size_t{gridDim.x} * blockDim.x)
        to[i] = from[i];
}

std::vector<T> drawn(std::size_t count, unsigned seed) {
    std::mt19937 random(seed);
    std::vector<T> x(count);
    for (T& value : x) value = T(static_cast<float>(static_cast<std::int32_t>(random())) * 0x1p-30f);
    return x;
}

struct Late {
    static constexpr int heads = 8, kv_heads = 4, n = 700;
    int d;
    std::size_t queries = std::size_t{heads} * n * d, keys = std::size_t{kv_heads} * n * d;
    DeviceMemory<T> q, k, v, dout, o, dq, dk, dv;
    DeviceMemory<T> earlier, later;  // of the operand that is late
    DeviceMemory<float> lse;

    explicit Late(int head_dim)
        : d(head_dim),
          q(drawn(queries, 1)),
          k(drawn(keys, 2)),
          v(drawn(keys, 3)),
          dout(drawn(queries, 4)),
          o(queries),
          dq(queries),
          dk(keys),
          dv(keys),
          earlier(std::vector<T>(queries, T(1.0f))),
          later(queries),
          lse(std::size_t{heads} * n) {}

    template <class Call>
    [[nodiscard]] Call sizes() const {
        Call call;
        call.heads = heads;
        call.kv_heads = kv_heads;
        call.n_q = call.n_k = n;
        call.head_dim = d;
        call.scale = 0.125;
        call.q = q.data();
        call.k = k.data();
        call.v = v.data();
        call.lse = lse.data();
        call.q_strides = call.o_strides = contiguous(heads, n, d);
        call.k_strides = call.v_strides = contiguous(kv_heads, n, d);
        return call;
    }
    [[nodiscard]] ForwardCall forward() const {
        auto call = sizes<ForwardCall>();
        call.o = o.data();
        return call;
    }
    [[nodiscard]] BackwardCall backward() const {
        auto call = sizes<BackwardCall>();
        call.o = o.data();
        call.dout = dout.data();
        call.dq = dq.data();
        call.dk = dk.data();
        call.dv = dv.data();
        call.dout_strides = call.dq_strides = call.q_strides;
        call.dk_strides = call.dv_strides = call.k_strides;
        return call;
    }
    /// Has `operand` written late, by the kernel that stands before what `launch` launches.
    template <class Launch>
    void run(const DeviceMemory<T>& operand, std::size_t count, const Launch& launch) const {
        const std::size_t bytes = count * sizeof(T);
        check(cudaMemcpy(later.data(), operand.data(), bytes, cudaMemcpyDeviceToDevice), "keeping the operand");
        check(cudaMemcpy(operand.data(), earlier.data(), bytes, cudaMemcpyDeviceToDevice), "spoiling the operand");
        check(cudaDeviceSynchronize(), "copying");
        write_late<<<16, 128>>>(reinterpret_cast<std::uint32_t*>(operand.data()),
                                reinterpret_cast<const std::uint32_t*>(later.data()), count / 2, 1'000'000);
        launch();
        check(cudaDeviceSynchronize(), "running behind the late operand");
    }
};

template <class X>
std::vector<unsigned char> bytes_of(const DeviceMemory<X>& memory) {
    const std::vector<X> x = memory.host();
    std::vector<unsigned char> bytes(x.size() * sizeof(X));
    std::memcpy(bytes.data(), x.data(), bytes.size());
    return bytes;
}

TEST(TensorRecorderLaunches, ReadWhatTheKernelBeforeThemWritesLate) {
    NEEDS_HOPPER();
    for (const int d : {64, 128})
        for (const double fraction : {0.05, 1.0}) {  // two launches, one
            const Late on(d);
            const ForwardCall call = on.forward();
            const ForwardKernel kernel = supported(forward_plan(), d, true).kernel;
            const std::vector<RecordedCell> none(RecordedShape(call).cells());
            const auto outputs = [&](const auto& run) {
                const DeviceMemory<RecordedCell> cells(none);
                run([&] { launch_recorded_forward(call, kernel, {fraction, 3, cells.data()}); });
                return std::vector{bytes_of(on.o), bytes_of(on.lse), bytes_of(cells)};
            };
            const auto expected = outputs([](const auto& launch) {
                launch();
                check(cudaDeviceSynchronize(), "running");
            });
            ASSERT_NE(expected[2], std::vector<unsigned char>(expected[2].size())) << "no tile was drawn";
            const auto expect_same = [&](const char* name, const DeviceMemory<T>& operand, std::size_t count) {
                EXPECT_TRUE(expected == outputs([&](const auto& launch) { on.run(operand, count, launch); }))
                    << name << " late, d " << d << ", " << fraction << " of the tiles";
            };
            expect_same("q", on.q, on.queries);
            expect_same("k", on.k, on.keys);
            expect_same("v", on.v, on.keys);
        }
}

/// The backward's recorder, whose second launch alone begins beside another, its first. dq is not compared: its sums have no order.
TEST(TensorRecorderLaunches, OfTheBackwardReadWhatTheKernelBeforeThemWritesLate) {
    NEEDS_HOPPER();
    for (const int d : {64, 128}) {
        const Late on(d);
        launch_forward(on.forward(), supported(forward_plan(), d, true).kernel);
        BackwardCall call = on.backward();
        const DeviceMemory<unsigned char> workspace(backward_workspace(call));
        call.workspace = workspace.data();
        const BackwardKernel kernel = supported_backward(backward_plan(d), d, true).kernel;
        const std::vector<RecordedCell> none(RecordedBackwardShape(call).cells());
        const auto outputs = [&](const auto& run) {
            const DeviceMemory<RecordedCell> cells(none);
            run([&] { launch_recorded_backward(call, kernel, {0.1, 3, cells.data()}); });
            return std::vector{bytes_of(on.dk), bytes_of(on.dv), bytes_of(cells)};
        };
        const auto expected = outputs([](const auto& launch) {
            launch();
            check(cudaDeviceSynchronize(), "running");
        });
        ASSERT_NE(expected[2], std::vector<unsigned char>(expected[2].size())) << "no tile was drawn";
        const auto expect_same = [&](const char* name, const DeviceMemory<T>& operand, std::size_t count) {
            EXPECT_TRUE(expected == outputs([&](const auto& launch) { on.run(operand, count, launch); }))
                << name << " late, d " << d;
        };
        expect_same("q", on.q, on.queries);
        expect_same("k", on.k, on.keys);
        expect_same("v", on.v, on.keys);
        expect_same("dO", on.dout, on.queries);
    }
}

}  // namespace
}  // namespace faultline::tensor_kernel
