// SPDX-License-Identifier: Apache-2.0
// The products of a 2-layer GPT of width 64 on 512 tokens, of one head, and a large one.
#include <faultline/gemm/gemm.hpp>

#include <benchmark/benchmark.h>

#include <vector>

namespace faultline {
namespace {

void product(benchmark::State& state) {
    const std::ptrdiff_t m = state.range(0), n = state.range(1), k = state.range(2);
    const bool ta = state.range(3), tb = state.range(4);
    std::vector<float> a(static_cast<std::size_t>(m * k), 0.5F), b(static_cast<std::size_t>(k * n), 0.25F),
        c(static_cast<std::size_t>(m * n));
    const MatrixView<const float> left(a.data(), ta ? k : m, ta ? m : k), right(b.data(), tb ? n : k, tb ? k : n);
    for (auto _ : state) {
        gemm(Transpose(ta), left, Transpose(tb), right, MatrixView<float>(c.data(), m, n));
        benchmark::ClobberMemory();
    }
    state.counters["GFLOP/s"] =
        benchmark::Counter(2e-9 * static_cast<double>(m * n * k), benchmark::Counter::kIsIterationInvariantRate);
}
BENCHMARK(product)
    ->ArgNames({"m", "n", "k", "ta", "tb"})
    ->Args({512, 192, 64, 0, 0})
    ->Args({512, 256, 64, 0, 0})
    ->Args({512, 64, 256, 0, 0})
    ->Args({512, 256, 64, 0, 1})
    ->Args({512, 64, 256, 0, 1})
    ->Args({64, 256, 512, 1, 0})
    ->Args({256, 64, 512, 1, 0})
    ->Args({128, 128, 32, 0, 1})
    ->Args({128, 32, 128, 0, 0})
    ->Args({128, 32, 128, 1, 0})
    ->Args({1024, 1024, 1024, 0, 0});

}  // namespace
}  // namespace faultline

BENCHMARK_MAIN();
