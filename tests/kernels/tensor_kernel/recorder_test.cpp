// SPDX-License-Identifier: Apache-2.0
// The recorder of the tensor-core forward against the emulation's local errors, cell by cell.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <tuple>

#include <faultline/tensor_kernel/recording.hpp>

#include "heads.hpp"
#include "on_hopper.hpp"

namespace faultline::tensor_kernel {
namespace {

using testing::Head;

/// Of one site in 16 rows and 128 keys, in binary64.
struct Cell {
    double sum = 0, size = 0, squares = 0, max_abs = 0, count = 0;
};

/// The emulation's errors at the elements that the device looks at.
class SampledErrors final : public Instrument {
  public:
    SampledErrors(int d, std::uint32_t seed) : d_(d), seed_(seed) {}
    [[nodiscard]] bool watches(Site site) const override {
        return std::find(recorded_sites.begin(), recorded_sites.end(), site) != recorded_sites.end();
    }
    void at(Site site, const TileAt& where, MatrixView<double> value, MatrixView<const double> exact) override {
        const bool of_scores =
            site == Site::s_accumulate || site == Site::exp_argument || site == Site::exp || site == Site::p_cast;
        const bool product = site == Site::s_accumulate || site == Site::pv_accumulate;
        for (std::ptrdiff_t i = 0; i < value.rows; ++i)
            for (std::ptrdiff_t j = 0; j < value.cols; ++j) {
                if (of_scores && j >= where.visible0 + i) continue;
                const int row = static_cast<int>(where.query0 + i), column = static_cast<int>(j);
                const bool of_s = site == Site::s_accumulate;
                if (product) {
                    if (!(of_s ? sample::has_scores(row / 128, where.k_tile)
                               : sample::has_output(row / 128, where.k_tile)))
                        continue;
                    const std::uint32_t bits = sample::product_bits(seed_, where.head, row / 16);
                    const int first = of_s ? sample::first_score_column(bits, where.k_tile)
                                           : sample::first_output_column(bits, where.k_tile, d_);
                    if (row % 16 / 8 != sample::product_half(bits) || column < first || column >= first + 8) continue;
                } else if (!sample::has_column(column)) {
                    continue;
                }
                Cell& cell = cells[{site, where.head, row / 16, site == Site::o_cast ? 0 : where.k_tile}];
                const double error = value(i, j) - exact(i, j);
                cell.sum += error;
                cell.size += std::abs(error);
                cell.squares += error * error;
                cell.max_abs = std::max(cell.max_abs, std::abs(error));
                ++cell.count;
            }
    }
    std::map<std::tuple<Site, int, int, int>, Cell> cells;

