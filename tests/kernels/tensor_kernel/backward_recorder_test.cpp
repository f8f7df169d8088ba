// SPDX-License-Identifier: Apache-2.0
// The tensor-core backward's recorder against the emulation, whose tiles have the same bits: the local errors of the same
// sample, summed up in binary64 from what kernels/cpu shows an instrument.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <tuple>

#include <faultline/tensor_kernel/backward_recording.hpp>

#include "heads.hpp"
#include "on_hopper.hpp"

namespace faultline::tensor_kernel {
namespace {

using testing::Head;

/// Errors of the sample by site, query head, query tile and key tile.
class SampledErrors final : public Instrument {
  public:
    struct Sums {
        double sum = 0, sum_abs = 0, sum_squared = 0, max_abs = 0, count = 0;
    };
    SampledErrors(const HeadGroup& group, std::uint32_t seed) : group_(group), seed_(seed) {}

    [[nodiscard]] bool watches(Site site) const override {
        return std::ranges::find(recorded_backward_sites, site) != recorded_backward_sites.end();
    }
    void at(Site site, const TileAt& where, MatrixView<double> value, MatrixView<const double> exact) override {
        Sums& sums = tiles[{site, where.head, where.q_tile, where.k_tile}];
        for (std::ptrdiff_t i = 0; i < value.rows; ++i)
            for (std::ptrdiff_t j = 0; j < value.cols; ++j) {
                const std::ptrdiff_t query = where.query0 + i, key = where.key0 + j;
                if (!is_visible(group_, static_cast<std::size_t>(where.head), query, key) ||
                    !is_sampled(site, where.head, query, key))
                    continue;
                const double e = value(i, j) - exact(i, j);
                sums.sum += e;
                sums.sum_abs += std::abs(e);
                sums.sum_squared += e * e;
                sums.max_abs = std::max(sums.max_abs, std::abs(e));
                sums.count += 1;
            }
    }
    std::map<std::tuple<Site, int, int, int>, Sums> tiles;

