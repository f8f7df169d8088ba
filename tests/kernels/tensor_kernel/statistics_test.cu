// SPDX-License-Identifier: Apache-2.0
// What the tensor-core kernels say of their rows, against the same numbers of the emulation, which has their bits: the largest
// scores exactly, sums of ds to the rounding of fp32 additions, entropies and saturation against binary64.
#include <gtest/gtest.h>

#include <cmath>

#include <faultline/cpu/row_sums.hpp>
#include <faultline/probes/saturation.hpp>
#include <faultline/tensor_kernel/backward.hpp>
#include <faultline/tensor_kernel/group_memory.cuh>
#include <faultline/tensor_kernel/row_statistics.hpp>

#include "heads.hpp"
#include "on_hopper.hpp"

namespace faultline::tensor_kernel {
namespace {

using testing::Head;
using T = __nv_bfloat16;

/// The largest scaled score of each 16 rows, and the sums of ds, as the emulation sees them.
class Watch final : public Instrument {
  public:
    Watch(const HeadGroup& g, const RoundingPlan& plan)
        : scale_(static_cast<float>(g.scale)),
          gradient_(score_gradient_site(plan.schedule, g.scale, false)),
          largest(static_cast<std::size_t>(row_groups(static_cast<int>(g.q[0].rows))), -INFINITY) {}
    [[nodiscard]] bool watches(Site site) const override {
        return site == Site::s_accumulate || site == gradient_.site;
    }
    void at(Site site, const TileAt& where, MatrixView<double> value, MatrixView<const double>) override {
        for (std::ptrdiff_t i = 0; i < value.rows; ++i)
            for (std::ptrdiff_t j = 0; j < std::min(value.cols, where.visible0 + i); ++j)
                if (site == Site::s_accumulate) {
                    float& to = largest[static_cast<std::size_t>((where.query0 + i) / 16)];
                    to = std::fmax(to, static_cast<float>(value(i, j)) * scale_);
                } else {
                    sum += value(i, j);
                    magnitude += std::abs(value(i, j));
                }
    }

  private:
    float scale_;
    ScoreGradientSite gradient_;

  public:
    std::vector<float> largest;
    double sum = 0, magnitude = 0;
};

/// One head on the device.
struct OnDevice {
    ForwardCall forward;
    BackwardCall backward;
    DeviceMemory<T> q, k, v, dout, o, dq, dk, dv;
    DeviceMemory<float> lse, largest;
    DeviceMemory<double> zero_sums, rows;
    DeviceMemory<unsigned char> workspace;

