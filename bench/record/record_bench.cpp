// SPDX-License-Identifier: Apache-2.0
// What recording costs: the figures behind Storage's defaults (measured choice, level 1, threads). Bytes per second are
// of the uncompressed values; `ratio` is file size over that.
//   noise     float32 white noise: local errors of one site
//   activations  bf16 of normal numbers: captured tensors
//   smooth    float32 counts and row statistics that vary slowly
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <random>
#include <string>

#include <benchmark/benchmark.h>

#include <faultline/record/deflate.hpp>
#include <faultline/record/record_file.hpp>
#include <faultline/record/run_file.hpp>

namespace faultline {
namespace {

constexpr std::int64_t rows = 4096, cols = 1024;

std::string file_name() {
    return (std::filesystem::temp_directory_path() / ("faultline-bench-" + std::to_string(::getpid()))).string();
}

Tensor noise() {
    std::mt19937_64 generator(1);
    std::normal_distribution<float> normal;
    std::vector<float> values(rows * cols);
    for (float& x : values) x = normal(generator);
    return make_tensor<float>("noise", {rows, cols}, values);
}

Tensor activations() {
    const Tensor source = noise();
    std::vector<std::uint16_t> bits;
    for (const float x : source.to_float())
        bits.push_back(static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(x) >> 16));
    return make_tensor<std::uint16_t>("activations", {rows, cols}, bits, Dtype::bf16);
}

Tensor smooth() {
    std::vector<float> values(rows * cols);
    for (std::size_t i = 0; i < values.size(); ++i)
        values[i] = std::round(100 * std::sin(static_cast<float>(i) / 5000));
    return make_tensor<float>("smooth", {rows, cols}, values);
}

void report(benchmark::State& state, const Tensor& tensor, const std::string& path) {
    state.SetBytesProcessed(state.iterations() * static_cast<std::int64_t>(tensor.bytes.size()));
    state.counters["ratio"] =
        static_cast<double>(std::filesystem::file_size(path)) / static_cast<double>(tensor.bytes.size());
    std::filesystem::remove(path);
}

/// Through RecordFile: the file is created, written and renamed, but the sync to disk is part of it too.
void record(benchmark::State& state, Tensor (*make)(), Storage storage) {
    const Tensor tensor = make();
    const std::string path = file_name();
    const Manifest manifest = make_manifest("attribution", "", "", 0);
    const std::vector<Axis> axes{{"row", rows}, {"col", cols}};
    for (auto _ : state) {
        RecordFile file = RecordFile::create(path, manifest, storage);
        file.write_bytes("x", tensor.dtype, tensor.bytes, axes);
        file.commit();
    }
    report(state, tensor, path);
}

/// HDF5's own filters inside H5Dwrite, for comparison.
void filter(benchmark::State& state, Tensor (*make)(), unsigned level) {
    h5::silence();
    const Tensor tensor = make();
    const std::string path = file_name();
    const auto chunk = h5::chunk_shape(tensor.shape, width(tensor.dtype));
    const std::vector<hsize_t> extents(chunk.begin(), chunk.end());
    for (auto _ : state) {
        const h5::Handle file(H5Fcreate(path.c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT), H5Fclose);
        const h5::Handle properties(H5Pcreate(H5P_DATASET_CREATE), H5Pclose);
        H5Pset_chunk(properties, 2, extents.data());
        H5Pset_shuffle(properties);
        H5Pset_deflate(properties, level);
        const h5::Handle type = h5::type_of(tensor.dtype), space = h5::space_of(tensor.shape);
        const h5::Handle dataset(H5Dcreate2(file, "x", type, space, H5P_DEFAULT, properties, H5P_DEFAULT), H5Dclose);
        if (H5Dwrite(dataset, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, tensor.bytes.data()) < 0)
            state.SkipWithError("write failed");
    }
    report(state, tensor, path);
}

/// One step of a run: `series` scalars and as many rows of 48 numbers, each flushed for those who watch.
void run_step(benchmark::State& state) {
    const auto count = static_cast<int>(state.range(0));
    const std::string path = file_name();
    {
        RunFile run = RunFile::create(path, make_manifest("run", "", "", 0));
        const std::vector<Axis> axes{{"layer", 6}, {"head", 8}};
        std::vector<RunFile::Series> scalars, vectors;
        for (int i = 0; i < count; ++i) {
            scalars.push_back(run.series("scalar" + std::to_string(i), Dtype::f64, {}));
            vectors.push_back(run.series("vector" + std::to_string(i), Dtype::f64, axes));
        }
        run.start();
        const std::vector<double> row(48, 0.5);
        std::int64_t step = 0;
        for (auto _ : state) {
            for (int i = 0; i < count; ++i) {
                run.set(scalars[static_cast<std::size_t>(i)], 1.0);
                run.set(vectors[static_cast<std::size_t>(i)], std::span<const double>(row));
            }
            run.end_step(step++);
        }
        run.close();
    }
    std::filesystem::remove(path);
}
BENCHMARK(run_step)->Arg(1)->Arg(8)->Arg(16)->Unit(benchmark::kMicrosecond)->Iterations(3000);

#define FAULTLINE_KINDS(function, label, ...)                                  \
    BENCHMARK_CAPTURE(function, noise_##label, noise, __VA_ARGS__)             \
        ->Unit(benchmark::kMillisecond)                                        \
        ->UseRealTime()                                                        \
        ->MeasureProcessCPUTime();                                             \
    BENCHMARK_CAPTURE(function, activations_##label, activations, __VA_ARGS__) \
        ->Unit(benchmark::kMillisecond)                                        \
        ->UseRealTime()                                                        \
        ->MeasureProcessCPUTime();                                             \
    BENCHMARK_CAPTURE(function, smooth_##label, smooth, __VA_ARGS__)           \
        ->Unit(benchmark::kMillisecond)                                        \
        ->UseRealTime()                                                        \
        ->MeasureProcessCPUTime()

using enum Storage::Compression;
FAULTLINE_KINDS(filter, level4, 4u);
FAULTLINE_KINDS(filter, level1, 1u);
FAULTLINE_KINDS(record, never, (Storage{never, 1, 0}));
FAULTLINE_KINDS(record, direct_level4, (Storage{always, 4, 0}));
FAULTLINE_KINDS(record, direct_level1, (Storage{always, 1, 0}));
FAULTLINE_KINDS(record, measured, (Storage{measured, 1, 0}));

}  // namespace
}  // namespace faultline

BENCHMARK_MAIN();
