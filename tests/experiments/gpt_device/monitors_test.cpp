// SPDX-License-Identifier: Apache-2.0
// The monitors of the device's trainer against the CPU's, on a card, at weights whose logits are large enough for some rows to
// be saturated.
#include <gtest/gtest.h>

#include <cmath>

#include "../../kernels/tensor_kernel/on_hopper.hpp"
#include "../../lib/tensor/support.hpp"
#include "small_runs.hpp"

namespace faultline::gpt {
namespace {

/// W_Q and W_K larger, so that logits reach tens.
std::vector<float> sharp(const TrainConfig& c) {
    std::vector<float> w = spread(c);
    const ParameterLayout layout(c.model);
    for (const Parameter& p : layout.all()) {
        if (p.role != Role::w_q && p.role != Role::w_k) continue;
        const MatrixView<float> view = p.of(std::span(w));
        for (std::ptrdiff_t i = 0; i < view.rows; ++i)
            for (std::ptrdiff_t j = 0; j < view.cols; ++j) view(i, j) *= 3;
    }
    return w;
}

StepReport device_report(TrainConfig c, const std::vector<float>& weights) {
    c.monitor_every = 1;
    const WindowOrder order(c.seed);
    DeviceTrainer trainer(c, text(), order);
    trainer.set_weights(weights);
    trainer.step();
    EXPECT_FALSE(trainer.failure());
    return trainer.report();
}

/// Numbers of heads as the report has them.
struct Numbers {
    std::vector<double> max_logit, qk_rms, zero_sum, zero_sum_abs, saturated, entropy;
};
Numbers of(const BatchStatistics& s, const TrainConfig& c) {
    Numbers n{s.max_logit, {}, s.zero_sum, s.zero_sum_abs, {}, {}};
    const double tokens = c.tokens_of_step();
    for (std::size_t i = 0; i < s.rows.size(); ++i) {
        n.qk_rms.push_back((s.q_rms[i] / tokens) * (s.k_rms[i] / tokens));
        n.saturated.push_back(s.saturated[i] / s.rows[i]);
        n.entropy.push_back(s.entropy[i] / s.rows[i]);
    }
    return n;
}
Numbers of(const StepReport& r) { return {r.max_logit, r.qk_rms, r.zero_sum, r.zero_sum_abs, r.saturated, r.entropy}; }

/// Root mean square over heads of a - b.
double apart(const std::vector<double>& a, const std::vector<double>& b) {
    EXPECT_EQ(a.size(), b.size());
    double squares = 0;
    for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i) squares += (a[i] - b[i]) * (a[i] - b[i]);
    return std::sqrt(squares / static_cast<double>(a.size()));
}
double size(const std::vector<double>& a) { return apart(a, std::vector<double>(a.size(), 0.0)); }

struct Field {
    const char* name;
    std::vector<double> Numbers::*values;
};
constexpr Field fields[] = {{"max_logit", &Numbers::max_logit},
                            {"qk_rms", &Numbers::qk_rms},
                            {"zero_sum", &Numbers::zero_sum},
                            {"zero_sum_abs", &Numbers::zero_sum_abs},
                            {"entropy", &Numbers::entropy}};

/// Rows whose largest weight lies within rounding of the threshold count on either side: with hundreds of rows a head some
/// millionths of them, so two are allowed for.
void expect_saturated(const Numbers& device, const Numbers& cpu, const TrainConfig& c) {
    const double rows = c.tokens_of_step() - c.batch * c.accumulate;
    for (std::size_t i = 0; i < cpu.saturated.size(); ++i)
        EXPECT_NEAR(device.saturated[i] * rows, cpu.saturated[i] * rows, 2) << i;
}

/// As GradientsInFp32AreAsNearToBinary64AsTheCpus: as many roundings of the same size in another order, over all heads at most
/// 4 times the CPU's error, or 4 units of fp32's rounding of the number where the CPU's is smaller than one (of the zero sum,
/// which is 0: of its magnitudes). The largest logit is no sum over a head, whose errors even out, but one score: of head_dim
/// additions each may be off by a unit of it.
TEST(DeviceMonitors, InFp32AreAsNearToBinary64AsTheCpus) {
    NEEDS_HOPPER();
    for (const Named& named : configurations()) {
        SCOPED_TRACE(named);
        const TrainConfig& c = named.config;
        const std::vector<float> weights = sharp(c);
        BatchStatistics exact_seen, cpu_seen;
        (void)cpu_gradient<double>(c, weights, nullptr, &exact_seen);
        (void)cpu_gradient<float>(c, weights, nullptr, &cpu_seen);
        const Numbers exact = of(exact_seen, c), cpu = of(cpu_seen, c), device = of(device_report(c, weights));
        for (const Field& f : fields) {
            const std::vector<double>& truth = exact.*f.values;
            const double additions = f.values == &Numbers::max_logit ? c.model.head_dim() : 1;
            const double unit = additions * 0x1p-24 * size(f.values == &Numbers::zero_sum ? exact.zero_sum_abs : truth);
            const double of_cpu = apart(cpu.*f.values, truth), of_device = apart(device.*f.values, truth);
            EXPECT_LE(of_device, 4 * std::max(of_cpu, unit)) << f.name;
            std::printf("%-50s %-13s %.3e, off by %.1e, the cpu's %.1e\n", named.name, f.name, size(truth), of_device,
                        of_cpu);
        }
        expect_saturated(device, cpu, c);
    }
}

/// As GradientsInBf16DifferFromTheCpusByLessThanBf16Costs.
TEST(DeviceMonitors, InBf16DifferFromTheCpusByLessThanBf16Costs) {
    NEEDS_HOPPER();
    std::vector<Named> all = configurations();
    for (Named& named : all) named.config.model.bf16 = true;
    TrainConfig c = small();
    c.model = {.layers = 2, .width = 128, .heads = 2, .context = 200, .vocabulary = 256, .bias = true};
    all.push_back({"tensor cores, heads of 64", with_tensor_kernel(c)});
    c.accumulate = 2;
    c.model.heads = 1;
    all.push_back({"tensor cores, heads of 128, two micro-batches", with_tensor_kernel(c)});
    for (const Named& named : all) {
        SCOPED_TRACE(named);
        const TrainConfig& of_run = named.config;
        const std::vector<float> weights = sharp(of_run);
        TrainConfig without_casts = of_run;
        without_casts.model.bf16 = false;
        without_casts.model.attention.clear();
        BatchStatistics exact_seen, cpu_seen;
        (void)cpu_gradient<double>(without_casts, weights, nullptr, &exact_seen);
        (void)cpu_gradient<float>(of_run, weights, nullptr, &cpu_seen);
        const Numbers exact = of(exact_seen, of_run), cpu = of(cpu_seen, of_run);
        const Numbers device = of(device_report(of_run, weights));
        for (const Field& f : fields) {
            const double cost = apart(cpu.*f.values, exact.*f.values), gap = apart(device.*f.values, cpu.*f.values);
            EXPECT_LE(gap, cost) << f.name;
            std::printf("%-50s %-13s %.3e, bf16 costs %.1e, the device is %.1e off the cpu\n", named.name, f.name,
                        size(exact.*f.values), cost, gap);
        }
    }
}

TEST(DeviceMonitors, StandWhereTheCpusDoAndAddUpOverTheSteps) {
    NEEDS_HOPPER();
    TrainConfig c = small();
    c.steps = 6;
    c.monitor_every = 4;
    const WindowOrder order(c.seed);
    Trainer cpu(c, text(), order);
    DeviceTrainer device(c, text(), order);
    std::vector<double> total(4, 0.0);
    while (!cpu.finished()) {
        const StepReport &a = cpu.step(), &b = device.step();
        SCOPED_TRACE(a.step);
        for (std::size_t i = 0; i < total.size(); ++i) {
            total[i] += b.zero_sum[i];
            EXPECT_DOUBLE_EQ(b.zero_sum_total[i], total[i]);
            EXPECT_EQ(std::isnan(b.entropy[i]), std::isnan(a.entropy[i]));
            EXPECT_EQ(std::isnan(b.saturated[i]), std::isnan(a.saturated[i]));
            EXPECT_NEAR(b.max_logit[i], a.max_logit[i], 1e-4 * std::abs(a.max_logit[i]));
        }
    }
}

/// Singular values of the weights as they come from the device against Eigen's of the same: those are within lanczos_error, 2^-38 of
/// the largest, and as much again for those of Eigen, from eigenvalues of W^T W, whose third may be off by more where it is small.
TEST(DeviceMonitors, SpectraAreThoseOfTheWeights) {
    NEEDS_HOPPER();
    for (const auto& [width, heads, layers] :
         {std::tuple{64, 2, 2}, {72, 9, 1}, {256, 4, 3}, {768, 12, 1}, {1280, 10, 1}})
        for (const bool leads : {false, true}) {
            SCOPED_TRACE(::testing::Message() << "width " << width << ", " << heads << " heads, leads " << leads);
            TrainConfig c = small();
            c.model.width = width;
            c.model.heads = heads;
            c.model.layers = layers;
            c.model.context = 16;
            c.model.output_gate = heads == 9;
            c.batch = 1;
            c.steps = 2;
            c.monitor_every = 1;
            const WindowOrder order(c.seed);
            DeviceTrainer trainer(c, text(), order);
            std::vector<float> weights = trainer.weights();
            const ParameterLayout layout(c.model);
            for (const Parameter& p : layout.all()) {
                if (!leads || (p.role != Role::w_q && p.role != Role::w_k)) continue;
                const MatrixView<float> w = p.of(std::span(weights));
                for (std::ptrdiff_t i = 0; i < w.rows; ++i)
                    for (std::ptrdiff_t j = 0; j < w.cols; ++j)
                        w(i, j) += 0.3F * static_cast<float>(std::sin(1.0 + 0.7 * static_cast<double>(i)) *
                                                             std::cos(0.3 * static_cast<double>(j)));
            }
            trainer.set_weights(weights);
            trainer.step();
            StepReport exact;
            const StepReport& found = trainer.report();
            exact.layers = layers;
            exact.heads = heads;
            report_spectra(c.model, layout, trainer.weights(), true, exact);
            const auto expect_near = [](const std::vector<double>& a, const std::vector<double>& b) {
                ASSERT_EQ(a.size(), b.size());
                for (std::size_t i = 0; i < a.size(); ++i) EXPECT_NEAR(a[i], b[i], 0x1p-36 * b[i / 3 * 3]) << i;
            };
            expect_near(found.singular_q, exact.singular_q);
            expect_near(found.singular_k, exact.singular_k);
            expect_near(found.singular_qk, exact.singular_qk);
            EXPECT_EQ(found.sigma_q.size(), static_cast<std::size_t>(layers));
        }
}

TEST(DeviceMonitors, AreAbsentWhereNobodyWantsThem) {
    NEEDS_HOPPER();
    TrainConfig c = small();
    c.steps = 2;
    const WindowOrder order(c.seed);
    DeviceTrainer without(c, text(), order, {.monitors = false}), with(c, text(), order);
    const StepReport &a = without.step(), &b = with.step();
    EXPECT_TRUE(a.max_logit.empty() && a.zero_sum.empty() && a.entropy.empty() && a.qk_rms.empty());
    EXPECT_EQ(b.max_logit.size(), 4U);
    EXPECT_EQ(a.loss, b.loss);  // looking changes nothing
    EXPECT_EQ(without.weights(), with.weights());
}

}  // namespace
}  // namespace faultline::gpt
