// SPDX-License-Identifier: Apache-2.0
// Large copies to a card and back through page-locked memory, bit for bit, where their type changes between pieces.
#include <faultline/device/staging.cuh>

#include <cstring>

#include <gtest/gtest.h>

#include <faultline/base/error.hpp>
#include <faultline/device/device.hpp>

#include "special_values.hpp"

namespace faultline::device {
namespace {

class DeviceStaging : public ::testing::Test {
  protected:
    void SetUp() override {
        try {
            (void)info();
        } catch (const WorkError& error) {
            GTEST_SKIP() << error.what();
        }
        ASSERT_EQ(cudaMalloc(reinterpret_cast<void**>(&memory_), most * sizeof(double)), cudaSuccess);
        ASSERT_EQ(cudaStreamCreate(&stream_), cudaSuccess);
        ASSERT_EQ(cudaEventCreate(&ready_), cudaSuccess);
    }
    void TearDown() override {
        (void)cudaEventDestroy(ready_);
        (void)cudaStreamDestroy(stream_);
        (void)cudaFree(memory_);
    }
    static void expect_same(const std::vector<double>& a, const std::vector<double>& b, const char* what) {
        ASSERT_EQ(a.size(), b.size()) << what;
        EXPECT_EQ(std::memcmp(a.data(), b.data(), a.size() * sizeof(double)), 0) << what;
    }

    static constexpr std::size_t piece = std::size_t{1} << 20;  ///< bytes of a slot
    static constexpr std::size_t most = 4 * piece / 2;
    double* memory_ = nullptr;
    cudaStream_t stream_ = nullptr;
    cudaEvent_t ready_ = nullptr;
};

/// The driver's own copy is the judge of either way.
TEST_F(DeviceStaging, EveryBitEitherWay) {
    for (const testing::Pieces& array : testing::arrays_of_pieces(piece)) {
        SCOPED_TRACE(array.what);
        const std::vector<double>& values = array.values;
        const std::size_t bytes = values.size() * sizeof(double);
        ASSERT_LE(values.size(), most);
        Staging staging;
        ASSERT_TRUE(staging.is_there());
        ASSERT_EQ(cudaMemsetAsync(memory_, 0x5A, bytes, stream_), cudaSuccess);
        ASSERT_EQ(staging.write(memory_, values.data(), values.size(), stream_), cudaSuccess);
        ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
        std::vector<double> there(values.size()), back(values.size());
        ASSERT_EQ(cudaMemcpy(there.data(), memory_, bytes, cudaMemcpyDeviceToHost), cudaSuccess);
        expect_same(there, values, "written");
        ASSERT_EQ(cudaMemcpy(memory_, values.data(), bytes, cudaMemcpyHostToDevice), cudaSuccess);
        ASSERT_EQ(cudaEventRecord(ready_, stream_), cudaSuccess);
        ASSERT_EQ(staging.read(back.data(), memory_, back.size(), ready_), cudaSuccess);
        expect_same(back, values, "read");
    }
}

/// A read waits for what was done before its event, in another stream.
TEST_F(DeviceStaging, ReadsWhatIsThereAtTheEvent) {
    const std::vector<double> values(piece / 2, 3.25);
    std::vector<double> back(values.size());
    Staging to, from;
    ASSERT_TRUE(to.is_there() && from.is_there());
    for (int i = 0; i < 20; ++i) {
        ASSERT_EQ(cudaMemsetAsync(memory_, 0, values.size() * sizeof(double), stream_), cudaSuccess);
        ASSERT_EQ(to.write(memory_, values.data(), values.size(), stream_), cudaSuccess);
        ASSERT_EQ(cudaEventRecord(ready_, stream_), cudaSuccess);
        ASSERT_EQ(from.read(back.data(), memory_, back.size(), ready_), cudaSuccess);
        expect_same(back, values, "read");
    }
}

}  // namespace
}  // namespace faultline::device
