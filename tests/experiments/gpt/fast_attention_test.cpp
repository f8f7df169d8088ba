// SPDX-License-Identifier: Apache-2.0
// Fast attention is the emulated kernel under fast_plan(): in double the exact function, in float to float rounding, in
// bf16 but for the few casts that a float's last bit tips over.
#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include <faultline/cpu/attention.hpp>
#include <faultline/format/format.hpp>
#include <faultline/gpt/fast_attention.hpp>
#include <faultline/injectors/attention_injector.hpp>
#include <faultline/random/random_stream.hpp>

namespace faultline::gpt {
namespace {

template <class T>
struct Head {
    std::ptrdiff_t n, d;
    std::vector<T> q, k, v, dout, o, lse, dq, dk, dv;
    HeadStatistics statistics;

    Head(std::ptrdiff_t length, std::ptrdiff_t head_dim, bool low, double size) : n(length), d(head_dim) {
        const auto count = static_cast<std::size_t>(n * d);
        const auto fill = [&](std::vector<T>& x, std::uint64_t seed, double scale) {
            const RandomStream stream(seed);
            x.resize(count);
            for (std::size_t i = 0; i < count; ++i) {
                const double value = scale * stream.normal(i);
                x[i] = static_cast<T>(low ? faultline::round(value, bf16)
                                          : static_cast<double>(static_cast<float>(value)));
            }
        };
        fill(q, 1, size);
        fill(k, 2, 1);
        fill(v, 3, 1);
        fill(dout, 4, 1);
        for (auto* x : {&o, &dq, &dk, &dv}) x->resize(count);
        lse.resize(static_cast<std::size_t>(n));
    }
    MatrixView<const T> in(const std::vector<T>& x) const { return {x.data(), n, d}; }
    MatrixView<T> out(std::vector<T>& x) const { return {x.data(), n, d}; }
    void run(const FastOptions& options, Instrument* instrument = nullptr) {
        FastScratch<T> scratch;
        fast_forward(in(q), in(k), in(v), options, out(o), std::span(lse), statistics, scratch, instrument);
        fast_backward(in(q), in(k), in(v), in(o), std::span<const T>(lse), in(dout), options, out(dq), out(dk), out(dv),
                      statistics, scratch, instrument);
    }
};

struct Emulated {
    GroupForward forward;
    GroupBackward backward;
};

template <class T>
Emulated emulate(const Head<T>& head, const RoundingPlan& plan, double scale, Instrument* instrument = nullptr) {
    const auto matrix = [&](const std::vector<T>& x) {
        Matrix m(head.n, head.d);
        for (std::size_t i = 0; i < x.size(); ++i) m.values[i] = static_cast<double>(x[i]);
        return m;
    };
    const Matrix q = matrix(head.q), k = matrix(head.k), v = matrix(head.v), dout = matrix(head.dout);
    HeadGroup group;
    group.q = {q.view()};
    group.dout = {dout.view()};
    group.k = k.view();
    group.v = v.view();
    group.scale = scale;
    Emulated result;
    result.forward = attention_forward(group, plan, instrument);
    result.backward = attention_backward(group, result.forward, plan, instrument);
    return result;
}

template <class T>
double relative(const std::vector<T>& value, const std::vector<double>& wanted) {
    double error = 0, size = 0;
    for (std::size_t i = 0; i < wanted.size(); ++i) {
        error += std::pow(static_cast<double>(value[i]) - wanted[i], 2);
        size += wanted[i] * wanted[i];
    }
    return size == 0 ? std::sqrt(error) : std::sqrt(error / size);  // one key: dq is 0
}

template <class T>
void expect_close(const Head<T>& head, const Emulated& emulated, double tolerance) {
    EXPECT_LE(relative(head.o, emulated.forward.heads[0].o.values), tolerance);
    EXPECT_LE(relative(head.lse, emulated.forward.heads[0].lse), tolerance);
    EXPECT_LE(relative(head.dq, emulated.backward.dq[0].values), tolerance);
    EXPECT_LE(relative(head.dk, emulated.backward.dk.values), tolerance);
    EXPECT_LE(relative(head.dv, emulated.backward.dv.values), tolerance);
}

constexpr double scale = 0.25;

TEST(FastAttention, DoubleIsTheExactFunction) {
    for (const std::ptrdiff_t n : {1, 5, 64, 65, 150}) {
        Head<double> head(n, 16, false, 2);
        head.run({.scale = scale});
        // 150 terms of 2^-53 each, with room for the condition of softmax at logits near 10.
        expect_close(head, emulate(head, RoundingPlan{}, scale), 150 * 16 * 0x1p-53);
    }
}

TEST(FastAttention, FloatIsThePlanToFloatRounding) {
    for (const std::ptrdiff_t n : {2, 64, 130}) {
        Head<float> head(n, 16, false, 2);
        head.run({.scale = scale});
        // exp of a logit of size up to 16 carries the logit's rounding: 16 units, and 2 for the operations after it.
        expect_close(head, emulate(head, fast_plan(false), scale), 18 * 0x1p-24);
    }
}

TEST(FastAttention, Bf16IsThePlanButForTiedCasts) {
    Head<float> head(130, 16, true, 2);
    head.run({.scale = scale, .bf16 = true});
    const Emulated emulated = emulate(head, fast_plan(true), scale);
    // A float that is off by some 18 units of 2^-24 falls to the other side of a bf16 tie with probability 18 2^-16
    // or so; it is then off by 2^-8. Relative to the whole: sqrt(18 2^-16) 2^-8.
    const double tolerance = 4 * std::sqrt(18 * 0x1p-16) * 0x1p-8;
    expect_close(head, emulated, tolerance);
    std::size_t same = 0;
    for (std::size_t i = 0; i < head.o.size(); ++i)
        same += static_cast<double>(head.o[i]) == emulated.forward.heads[0].o.values[i] ? 1 : 0;
    EXPECT_GT(same, head.o.size() * 99 / 100);
}

// An instrument sees the sites of both kernels, in tiles of the same shape, and what it changes has the same effect.
class Bias final : public Instrument {
  public:
    explicit Bias(Site site) : site_(site) {}
    std::map<std::ptrdiff_t, std::ptrdiff_t> rows;  ///< by first row
    [[nodiscard]] bool watches(Site site) const override { return site == site_; }
    void at(Site, const TileAt& where, MatrixView<double> value, MatrixView<const double> exact) override {
        rows[where.query0] += value.rows;
        for (std::ptrdiff_t i = 0; i < value.rows; ++i)
            for (std::ptrdiff_t j = 0; j < value.cols; ++j) {
                EXPECT_NEAR(value(i, j), exact(i, j), std::fabs(exact(i, j)) * 0x1p-8 + 1e-5);
                value(i, j) *= 1.25;
            }
    }

