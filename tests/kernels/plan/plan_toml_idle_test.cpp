// SPDX-License-Identifier: Apache-2.0
// What a plan file says and nothing reads, and the sentence that refuses it.
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "error_of.hpp"

namespace faultline {
namespace {

/// What the file itself says and nothing reads. Accepted ones: plan_toml_test.cpp.
TEST(PlanWithoutEffect, WhatChangesNothing) {
    const auto idle = [](const std::string& place, const std::string& lacks) {
        return "f.toml:" + place +
               ": changes nothing that this plan computes: expected it to be left out, or a plan with " + lacks;
    };
    const std::string in_exponent = "scale_at = \"exponent\"", recomputed = "p_saved = false",
                      of_o = "delta_from = \"o\" or \"o_unrounded\"", stable = "max_policy = \"stable\"",
                      tiles = "block_k above 0 (several key tiles)",
                      lag = "block_k above 0, or a sink that the maximum starts at (a maximum that can lag)",
                      no_sink = "zero_sum = \"none\" and key_centering = false, with which alone a sink is computed",
                      columns =
                          "an exp_poly_every, exp_poly_count, exp_poly_skip and block_k that leave some columns to "
                          "the polynomial";
    const std::vector<std::pair<const char*, std::string>> all{
        {"base = \"fa2\"\n[schedule]\nscale_at = \"scores\"\nargument = \"fused\"",
         idle("4:12: schedule.argument", in_exponent)},
        {"base = \"fa2\"\n[schedule]\nscale_at = \"scores\"\nrescale_argument = \"fused\"",
         idle("4:20: schedule.rescale_argument", in_exponent)},
        {"[schedule]\nargument = \"unfused\"\nscale_at = \"scores\"", idle("2:12: schedule.argument", in_exponent)},
        {"base = \"math\"\nschedule.argument = \"fused\"", idle("2:21: schedule.argument", in_exponent)},
        {"base = \"math\"\nschedule.bwd_argument = \"fused\"", idle("2:25: schedule.bwd_argument", recomputed)},
        {"base = \"llmc\"\nschedule.bwd_exp_base = \"two\"", idle("2:25: schedule.bwd_exp_base", recomputed)},
        {"base = \"efficient\"\nschedule.bwd_argument = \"fused\"", idle("2:25: schedule.bwd_argument", in_exponent)},
        {"base = \"fa2\"\nschedule.max_threshold = 5", idle("2:26: schedule.max_threshold", "max_policy = \"lazy\"")},
        {"base = \"fa4\"\n[schedule]\nmax_policy = \"exact\"\nmax_threshold = 5",
         idle("4:17: schedule.max_threshold", "max_policy = \"lazy\"")},
        {"base = \"fa2\"\nschedule.stable_beta = 3", idle("2:24: schedule.stable_beta", stable)},
        {"base = \"fa2\"\nschedule.stable_tolerance = 0.5", idle("2:29: schedule.stable_tolerance", stable)},
        {"base = \"fa2\"\nschedule.exp_poly_count = 6", idle("2:27: schedule.exp_poly_count", columns)},
        {"base = \"fa2\"\nschedule.exp_poly_skip = 0", idle("2:26: schedule.exp_poly_skip", columns)},
        {"[schedule]\nblock_k = 64\nexp_poly_every = 16", idle("3:18: schedule.exp_poly_every", columns)},
        {"[schedule]\nexp_poly_every = 16\nexp_poly_count = 1", idle("3:18: schedule.exp_poly_count", columns)},
        {"base = \"fa2\"\n[schedule]\ndelta_from = \"p_dp\"\ndelta_order = \"mod_8\"",
         idle("4:15: schedule.delta_order", of_o)},
        {"base = \"fa2\"\n[schedule]\ndelta_from = \"p_dp\"\ndelta_threads = 4",
         idle("4:17: schedule.delta_threads", of_o)},
        {"base = \"fa2\"\n[schedule]\ndelta_order = \"sequential\"\ndelta_threads = 4",
         idle("4:17: schedule.delta_threads", "delta_order = \"octets\" or \"octet_pairs\"")},
        {"base = \"fa1\"\nschedule.sink_in_max = false",
         idle("2:24: schedule.sink_in_max", "normalize = \"after_pv\" or \"before_pv\" (a place for a sink)")},
        {"base = \"fa4\"\n[schedule]\nsink_in_max = false\nzero_sum = \"weighted\"",
         idle("3:15: schedule.sink_in_max", no_sink)},
        {"base = \"fa4\"\n[schedule]\nsink_in_max = false\nkey_centering = true",
         idle("3:15: schedule.sink_in_max", no_sink)},
        {"[schedule]\nmax_policy = \"lazy\"\nsink_in_max = false\nmax_threshold = 200.0\n[sites]\nexp = { format = "
         "\"fp32\" }",
         idle("2:14: schedule.max_policy", lag)},
        {"[schedule]\nmax_policy = \"lazy\"\nzero_sum = \"uniform\"\nmax_threshold = 20\n[sites]\np_cast = { format = "
         "\"fp16\" }",
         idle("2:14: schedule.max_policy", lag)},
        {"[schedule]\nmax_policy = \"lazy\"\nkey_centering = true", idle("2:14: schedule.max_policy", lag)},
        {"[schedule]\nmax_policy = \"lazy\"\nnormalize = \"each_tile\"", idle("2:14: schedule.max_policy", lag)},
        {"base = \"fa4\"\n[schedule]\nblock_k = 0\nmax_threshold = 5", idle("4:17: schedule.max_threshold", lag)},
        {"schedule.key_order = \"descending\"", idle("1:22: schedule.key_order", tiles)},
        {"schedule.pv_carry = \"added\"", idle("1:21: schedule.pv_carry", tiles)},
        {"schedule.rescale_argument = \"fused\"", idle("1:29: schedule.rescale_argument", tiles)},
        {"schedule.bwd_key_order = \"descending\"",
         idle("1:26: schedule.bwd_key_order", "bwd_block_k above 0 (several key tiles)")},
        {"schedule.dq_carry = \"chained\"", idle("1:21: schedule.dq_carry", "bwd_block_k above 0 (several key tiles)")},
        {"schedule.bwd_query_order = \"descending\"",
         idle("1:28: schedule.bwd_query_order", "bwd_block_q above 0 (several query tiles)")},
        {"schedule.dkv_carry = \"added\"",
         idle("1:22: schedule.dkv_carry", "bwd_block_q above 0 (several query tiles)")},
        {"[[tiles]]\nhead_dim = 64\ndelta_threads = 4",
         idle("3:17: tiles[0].delta_threads", "delta_order = \"octets\" or \"octet_pairs\"")},
        {"[[tiles]]\nhead_dim = 64\nexp_poly_count = 2", idle("3:18: tiles[0].exp_poly_count", columns)},
        {"[[tiles]]\nhead_dim = 64\nblock_k = 32\nexp_poly_every = 8", idle("4:18: tiles[0].exp_poly_every", columns)},
        {"base = \"fa4\"\n[[tiles]]\nhead_dim = 64\nexp_poly_every = 0\nexp_poly_count = 2",
         idle("5:18: tiles[0].exp_poly_count", columns)},
        {"sites.p_cast.rounding = \"toward_zero\"",
         "f.toml:1:25: sites.p_cast.rounding: is of a site whose format is exact, which rounds nothing: expected a "
         "format with it"},
        {"base = \"fa2\"\n[sites.p_cast]\nformat = \"exact\"\nrounding = \"stochastic\"",
         "f.toml:4:12: sites.p_cast.rounding: is of a site whose format is exact, which rounds nothing: expected a "
         "format with it"},
        {"base = \"fa2\"\nsites.row_sum.accumulation = \"fp32-pairwise\"",
         "f.toml:2:30: sites.row_sum.accumulation: names an order of its own: expected \"fp32-sequential\", which stands "
         "for fp32 additions, or an exact site, because the order is that of schedule.row_sum_order"},
        {"base = \"fa2\"\nsites.delta.accumulation = \"fp32-fma\"",
         "f.toml:2:28: sites.delta.accumulation: names an order of its own: expected \"fp32-sequential\", which stands "
         "for fp32 additions, or an exact site, because the order is that of schedule.delta_order"},
    };
    for (const auto& [text, error] : all) EXPECT_EQ(error_of(text), error) << text;
}

/// A rule for a step of a sink, a softcap or dropout, where the schedule refuses every problem that has one.
TEST(PlanWithoutEffect, RulesOfWhatThePlanRefuses) {
    const auto error = [](const std::string& schedule, const std::string& site) {
        return error_of("base = \"fa2\"\n[schedule]\n" + schedule + "\n[sites]\n" + site + " = { format = \"bf16\" }");
    };
    const auto never = [](const std::string& site) {
        return "sites." + site +
               ": has a rule, and the plan's schedule never reaches it: expected no rule, or a schedule with that step";
    };
    for (const std::string site : {"softcap", "ds_softcap", "bwd_softcap", "sink_exp", "sink_sum", "sink_p", "dsink"}) {
        EXPECT_EQ(error("ds_p = \"cast\"", site), "no error") << site;
        for (const char* schedule : {"zero_sum = \"uniform\"", "key_centering = true"})
            EXPECT_THAT(error(schedule, site), ::testing::EndsWith(never(site))) << schedule;
    }
    for (const std::string site : {"p_dropout", "dp_dropout"}) {
        const std::string one_tile = "block_k = 0\nnormalize = \"before_pv\"";
        EXPECT_EQ(error(one_tile, site), "no error") << site;
        EXPECT_THAT(error(one_tile + "\ndelta_in = \"accumulator\"", site), ::testing::EndsWith(never(site)));
    }
}

TEST(PlanWithoutEffect, EntriesThatSayNothing) {
    const std::string idle_case =
        ": replaces nothing of the schedule, and keeps no head from a later case: expected a size in it, or no such case";
    const std::string empty = ": is empty: expected format, rounding or accumulation, or no entry";
    const std::vector<std::pair<const char*, std::string>> all{
        {"base = \"fa2\"\n[[tiles]]\nhead_dim = 64", "f.toml:2:1: tiles[0]" + idle_case},
        {"[[tiles]]\nhead_dim = 64\nblock_k = 32\n[[tiles]]\nhead_dim = 128\ncausal = true",
         "f.toml:4:1: tiles[1]" + idle_case},
        // A later case of other calls keeps nothing either.
        {"[[tiles]]\nhead_dim = 64\ncausal = true\n[[tiles]]\nhead_dim = 64\ncausal = false\nblock_k = 32",
         "f.toml:1:1: tiles[0]" + idle_case},
        {"[[tiles]]\nhead_dim = 64\n[[tiles]]\nhead_dim = 128\nblock_k = 32", "no error"},
        {"[[tiles]]\nhead_dim = 64\ncausal = true\n[[tiles]]\nhead_dim = 64\nwindow = true\nblock_k = 32", "no error"},
        // The heads up to 64 are the first case's already, and what remains has the schedule's tiles.
        {"[[tiles]]\nhead_dim = 64\nblock_k = 32\n[[tiles]]\nhead_dim = 96\n[[tiles]]\nhead_dim = 128\nblock_k = 0\n"
         "[[tiles]]\nhead_dim = 256\nblock_k = 64",
         "f.toml:4:1: tiles[1]" + idle_case},
        {"base = \"fa2\"\n[sites]\np_cast = {}", "f.toml:3:10: sites.p_cast" + empty},
        {"[sites.p_cast]", "f.toml:1:1: sites.p_cast" + empty},
    };
    for (const auto& [text, error] : all) EXPECT_EQ(error_of(text), error) << text;
}

}  // namespace
}  // namespace faultline
