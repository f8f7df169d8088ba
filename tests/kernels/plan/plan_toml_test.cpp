// SPDX-License-Identifier: Apache-2.0
// Plans to TOML and back.
#include <cmath>
#include <limits>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <faultline/format/names.hpp>
#include <faultline/plan/difference.hpp>
#include <faultline/plan/effect.hpp>
#include <faultline/plan/plan_toml.hpp>
#include <faultline/plan/presets.hpp>
#include <faultline/plan/schedule_fields.hpp>

namespace faultline {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

/// What says nothing is not written.
void expect_round_trip(const RoundingPlan& given) {
    const RoundingPlan plan = without_idle(given);
    EXPECT_EQ(to_toml(given), to_toml(plan));
    const RoundingPlan read = parse_plan(to_toml(plan), "text");
    EXPECT_THAT(differences(plan, read), IsEmpty()) << to_toml(plan);
    EXPECT_TRUE(read.same_numerics(plan));
    EXPECT_EQ(read.name, plan.name);
    EXPECT_EQ(read.description, plan.description);
    EXPECT_EQ(read.source, plan.source);
    EXPECT_EQ(to_toml(read), to_toml(plan));
}

TEST(PlanToml, PresetsRoundTrip) {
    for (const RoundingPlan& preset : presets()) expect_round_trip(preset);
}

/// Every value of every field, one at a time.
TEST(PlanToml, EveryFieldOfTheScheduleRoundTrips) {
    for (std::size_t at = 0; at < schedule_field_names().size(); ++at) {
        std::size_t here = 0;
        RoundingPlan base;
        for_each_field(base.schedule, [&](std::string_view, auto& field) {
            if (here++ != at) return;
            using T = std::remove_reference_t<decltype(field)>;
            const T before = field;
            const auto check = [&](T value) {
                field = value;
                if (problem_with(base).empty()) expect_round_trip(base);
                field = before;
            };
            if constexpr (std::is_same_v<T, bool>) {
                check(!before);
            } else if constexpr (std::is_same_v<T, int>) {
                for (const int value : {1, 2, 64, 4096, std::numeric_limits<int>::max()}) check(value);
            } else if constexpr (std::is_same_v<T, double>) {
                for (const double value : {0.1, 1.0, 1e300, 5e-324, -2.5, 3.0000000000000004}) check(value);
            } else {
                for (const auto& entry : enumerators<T>()) check(entry.value);
            }
        });
    }
}

TEST(PlanToml, EveryFormatRoundingAndAccumulationRoundTrips) {
    for (const NamedFormat& format : all_formats())
        expect_round_trip(RoundingPlan{}.with(Site::p_cast, {.format = format.format}));
    for (const Rounding rounding : all_roundings())
        expect_round_trip(RoundingPlan{}.with(Site::p_cast, {.format = bf16, .rounding = rounding}));
    for (const NamedAccumulation& known : accumulations())
        expect_round_trip(RoundingPlan{}.with(Site::s_accumulate, {.accumulation = known.accumulation}));
    expect_round_trip(RoundingPlan{}.with(Site::p_cast, {.format = with_saturation(e4m3, false)}));
}

TEST(PlanToml, FormatsAndUnitsWithoutANameRoundTrip) {
    const Format odd{.precision = 5, .emin = -14, .emax = 15, .subnormals = false};
    const Format no_nan{
        .precision = 3, .emin = -2, .emax = 4, .infinities = false, .nans = NanKind::none, .saturates = true};
    const Format one_nan{.precision = 6, .emin = -6, .emax = 8, .infinities = false, .nans = NanKind::single_code};
    const MatrixUnit unit{.terms = 12,
                          .fraction_bits = 20,
                          .output = OutputFormat::e8m13_rz,
                          .a_min_exponent = -14,
                          .b_min_exponent = -6,
                          .input_fraction_bits = 9,
                          .zero = ZeroOperand::at_minimum};
    for (const Format& format : {odd, no_nan, one_nan}) {
        ASSERT_EQ(validate(format), "");
        expect_round_trip(RoundingPlan{}.with(Site::ds_cast, {.format = format, .rounding = Rounding::stochastic}));
    }
    expect_round_trip(
        RoundingPlan{}.with(Site::dq_accumulate, {fp32, Rounding::toward_zero, {Accumulation::Kind::fused, unit}}));
}

TEST(PlanToml, TextsOfAnyKindRoundTrip) {
    RoundingPlan plan;
    plan.name = "it's \"mine\" \\ 100% größer";
    plan.description = "two\nlines\tand a bell\a and \x7F";
    plan.source = "kernel.cu:1 # not a comment";
    plan.schedule.delta_order = DeltaOrder::octets;
    plan.tiles = {{.head_dim = 64, .causal = false, .block_q = 0, .delta_threads = 2},
                  {.head_dim = 128, .bwd_block_k = 80}};
    expect_round_trip(plan);
}

TEST(PlanToml, WhatIsLeftOutIsExactAndDefault) {
    const RoundingPlan plan = parse_plan("", "folder/my plan.toml");
    EXPECT_TRUE(plan.same_numerics(RoundingPlan{}));
    EXPECT_EQ(plan.name, "my plan") << "named for its file";
    EXPECT_EQ(parse_plan("name = \"other\"", "folder/mine.toml").name, "other");
    const RoundingPlan partial = parse_plan("[sites.p_cast]\nformat = \"bf16\"\n[schedule]\nblock_q = 64", "x");
    EXPECT_THAT(differences(RoundingPlan{}, partial), ElementsAre(Difference{"schedule.block_q", "0", "64"},
                                                                  Difference{"sites.p_cast.format", "exact", "bf16"}));
    const RoundingPlan numbers = parse_plan("[schedule]\nmax_policy = \"stable\"\nstable_beta = 3", "x");
    EXPECT_EQ(numbers.schedule.stable_beta, 3) << "an integer is a number";
}

TEST(PlanToml, BaseIsChangedWhereTheFileSaysSo) {
    const RoundingPlan changed = parse_plan(R"(
        base = "fa2"
        [schedule]
        delta_from = "o_unrounded"
        [sites.ds_cast]
        rounding = "stochastic"
        [sites.o_cast]
        format = "fp32"
    )",
                                            "changed.toml");
    EXPECT_THAT(differences(plan("fa2"), changed),
                ElementsAre(Difference{"schedule.delta_from", "o", "o_unrounded"},
                            Difference{"sites.o_cast.format", "bf16", "fp32"},
                            Difference{"sites.ds_cast.rounding", "nearest_even", "stochastic"}));
    EXPECT_EQ(changed.name, "changed");
    EXPECT_EQ(changed.source, "") << "the base's source speaks of the base alone";
    EXPECT_EQ(changed.tiles, plan("fa2").tiles);
    EXPECT_THAT(parse_plan("base = \"fa2\"\ntiles = []", "x").tiles, IsEmpty());
}