  private:
    int d_;
    std::uint32_t seed_;
};

/// An error that the device takes for one of size e is off by the shadow's own error, and by the rounding of its sums: of at
/// most 512 terms, in fp32 some 24 additions after another. Shadow: products and casts below 2^-24 |error| (their difference
/// is rounded to fp32); exp's 2^-32 of p <= 1; the argument's 2^-44 of |x| < 2^9, and the same of o for its rescale.
double shadow_of(Site site) {
    if (site == Site::exp) return 0x1p-32;
    if (site == Site::exp_argument) return 0x1p-35;
    // A zero operand counts as 2^-127: 128 products with numbers below 2^5.
    if (site == Site::s_accumulate || site == Site::pv_accumulate) return 0x1p-115;
    return 0;
}

void expect_the_emulations_errors(const Head& head, const RoundingPlan& plan, int d) {
    const HeadGroup g = head.group();
    constexpr std::uint32_t seed = 5;
    const RecordedForward recorded = recorded_forward(std::span<const HeadGroup>(&g, 1), plan, 1.0, seed);
    SampledErrors emulated(d, seed);
    const GroupForward cpu = faultline::attention_forward(g, plan, &emulated);
    for (std::size_t h = 0; h < cpu.heads.size(); ++h)
        EXPECT_EQ(recorded.groups.front().heads[h].o, cpu.heads[h].o) << "the recorder must change nothing";

    ForwardCall call;
    call.heads = static_cast<int>(g.q.size());
    call.n_q = static_cast<int>(g.q.front().rows);
    call.n_k = static_cast<int>(g.k.rows);
    const RecordedShape shape(call);
    for (std::size_t site = 0; site < recorded_sites.size(); ++site) {
        int compared = 0;
        for (const auto& [key, cell] : emulated.cells) {
            const auto& [of_site, h, group, k_tile] = key;
            if (of_site != recorded_sites[site]) continue;
            const RecordedCell& device = recorded.cells[shape.index(h, group, k_tile, site)];
            SCOPED_TRACE(::testing::Message()
                         << name(of_site) << " head " << h << " rows " << 16 * group << " keys " << 128 * k_tile);
            ASSERT_EQ(device.count, cell.count);
            const double each = shadow_of(of_site);
            ASSERT_NEAR(device.sum, cell.sum, 0x1p-19 * cell.size + cell.count * each);
            ASSERT_NEAR(device.sum_squared, cell.squares,
                        0x1p-19 * cell.squares + each * (2 * cell.size + cell.count * each));
            ASSERT_NEAR(device.max_abs, cell.max_abs, 0x1p-22 * cell.max_abs + each);
            ++compared;
        }
        EXPECT_GT(compared, 0) << name(recorded_sites[site]);
    }
}

TEST(TensorRecorder, HasTheEmulationsLocalErrors) {
    NEEDS_HOPPER();
    for (const int d : {64, 128})
        for (const bool causal : {true, false}) {
            SCOPED_TRACE(::testing::Message() << "head_dim " << d << (causal ? " causal" : " full"));
            Head head(300, 333, d, 3, 2, 2.0);
            head.causal = causal;
            expect_the_emulations_errors(head, forward_plan(), d);
        }
}

TEST(TensorRecorder, HasThemUnderOtherPlansAndAtLargeLogits) {
    NEEDS_HOPPER();
    RoundingPlan subtract = forward_plan();
    subtract.schedule.argument = ArgumentForm::subtract_then_scale;
    RoundingPlan stable = forward_plan();
    stable.schedule.max_policy = MaxPolicy::stable;
    stable.set(Site::row_max, Rule{fp32});
    expect_the_emulations_errors(Head(256, 256, 128, 4, 1, 8.0), subtract, 128);
    expect_the_emulations_errors(Head(256, 256, 64, 4, 1, 2.0), stable, 64);
}

TEST(TensorRecorder, LooksAtTheFractionAskedFor) {
    NEEDS_HOPPER();
    const Head head(1024, 1024, 64, 9, 8, 1.0);
    const HeadGroup g = head.group();
    const RecordedForward recorded = recorded_forward(std::span<const HeadGroup>(&g, 1), forward_plan(), 0.25, 3);
    int looked_at = 0, expected = 0, tiles = 0;
    const RecordedStatistics& s = recorded.statistics[1];  // exp_argument
    for (int h = 0; h < s.heads; ++h)
        for (int i = 0; i < s.q_tiles; ++i, ++tiles) {
            const bool wanted = sample::tile_bits(3, h, i) < sample::threshold(0.25);
            expected += wanted;
            for (int j = 0; j < s.k_tiles; ++j) {
                const bool counted = s.count[(h * s.q_tiles + i) * s.k_tiles + j] > 0;
                ASSERT_EQ(counted, wanted && j <= i) << h << ", " << i << ", " << j;
                looked_at += counted && j == 0;
            }
        }
    EXPECT_EQ(looked_at, expected);
    EXPECT_NEAR(looked_at, 0.25 * tiles, 4 * std::sqrt(0.25 * 0.75 * tiles));
}

TEST(TensorRecorder, JoinsCellsToTiles) {
    ForwardCall call;
    call.heads = call.kv_heads = 1;
    call.n_q = 40;
    call.n_k = 200;
    call.head_dim = 64;
    call.causal = false;
    const RecordedShape shape(call);
    ASSERT_EQ(shape.cells(), std::size_t{3 * 2 * 7});
    std::vector<RecordedCell> cells(shape.cells());
    cells[shape.index(0, 0, 1, 2)] = {1, 5, 2, 3};
    cells[shape.index(0, 2, 1, 2)] = {2, 4, 1, 1};
    const auto statistics = recorded_statistics(call, ForwardRecorder{}, cells);
    EXPECT_EQ(statistics[2].site, Site::exp);
    EXPECT_EQ(statistics[2].count, (std::vector<double>{0, 4}));
    EXPECT_EQ(statistics[2].signed_mean, (std::vector<double>{0, 0.75}));
    EXPECT_EQ(statistics[2].rms, (std::vector<double>{0, 1.5}));
    EXPECT_EQ(statistics[2].max_abs, (std::vector<double>{0, 2}));
}

TEST(TensorRecorder, OnlySomeKernelsHaveOne) {
    EXPECT_TRUE(has_recorder(supported(forward_plan(), 64, true).kernel));
    EXPECT_FALSE(has_recorder(supported(forward_plan(Element::fp16), 64, true).kernel));
    RoundingPlan unfused = forward_plan();
    unfused.schedule.argument = ArgumentForm::unfused;
    EXPECT_FALSE(has_recorder(supported(unfused, 64, true).kernel));
}

}  // namespace
}  // namespace faultline::tensor_kernel