    static std::vector<T> of(const Matrix& m) {
        return stored<T>(1, [&](std::size_t) { return std::vector{m.view()}; });
    }
    explicit OnDevice(const Head& head, const Matrix& o_of_backward)
        : forward(call_of<ForwardCall>(std::vector{head.group()})),
          backward(call_of<BackwardCall>(std::vector{head.group()})),
          q(of(head.q[0])),
          k(of(head.k)),
          v(of(head.v)),
          dout(of(head.dout[0])),
          o(of(o_of_backward)),
          dq(head.q[0].values.size()),
          dk(head.k.values.size()),
          dv(head.v.values.size()),
          lse(static_cast<std::size_t>(forward.n_q)),
          largest(static_cast<std::size_t>(row_groups(forward.n_q))),
          zero_sums(static_cast<std::size_t>(2 * zero_sum_parts(forward.n_k))),
          rows(static_cast<std::size_t>(2 * row_groups(forward.n_q))),
          workspace(backward_workspace(backward)) {
        forward.q = q.data();
        forward.k = k.data();
        forward.v = v.data();
        forward.lse = lse.data();
        forward.largest = largest.data();
        backward.dout_strides = backward.dq_strides = backward.q_strides;
        backward.dk_strides = backward.dv_strides = backward.k_strides;
        backward.q = q.data();
        backward.k = k.data();
        backward.v = v.data();
        backward.o = o.data();
        backward.dout = dout.data();
        backward.lse = lse.data();
        backward.dq = dq.data();
        backward.dk = dk.data();
        backward.dv = dv.data();
        backward.workspace = workspace.data();
        backward.zero_sums = zero_sums.data();
    }
};

struct Shape {
    int n_q, n_k;
    bool causal;
};
constexpr Shape shapes[] = {{128, 128, true}, {301, 301, true}, {260, 515, false},
                            {400, 150, true}, {1, 1, true},     {200, 17, false}};

template <class F>
void for_heads(double logits, F&& check) {
    for (const int d : {64, 128})
        for (const Shape& s : shapes) {
            SCOPED_TRACE(::testing::Message()
                         << "head_dim " << d << ", " << s.n_q << " x " << s.n_k << ", causal " << s.causal);
            Head head(s.n_q, s.n_k, d, static_cast<std::uint64_t>(1 + s.n_q), 1, logits);
            head.causal = s.causal;
            check(head, d);
        }
}

TEST(TensorStatistics, LargestScoresAreTheEmulations) {
    NEEDS_HOPPER();
    for_heads(3.0, [](const Head& head, int d) {
        RoundingPlan stable = forward_plan();
        stable.schedule.max_policy = MaxPolicy::stable;
        stable.set(Site::row_max, Rule{fp32});
        for (const RoundingPlan& plan : {forward_plan(), stable, forward_plan(Element::bf16, Unit::mma, d)}) {
            const ForwardSupport support = supported(plan, d, head.causal);
            ASSERT_TRUE(support) << support.why;
            const HeadGroup g = head.group();
            Watch watch(g, plan);
            const GroupForward cpu = faultline::attention_forward(g, plan, &watch);
            OnDevice device(head, cpu.heads[0].o);
            DeviceMemory<T> o(head.q[0].values.size());
            device.forward.o = o.data();
            launch_forward(device.forward, support.kernel);
            ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
            EXPECT_EQ(device.largest.host(), watch.largest);
        }
    });
}

/// A thread of the kernels adds 32 elements for each 64 queries, the sum of two at a time: every addition is off by 2^-24 of
/// what it has summed up, which is no more than the magnitudes. O is 1.3 of what it should be, so that rows do not sum to 0.
TEST(TensorStatistics, SumsOfDsAreTheEmulations) {
    NEEDS_HOPPER();
    for_heads(2.0, [](const Head& head, int d) {
        RoundingPlan scaled = backward_plan(d);
        scaled.schedule.ds_scale = DsScale::before;
        for (const RoundingPlan& plan : {backward_plan(d), scaled, backward_plan(d, Element::bf16, Unit::mma)}) {
            const BackwardSupport support = supported_backward(plan, d, head.causal);
            ASSERT_TRUE(support) << support.why;
            const HeadGroup g = head.group();
            GroupForward forward = faultline::attention_forward(g, plan);
            for (double& x : forward.heads[0].o.values) x = round(1.3 * x, bf16, Rounding::nearest_even);
            Watch watch(g, plan);
            (void)faultline::attention_backward(g, forward, plan, &watch);
            OnDevice device(head, forward.heads[0].o);
            const std::vector<float> lse(forward.heads[0].lse.begin(), forward.heads[0].lse.end());
            const DeviceMemory<float> of_forward(lse);
            device.backward.lse = of_forward.data();
            launch_backward(device.backward, support.kernel);
            ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
            const std::vector<double> parts = device.zero_sums.host();
            double sum = 0, magnitude = 0;
            for (std::size_t i = 0; i < parts.size(); i += 2) {
                sum += parts[i];
                magnitude += parts[i + 1];
            }
            const double additions = 1 + 16 * std::ceil(device.backward.n_q / 64.0);
            const double bound = additions * 0x1p-24 * watch.magnitude;
            EXPECT_NEAR(sum, watch.sum, bound) << support.kernel.name;
            EXPECT_NEAR(magnitude, watch.magnitude, bound) << support.kernel.name;
            if (device.backward.n_k > 1) EXPECT_GT(std::abs(watch.sum), 10 * bound);  // there is something to see
        }
    });
}

/// Scores are sums of d products, off by d 2^-24 of their magnitudes (wgmma cuts each addition off at 2^-23 of the largest
/// addend); p and its logarithm, by ex2 and a scale of 24 bits, by some 2^-22 (1 + |t|), of which an entropy has as much as it
/// has weight there: 2^-12 covers both for scores up to 2^6 with d = 128. A row whose largest weight is as near to the
/// threshold may be on either side.
TEST(TensorStatistics, EntropyAndSaturationAreThoseOfTheScores) {
    NEEDS_HOPPER();
    for (const double logits : {1.0, 12.0})
        for_heads(logits, [&](const Head& head, int) {
            const HeadGroup g = head.group();
            const int n_q = static_cast<int>(g.q[0].rows), n_k = static_cast<int>(g.k.rows);
            std::vector<double> saturated(static_cast<std::size_t>(row_groups(n_q))), entropy(saturated),
                near(saturated);
            for (int i = 0; i < n_q; ++i) {
                std::vector<double> scores;
                for (int j = 0; j < (head.causal ? std::min(n_k, i + 1 + n_k - n_q) : n_k); ++j) {
                    double dot = 0;
                    for (std::ptrdiff_t c = 0; c < g.k.cols; ++c) dot += g.q[0](i, c) * g.k(j, c);
                    scores.push_back(dot * g.scale);
                }
                const RowSaturation row = row_saturation(scores);
                if (!row.chooses()) continue;
                const auto group = static_cast<std::size_t>(i / 16);
                saturated[group] += row.saturated();
                near[group] += std::abs(row.p_max - rounds_to_one) < 0x1p-12;
                entropy[group] += row.entropy;
            }
            const RoundingPlan plan = forward_plan();
            const GroupForward cpu = faultline::attention_forward(g, plan);
            OnDevice device(head, cpu.heads[0].o);
            const std::vector<float> lse(cpu.heads[0].lse.begin(), cpu.heads[0].lse.end());
            const DeviceMemory<float> of_forward(lse);
            RowStatisticsCall call;
            call.n_q = n_q;
            call.n_k = n_k;
            call.head_dim = static_cast<int>(g.k.cols);
            call.causal = head.causal;
            call.scale = head.scale;
            call.q = device.q.data();
            call.k = device.k.data();
            call.q_strides = device.forward.q_strides;
            call.k_strides = device.forward.k_strides;
            call.lse = of_forward.data();
            call.out = device.rows.data();
            launch_row_statistics(call);
            ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
            const std::vector<double> out = device.rows.host();
            for (std::size_t group = 0; group < saturated.size(); ++group) {
                EXPECT_NEAR(out[2 * group], saturated[group], near[group]) << group;
                EXPECT_NEAR(out[2 * group + 1], entropy[group], 16 * 0x1p-12) << group;
            }
        });
}

}  // namespace
}  // namespace faultline::tensor_kernel
