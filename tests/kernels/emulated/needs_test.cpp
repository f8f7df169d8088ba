// SPDX-License-Identifier: Apache-2.0
// What a call is said to need, against what it takes: a back end that counts. And numbers of large calls, worked out by hand.
#include <faultline/emulated/needs.hpp>

#include <algorithm>
#include <map>

#include <gtest/gtest.h>

#include <faultline/corrections/correction.hpp>
#include <faultline/cpu/recorder.hpp>
#include <faultline/emulated/host.hpp>
#include <faultline/injectors/attention_injector.hpp>

#include "plans.hpp"

namespace faultline {
namespace {

using emulated::Limits;
using emulated::Need;
using emulated::NeedOf;
using emulated::Passes;
using testing::drawn;
using testing::Head;
using testing::with_extras;
using testing::with_small_tiles;

/// The host's, with a device's way of taking memory: pieces of 256 bytes, tiles in waves of teams, tapes. Its teams do nothing,
/// and leave empty tapes.
class Counting : public emulated::HostBackend {
  public:
    Counting(const Limits& limits, std::size_t share)
        : HostBackend(limits.wanted_teams, limits.least_rows, share / sizeof(double)), limits_(limits), share_(share) {}
    [[nodiscard]] Limits limits() const { return limits_; }
    double* zeros(std::size_t n) {
        take(n * sizeof(double));
        return HostBackend::zeros(n);
    }
    double* tape(std::size_t n) {
        tapes += n * sizeof(double);
        return HostBackend::zeros(n);
    }
    const double* upload(const double* from, std::size_t n) {
        take(n * sizeof(double));
        return HostBackend::upload(from, n);
    }
    template <class T>
    const T* upload_values(const T* values, std::size_t n) {
        take(n * sizeof(T));
        return values;
    }
    template <class Job>
    void run(const Job&, std::ptrdiff_t teams, std::ptrdiff_t doubles) {
        if (doubles <= limits_.fast_doubles) return;
        const std::size_t each = static_cast<std::size_t>(doubles) * sizeof(double);
        tiles =
            std::max(tiles, each * std::min(static_cast<std::size_t>(teams), std::max(share_ / each, std::size_t{1})));
    }
    std::size_t operands = 0, tiles = 0, tapes = 0;

