// SPDX-License-Identifier: Apache-2.0
#include <faultline/dissociation/source.hpp>

#include <vector>

#include <gtest/gtest.h>

#include <faultline/base/error.hpp>

namespace faultline {
namespace {

TEST(Source, IsFaultsAndPlans) {
    const Source s = parse_source("plan:exact+plan:repo-2510.04212:layers=1:heads=0:untiled+delta:fixed:0.1", 32);
    ASSERT_EQ(s.attention.size(), 2U);
    EXPECT_EQ(s.attention[0].layer, -1);
    EXPECT_EQ(s.attention[1].layer, 1);
    EXPECT_EQ(s.attention[1].heads, std::vector<int>{0});
    EXPECT_EQ(s.attention[1].plan->schedule.block_k, 0);
    EXPECT_EQ(s.faults.size(), 1U);
    EXPECT_TRUE(parse_source("none", 32).is_none());
    EXPECT_EQ(parse_source("plan:fa2:correction=delta_p_dp", 32).attention[0].plan->schedule.delta_from,
              DeltaFrom::p_dp);
    EXPECT_TRUE((*parse_source("plan:fa2:exact=o_cast,lse", 32).attention[0].plan)[Site::o_cast].is_exact());
    for (const char* word :
         {"plan", "plan:nokernel", "plan:fa2:layers=0:layers=1", "plan:fa2:untiled:untiled", "plan:fa2:exact=ocast",
          "plan:fa2:layer=1", "plan:fa2:layers=x", "plan:fa2:correction=qk_norm", ""})
        EXPECT_THROW((void)parse_source(word, 32), RequestError) << word;
}

}  // namespace
}  // namespace faultline
