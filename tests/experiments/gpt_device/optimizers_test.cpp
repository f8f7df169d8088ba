// SPDX-License-Identifier: Apache-2.0
// Muon and SGD on the device against the CPU's, on a card.
#include <gtest/gtest.h>

#include <cmath>

#include "../../kernels/tensor_kernel/on_hopper.hpp"
#include "../../lib/tensor/support.hpp"
#include "small_runs.hpp"

namespace faultline::gpt {
namespace {

using test::Folder;

std::vector<Named> optimizers() {
    std::vector<Named> all;
    TrainConfig c = small();
    c.steps = 8;
    c.schedule = {.learning_rate = 0.02, .warmup = 3};
    c.model.bias = true;
    c.optimizer.kind = OptimizerKind::muon;
    c.optimizer.momentum = 0.95;
    c.optimizer.adamw_rate = 0.15;
    c.optimizer.weight_decay = 0.1;
    all.push_back({"muon", c});
    c.model.output_gate = true;
    all.push_back({"muon, output gate", c});
    c.model.output_gate = false;
    c.model.layers = 1;
    c.model.width = 96;
    c.model.heads = 3;
    c.optimizer.nesterov = false;
    all.push_back({"muon, one layer, no Nesterov", c});
    c = small();
    c.steps = 8;
    c.schedule = {.learning_rate = 0.1, .warmup = 3};
    c.optimizer.kind = OptimizerKind::sgd;
    c.optimizer.weight_decay = 0.01;
    all.push_back({"sgd", c});
    return all;
}

std::vector<double> doubles(const std::vector<float>& from) { return {from.begin(), from.end()}; }

/// What a parameter has moved by from the start, on the device against the CPU. A gradient is off by some 2^-20 of itself
/// (GradientsInFp32AreAsNearToBinary64AsTheCpus), eight steps make 2^-17 of it, and the five Newton-Schulz steps, whose
/// polynomial has the slope 3.4445 at small singular values, enlarge it 3.4445^5 = 485 = 2^9 times at most: 2^-8. AdamW
/// divides by the gradient's own size, where that is as small as epsilon too; the biases of k, whose gradient is 0 but for
/// rounding, are left out.
TEST(DeviceOptimizers, MoveWeightsAsTheCpuDoes) {
    NEEDS_HOPPER();
    for (const Named& named : optimizers()) {
        SCOPED_TRACE(named);
        const TrainConfig& c = named.config;
        const WindowOrder order(c.seed);
        Trainer cpu(c, text(), order);
        DeviceTrainer device(c, text(), order);
        const std::vector<double> start = doubles(device.weights());
        double gap = 0;
        while (!cpu.finished()) gap = std::max(gap, std::abs(cpu.step().loss - device.step().loss));
        EXPECT_LE(gap, 1e-4);
        EXPECT_LT(device.report().loss, 5.5);  // of log 256 = 5.545
        std::vector<double> mine = doubles(device.weights()),
                            his(cpu.model().weights().begin(), cpu.model().weights().end());
        for (std::size_t i = 0; i < start.size(); ++i) {
            mine[i] -= start[i];
            his[i] -= start[i];
        }
        double most = 0;
        const ParameterLayout layout(c.model);
        for (const Parameter& p : layout.all()) {
            if (p.name.find(".b_in") != std::string::npos) continue;
            const double apart = distance(p, mine, his);
            EXPECT_LE(apart, 0x1p-8) << p.name;
            most = std::max(most, apart);
        }
        std::printf("%-50s losses %.1e apart, ways at most %.1e of themselves\n", named.name, gap, most);
    }
}

TEST(DeviceOptimizers, GoOnFromTheirCheckpointsBitForBit) {
    NEEDS_HOPPER();
    for (Named& named : optimizers()) {
        SCOPED_TRACE(named);
        named.config.model.bf16 = true;
        const TrainConfig& c = named.config;
        const WindowOrder order(c.seed);
        const Folder folder;
        const std::string path = (folder.path() / "half.safetensors").string();
        DeviceTrainer whole(c, text(), order), first(c, text(), order), second(c, text(), order);
        while (!whole.finished()) whole.step();
        for (int i = 0; i < 3; ++i) first.step();
        first.save(path);
        second.restore(path);
        while (!second.finished()) second.step();
        EXPECT_EQ(second.weights(), whole.weights());
    }
}

}  // namespace
}  // namespace faultline::gpt