TEST(PlanToml, ASizeOfTheFilesScheduleHoldsForEveryHead) {
    const RoundingPlan changed = parse_plan("base = \"fa2\"\nschedule.block_k = 48\nschedule.delta_threads = 2", "x");
    for (const int head_dim : {32, 64, 128, 512}) {
        const Schedule here = for_head_dim(changed, head_dim).schedule,
                       base = for_head_dim(plan("fa2"), head_dim).schedule;
        EXPECT_EQ(here.block_k, 48) << head_dim;
        EXPECT_EQ(here.delta_threads, 2) << head_dim;
        EXPECT_EQ(here.block_q, base.block_q) << head_dim;
        EXPECT_EQ(here.bwd_block_k, base.bwd_block_k) << head_dim;
    }
}

TEST(PlanToml, APresetSaysNothingWithoutEffect) {
    for (const RoundingPlan& preset : presets()) EXPECT_THAT(differences(preset, without_idle(preset)), IsEmpty());
}

// Written or not, a default is the default; and what the arithmetic amounts to may be said.
TEST(PlanToml, WithoutEffectADefaultIsAcceptedAndWhatTheArithmeticIs) {
    std::string text = "[schedule]\n";
    const Schedule standard;
    for_each_field(standard, [&](std::string_view field, const auto& value) {
        using T = std::remove_cvref_t<decltype(value)>;
        std::string shown;
        if constexpr (std::is_same_v<T, bool>)
            shown = value ? "true" : "false";
        else if constexpr (std::is_arithmetic_v<T>)
            shown = std::to_string(value);
        else
            shown = '"' + std::string(name(value)) + '"';
        text += std::string(field) + " = " + shown + "\n";
    });
    EXPECT_TRUE(parse_plan(text, "x").same_numerics(without_idle(RoundingPlan{}))) << text;
    for (const char* said : {"argument = \"subtract_then_scale\"", "bwd_argument = \"subtract_then_scale\"",
                             "bwd_exp_base = \"e\"", "rescale_argument = \"subtract_then_scale\""})
        EXPECT_TRUE(parse_plan("base = \"math\"\n[schedule]\n" + std::string(said), "x").same_numerics(plan("math")))
            << said;
}

