// SPDX-License-Identifier: Apache-2.0
// Steps per second of training: the quick recipe with the fast kernel, with an instrument at delta, with emulated plans;
// two threads; and a larger model. torch_gpt.py beside it is the same model in PyTorch.
#include <benchmark/benchmark.h>

#include <faultline/gpt/trainer.hpp>
#include <faultline/plan/presets.hpp>

namespace faultline::gpt {
namespace {

const TokenData& text() {
    static const TokenData data = [] {
        std::string all;
        for (int i = 0; i < 20000; ++i) all += "line " + std::to_string(i * 7919) + " of a text.\n";
        return tokens_of_text(all);
    }();
    return data;
}

TrainConfig recipe(int threads) {
    TrainConfig c;
    c.steps = std::int64_t{1} << 40;
    c.validate_every = 0;
    c.threads = threads;
    return c;
}

class DeltaBias final : public AttentionHook {
  public:
    [[nodiscard]] bool watches(std::int64_t, int, Site site) const override { return site == Site::delta; }
    [[nodiscard]] std::unique_ptr<Instrument> instrument(const HeadAt& where) override {
        return where.backward ? std::make_unique<OfHead>() : nullptr;
    }

  private:
    class OfHead final : public Instrument {
      public:
        [[nodiscard]] bool watches(Site site) const override { return site == Site::delta; }
        void at(Site, const TileAt&, MatrixView<double> value, MatrixView<const double>) override {
            for (std::ptrdiff_t i = 0; i < value.rows; ++i) value(i, 0) *= 1.1;
        }
    };
};

void steps(benchmark::State& state, const TrainConfig& config, const Hooks& hooks = {}) {
    const WindowOrder order(0);
    Trainer trainer(config, text(), order, hooks);
    for (auto _ : state) trainer.step();
    const double tokens = static_cast<double>(config.batch) * config.model.context;
    state.counters["tokens/s"] = benchmark::Counter(tokens, benchmark::Counter::kIsIterationInvariantRate);
}

void quick(benchmark::State& state) { steps(state, recipe(static_cast<int>(state.range(0)))); }
BENCHMARK(quick)->Arg(1)->Arg(2)->Unit(benchmark::kMillisecond)->UseRealTime();

void quick_fp32(benchmark::State& state) {
    TrainConfig c = recipe(static_cast<int>(state.range(0)));
    c.model.bf16 = false;
    steps(state, c);
}
BENCHMARK(quick_fp32)->Arg(1)->Arg(2)->Unit(benchmark::kMillisecond)->UseRealTime();

void biased_delta(benchmark::State& state) {
    DeltaBias hook;
    steps(state, recipe(1), {.attention = &hook});
}
BENCHMARK(biased_delta)->Unit(benchmark::kMillisecond)->UseRealTime();

void emulated(benchmark::State& state, const char* name) {
    TrainConfig c = recipe(1);
    c.model.attention = {{-1, {}, std::make_shared<const RoundingPlan>(plan(name))}};
    steps(state, c);
}
BENCHMARK_CAPTURE(emulated, math, "math")->Unit(benchmark::kMillisecond)->UseRealTime();
BENCHMARK_CAPTURE(emulated, fa2, "fa2")->Unit(benchmark::kMillisecond)->UseRealTime();

void width_384(benchmark::State& state) {
    TrainConfig c = recipe(2);
    c.model.layers = 6;
    c.model.width = 384;
    c.model.heads = 6;
    c.model.context = 256;
    steps(state, c);
}
BENCHMARK(width_384)->Unit(benchmark::kMillisecond)->UseRealTime();

}  // namespace
}  // namespace faultline::gpt

BENCHMARK_MAIN();
