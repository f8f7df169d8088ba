// SPDX-License-Identifier: Apache-2.0
// What is said where a card cannot be used: text, on any machine.
#include <faultline/device/refusals.hpp>

#include <cstdint>
#include <cstdlib>

#include <gtest/gtest.h>

#include <faultline/base/error.hpp>

namespace faultline::device {
namespace {

constexpr std::size_t mib = std::size_t{1} << 20;

TEST(Refusals, RoomNamesThePlanAndNeverEqualNumbers) {
    EXPECT_EQ(no_room("math", 15 * mib, 3 * mib, 2 * mib),
              "device cuda: plan \"math\": a run needs 15 MiB, 3 of them for what is recorded, and 2 MiB are free: "
              "expected a shorter sequence, or smaller tiles (block_q, block_k) of the plan");
    // 2.5 MiB of 2.25.
    EXPECT_NE(no_room("fa2", 5 * mib / 2, 0, 9 * mib / 4).find("needs 3 MiB and 2 MiB are free"), std::string::npos);
    EXPECT_NE(no_room("fa2", 2 * mib + 1, 1, 2 * mib).find("needs 3 MiB, 1 of them for"), std::string::npos);
}

TEST(Refusals, RoomForTruth) {
    EXPECT_EQ(no_room_for_truth(4096, 83 * mib + 1, 64 * mib),
              "device cuda: truth: rows of 4096 keys need 84 MiB, one at a time, and 64 MiB are free: expected a "
              "shorter sequence, or more memory");
}

/// FAULTLINE_DEVICE_MIB while it lives.
class Limit {
  public:
    explicit Limit(const char* text) { (void)setenv("FAULTLINE_DEVICE_MIB", text, 1); }
    Limit(const Limit&) = delete;
    Limit& operator=(const Limit&) = delete;
    ~Limit() { (void)unsetenv("FAULTLINE_DEVICE_MIB"); }
};

TEST(Refusals, MemoryLimit) {
    (void)unsetenv("FAULTLINE_DEVICE_MIB");
    EXPECT_EQ(memory_limit(), SIZE_MAX);
    EXPECT_EQ((Limit(""), memory_limit()), SIZE_MAX);
    EXPECT_EQ((Limit("1"), memory_limit()), mib);
    EXPECT_EQ((Limit("143771"), memory_limit()), 143771 * mib);
    for (const char* const text : {"0", "-3", "lots", "12GiB", " 12", "1.5", "99999999999999999999", "2199023255552"})
        try {
            const Limit limit(text);
            (void)memory_limit();
            ADD_FAILURE() << text;
        } catch (const RequestError& error) {
            EXPECT_EQ(std::string(error.what()),
                      "FAULTLINE_DEVICE_MIB: \"" + std::string(text) +
                          "\": expected the MiB of the card's memory that may be used, 1 to 1099511627776");
        }
}

TEST(Refusals, Architectures) {
    EXPECT_EQ(architectures_of("80-real,90a-real"), "8.x and 9.0");
    EXPECT_EQ(architectures_of("80,90a-real"), "8.x, 9.0 and later ones");
    EXPECT_EQ(architectures_of("80-real"), "8.x");
    EXPECT_EQ(architectures_of("86-real,90-real,100a-real"), "8.6 and later of it, 9.x and 10.0");
    EXPECT_EQ(architectures_of("90-virtual"), "9.x and later ones");
}

TEST(Refusals, ACardWithoutCode) {
    EXPECT_EQ(no_code("NVIDIA B200", 10, 0, "80-real,90a-real"),
              "device cuda: NVIDIA B200 has compute capability 10.0, and this build has code for 8.x and 9.0: expected "
              "such a card, or a build with CMAKE_CUDA_ARCHITECTURES for this one");
}

TEST(Refusals, Memory) {
    EXPECT_EQ(memory_text(64 * mib), "64 MiB");
    EXPECT_EQ(memory_text(10239 * mib), "10239 MiB");
    EXPECT_EQ(memory_text(10240 * mib), "10 GiB");
    EXPECT_EQ(memory_text(std::size_t{143771} * mib), "140 GiB");
}

}  // namespace
}  // namespace faultline::device
