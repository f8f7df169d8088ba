// SPDX-License-Identifier: Apache-2.0
// Multiply-adds per second of every kind of accumulation, one thread, on tiles of attention's size. The goal is 5e7 on any
// unit. `multiply_adds` is the rate; `peak/…` is what this core does at most when every lane multiplies and adds, in the
// widest registers it has (AVX-512: binary64 8, fp32 16 lanes, two operations for a multiply and an add): the ceiling
// of `exact` and of the fp32 orders. Inputs are normal variates, with operands of the unit's format ("narrow"), or with A
// unrounded ("wide", what counterfactuals do), or as a softmax leaves them, most of A far below the row's maximum
// ("softmax").
#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include <benchmark/benchmark.h>

#include <faultline/base/clones.hpp>
#include <faultline/tensor_core/accumulate.hpp>
#include <faultline/tensor_core/reference.hpp>

namespace faultline {
namespace {

enum class Input { narrow, wide, softmax };

double rounded(double x, int fraction_bits) {
    int e = 0;
    const double f = std::frexp(x, &e);
    return std::ldexp(std::nearbyint(std::ldexp(f, fraction_bits + 1)), e - fraction_bits - 1);
}

struct Tile {
    std::ptrdiff_t m, n, k;
    std::vector<double> a, b, c;
};

Tile tile(std::ptrdiff_t size, std::string_view name, Input input) {
    const int fraction_bits = name.find("e5m2") != name.npos ? 2 : name.find("e4m3") != name.npos ? 3 : 7;
    std::mt19937_64 generator(1);
    std::normal_distribution<double> normal;
    const auto count = static_cast<std::size_t>(size * size);
    Tile t{size, size, size, std::vector<double>(count), std::vector<double>(count), std::vector<double>(count)};
    for (double& x : t.b) x = rounded(normal(generator), fraction_bits);
    for (double& x : t.a) {
        x = normal(generator);
        if (input == Input::softmax) x = std::max(std::exp(20 * x - 60), 0x1p-126);
        if (input != Input::wide) x = rounded(x, fraction_bits);
    }
    return t;
}

template <class Multiply>
void measure(benchmark::State& state, Tile t, Multiply multiply) {
    for (auto _ : state) {
        multiply(MatrixView<const double>(t.a.data(), t.m, t.k), MatrixView<const double>(t.b.data(), t.k, t.n),
                 MatrixView<double>(t.c.data(), t.m, t.n));
        benchmark::ClobberMemory();
    }
    state.counters["multiply_adds"] =
        benchmark::Counter(static_cast<double>(t.m * t.n * t.k), benchmark::Counter::kIsIterationInvariantRate);
}

void add(const std::string& name, std::ptrdiff_t size, Input input) {
    const Accumulation accumulation = find_accumulation(name).value();
    const char* inputs[] = {"narrow", "wide", "softmax"};
    const std::string title = name + "/" + inputs[static_cast<int>(input)] + "/" + std::to_string(size);
    benchmark::RegisterBenchmark(title.c_str(), [=](benchmark::State& state) {
        measure(state, tile(size, name, input),
                [&](auto a, auto b, auto c) { multiply_accumulate(accumulation, a, b, c); });
    });
}

// Eight independent chains of multiply and add, so that latency does not show.
template <class T>
[[gnu::always_inline]] inline void chains(T* x) {
    using Vector [[gnu::vector_size(64)]] = T;
    Vector sum[8]{};
    const Vector factor = Vector{} + x[0];
    for (int i = 0; i < 4096; ++i)
        for (Vector& s : sum) s = s * factor + x[1];
    for (const Vector& s : sum)
        for (std::size_t j = 0; j < sizeof(Vector) / sizeof(T); ++j) x[2] += s[j];
}
FAULTLINE_CLONES void chains_double(double* x) { chains(x); }
FAULTLINE_CLONES void chains_float(float* x) { chains(x); }

template <class T>
void add_peak(const char* title, void (*run)(T*)) {
    benchmark::RegisterBenchmark(title, [run](benchmark::State& state) {
        T x[3] = {static_cast<T>(0.5), 1, 0};
        for (auto _ : state) {
            run(x);
            benchmark::DoNotOptimize(x[2]);
        }
        state.counters["multiply_adds"] =
            benchmark::Counter(4096.0 * 8 * 64 / sizeof(T), benchmark::Counter::kIsIterationInvariantRate);
    });
}

void register_all() {
    add_peak("peak/binary64", chains_double);
    add_peak("peak/fp32", chains_float);
    for (const std::ptrdiff_t size : {64, 128}) {
        for (const char* name : {"exact", "fp32-sequential", "fp32-fma", "fp32-pairwise"})
            add(name, size, Input::narrow);
        for (const char* name : {"volta-mma-fp16", "ampere-mma-bf16", "hopper-mma-bf16", "hopper-mma-fp16-f16acc",
                                 "hopper-mma-tf32", "hopper-wgmma-e4m3", "blackwell-tcgen05-e4m3"})
            for (const Input input : {Input::narrow, Input::wide, Input::softmax}) add(name, size, input);
    }
    benchmark::RegisterBenchmark("reference/hopper-mma-bf16/64", [](benchmark::State& state) {
        const Accumulation accumulation = *find_accumulation("hopper-mma-bf16");
        measure(state, tile(64, "bf16", Input::narrow),
                [&](auto a, auto b, auto c) { reference::multiply_accumulate(accumulation, a, b, c); });
    });
}

}  // namespace
}  // namespace faultline

int main(int argc, char** argv) {
    faultline::register_all();
    benchmark::Initialize(&argc, argv);
    benchmark::RunSpecifiedBenchmarks();
}
