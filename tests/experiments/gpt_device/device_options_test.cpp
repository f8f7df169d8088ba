// SPDX-License-Identifier: Apache-2.0
// What decides a run on the device beside its configuration; without a card.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include <faultline/base/error.hpp>
#include <faultline/gpt/fingerprint.hpp>
#include <faultline/gpt_device/device_trainer.hpp>

#include "../../lib/ranks/on_ranks.hpp"

namespace faultline::gpt {
namespace {

using testing::HasSubstr;

/// Keys in which the fingerprints of two runs of one configuration differ.
std::vector<std::string> differ_in(const DeviceOptions& a, const DeviceOptions& b) {
    const auto one = fingerprint(on_the_device({}, a)), two = fingerprint(on_the_device({}, b));
    std::vector<std::string> keys;
    for (const auto& [from, to] : {std::pair(&one, &two), std::pair(&two, &one)})
        for (const auto& entry : *from)
            if (std::ranges::find(*to, entry) == to->end() && std::ranges::find(keys, entry.first) == keys.end())
                keys.push_back(entry.first);
    return keys;
}

// A checkpoint is refused where a key of the fingerprint has another value: with another number of ranks an element's additions
// stand in another order, in bf16 they are others.
TEST(DeviceRunsFingerprint, HasTheRanksAndInWhatTheyAddUp) {
    const auto two = connected_ranks(2), four = connected_ranks(4);
    const DeviceOptions alone, of_two{.ranks = two[0].get()}, of_four{.ranks = four[0].get()},
        rounded{.ranks = two[0].get(), .exchange = {.reduce = Reduce::nccl_bf16}},
        at_end{.ranks = two[0].get(), .exchange = {.overlapped = false}}, fastest{.deterministic = false};
    EXPECT_THAT(differ_in(alone, of_two), testing::Contains("ranks"));
    EXPECT_THAT(differ_in(of_two, of_four), testing::ElementsAre("ranks"));
    EXPECT_THAT(differ_in(of_two, rounded), testing::ElementsAre("reduce"));
    EXPECT_THAT(differ_in(of_two, at_end), testing::IsEmpty());  // the same additions
    // Of two ranks' gradients there is one sum, whoever makes it; four's, gathered, are added in another order than NCCL's.
    const auto gathered = [](const auto& ranks) {
        return DeviceOptions{.ranks = ranks[0].get(), .exchange = {.reduce = Reduce::gather}};
    };
    EXPECT_THAT(differ_in(of_two, gathered(two)), testing::IsEmpty());
    EXPECT_THAT(differ_in(of_four, gathered(four)), testing::ElementsAre("reduce"));
    EXPECT_THAT(differ_in(of_four, {.ranks = four[0].get(), .exchange = {.reduce = Reduce::nccl}}), testing::IsEmpty());
    EXPECT_THAT(differ_in(of_two, {.ranks = two[1].get()}), testing::IsEmpty());
    EXPECT_THAT(differ_in(alone, fastest), testing::ElementsAre("deterministic"));
}

TEST(DeviceRanks, OfMuonHaveTheSameProducts) {
    const auto two = connected_ranks(2);
    TrainConfig muon;
    muon.optimizer.kind = OptimizerKind::muon;
    const DeviceOptions fastest{.deterministic = false, .ranks = two[0].get()};
    try {
        (void)on_the_device(muon, fastest);
        ADD_FAILURE();
    } catch (const RequestError& error) {
        EXPECT_THAT(error.what(), HasSubstr("deterministic: false: Muon's products would be chosen by each rank"));
    }
    EXPECT_NO_THROW((void)on_the_device(muon, {.ranks = two[0].get()}));
    EXPECT_NO_THROW((void)on_the_device(muon, {.deterministic = false}));
    EXPECT_NO_THROW((void)on_the_device({}, fastest));
}

TEST(DeviceRanks, DivideTheMicroBatches) {
    TrainConfig c;
    c.accumulate = 6;
    EXPECT_EQ(micro_batches_of_a_rank(3, c), 2);
    EXPECT_THROW((void)micro_batches_of_a_rank(4, c), RequestError);
}

}  // namespace
}  // namespace faultline::gpt
