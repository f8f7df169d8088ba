// SPDX-License-Identifier: Apache-2.0
// The tensor-core backward against kernels/cpu under the same plan, bit for bit, and against the gradients in binary64 with a
// bound derived from the plan's roundings. On a card; the rest is what plans it takes.
#include <gtest/gtest.h>

#include <cmath>

#include <faultline/base/error.hpp>
#include <faultline/tensor_kernel/backward.hpp>

#include "heads.hpp"
#include "on_hopper.hpp"

namespace faultline::tensor_kernel {
namespace {

using testing::Head;

/// Elements that differ (zeros of either sign are equal).
int differing(const Matrix& a, const Matrix& b) {
    int count = static_cast<int>(std::abs(static_cast<double>(a.values.size()) - static_cast<double>(b.values.size())));
    for (std::size_t i = 0; i < std::min(a.values.size(), b.values.size()); ++i) count += a.values[i] != b.values[i];
    return count;
}

GroupBackward on_device(const HeadGroup& g, const GroupForward& forward, const RoundingPlan& plan) {
    return attention_backward(std::span<const HeadGroup>(&g, 1), std::span<const GroupForward>(&forward, 1), plan)
        .front();
}

void expect_same_bits(const Head& head, const RoundingPlan& plan) {
    const HeadGroup g = head.group();
    const GroupForward forward = faultline::attention_forward(g, plan);
    const GroupBackward device = on_device(g, forward, plan), cpu = faultline::attention_backward(g, forward, plan);
    EXPECT_EQ(differing(device.dq[0], cpu.dq[0]), 0) << "dq";
    EXPECT_EQ(differing(device.dk, cpu.dk), 0) << "dk";
    EXPECT_EQ(differing(device.dv, cpu.dv), 0) << "dv";
}

struct Shape {
    int n_q, n_k;
    bool causal;
};
std::ostream& operator<<(std::ostream& out, const Shape& s) {
    return out << s.n_q << " x " << s.n_k << (s.causal ? " causal" : " full");
}
constexpr Shape shapes[] = {{128, 128, true}, {384, 384, true}, {301, 301, true}, {260, 515, false}, {64, 333, true},
                            {1, 300, false},  {400, 150, true}, {1, 1, true},     {200, 17, false}};

TEST(TensorBackward, HasTheEmulationsBitsForEveryShape) {
    NEEDS_HOPPER();
    for (const int d : {64, 128})
        for (const Shape& s : shapes) {
            SCOPED_TRACE(::testing::Message() << "head_dim " << d << ", " << s);
            Head head(s.n_q, s.n_k, d, static_cast<std::uint64_t>(1 + s.n_q), 1, 2.0);
            head.causal = s.causal;
            expect_same_bits(head, backward_plan(d));
        }
}

std::vector<RoundingPlan> plans_of_every_variant(int d) {
    RoundingPlan unfused = backward_plan(d);
    unfused.schedule.bwd_argument = ArgumentForm::unfused;
    RoundingPlan scaled = backward_plan(d);
    scaled.schedule.ds_scale = DsScale::before;
    RoundingPlan rounded = backward_plan(d);
    rounded.schedule.functions = Functions::correctly_rounded;
    RoundingPlan cudnn = rounded;
    cudnn.schedule.bwd_exp_base = ExpBase::e;
    cudnn.set(Site::lse_scale, Rule{});  // lse in natural units, as it is stored
    cudnn.schedule.ds_scale = DsScale::before;
    cudnn.schedule.delta_order = DeltaOrder::octet_pairs;
    RoundingPlan unrounded_o = backward_plan(d);
    unrounded_o.schedule.delta_from = DeltaFrom::o_unrounded;
    return {backward_plan(d), unfused, scaled, rounded, cudnn, unrounded_o};
}

TEST(TensorBackward, HasTheEmulationsBitsForEveryVariant) {
    NEEDS_HOPPER();
    for (const int d : {64, 128})
        for (const double logits : {1.0, 20.0})
            for (const RoundingPlan& plan : plans_of_every_variant(d)) {
                SCOPED_TRACE(::testing::Message()
                             << "head_dim " << d << ", " << supported_backward(plan, d, true).kernel.name
                             << (plan.schedule.delta_from == DeltaFrom::o ? "" : ", delta of the unrounded o")
                             << ", logits of " << logits);
                expect_same_bits(Head(260, 260, d, 7, 1, logits), plan);
            }
}

TEST(TensorBackward, HasTheEmulationsBitsInFp16) {
    NEEDS_HOPPER();
    for (const int d : {64, 128}) {
        SCOPED_TRACE(d);
        expect_same_bits(Head(333, 333, d, 11, 1, 2.0), backward_plan(d, Element::fp16));
    }
}

/// Several groups in one call are each what they are alone.
TEST(TensorBackward, GroupsDoNotMix) {
    NEEDS_HOPPER();
    const Head a(200, 200, 64, 3, 2), b(200, 200, 64, 4, 2);
    const RoundingPlan plan = backward_plan(64);
    const std::vector<HeadGroup> groups{a.group(), b.group()};
    const std::vector<GroupForward> forwards{faultline::attention_forward(groups[0], plan),
                                             faultline::attention_forward(groups[1], plan)};
    const std::vector<GroupBackward> together = attention_backward(groups, forwards, plan);
    for (std::size_t g = 0; g < 2; ++g) {
        const GroupBackward alone = on_device(groups[g], forwards[g], plan);
        EXPECT_EQ(differing(together[g].dq[1], alone.dq[1]), 0);
        EXPECT_EQ(differing(together[g].dk, alone.dk), 0);
        EXPECT_EQ(differing(together[g].dv, alone.dv), 0);
    }
}

/// The gradients of a head group in binary64 and how far the kernel may be from them: u = 2^-8 is bf16's unit roundoff,
/// w = 2^-22 bounds one fp32 operation, ex2.approx (2^-22 of its result) and an addition of wgmma (2^-23 of the largest
/// term). With S_i the largest sum of |q k| scale of a row, D_ij = sum |dO v|, V_ic = sum_j p |v|:
///   eps_i    p: the score's d/16 additions and the argument, twice, since lse has them too; lse's sum of n/8 terms a lane;
///            lse itself
///   ds_ij    p ((eps + 3 w) |dp - delta| + w d/16 D_ij + delta's error) + u |ds|, delta's error being that of the stored o,
///            2 u + eps of V, times |dO|, and its own d additions
///   dq, dk   the errors of ds times |scale k|, |scale q|; the additions, n/16 and one a tile; u of the result
///   dv       (u + eps) p |dO|, the additions, u of the result
/// 1 + 2^-5 takes up the squares; a p below 2^-126 is 0.
///
/// With a projection `apart` bounds how far the kernel may be from the emulation, whose ds is the same: the sum r_i of a row's
/// ds is at most that of its errors R_i; what the kernel takes off, r_i w_ij, is rounded to bf16 and added up in fp32, in
/// another order than the emulation, as r_i and the weights' sum are (n w of sum |ds|, of sum p).
struct Bounded {
    std::vector<Matrix> dq, dq_bound, dq_apart;
    Matrix dk, dk_bound, dk_apart, dv, dv_bound;

