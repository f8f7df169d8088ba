// SPDX-License-Identifier: Apache-2.0
// What it costs to follow three singular directions of a weight that moves by a thousandth of its norm a step, against the
// decomposition from nothing and the eigenvalues alone that the trainer records.
#include <benchmark/benchmark.h>

#include <Eigen/SVD>

#include <faultline/probes/leading.hpp>
#include <faultline/probes/spectra.hpp>
#include <faultline/random/random_stream.hpp>

namespace faultline {
namespace {

Eigen::MatrixXd gaussian(Eigen::Index n, std::uint64_t seed) {
    const RandomStream stream(seed);
    Eigen::MatrixXd m(n, n);
    for (Eigen::Index i = 0; i < m.size(); ++i) m.data()[i] = stream.normal(static_cast<std::uint64_t>(i));
    return m;
}

/// A weight as a trained one is: a few directions above the noise.
Eigen::MatrixXd weight(Eigen::Index n) {
    Eigen::MatrixXd w = gaussian(n, 1) / std::sqrt(static_cast<double>(n));
    for (Eigen::Index i = 0; i < 6; ++i) w(i, i) += static_cast<double>(20 - 2 * i);
    return w;
}

void warm_iteration(benchmark::State& state) {
    const Eigen::Index n = state.range(0);
    const Eigen::MatrixXd start = weight(n), step = gaussian(n, 2) * (1e-3 * start.norm() / static_cast<double>(n));
    LeadingDirections found(3);
    found.update(start);
    double iterations = 0, t = 0;
    for (auto _ : state) {
        t += 1;
        const Eigen::MatrixXd w = start + (static_cast<int>(t) % 2) * step;
        iterations += found.update(w);
    }
    state.counters["iterations"] = iterations / static_cast<double>(state.iterations());
}
BENCHMARK(warm_iteration)->Arg(64)->Arg(256)->Arg(768)->Unit(benchmark::kMicrosecond);

void full_svd(benchmark::State& state) {
    const Eigen::MatrixXd w = weight(state.range(0));
    for (auto _ : state)
        benchmark::DoNotOptimize(Eigen::BDCSVD<Eigen::MatrixXd>(w, Eigen::ComputeThinU | Eigen::ComputeThinV));
}
BENCHMARK(full_svd)->Arg(64)->Arg(256)->Unit(benchmark::kMicrosecond);

void eigenvalues(benchmark::State& state) {
    const Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor> w =
        weight(state.range(0)).cast<float>();
    for (auto _ : state) benchmark::DoNotOptimize(singular_values({w.data(), w.rows(), w.cols()}, 3));
}
BENCHMARK(eigenvalues)->Arg(64)->Arg(256)->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace faultline

BENCHMARK_MAIN();