TEST(PlanToml, FieldsThatABaseHasAndTheScheduleLeavesBehindAreDropped) {
    const RoundingPlan lazy = parse_plan("base = \"fa4\"\nschedule.max_policy = \"exact\"", "x");
    EXPECT_EQ(lazy.schedule.max_threshold, Schedule{}.max_threshold);
    const RoundingPlan from_p = parse_plan("base = \"fa2\"\nschedule.delta_from = \"p_dp\"", "x");
    EXPECT_EQ(from_p.schedule.delta_order, DeltaOrder::sequential);
    for (const TileCase& tile : from_p.tiles) EXPECT_FALSE(tile.delta_threads);
    EXPECT_EQ(from_p[Site::delta_product], Rule{});
    const RoundingPlan short_tiles = parse_plan("base = \"fa4\"\nschedule.block_k = 64", "x");
    EXPECT_EQ(for_head_dim(short_tiles, 192, true).schedule.exp_poly_every, 0)
        << "two fragments: the one skipped, the last";
    EXPECT_EQ(for_head_dim(short_tiles, 256, true).schedule.exp_poly_every, 14) << "none skipped";
    const RoundingPlan scores = parse_plan("base = \"fa2\"\nschedule.scale_at = \"scores\"", "x");
    EXPECT_EQ(scores.schedule.argument, ArgumentForm::subtract_then_scale);
    const RoundingPlan one_tile = parse_plan("base = \"fa4\"\nschedule.block_k = 0", "x");
    EXPECT_EQ(one_tile.schedule.max_policy, MaxPolicy::exact) << "nothing to lag behind";
    const RoundingPlan projected = parse_plan("base = \"fa2\"\nschedule.zero_sum = \"weighted\"", "x");
    for (const Site site : {Site::softcap, Site::ds_softcap, Site::sink_p}) {
        EXPECT_FALSE(plan("fa2")[site].is_exact());
        EXPECT_EQ(projected[site], Rule{});
    }
    const RoundingPlan one_size = parse_plan(
        "base = \"fa2\"\n[schedule]\nblock_q = 16\nblock_k = 48\nbwd_block_q = 16\nbwd_block_k = 48\ndelta_threads = 2",
        "x");
    EXPECT_THAT(one_size.tiles, IsEmpty()) << "its cases are left nothing to replace";
    for (const RoundingPlan* plan : {&lazy, &from_p, &short_tiles, &scores, &one_tile, &projected, &one_size})
        expect_round_trip(*plan);
    RoundingPlan shielded;
    shielded.tiles = {{.head_dim = 64}, {.head_dim = 128, .block_k = 32}, {.head_dim = 256}};
    const RoundingPlan left = without_idle(shielded);
    EXPECT_EQ(left.tiles, (std::vector<TileCase>{shielded.tiles[0], shielded.tiles[1]}));
    expect_round_trip(shielded);
}

TEST(PlanToml, WhatABaseHasAndTheScheduleLeavesBehindIsDropped) {
    const RoundingPlan two = parse_plan("base = \"fa2\"", "two");
    ASSERT_FALSE(two[Site::lse_scale].is_exact());
    const RoundingPlan e = parse_plan("base = \"fa2\"\nschedule.bwd_exp_base = \"e\"", "e");
    EXPECT_TRUE(e[Site::lse_scale].is_exact());
    EXPECT_EQ(parse_plan(to_toml(e), "e"), e);
    for (const RoundingPlan& preset : presets())
        for (const Site site : preset.rounding_sites()) EXPECT_TRUE(reaches(preset, site)) << preset.name << name(site);
}

}  // namespace
}  // namespace faultline