    explicit Bounded(const HeadGroup& in, ZeroSum projection = ZeroSum::none) {
        const std::ptrdiff_t n_q = in.q[0].rows, n_k = in.k.rows, d = in.k.cols;
        constexpr double u = 0x1p-8, w = 0x1p-22, margin = 1 + 0x1p-5, flushed = 0x1p-126;
        const auto heads = static_cast<double>(in.q.size());
        const double rows = heads * static_cast<double>(n_q), n = static_cast<double>(n_k),
                     dim = static_cast<double>(d);
        dk = dk_bound = dk_apart = dv = dv_bound = Matrix(n_k, d);
        for (std::size_t h = 0; h < in.q.size(); ++h) {
            const MatrixView<const double> q = in.q[h], dout = in.dout[h];
            Matrix& out = dq.emplace_back(n_q, d);
            Matrix& bound = dq_bound.emplace_back(n_q, d);
            Matrix& apart = dq_apart.emplace_back(n_q, d);
            for (std::ptrdiff_t i = 0; i < n_q; ++i) {
                const std::ptrdiff_t seen = in.causal ? std::clamp<std::ptrdiff_t>(i + 1 + n_k - n_q, 0, n_k) : n_k;
                const auto count = static_cast<std::size_t>(seen);
                std::vector<double> p(count), dp(count), dp_size(count), o_size(static_cast<std::size_t>(d));
                double top = -INFINITY, largest = 0, sum = 0;
                for (std::ptrdiff_t j = 0; j < seen; ++j) {
                    const auto at = static_cast<std::size_t>(j);
                    double dot = 0, size = 0;
                    for (std::ptrdiff_t c = 0; c < d; ++c) {
                        dot += q(i, c) * in.k(j, c);
                        size += std::abs(q(i, c) * in.k(j, c));
                        dp[at] += dout(i, c) * in.v(j, c);
                        dp_size[at] += std::abs(dout(i, c) * in.v(j, c));
                    }
                    p[at] = dot * in.scale;
                    top = std::max(top, p[at]);
                    largest = std::max(largest, size * in.scale);
                }
                for (double& x : p) sum += x = std::exp(x - top);
                double delta = 0, delta_size = 0;
                for (std::ptrdiff_t j = 0; j < seen; ++j) {
                    const auto at = static_cast<std::size_t>(j);
                    p[at] /= sum;
                    delta += p[at] * dp[at];
                    for (std::ptrdiff_t c = 0; c < d; ++c)
                        o_size[static_cast<std::size_t>(c)] += p[at] * std::abs(in.v(j, c));
                }
                for (std::ptrdiff_t c = 0; c < d; ++c)
                    delta_size += std::abs(dout(i, c)) * o_size[static_cast<std::size_t>(c)];
                const double lse = seen > 0 ? std::abs(top) + std::log(sum) : 0;
                const double eps = w * ((dim / 16 + 2) * 4 * largest + n / 8 + 8 + 4 * lse);
                const double delta_error = (2 * u + eps + w * dim) * delta_size;
                for (std::ptrdiff_t j = 0; j < seen; ++j) {
                    const auto at = static_cast<std::size_t>(j);
                    const double ds = p[at] * (dp[at] - delta);
                    const double ds_error =
                        u * std::abs(ds) + flushed * std::abs(dp[at] - delta) +
                        p[at] * ((eps + 3 * w) * std::abs(dp[at] - delta) + w * dim / 16 * dp_size[at] + delta_error);
                    for (std::ptrdiff_t c = 0; c < d; ++c) {
                        const double k = in.scale * in.k(j, c), key = in.scale * q(i, c);
                        out(i, c) += ds * k;
                        bound(i, c) += margin * (ds_error + w * (n / 16 + n / 128 + 1) * std::abs(ds)) * std::abs(k);
                        dk(j, c) += ds * key;
                        dk_bound(j, c) += margin * (ds_error + w * (rows / 16 + 1) * std::abs(ds)) * std::abs(key);
                        dv(j, c) += p[at] * dout(i, c);
                        dv_bound(j, c) += margin * ((u + eps + w * rows / 16) * p[at] + flushed) * std::abs(dout(i, c));
                    }
                }
                for (std::ptrdiff_t c = 0; c < d; ++c) bound(i, c) += margin * u * std::abs(out(i, c));
                if (projection == ZeroSum::none) continue;
                double left = 0, ds_size = 0;  // R_i, sum |ds|
                for (std::ptrdiff_t j = 0; j < seen; ++j) {
                    const auto at = static_cast<std::size_t>(j);
                    const double away = std::abs(dp[at] - delta);
                    left +=
                        u * p[at] * away + p[at] * ((eps + 3 * w) * away + w * dim / 16 * dp_size[at] + delta_error);
                    ds_size += p[at] * away;
                }
                for (std::ptrdiff_t j = 0; j < seen; ++j) {
                    const double weight = projection == ZeroSum::weighted  ? p[static_cast<std::size_t>(j)]
                                          : projection == ZeroSum::uniform ? 1 / static_cast<double>(seen)
                                                                           : 1;  // any key may be the largest's
                    const double taken = (u + 2 * n * w) * left * weight + n * w * ds_size * weight;
                    const double added =
                        w * (rows / 16 + 2) *
                        (p[static_cast<std::size_t>(j)] * std::abs(dp[static_cast<std::size_t>(j)] - delta) +
                         left * weight);
                    for (std::ptrdiff_t c = 0; c < d; ++c) {
                        apart(i, c) += margin * (taken + added) * std::abs(in.scale * in.k(j, c));
                        dk_apart(j, c) += margin * (taken + added) * std::abs(in.scale * q(i, c));
                    }
                }
            }
        }
        for (std::size_t i = 0; i < dk.values.size(); ++i) {
            dk_bound.values[i] += margin * u * std::abs(dk.values[i]);
            dv_bound.values[i] += margin * u * std::abs(dv.values[i]);
        }
    }
};

/// Elements beyond the bound; NaN is.
int beyond(const Matrix& x, const Matrix& truth, const Matrix& bound) {
    int count = 0;
    for (std::size_t i = 0; i < truth.values.size(); ++i)
        count += !(std::abs(x.values[i] - truth.values[i]) <= bound.values[i]);
    return count;
}

TEST(TensorBackward, IsWithinThePlansRoundingsOfTheGradients) {
    NEEDS_HOPPER();
    struct Case {
        Shape shape;
        int query_heads;
        double logits;
    };
    constexpr Case cases[] = {{{513, 513, true}, 1, 2.0},
                              {{200, 300, true}, 4, 1.0},
                              {{150, 140, false}, 3, 2.0},
                              {{300, 300, true}, 2, 30.0}};
    for (const int d : {64, 128})
        for (const Case& c : cases) {
            SCOPED_TRACE(::testing::Message() << "head_dim " << d << ", " << c.shape << ", " << c.query_heads
                                              << " query heads, logits of " << c.logits);
            Head head(c.shape.n_q, c.shape.n_k, d, 5, c.query_heads, c.logits);
            head.causal = c.shape.causal;
            const HeadGroup g = head.group();
            const RoundingPlan plan = backward_plan(d);
            const GroupBackward out = on_device(g, faultline::attention_forward(g, plan), plan);
            const Bounded truth(g);
            for (std::size_t h = 0; h < g.q.size(); ++h)
                EXPECT_EQ(beyond(out.dq[h], truth.dq[h], truth.dq_bound[h]), 0) << "dq of head " << h;
            EXPECT_EQ(beyond(out.dk, truth.dk, truth.dk_bound), 0) << "dk";
            EXPECT_EQ(beyond(out.dv, truth.dv, truth.dv_bound), 0) << "dv";
        }
}

/// Delta of P and dP has a smaller error than that of the stored O, which the bound is for.
TEST(TensorBackward, DeltaOfPAndDpIsWithinThePlansRoundings) {
    NEEDS_HOPPER();
    for (const int d : {64, 128})
        for (const DeltaFrom from : {DeltaFrom::p_dp, DeltaFrom::p_dp_normalized}) {
            SCOPED_TRACE(::testing::Message() << "head_dim " << d << ", normalized " << (from != DeltaFrom::p_dp));
            const Head head(300, 333, d, 6, 2, 3.0);
            const HeadGroup g = head.group();
            RoundingPlan plan = backward_plan(d);
            plan.schedule.delta_from = from;
            const GroupBackward out = on_device(g, faultline::attention_forward(g, plan), plan);
            const Bounded truth(g);
            for (std::size_t h = 0; h < g.q.size(); ++h)
                EXPECT_EQ(beyond(out.dq[h], truth.dq[h], truth.dq_bound[h]), 0) << "dq of head " << h;
            EXPECT_EQ(beyond(out.dk, truth.dk, truth.dk_bound), 0) << "dk";
            EXPECT_EQ(beyond(out.dv, truth.dv, truth.dv_bound), 0) << "dv";
        }
}

/// Keys with a large mean, along which a row of ds that does not sum to zero puts its error: the projection takes nearly all of
/// it away, and what it leaves is what the emulation's leaves.
TEST(TensorBackward, ProjectsAsTheEmulationDoes) {
    NEEDS_HOPPER();
    for (const int d : {64, 128})
        for (const bool causal : {true, false}) {
            Head head(280, 300, d, 8, 1, 2.0);
            head.causal = causal;
            for (std::ptrdiff_t j = 0; j < head.k.rows; ++j)
                for (std::ptrdiff_t c = 0; c < d; c += 4) head.k(j, c) += 8;  // of bf16 still: sums of few bits
            for (double& x : head.k.values) x = round(x, bf16, Rounding::nearest_even);
            const HeadGroup g = head.group();
            const auto error = [&](const GroupBackward& out, const Bounded& truth) {
                double sum = 0;
                for (std::size_t i = 0; i < truth.dq[0].values.size(); ++i)
                    sum += std::pow(out.dq[0].values[i] - truth.dq[0].values[i], 2);
                return std::sqrt(sum);
            };
            const RoundingPlan plain = backward_plan(d);
            const GroupForward forward = faultline::attention_forward(g, plain);
            const double unprojected = error(on_device(g, forward, plain), Bounded(g));
            for (const ZeroSum kind : {ZeroSum::weighted, ZeroSum::uniform, ZeroSum::largest}) {
                SCOPED_TRACE(::testing::Message() << "head_dim " << d << (causal ? " causal" : " full")
                                                  << ", projection " << static_cast<int>(kind));
                RoundingPlan plan = plain;
                plan.schedule.zero_sum = kind;
                const GroupBackward out = on_device(g, forward, plan);
                const GroupBackward cpu = faultline::attention_backward(g, forward, plan);
                const Bounded truth(g, kind);
                const auto apart = [](const Matrix& a, const Matrix& b, const Matrix& bound) {
                    int count = 0;
                    for (std::size_t i = 0; i < a.values.size(); ++i) {
                        const double casts = 0x1p-8 * (std::abs(a.values[i]) + std::abs(b.values[i]));
                        count += !(std::abs(a.values[i] - b.values[i]) <= casts + bound.values[i]);
                    }
                    return count;
                };
                EXPECT_EQ(apart(out.dq[0], cpu.dq[0], truth.dq_apart[0]), 0) << "dq";
                EXPECT_EQ(apart(out.dk, cpu.dk, truth.dk_apart), 0) << "dk";
                EXPECT_EQ(differing(out.dv, cpu.dv), 0) << "dv";
                EXPECT_LT(error(out, truth), unprojected / 2) << "the projection has an effect";
            }
        }
}

TEST(TensorBackwardPlans, TakesFa3AndEveryVariant) {
    std::vector<std::string> names;
    for (const RoundingPlan& plan : plans_of_every_variant(128)) {
        const BackwardSupport support = supported_backward(plan, 128, false);
        EXPECT_EQ(support.why, "");
        names.push_back(support.kernel.name);
        EXPECT_EQ(support.kernel.delta_from, plan.schedule.delta_from);
    }
    EXPECT_EQ(names, (std::vector<std::string>{"fused", "unfused", "scaled_before_cast", "correctly_rounded",
                                               "cudnn_like", "fused"}));
    for (const bool causal : {false, true})
        for (const int d : {64, 128}) EXPECT_EQ(supported_backward(plan("fa3"), d, causal).why, "");
    EXPECT_EQ(supported_backward(plan("cudnn-like"), 128, true).kernel.name, "cudnn_like");
    RoundingPlan repaired = backward_plan(128);
    repaired.schedule.zero_sum = ZeroSum::weighted;
    repaired.schedule.delta_from = DeltaFrom::p_dp;
    EXPECT_EQ(supported_backward(repaired, 128, true).kernel.name, "projected");
    EXPECT_EQ(supported_backward(backward_plan(64, Element::fp16), 64, true).kernel.element, Element::fp16);
}

TEST(TensorBackwardPlans, SaysWhatItDoesNotHave) {
    EXPECT_EQ(supported_backward(plan("fa3"), 96, true).why, "head_dim is 96: expected 64 or 128");
    RoundingPlan other = backward_plan(128);
    other.schedule.bwd_argument = ArgumentForm::unfused;
    other.schedule.zero_sum = ZeroSum::weighted;
    EXPECT_EQ(supported_backward(other, 128, true).why,
              "schedule.zero_sum is weighted: the tensor-core backward has none");
    other = backward_plan(128);
    other.schedule.bwd_block_k = 64;
    EXPECT_EQ(supported_backward(other, 128, true).why, "schedule.bwd_block_k is 64: the tensor-core backward has 128");
    other = backward_plan(128);
    other.schedule.bwd_block_q = 72;
    EXPECT_FALSE(supported_backward(other, 128, true));
    other = backward_plan(128);
    other.set(Site::ds_cast, Rule{tf32});
    EXPECT_EQ(supported_backward(other, 128, true).why,
              "sites.ds_cast.format is tf32: the tensor-core backward has bf16");
}

TEST(TensorBackwardPlans, TheForwardsRulesAndTheQueryTileDoNotMatter) {
    RoundingPlan other = backward_plan(128);
    other.set(Site::p_cast, Rule{});
    other.schedule.max_policy = MaxPolicy::stable;
    other.schedule.bwd_block_q = 80;
    EXPECT_EQ(supported_backward(other, 128, true).why, "");
}

TEST(TensorBackwardPlans, ABuildOrMachineWithoutHopperSaysSo) {
    if (has_hopper()) GTEST_SKIP() << "there is one";
    const Head head(8, 8, 64, 1);
    const HeadGroup g = head.group();
    const RoundingPlan plan = backward_plan(64);
    try {
        on_device(g, faultline::attention_forward(g, plan), plan);
        FAIL();
    } catch (const WorkError& e) {
        EXPECT_EQ(std::string(e.what()).rfind("device cuda: ", 0), 0) << e.what();
    }
}

}  // namespace
}  // namespace faultline::tensor_kernel
