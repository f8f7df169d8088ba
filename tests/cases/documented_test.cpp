// SPDX-License-Identifier: Apache-2.0
// docs/cases.md names every test of this program, and none that is not there.
#include <fstream>
#include <iterator>
#include <regex>
#include <set>

#include <gtest/gtest.h>

#include "paths.hpp"

namespace faultline {
namespace {

TEST(Documented, EveryCaseIsInTheTable) {
    std::ifstream in(test::source_dir() / "docs" / "cases.md");
    const std::string text{std::istreambuf_iterator<char>(in), {}};
    ASSERT_FALSE(text.empty());
    std::set<std::string> named, there;
    const std::regex test_name("`(\\w+\\.\\w+)`");
    const std::size_t rows = text.find("|---|");
    ASSERT_NE(rows, std::string::npos);
    for (std::sregex_iterator at(text.begin() + static_cast<std::ptrdiff_t>(rows), text.end(), test_name), end;
         at != end; ++at)
        named.insert((*at)[1]);
    const ::testing::UnitTest& all = *::testing::UnitTest::GetInstance();
    for (int s = 0; s < all.total_test_suite_count(); ++s) {
        const ::testing::TestSuite& suite = *all.GetTestSuite(s);
        for (int t = 0; t < suite.total_test_count(); ++t)
            there.insert(std::string(suite.name()) + "." + suite.GetTestInfo(t)->name());
    }
    there.erase("Documented.EveryCaseIsInTheTable");
    EXPECT_EQ(named, there);
}

}  // namespace
}  // namespace faultline
