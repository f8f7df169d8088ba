// SPDX-License-Identifier: Apache-2.0
// What each correction changes in a plan, field by field, and that it changes nothing else.
#include <algorithm>
#include <cmath>
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <faultline/base/error.hpp>
#include <faultline/corrections/correction.hpp>
#include <faultline/plan/difference.hpp>
#include <faultline/plan/presets.hpp>

namespace faultline {
namespace {

using testing::IsEmpty;
using testing::IsSubsetOf;
using testing::UnorderedElementsAreArray;

using Changes = std::vector<Difference>;

Changes changes(std::string_view correction, std::string_view preset, std::string_view layer = {}) {
    return differences(plan(preset), apply(parse_correction(correction), plan(preset), layer));
}

struct Expected {
    std::string_view correction;
    Changes in_fa2;
};

/// fp32_backward: every site of the backward but the stored outputs.
Changes fp32_backward_of_fa2() {
    Changes all{{"schedule.delta_from", "o", "p_dp_normalized"}};
    for (const char* site : {"bwd_p_cast", "ds_cast"})
        all.push_back({"sites." + std::string(site) + ".format", "bf16", "fp32"});
    for (const char* site : {"bwd_s_accumulate", "dp_accumulate", "dv_accumulate", "dk_accumulate", "dq_accumulate"})
        all.push_back({"sites." + std::string(site) + ".accumulation", "hopper-mma-bf16", "fp32-sequential"});
    return all;
}

// One row for each entry of the catalogue, and pairs.
const std::vector<Expected> table{
    {"stable_max", {{"schedule.max_policy", "exact", "stable"}}},
    {"stable_max:2", {{"schedule.max_policy", "exact", "stable"}, {"schedule.stable_beta", "7", "2"}}},
    {"stable_max:2,0.5",
     {{"schedule.max_policy", "exact", "stable"},
      {"schedule.stable_beta", "7", "2"},
      {"schedule.stable_tolerance", "0.001", "0.5"}}},
    {"subtract_then_scale",
     {{"schedule.argument", "fused", "subtract_then_scale"},
      {"schedule.bwd_argument", "fused", "subtract_then_scale"}}},
    {"unfused", {{"schedule.argument", "fused", "unfused"}, {"schedule.bwd_argument", "fused", "unfused"}}},
    {"o_fp32_delta", {{"schedule.delta_from", "o", "o_unrounded"}}},
    {"delta_p_dp", {{"schedule.delta_from", "o", "p_dp"}}},
    {"delta_p_dp_normalized", {{"schedule.delta_from", "o", "p_dp_normalized"}}},
    {"delta_exact",
     {{"schedule.delta_from", "o", "o_unrounded"},
      {"sites.delta.format", "fp32", "exact"},
      {"sites.delta.accumulation", "fp32-sequential", "exact"}}},
    {"zero_sum_uniform", {{"schedule.zero_sum", "none", "uniform"}}},
    {"zero_sum_weighted", {{"schedule.zero_sum", "none", "weighted"}}},
    {"zero_sum_largest", {{"schedule.zero_sum", "none", "largest"}}},
    {"key_centering", {{"schedule.key_centering", "false", "true"}}},
    {"stochastic_rounding:ds_cast", {{"sites.ds_cast.rounding", "nearest_even", "stochastic"}}},
    {"stochastic_rounding:o_cast,p_cast",
     {{"sites.o_cast.rounding", "nearest_even", "stochastic"},
      {"sites.p_cast.rounding", "nearest_even", "stochastic"}}},
    {"fp32_backward", fp32_backward_of_fa2()},
    {"fp32_forward_o", {{"sites.o_cast.format", "bf16", "fp32"}}},
    {"two_sum", {{"schedule.row_sum_adds", "unrounded", "two_sums"}}},
    {"rounded_row_sum", {{"schedule.row_sum_adds", "unrounded", "rounded"}}},
    {"qk_norm", {}},
    {"o_fp32_delta+zero_sum_uniform",
     {{"schedule.delta_from", "o", "o_unrounded"}, {"schedule.zero_sum", "none", "uniform"}}},
    {"unfused+fp32_forward_o+key_centering",
     {{"schedule.argument", "fused", "unfused"},
      {"schedule.bwd_argument", "fused", "unfused"},
      {"schedule.key_centering", "false", "true"},
      {"sites.o_cast.format", "bf16", "fp32"}}},
};

TEST(Corrections, ChangeWhatTheySayAndNothingElse) {
    for (const Expected& row : table)
        EXPECT_THAT(changes(row.correction, "fa2"), UnorderedElementsAreArray(row.in_fa2)) << row.correction;
}

TEST(Corrections, EveryOneStandsInTheTable) {
    for (const CorrectionInfo& info : corrections()) {
        const bool found = std::any_of(table.begin(), table.end(), [&](const Expected& row) {
            return row.correction.substr(0, row.correction.find(':')) == info.name;
        });
        EXPECT_TRUE(found) << info.name;
        EXPECT_FALSE(info.description.empty() || info.source.empty() || info.topic.empty()) << info.name;
    }
}

/// In any plan a correction touches no other fields than those that it may.
TEST(Corrections, StayWithTheirFieldsInEveryPreset) {
    const auto may_change = [](std::string_view correction) {
        std::set<std::string> fields;
        for (const Expected& row : table)
            if (row.correction.substr(0, row.correction.find_first_of(":+")) == correction)
                for (const Difference& d : row.in_fa2) fields.insert(d.field);
        const auto for_formats = [&](std::initializer_list<const char*> sites) {
            for (const char* site : sites) fields.insert("sites." + std::string(site) + ".format");
        };
        if (correction == "fp32_backward") {
            fields.insert({"schedule.p_saved", "schedule.delta_in", "sites.delta.format"});
            for (const SiteInfo& site : sites()) {
                if (site.pass != Pass::backward || site.name == "dq_cast" || site.name == "dk_cast" ||
                    site.name == "dv_cast")
                    continue;
                for (const char* part : {".format", ".accumulation"})
                    fields.insert("sites." + std::string(site.name) + part);
            }
        }
        if (correction == "delta_p_dp" || correction == "delta_p_dp_normalized")
            fields.insert({"schedule.delta_in", "sites.delta.format"});
        // An argument that is 0 at the maximum has a rescale that is, and one in two products no difference to scale.
        if (correction == "subtract_then_scale" || correction == "unfused") fields.insert("schedule.rescale_argument");
        if (correction == "unfused") fields.insert("schedule.lse_in");
        if (correction == "delta_exact") fields.insert("sites.delta_product.format");
        if (correction == "fp32_forward_o")
            for_formats({"o_rescale", "pv_accumulate", "o_normalize", "merge", "partial_o_cast"});
        return fields;
    };
    for (const RoundingPlan& preset : presets()) {
        for (const Correction& correction : standard_corrections(preset)) {
            if (correction.steps.size() > 1) continue;
            std::set<std::string> changed;
            for (const Difference& d : differences(preset, apply(correction, preset))) changed.insert(d.field);
            EXPECT_THAT(changed, IsSubsetOf(may_change(correction.steps[0].info->name)))
                << preset.name << " " << correction.name;
        }
    }
}

TEST(Corrections, KeepThePlansOtherTextsAndSayWhatWasDone) {
    const RoundingPlan fa3 = plan("fa3");
    const RoundingPlan corrected = apply(parse_correction("stable_max:2"), fa3);
    EXPECT_EQ(corrected.name, "fa3+stable_max:2");
    EXPECT_EQ(corrected.source, fa3.source);
    EXPECT_EQ(corrected.tiles, fa3.tiles);
}

// lse and a stored p were made of the forward's scores: a backward of other scores is off by the exponential of the
// difference, which with bf16 scores made dv worse a thousandfold.
TEST(Corrections, Fp32BackwardKeepsTheForwardsScores) {
    const RoundingPlan stored = apply(parse_correction("fp32_backward"), plan("standard-bf16"));
    EXPECT_TRUE(stored.schedule.p_saved);
    for (const Site site : {Site::ds, Site::ds_cast, Site::dp_cast, Site::bwd_p_cast})
        EXPECT_EQ(stored[site].format, fp32) << name(site);
    for (const Site site : {Site::dp_accumulate, Site::dq_accumulate})
        EXPECT_EQ(stored[site].accumulation, fp32_sequential) << name(site);
    EXPECT_EQ(stored[Site::dq_cast].format, bf16) << "what is stored stays the model's choice";
    const RoundingPlan recomputed = apply(parse_correction("fp32_backward"), plan("repo-2510.04212"));
    for (const Site site : {Site::bwd_s_cast, Site::bwd_s_scale})
        EXPECT_EQ(recomputed[site], plan("repo-2510.04212")[site]) << name(site);
}

TEST(Corrections, Fp32BackwardTakesDeltaOutOfTheAccumulator) {
    const RoundingPlan corrected = apply(parse_correction("delta_p_dp"), plan("fa1"));
    EXPECT_EQ(corrected.schedule.delta_in, DeltaIn::difference) << "delta is known only after dp";
    EXPECT_EQ(problem_with(apply(parse_correction("fp32_backward"), plan("fa1"))), "");
}

TEST(Corrections, Fp32ForwardOWidensAStreamingState) {
    const RoundingPlan corrected = apply(parse_correction("fp32_forward_o"), plan("repo-2510.04212"));
    for (const Site site : {Site::o_rescale, Site::pv_accumulate, Site::o_normalize, Site::o_cast})
        EXPECT_EQ(corrected[site].format, fp32) << name(site);
    EXPECT_EQ(corrected[Site::row_sum].format, bf16) << "the row sum is not O";
}

TEST(Corrections, ActInTheNamedLayersAlone) {
    EXPECT_THAT(changes("fp32_backward:layer1,layer3", "fa2", "layer0"), IsEmpty());
    EXPECT_THAT(changes("fp32_backward:layer1,layer3", "fa2", "layer1"),
                UnorderedElementsAreArray(fp32_backward_of_fa2()));
    EXPECT_THAT(changes("fp32_backward:layer1,layer3", "fa2", "layer3"),
                UnorderedElementsAreArray(fp32_backward_of_fa2()));
    EXPECT_EQ(changes("fp32_backward:layer1+unfused", "fa2", "layer0").size(), 2U) << "the other step acts everywhere";
    EXPECT_TRUE(changes_plan(parse_correction("fp32_backward:layer1"), plan("fa2")));
}

TEST(Corrections, OfTheExactPlanMakeNoSiteRound) {
    for (const CorrectionInfo& info : corrections()) {
        if (info.arguments == Arguments::sites) continue;
        EXPECT_THAT(apply(parse_correction(info.name), RoundingPlan{}).rounding_sites(), IsEmpty()) << info.name;
    }
}

TEST(Corrections, StandardOnesChangeThePlanAndAreValid) {
    for (const RoundingPlan& preset : presets()) {
        std::set<std::string> names;
        for (const Correction& correction : standard_corrections(preset)) {
            EXPECT_TRUE(changes_plan(correction, preset)) << preset.name << " " << correction.name;
            EXPECT_FALSE(correction.changes_function());
            EXPECT_EQ(problem_with(apply(correction, preset)), "") << preset.name << " " << correction.name;
            EXPECT_TRUE(names.insert(correction.name).second) << correction.name;
        }
    }
    std::set<std::string> of_fa2;
    for (const Correction& correction : standard_corrections(plan("fa2"))) of_fa2.insert(correction.name);
    EXPECT_THAT(of_fa2,
                testing::UnorderedElementsAre(
                    "stable_max", "subtract_then_scale", "unfused", "o_fp32_delta", "delta_p_dp",
                    "delta_p_dp_normalized", "delta_exact", "zero_sum_uniform", "zero_sum_weighted", "zero_sum_largest",
                    "key_centering", "stochastic_rounding:ds_cast", "stochastic_rounding:o_cast", "fp32_backward",
                    "fp32_forward_o", "two_sum", "rounded_row_sum", "o_fp32_delta+zero_sum_uniform",
                    "o_fp32_delta+zero_sum_weighted", "delta_p_dp+zero_sum_weighted"));
    std::set<std::string> of_unfused;
    for (const Correction& correction : standard_corrections(plan("fa2-unfused"))) of_unfused.insert(correction.name);
    EXPECT_FALSE(of_unfused.contains("unfused")) << "the plan has it already";
}

TEST(QkNorm, DividesEachRowByItsRootMeanSquareAndRounds) {
    Matrix q(2, 4), k(3, 4);
    q.values = {3, -3, 3, 3, 0, 0, 0, 0};  // rms 3; a row of zeros stays
    k.values = {1, 2, 3, 4, 0x1p-120, 0, 0, 0, 1, 1, 1, 1};
    const Matrix q_before = q, k_before = k;
    transform_inputs(parse_correction("unfused"), q, k, bf16, bf16);
    EXPECT_EQ(q, q_before);
    EXPECT_EQ(k, k_before);
    const Correction correction = parse_correction("qk_norm");
    EXPECT_TRUE(correction.changes_function());
    EXPECT_TRUE(parse_correction("unfused+qk_norm").changes_function());
    transform_inputs(correction, q, k, bf16, bf16);
    EXPECT_THAT(q.values, testing::ElementsAre(1, -1, 1, 1, 0, 0, 0, 0));
    // rms sqrt(30/4) = 2.7386128: 0.36515, 0.73030, 1.09545, 1.46059, to the nearest bf16 (spacing 2^-9, 2^-8, 2^-7, 2^-7).
    // The second row's rms is 2^-121, its element 2.
    EXPECT_THAT(k.values,
                testing::ElementsAre(187 * 0x1p-9, 187 * 0x1p-8, 140 * 0x1p-7, 187 * 0x1p-7, 2, 0, 0, 0, 1, 1, 1, 1));
    Matrix unrounded(1, 2), single(1, 2);
    unrounded.values = single.values = {1, 7};  // rms 5
    transform_inputs(correction, unrounded, single, exact, fp32);
    EXPECT_THAT(unrounded.values, testing::ElementsAre(0.2, 1.4));
    EXPECT_THAT(single.values, testing::ElementsAre(double{0.2F}, double{1.4F})) << "each in its own format";
}

}  // namespace
}  // namespace faultline
