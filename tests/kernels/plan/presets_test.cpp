// SPDX-License-Identifier: Apache-2.0
// The presets as they are compiled in: complete, sourced, found by name, with the tiles of the kernels' launch templates.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <faultline/base/error.hpp>
#include <faultline/plan/difference.hpp>
#include <faultline/plan/plan_toml.hpp>
#include <faultline/plan/presets.hpp>

#include "paths.hpp"

namespace faultline {
namespace {

namespace fs = std::filesystem;
using testing::ElementsAre;
using testing::IsSupersetOf;
using testing::UnorderedElementsAreArray;

const fs::path folder = test::source_dir() / "kernels/plan/presets";

std::string text_of(const fs::path& file) {
    std::ifstream in(file, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
}

TEST(Presets, AreTheFilesOfTheFolder) {
    std::vector<std::string> files;
    for (const auto& entry : fs::directory_iterator(folder)) files.push_back(entry.path().stem().string());
    EXPECT_THAT(preset_names(), UnorderedElementsAreArray(files))
        << "a preset's name stands in kernels/plan/CMakeLists.txt";
    EXPECT_THAT(preset_names(), IsSupersetOf({"exact", "standard-bf16", "fa1", "fa2", "fa2-unfused",
                                              "fa2-unfused-splitkv", "fa3", "repo-2510.04212"}));
    EXPECT_EQ(preset_names().front(), "exact");
    for (const std::string_view name : preset_names())
        EXPECT_EQ(preset_toml(name), text_of(folder / (std::string(name) + ".toml"))) << name;
}

TEST(Presets, SayWhatTheyAreAndWhereItStands) {
    for (const RoundingPlan& preset : presets()) {
        EXPECT_FALSE(preset.description.empty()) << preset.name;
        EXPECT_FALSE(preset.source.empty()) << preset.name;
        EXPECT_EQ(problem_with(preset), "") << preset.name;
        EXPECT_TRUE(std::is_sorted(preset.tiles.begin(), preset.tiles.end(),
                                   [](const TileCase& a, const TileCase& b) { return a.head_dim < b.head_dim; }))
            << preset.name << ": the first case that fits decides, so smaller heads stand first";
    }
    EXPECT_TRUE(presets()[0].same_numerics(RoundingPlan{}));
}

TEST(Presets, AreFoundByNameAndByFile) {
    for (const std::string_view name : preset_names()) {
        EXPECT_EQ(plan(name).name, name);
        const RoundingPlan read = plan((folder / (std::string(name) + ".toml")).string());
        EXPECT_TRUE(read.same_numerics(plan(name))) << name;
        EXPECT_EQ(read.source, plan(name).source);
    }
    try {
        (void)plan("fa22");
        FAIL();
    } catch (const RequestError& error) {
        const std::string sentence = error.what();
        EXPECT_TRUE(sentence.starts_with("plan \"fa22\": no such preset and not a file ending in .toml: expected "))
            << sentence;
        EXPECT_TRUE(sentence.ends_with(" (did you mean \"fa2\"?)")) << sentence;
    }
    EXPECT_THROW((void)preset_toml("nothing"), RequestError);
}

// flash_fwd_launch_template.h and flash_bwd_launch_template.h of flash-attention 0251105a, compute capability 9.0.
TEST(Presets, FlashAttention2Tiles) {
    const auto tiles = [](std::string_view name, int head_dim) {
        const Schedule s = for_head_dim(plan(name), head_dim).schedule;
        return std::array{s.block_q, s.block_k, s.bwd_block_q, s.bwd_block_k};
    };
    for (const char* name : {"fa2", "fa2-unfused"}) {
        EXPECT_THAT(tiles(name, 64), ElementsAre(128, 128, 128, 128));
        EXPECT_THAT(tiles(name, 80), ElementsAre(128, 64, 64, 128));
        EXPECT_THAT(tiles(name, 128), ElementsAre(128, 64, 64, 128));
        EXPECT_THAT(tiles(name, 256), ElementsAre(64, 64, 64, 64));
    }
    EXPECT_THAT(tiles("fa2-unfused-splitkv", 64), ElementsAre(64, 256, 128, 128));
    EXPECT_THAT(tiles("fa2-unfused-splitkv", 128), ElementsAre(64, 128, 64, 128));
}

// The rule of the source as a function of head size (a kernel pads it to 64, 96, 128, 192 or 256), causal flag and window:
// hopper/tile_size.h:13-40 and flash_bwd_launch_template.h:311-381 of flash-attention 0251105a; flash_api.cpp:148-149, local
// is a window and then not causal.
TEST(Presets, FlashAttention3TilesByHeadSizeAndMask) {
    const auto rule = [](int d, bool causal, bool window) -> std::array<int, 4> {
        const bool local = window, triangle = causal && !window;
        if (d <= 64) return {192, triangle || local ? 128 : 192, 128, 128};
        if (d <= 96) return {192, local ? 128 : 144, 64, 128};
        if (d <= 128) return {128, triangle || local ? 128 : 176, triangle || local ? 64 : 80, 128};
        if (d <= 192) return {128, local ? 96 : 112, 64, 96};
        return {128, local ? 64 : 80, 64, 80};
    };
    const auto fp8_block_k = [](int d, bool window) {
        return d <= 64 ? 160 : d <= 96 ? 128 : d <= 128 ? 224 : d <= 192 ? 160 : window ? 64 : 128;
    };
    for (const int d : {32, 64, 72, 96, 112, 128, 160, 192, 224, 256})
        for (const bool causal : {true, false})
            for (const bool window : {true, false}) {
                const Schedule s = for_head_dim(plan("fa3"), d, causal, window).schedule;
                EXPECT_EQ((std::array{s.block_q, s.block_k, s.bwd_block_q, s.bwd_block_k}), rule(d, causal, window))
                    << d << causal << window;
                EXPECT_EQ(for_head_dim(plan("fa3-fp8"), d, causal, window).schedule.block_k, fp8_block_k(d, window))
                    << d << window;
            }
}

// flash_attn/cute of flash-attention 0251105a, the table that fa4.toml cites: every, count, skip by head size and mask.
TEST(Presets, FlashAttention4Polynomial) {
    const auto polynomial = [](int head_dim, bool causal, bool window = false) {
        const Schedule s = for_head_dim(plan("fa4"), head_dim, causal, window).schedule;
        EXPECT_EQ(s.block_k, 128) << head_dim;
        return std::array{s.exp_poly_every, s.exp_poly_count, s.exp_poly_skip};
    };
    for (const int head_dim : {64, 96, 112})
        for (const bool causal : {true, false}) EXPECT_THAT(polynomial(head_dim, causal), ElementsAre(16, 4, 1));
    for (const int head_dim : {120, 128}) {
        EXPECT_THAT(polynomial(head_dim, true), ElementsAre(16, 4, 1));
        EXPECT_THAT(polynomial(head_dim, false), ElementsAre(10, 4, 1));
    }
    EXPECT_THAT(polynomial(160, true), ElementsAre(0, 4, 1));
    EXPECT_THAT(polynomial(192, true), ElementsAre(32, 4, 1));
    EXPECT_THAT(polynomial(192, false), ElementsAre(16, 4, 0));
    for (const bool causal : {true, false}) EXPECT_THAT(polynomial(256, causal), ElementsAre(14, 6, 0));
    // A window: no key of the table, whatever the causal flag beside it.
    for (const bool causal : {true, false}) {
        for (const int head_dim : {64, 112, 120, 128})
            EXPECT_THAT(polynomial(head_dim, causal, true), ElementsAre(16, 4, 1)) << head_dim;
        EXPECT_EQ(polynomial(192, causal, true)[0], 0);
    }
    // A plan of one's own sets one rule for all heads.
    EXPECT_EQ(for_head_dim(parse_plan("base = \"fa4\"\nschedule.exp_poly_every = 8", "x"), 256).schedule.exp_poly_every,
              8);
}

std::set<std::string> changed_fields(std::string_view a, std::string_view b) {
    std::set<std::string> fields;
    for (const Difference& d : differences(plan(a), plan(b))) fields.insert(d.field);
    return fields;
}

TEST(Presets, TheTwoBuildsOfFlashAttention2DifferInTheArgumentAlone) {
    EXPECT_THAT(changed_fields("fa2", "fa2-unfused"), ElementsAre("schedule.argument", "schedule.bwd_argument"));
    EXPECT_THAT(changed_fields("fa2-unfused", "fa2-unfused-splitkv"),
                ElementsAre("schedule.block_k", "schedule.block_q", "schedule.key_splits", "sites.merge.format",
                            "sites.partial_o_cast.format", "tiles"));
}

}  // namespace
}  // namespace faultline
