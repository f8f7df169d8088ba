// SPDX-License-Identifier: Apache-2.0
// Truth on the device: the bits of the processor's fast path, and MPFR's elements within their bounds.
#include <cmath>
#include <string>

#include <gtest/gtest.h>

#include <faultline/base/error.hpp>
#include <faultline/device/device.hpp>
#include <faultline/device/truth.hpp>

#include "cases.hpp"

namespace faultline {
namespace {

constexpr TruthOptions fast{.correctly_rounded = false};

/// Why there is nothing to compare: empty where a device is there.
std::string no_device() {
    try {
        (void)device::info();
    } catch (const WorkError& error) {
        return error.what();
    }
    return {};
}

TEST(NoDeviceTruth, OneSentenceSaysSo) {
    const std::string reason = no_device();
    if (reason.empty()) GTEST_SKIP() << "there is a device";
    const auto owned = test::random_problem({}, 1);
    try {
        (void)device::attention_truth(owned.problem);
        FAIL() << "truth came from nowhere";
    } catch (const WorkError& error) {
        EXPECT_NE(std::string(error.what()).find("device cuda: "), std::string::npos) << error.what();
        EXPECT_NE(std::string(error.what()).find("expected"), std::string::npos) << error.what();
    }
}

class DeviceTruth : public testing::Test {
  protected:
    void SetUp() override {
        if (const std::string reason = no_device(); !reason.empty()) GTEST_SKIP() << reason;
    }
    static void expect_bits_of_the_processor(const TruthProblem& problem, const std::string& name) {
        const GroupTruth cpu = attention_truth(problem, fast);
        test::expect_same_bits(cpu, device::attention_truth(problem, fast), name);
    }
};

TEST_F(DeviceTruth, ShapesMasksAndFormats) { test::shapes_masks_and_formats(expect_bits_of_the_processor); }
TEST_F(DeviceTruth, SaturatedRows) { test::saturated_rows(expect_bits_of_the_processor); }
TEST_F(DeviceTruth, KeysThatAgreeInAColumn) { test::keys_that_agree_in_a_column(expect_bits_of_the_processor); }
TEST_F(DeviceTruth, BiasSoftcapSinkDropout) { test::bias_softcap_sink_dropout(expect_bits_of_the_processor); }
TEST_F(DeviceTruth, RowsThatAreLost) { test::rows_that_are_lost(expect_bits_of_the_processor); }

TEST_F(DeviceTruth, LongRowsAndStrips) {
    for (const bool causal : {true, false})
        for (const double size : {1.0, 6.0}) {
            test::Shape shape{.n_q = 700, .n_k = 900, .d = 128, .d_v = 64, .heads = 2, .causal = causal};
            shape.q_size = shape.k_size = size;
            const auto owned = test::random_problem(shape, 77);
            const GroupTruth cpu = attention_truth(owned.problem, fast);
            const std::string name = (causal ? "causal " : "") + std::to_string(size);
            test::expect_same_bits(cpu, device::attention_truth(owned.problem, fast), name);
            constexpr std::size_t for_strips = std::size_t{80} << 20;  // some hundred rows at a time
            test::expect_same_bits(cpu, device::attention_truth(owned.problem, fast, for_strips), name + ", strips");
        }
}

TEST_F(DeviceTruth, WithinItsBoundsByTheJudge) {
    test::Shape shape{.n_q = 40, .n_k = 60, .d = 64, .d_v = 64, .heads = 2};
    shape.q_size = shape.k_size = 3;
    const auto owned = test::random_problem(shape, 9);
    const GroupTruth truth = device::attention_truth(owned.problem);
    EXPECT_EQ(truth.undecided_elements, 0U);
    test::expect_within_bounds(owned.problem, truth, "device");
}

TEST_F(DeviceTruth, TooLittleMemoryIsRefused) {
    const auto owned = test::random_problem({}, 3);
    EXPECT_THROW((void)device::attention_truth(owned.problem, {}, 1000), WorkError);
    EXPECT_THROW((void)device::attention_truth(owned.problem, {.keep_matrices = true}), RequestError);
}

}  // namespace
}  // namespace faultline
