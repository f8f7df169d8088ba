// SPDX-License-Identifier: Apache-2.0
// round_bulk on 2^20 floats, one thread, beside memcpy of the same arrays: the speed that memory allows. Two kinds of
// data: normal, and log-uniform over 2^-20 to 2^20 with either sign, which visits the subnormals and the overflow of the
// small formats and so punishes a loop that branches on them. Rows that end in /cache round the first 2^14 of the floats:
// where two arrays of 4 MiB miss the second-level cache, memory hides what the kernels can do.
#include <faultline/format/bulk.hpp>
#include <faultline/format/names.hpp>

#include <benchmark/benchmark.h>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

namespace faultline {
namespace {

constexpr std::size_t count = std::size_t{1} << 20;
constexpr std::size_t cached_count = std::size_t{1} << 14;

std::vector<float> normal_data() {
    std::vector<float> values(count);
    for (std::size_t i = 0; i < count; ++i) values[i] = static_cast<float>(RandomStream(1).normal(i));
    return values;
}

std::vector<float> log_uniform_data() {
    std::vector<float> values(count);
    const RandomStream stream(2);
    for (std::size_t i = 0; i < count; ++i) {
        const double magnitude = std::exp2(40 * stream.uniform(2 * i) - 20);
        values[i] = static_cast<float>(stream.bits(2 * i + 1) % 2 == 0 ? magnitude : -magnitude);
    }
    return values;
}

void set_rates(benchmark::State& state, std::size_t size, std::size_t element_bytes) {
    const auto elements = static_cast<std::int64_t>(state.iterations()) * static_cast<std::int64_t>(size);
    state.SetItemsProcessed(elements);
    state.SetBytesProcessed(elements * static_cast<std::int64_t>(2 * element_bytes));
}

void copy(benchmark::State& state, std::span<const float> from) {
    std::vector<float> to(from.size());
    for ([[maybe_unused]] auto _ : state) {
        std::memcpy(to.data(), from.data(), from.size_bytes());
        benchmark::DoNotOptimize(to.data());
        benchmark::ClobberMemory();
    }
    set_rates(state, from.size(), sizeof(float));
}

template <class T>
void round_all(benchmark::State& state, std::span<const T> from, Format f, Rounding mode) {
    std::vector<T> to(from.size());
    for ([[maybe_unused]] auto _ : state) {
        round_bulk(from, std::span<T>(to), f, mode, RandomStream(3));
        benchmark::DoNotOptimize(to.data());
        benchmark::ClobberMemory();
    }
    set_rates(state, from.size(), sizeof(T));
}

void register_all() {
    static const std::vector<float> normal = normal_data(), log_uniform = log_uniform_data();
    static const std::vector<double> doubles(normal.begin(), normal.end());
    benchmark::RegisterBenchmark("memcpy", [](benchmark::State& s) { copy(s, normal); });
    static const std::span<const float> cached = std::span<const float>(normal).first(cached_count);
    benchmark::RegisterBenchmark("memcpy/cache", [](benchmark::State& s) { copy(s, cached); });
    for (const Format f : {fp32, bf16, fp16, e5m2, e4m3, e3m2, e2m3, e2m1}) {
        benchmark::RegisterBenchmark((name(f) + "/nearest_even/normal").c_str(), [f](benchmark::State& s) {
            round_all<float>(s, normal, f, Rounding::nearest_even);
        });
        benchmark::RegisterBenchmark((name(f) + "/nearest_even/log_uniform").c_str(), [f](benchmark::State& s) {
            round_all<float>(s, log_uniform, f, Rounding::nearest_even);
        });
    }
    for (const Format f : {fp32, bf16, fp16, e5m2, e4m3, e3m2, e2m3, e2m1}) {
        for (const Rounding mode : {Rounding::nearest_even, Rounding::stochastic}) {
            benchmark::RegisterBenchmark((name(f) + "/" + std::string(name(mode)) + "/cache").c_str(),
                                         [f, mode](benchmark::State& s) { round_all<float>(s, cached, f, mode); });
        }
    }
    for (const Format f : {bf16, e4m3}) {
        for (const Rounding mode : all_roundings()) {
            if (mode == Rounding::nearest_even) continue;
            benchmark::RegisterBenchmark((name(f) + "/" + std::string(name(mode)) + "/normal").c_str(),
                                         [f, mode](benchmark::State& s) { round_all<float>(s, normal, f, mode); });
        }
        benchmark::RegisterBenchmark((name(f) + "/nearest_even/double").c_str(), [f](benchmark::State& s) {
            round_all<double>(s, doubles, f, Rounding::nearest_even);
        });
    }
}

}  // namespace
}  // namespace faultline

int main(int argc, char** argv) {
    benchmark::Initialize(&argc, argv);
    if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
    faultline::register_all();
    benchmark::RunSpecifiedBenchmarks();
}