  private:
    Site site_;
};

TEST(FastAttention, AnInstrumentHasTheSameEffectInBothKernels) {
    for (const Site site : fast_sites()) {
        Head<float> head(130, 16, false, 1);
        Bias fast(site), slow(site);
        head.run({.scale = scale}, &fast);
        const Emulated emulated = emulate(head, fast_plan(false), scale, &slow);
        SCOPED_TRACE(std::string(name(site)));
        EXPECT_FALSE(fast.rows.empty());
        // The emulated row sum and accumulators reach their value in one key tile, as the fast ones do. delta and lse are
        // shown by query tile or whole, hence only the total is compared.
        std::ptrdiff_t fast_rows = 0, slow_rows = 0;
        for (const auto& [first, count] : fast.rows) fast_rows += count;
        for (const auto& [first, count] : slow.rows) slow_rows += count;
        EXPECT_EQ(fast_rows, slow_rows);
        expect_close(head, emulated, 32 * 0x1p-24);
    }
}

// A fault makes nothing visible that the mask hides: an additive one touches as many elements as rows see keys, and is the
// same fault in the emulated kernel.
TEST(FastAttention, AFaultLeavesMaskedElementsAlone) {
    constexpr std::ptrdiff_t n = 130;
    for (const Site site : fast_sites()) {
        if (info(site).shape != SiteShape::score_tile) continue;
        SCOPED_TRACE(std::string(name(site)));
        const Fault fault{.site = site, .law = Law::fixed, .magnitude = 0.3, .hold = Hold::nearest};
        Head<float> head(n, 16, false, 1);
        AttentionInjector fast(fault, fast_plan(false), 1), slow(fault, fast_plan(false), 1);
        head.run({.scale = scale}, &fast);
        EXPECT_EQ(fast.total().count, n * (n + 1) / 2.0);
        const Emulated emulated = emulate(head, fast_plan(false), scale, &slow);
        EXPECT_EQ(slow.total().count, fast.total().count);
        // Tiles are alike, so amplitudes are, to the rounding of float in what they are made of.
        expect_close(head, emulated, 32 * 0x1p-24);
    }
}

TEST(FastAttention, EveryOtherSiteIsRefusedByName) {
    EXPECT_TRUE(is_fast_site(Site::delta));
    EXPECT_FALSE(is_fast_site(Site::o_rescale));
    EXPECT_FALSE(is_fast_site(Site::s_cast));
}

TEST(FastAttention, StatisticsOfAUniformRow) {
    Head<double> head(3, 4, false, 0);  // q = 0: every score is 0, every p is 1/(i+1)
    head.statistics.detailed = true;
    head.run({.scale = scale});
    EXPECT_EQ(head.statistics.max_logit, 0);
    EXPECT_EQ(head.statistics.rows, 2);
    EXPECT_EQ(head.statistics.saturated, 0);
    EXPECT_NEAR(head.statistics.entropy, std::log(2.0) + std::log(3.0), 1e-15);
    EXPECT_NEAR(head.statistics.zero_sum, 0, 1e-15);
    EXPECT_GT(head.statistics.zero_sum_abs, 0.01);
}

TEST(FastAttention, SoftcapBoundsTheScores) {
    Head<double> head(20, 8, false, 50);
    head.run({.scale = scale, .softcap = 3});
    EXPECT_LE(head.statistics.max_logit, 3);
    EXPECT_GT(head.statistics.max_logit, 2.9);
}

}  // namespace
}  // namespace faultline::gpt