  private:
    [[nodiscard]] bool is_sampled(Site site, int head, std::ptrdiff_t query, std::ptrdiff_t key) const {
        if (site != Site::bwd_s_accumulate && site != Site::dp_accumulate) return sample::has_query(query);
        const int first = sample::first_product_query(static_cast<int>(key / 128));
        const bool its_turn = sample::has_score_product(static_cast<int>(key / 16), static_cast<int>(query / 64)) ==
                              (site == Site::bwd_s_accumulate);
        return its_turn && key % 16 == sample::product_key(seed_, head, static_cast<int>(key / 16)) &&
               query % 64 >= first && query % 64 < first + 8;
    }
    HeadGroup group_;
    std::uint32_t seed_;
};

/// The device's sums are of floats, each an error rounded once (2^-24 of it), added in fp32 (at most 2^-24 of the sum of their
/// sizes for each of the additions that a sum passes through: 4 in a thread, 5 of the butterfly; 16 warps are joined in
/// binary64), with shadows that err by 2^-38 of the sizes of a product's terms, 2^-36 of p, and 2^-44 of the terms of an argument or of
/// p (dp - delta). `terms`, head size times the largest factors, is more than four times those sizes (the mean of |x y| of two normal
/// numbers is 2/pi, and their largest are beyond 2).
void expect_same_statistics(const std::vector<RecordedStatistics>& device, const SampledErrors& cpu, double terms) {
    for (const RecordedStatistics& s : device) {
        std::size_t at = 0;
        for (int head = 0; head < s.heads; ++head)
            for (int q = 0; q < s.q_tiles; ++q)
                for (int k = 0; k < s.k_tiles; ++k, ++at) {
                    SCOPED_TRACE(::testing::Message()
                                 << name(s.site) << ", head " << head << ", tile " << q << ", " << k);
                    const auto found = cpu.tiles.find({s.site, head, q, k});
                    const SampledErrors::Sums sums = found == cpu.tiles.end() ? SampledErrors::Sums{} : found->second;
                    ASSERT_EQ(s.count[at], sums.count);
                    if (sums.count == 0) continue;
                    const double shadow = s.site == Site::bwd_exp ? 0x1p-36 : 0x1p-40 * terms, rounding = 12 * 0x1p-24;
                    EXPECT_NEAR(s.signed_mean[at], sums.sum / sums.count,
                                shadow + rounding * sums.sum_abs / sums.count);
                    const double rms = std::sqrt(sums.sum_squared / sums.count);
                    EXPECT_NEAR(s.rms[at], rms, shadow + rounding * rms);
                    EXPECT_NEAR(s.max_abs[at], sums.max_abs, shadow + rounding * sums.max_abs);
                }
    }
}

double largest(const Matrix& m) {
    double x = 0;
    for (const double v : m.values) x = std::max(x, std::abs(v));
    return x;
}

TEST(TensorBackwardRecorder, SeesTheEmulationsErrors) {
    NEEDS_HOPPER();
    for (const int d : {64, 128})
        for (const int query_heads : {1, 2})
            for (const bool causal : {true, false}) {
                SCOPED_TRACE(::testing::Message()
                             << "head_dim " << d << ", " << query_heads << " query heads, causal " << causal);
                constexpr std::uint32_t seed = 7;
                Head head(300, 333, d, 9, query_heads, 2.0);
                head.causal = causal;
                const HeadGroup g = head.group();
                const RoundingPlan plan = backward_plan(d);
                const GroupForward forward = faultline::attention_forward(g, plan);
                SampledErrors cpu(g, seed);
                (void)faultline::attention_backward(g, forward, plan, &cpu);
                const RecordedBackward device = recorded_backward({&g, 1}, {&forward, 1}, plan, 1, seed);
                const double terms =
                    d * std::max(largest(head.q[0]) * largest(head.k), largest(head.dout[0]) * largest(head.v));
                expect_same_statistics(device.statistics, cpu, terms);
            }
}

TEST(TensorBackwardRecorder, JoinsCellsToTiles) {
    BackwardCall call;
    call.heads = 2;
    call.kv_heads = 1;
    call.n_q = 200;
    call.n_k = 300;
    for (const int d : {64, 128}) {
        call.head_dim = d;
        const RecordedBackwardShape shape(call);
        ASSERT_EQ(shape.cells(), 2u * 4 * 19 * backward_site_cells);
        std::vector<RecordedCell> cells(shape.cells(), RecordedCell{1, 4, 3, 2});
        cells[shape.index(1, 3, 18, 5)] = {5, 9, 7, 4};
        const RecordedStatistics s = recorded_statistics(call, {1, 1, nullptr}, cells)[5];
        EXPECT_EQ(s.site, Site::ds);
        EXPECT_EQ(s.q_tiles, d == 64 ? 2 : 4);
        EXPECT_EQ(s.k_tiles, 3);
        ASSERT_EQ(s.count.size(), 2u * static_cast<std::size_t>(s.q_tiles) * 3);
        const double steps = d == 64 ? 2 : 1;
        EXPECT_EQ(s.count.front(), steps * 8 * 2);
        EXPECT_EQ(s.signed_mean.front(), 0.5);
        EXPECT_EQ(s.rms.front(), std::sqrt(2.0));
        // The last tile: 3 groups of 16 keys, one cell of which is other than the rest.
        EXPECT_EQ(s.count.back(), (steps * 3 - 1) * 2 + 4);
        EXPECT_EQ(s.signed_mean.back(), ((steps * 3 - 1) + 5) / s.count.back());
        EXPECT_EQ(s.rms.back(), std::sqrt(((steps * 3 - 1) * 4 + 9) / s.count.back()));
        EXPECT_EQ(s.max_abs.back(), 7);
    }
}

TEST(TensorBackwardRecorder, ChangesNothing) {
    NEEDS_HOPPER();
    for (const int d : {64, 128})
        for (const ZeroSum kind : {ZeroSum::none, ZeroSum::weighted}) {
            const Head head(260, 260, d, 3);
            const HeadGroup g = head.group();
            RoundingPlan plan = backward_plan(d);
            plan.schedule.zero_sum = kind;
            const GroupForward forward = faultline::attention_forward(g, plan);
            const GroupBackward plain = attention_backward({&g, 1}, {&forward, 1}, plan).front();
            for (const double fraction : {1.0, 0.3}) {
                const GroupBackward recorded = recorded_backward({&g, 1}, {&forward, 1}, plan, fraction).groups.front();
                EXPECT_EQ(recorded.dq[0].values, plain.dq[0].values);
                EXPECT_EQ(recorded.dk.values, plain.dk.values);
                EXPECT_EQ(recorded.dv.values, plain.dv.values);
            }
        }
}

/// A fraction of the key tiles is looked at, and those as they are in a run that looks at all.
TEST(TensorBackwardRecorder, SamplesKeyTiles) {
    NEEDS_HOPPER();
    const Head head(1500, 1500, 64, 3);
    const HeadGroup g = head.group();
    const RoundingPlan plan = backward_plan(64);
    const GroupForward forward = faultline::attention_forward(g, plan);
    const RecordedBackward all = recorded_backward({&g, 1}, {&forward, 1}, plan, 1);
    const RecordedBackward some = recorded_backward({&g, 1}, {&forward, 1}, plan, 0.5);
    for (std::size_t site = 0; site < all.statistics.size(); ++site) {
        const RecordedStatistics &a = all.statistics[site], &b = some.statistics[site];
        int looked_at = 0;
        for (std::size_t i = 0; i < a.count.size(); ++i) {
            const bool expected = sample::key_tile_bits(1, 0, static_cast<int>(i) % a.k_tiles) < sample::threshold(0.5);
            EXPECT_EQ(b.count[i], expected ? a.count[i] : 0);
            if (b.count[i] == 0) continue;
            ++looked_at;
            EXPECT_EQ(a.rms[i], b.rms[i]);
            EXPECT_EQ(a.signed_mean[i], b.signed_mean[i]);
        }
        EXPECT_GT(looked_at, 0);
        EXPECT_LT(looked_at, 78);
    }
}

}  // namespace
}  // namespace faultline::tensor_kernel
