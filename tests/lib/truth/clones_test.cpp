// SPDX-License-Identifier: Apache-2.0
// The clone that this machine picks and the baseline without fma instructions give the same bits.
#include <array>
#include <cstdio>
#include <memory>
#include <string>

#include <gtest/gtest.h>

#include "fingerprint.hpp"

namespace faultline {
namespace {

TEST(Clones, SameBitsAsTheBaseline) {
    const std::unique_ptr<std::FILE, int (*)(std::FILE*)> pipe(popen("\"" FAULTLINE_PLAIN_FINGERPRINT "\"", "r"),
                                                               pclose);
    ASSERT_NE(pipe, nullptr);
    std::array<char, 64> line{};
    ASSERT_NE(std::fgets(line.data(), static_cast<int>(line.size()), pipe.get()), nullptr);
    std::array<char, 64> own{};
    std::snprintf(own.data(), own.size(), "%016llx\n", static_cast<unsigned long long>(test::fingerprint()));
    EXPECT_STREQ(line.data(), own.data());
}

}  // namespace
}  // namespace faultline