  private:
    void take(std::size_t bytes) { operands += (bytes + 255) / 256 * 256; }
    Limits limits_;
    std::size_t share_;
};

struct Case {
    Head head;
    RoundingPlan plan;
    std::string what;
};

void expect_exact(const Case& c, Instrument* instrument, const Limits& limits, std::size_t share) {
    const HeadGroup group = c.head.group();
    const std::span one(&group, 1);
    const auto expect = [&](const Counting& used, Passes passes, const char* pass) {
        SCOPED_TRACE(c.what + ", " + pass);
        const Need need = NeedOf(one, c.plan, limits, instrument).of(passes);
        EXPECT_EQ(need.operands, used.operands);
        EXPECT_EQ(need.tape_bytes(share), used.tapes);
        EXPECT_EQ(need.tile_bytes(share), used.tiles);
    };
    Counting forward(limits, share), backward(limits, share);
    const std::vector<GroupForward> left = emulated::forward(forward, one, c.plan, instrument);
    expect(forward, Passes::forward, "forward");
    (void)emulated::backward(backward, one, left, c.plan, instrument);
    expect(backward, Passes::backward, "backward");
    if (instrument != nullptr) return;
    Counting both(limits, share);
    (void)emulated::attention(both, one, c.plan);
    expect(both, Passes::both, "both");
}

void expect_exact(const Case& c) {
    const HeadGroup group = c.head.group();
    for (const Limits& limits : {Limits{8, 3, 700}, Limits{1, 1, 0}})
        for (const std::size_t share : {std::size_t{1}, std::size_t{20000}, std::size_t{1} << 30}) {
            expect_exact(c, nullptr, limits, share);
            TileRecorder recorder(group, c.plan);
            expect_exact(c, &recorder, limits, share);
        }
    AttentionInjector fault(parse_fault("delta:multiplicative:0.1"), c.plan, 4);
    expect_exact(c, &fault, {8, 3, 700}, 20000);
}

TEST(Needs, OfEveryPresetToTheByte) {
    for (const RoundingPlan& plan : presets()) {
        const RoundingPlan small = with_small_tiles(plan);
        expect_exact({Head(21, 27, 16, 1, 3, 3.0), small, plan.name});
        for (const unsigned kind : {3u, 7u})
            expect_exact({with_extras(Head(21, 27, 16, 2, 1, 3.0), for_head_dim(small, 16), kind), small,
                          plan.name + " with extras " + std::to_string(kind)});
    }
}

TEST(Needs, OfCorrectionsToTheByte) {
    for (const char* const text : {"key_centering", "zero_sum_weighted", "zero_sum_largest", "delta_p_dp_normalized"})
        expect_exact({Head(21, 21, 16, 3), with_small_tiles(apply(parse_correction(text), plan("fa2"))), text});
}

TEST(Needs, OfPlansDrawnAtRandomToTheByte) {
    int tried = 0;
    for (std::uint64_t seed = 1; seed <= 200; ++seed) {
        const RoundingPlan plan = drawn(seed);
        if (find_problem(for_head_dim(plan, 16))) continue;
        const Head head(13, 19, 16, seed, seed % 3 == 0 ? 2 : 1, 2.0);
        expect_exact({with_extras(head, for_head_dim(plan, 16), static_cast<unsigned>(seed % 8)), plan,
                      "plan of seed " + std::to_string(seed)});
        ++tried;
    }
    EXPECT_GT(tried, 20);
}

/// Rows and keys that see nothing, and a bias.
TEST(Needs, OfOddShapesToTheByte) {
    Head head(5, 40, 8, 4, 2);
    head.bias = {testing::random_matrix(5, 40, 1.0, 71), testing::random_matrix(5, 40, 1.0, 72)};
    expect_exact({head, with_small_tiles(plan("fa2")), "a bias"});
    expect_exact({Head(40, 5, 8, 5), with_small_tiles(plan("math")), "few keys"});
}

HeadGroup shape(std::ptrdiff_t n, std::ptrdiff_t d) {
    HeadGroup group;
    const MatrixView<const double> unread(nullptr, n, d);
    group.q = {unread};
    group.dout = {unread};
    group.k = group.v = unread;
    group.scale = 0.125;
    return group;
}

/// math has one tile of all n^2 scores. Every value of a tape stands there twice, with its exact one. For each site of the forward
/// that is a score tile there is one tile, of those of a row or an output 2 + 1 + 3.
TEST(Needs, TapeOfALongSequence) {
    constexpr std::ptrdiff_t n = 4096, d = 128;
    const HeadGroup group = shape(n, d);
    const RoundingPlan math = for_head_dim(plan("math"), d, true);
    struct All final : Instrument {
        [[nodiscard]] bool watches(Site) const override { return true; }
        void at(Site, const TileAt&, MatrixView<double>, MatrixView<const double>) override {}
    } all;
    const Limits limits{264, 16, 10000};
    std::size_t scores = 0, rows = 0, outputs = 0, columns = 0;
    for (const SiteInfo& site : sites()) {
        if (site.pass != Pass::forward) continue;
        (site.shape == SiteShape::score_tile   ? scores
         : site.shape == SiteShape::row        ? rows
         : site.shape == SiteShape::query_tile ? outputs
                                               : columns) += 1;
    }
    const std::size_t fields = 11, square = std::size_t{n} * n, tile = std::size_t{n} * d;
    const std::size_t times = 2 + 4;  // one tile of keys, twice, and three times and a split at the end
    const std::size_t doubles = 1 + scores * (fields + 2 * square) + times * rows * (fields + 2 * n) +
                                times * (outputs + columns) * (fields + 2 * tile);
    const Need need = NeedOf(std::span(&group, 1), math, limits, &all).of(Passes::forward);
    ASSERT_EQ(need.launches.size(), 1u);
    EXPECT_EQ(need.launches.front().teams, 1);
    EXPECT_EQ(need.tape_bytes(0), doubles * sizeof(double));
    EXPECT_GT(need.tape_bytes(0) >> 20, 2000u);  // GiB, where a run without an instrument takes some hundred MiB
    const Need bare = NeedOf(std::span(&group, 1), math, limits, nullptr).of(Passes::forward);
    EXPECT_EQ(bare.tape_bytes(SIZE_MAX), 0u);
    EXPECT_LT((bare.operands + bare.tile_bytes(0)) >> 20, 400u);
}

}  // namespace
}  // namespace faultline
