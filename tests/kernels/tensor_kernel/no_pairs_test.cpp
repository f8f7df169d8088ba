// SPDX-License-Identifier: Apache-2.0
// Calls without queries or without keys: what kernels/cpu returns, and nothing beside the rows of the outputs.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <vector>

#include <cuda_runtime_api.h>

#include <faultline/tensor_kernel/backward_recording.hpp>
#include <faultline/tensor_kernel/recording.hpp>

#include "backward_bits.hpp"
#include "forward_bits.hpp"
#include "on_hopper.hpp"

namespace faultline::tensor_kernel {
namespace {

using testing::Head;

void expect_success(cudaError_t error) {
    if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

TEST(TensorNoPairs, ForwardAndBackwardAreTheProcessors) {
    NEEDS_HOPPER();
    for (const int d : {64, 128})
        for (const auto& [n_q, n_k] : {std::pair(0, 200), std::pair(200, 0), std::pair(0, 0)}) {
            SCOPED_TRACE(::testing::Message() << n_q << " x " << n_k << ", d " << d);
            const Head head(n_q, n_k, d, 5, 2);
            for (const Unit unit : {Unit::wgmma, Unit::mma})
                expect_same_bits(head, unit == Unit::mma ? plan("fa2") : forward_plan(), unit);
            expect_same_gradients(head, backward_plan(d));
            const HeadGroup g = head.group();
            const std::vector<HeadGroup> groups{g};
            const RecordedForward recorded = recorded_forward(groups, forward_plan(), 0.5);
            EXPECT_EQ(differing(recorded.groups.front(), faultline::attention_forward(g, forward_plan())), 0u);
            EXPECT_TRUE(recorded.cells.empty());
            const std::vector<GroupForward> forwards{faultline::attention_forward(g, backward_plan(d))};
            const RecordedBackward gradients = recorded_backward(groups, forwards, backward_plan(d), 0.5, 1);
            const GroupBackward expected = faultline::attention_backward(g, forwards.front(), backward_plan(d));
            EXPECT_EQ(differing(gradients.groups.front().dk, expected.dk), 0u);
            EXPECT_EQ(differing(gradients.groups.front().dq.back(), expected.dq.back()), 0u);
        }
}

/// Host memory by way of the card, all of its bytes 0xAA before.
template <class T>
class Untouched {
  public:
    explicit Untouched(std::size_t count) : count_(count) {
        expect_success(cudaMalloc(&data_, count * sizeof(T)));
        expect_success(cudaMemset(data_, 0xAA, count * sizeof(T)));
    }
    Untouched(const Untouched&) = delete;
    Untouched& operator=(const Untouched&) = delete;
    ~Untouched() { (void)cudaFree(data_); }
    [[nodiscard]] T* data() const { return static_cast<T*>(data_); }
    [[nodiscard]] std::vector<T> host() const {
        std::vector<T> x(count_);
        expect_success(cudaMemcpy(x.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost));
        return x;
    }
    /// Elements of rows of `d` that are not 0, and elements between the rows that are not as they were.
    [[nodiscard]] std::size_t wrong(int d, int row) const {
        T before;
        std::memset(&before, 0xAA, sizeof before);
        const std::vector<T> x = host();
        std::size_t count = 0;
        for (std::size_t i = 0; i < x.size(); ++i)
            count += x[i] != (static_cast<int>(i % static_cast<std::size_t>(row)) < d ? T{} : before);
        return count;
    }

  private:
    std::size_t count_;
    void* data_ = nullptr;
};

/// Rows, heads and batch elements further apart than they are long; every output that a call may ask for.
TEST(TensorNoPairs, WriteTheRowsOfTheOutputsAlone) {
    NEEDS_HOPPER();
    constexpr int batch = 2, heads = 6, kv_heads = 3, d = 64, row = d + 8, n = 77;
    constexpr std::size_t queries = std::size_t{batch} * heads * n, keys = std::size_t{batch} * kv_heads * n;
    const auto strides = [](int of) { return Strides{row, std::int64_t{n} * row, std::int64_t{of} * n * row}; };
    {
        ForwardCall call{.batch = batch, .heads = heads, .kv_heads = kv_heads, .n_q = n, .head_dim = d, .scale = 0.125};
        const Untouched<std::uint16_t> o(queries * row);
        const Untouched<std::uint32_t> unrounded(queries * row);
        const Untouched<float> lse(queries), largest(std::size_t{batch} * heads * row_groups(n));
        call.o = o.data();
        call.o_unrounded = reinterpret_cast<float*>(unrounded.data());
        call.lse = lse.data();
        call.largest = largest.data();
        call.o_strides = strides(heads);
        launch_forward(call, supported(forward_plan(), d, true).kernel);
        expect_success(cudaDeviceSynchronize());
        EXPECT_EQ(o.wrong(d, row), 0u);
        EXPECT_EQ(unrounded.wrong(d, row), 0u);
        EXPECT_EQ(lse.host(), std::vector<float>(queries, std::numeric_limits<float>::infinity()));
        EXPECT_EQ(largest.host(), std::vector<float>(std::size_t{batch} * heads * row_groups(n),
                                                     -std::numeric_limits<float>::infinity()));
    }
    for (const bool without_keys : {true, false}) {
        BackwardCall call{.batch = batch,
                          .heads = heads,
                          .kv_heads = kv_heads,
                          .n_q = without_keys ? n : 0,
                          .n_k = without_keys ? 0 : n,
                          .head_dim = d,
                          .scale = 0.125};
        const Untouched<std::uint16_t> dq(queries * row), dk(keys * row), dv(keys * row);
        const Untouched<double> sums(std::size_t{2} * batch * kv_heads * zero_sum_parts(n));
        call.dq = dq.data();
        call.dk = dk.data();
        call.dv = dv.data();
        call.zero_sums = sums.data();
        call.dq_strides = strides(heads);
        call.dk_strides = call.dv_strides = strides(kv_heads);
        launch_backward(call, supported_backward(backward_plan(d), d, true).kernel);
        expect_success(cudaDeviceSynchronize());
        EXPECT_EQ(dq.wrong(without_keys ? d : 0, row), 0u);
        EXPECT_EQ(dk.wrong(without_keys ? 0 : d, row), 0u);
        EXPECT_EQ(dv.wrong(without_keys ? 0 : d, row), 0u);
        if (!without_keys) EXPECT_EQ(sums.host(), std::vector<double>(sums.host().size(), 0.0));
    }
}

TEST(TensorNoPairs, OtherSizesAreStillExpected) {
    NEEDS_HOPPER();
    ForwardCall call{.n_q = 0, .n_k = 8, .head_dim = 64, .scale = 0.125};
    const ForwardKernel kernel = supported(forward_plan(), 64, true).kernel;
    EXPECT_NO_THROW(launch_forward(call, kernel));
    call.head_dim = 96;
    EXPECT_THROW(launch_forward(call, kernel), std::invalid_argument);
    call.head_dim = 64;
    call.n_k = -1;
    EXPECT_THROW(launch_forward(call, kernel), std::invalid_argument);
}

}  // namespace
}  // namespace faultline::tensor_kernel
