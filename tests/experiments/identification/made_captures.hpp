// SPDX-License-Identifier: Apache-2.0
// Captures of kernels that are plans of ours, so that the answer is known; and where the real ones are.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <faultline/attribution/group_run.hpp>
#include <faultline/random/random_stream.hpp>

#include "paths.hpp"

namespace faultline::testing {

struct Made {
    std::string kernel;
    RoundingPlan plan;
};

struct MadeShape {
    std::ptrdiff_t heads = 1, kv_heads = 1, n = 320, d = 32;
    bool gradient = true;
    double query_size = 3;  ///< spreads the logits over some ten units, so that maxima move and p underflows bf16
    std::uint64_t seed = 1;
    std::function<void(LayerCapture&)> extras{};  ///< adds a softcap, sinks, dropout
};

inline HeadArray random_array(std::ptrdiff_t heads, std::ptrdiff_t rows, std::ptrdiff_t cols, double size,
                              std::uint64_t seed) {
    HeadArray a{1, heads, rows, cols, std::vector<double>(static_cast<std::size_t>(heads * rows * cols)), Dtype::bf16};
    const RandomStream stream(seed, 23);
    for (std::size_t i = 0; i < a.values.size(); ++i)
        a.values[i] = round(size * stream.normal(i), bf16, Rounding::nearest_even);
    return a;
}

/// One layer of bf16 normal deviates and, for every plan, what it returns for them, held in binary64: nothing is rounded that
/// the plan does not round.
inline Capture made_capture(const std::vector<Made>& kernels, const MadeShape& shape = {}) {
    Capture capture;
    capture.path = "made";
    LayerCapture& layer = capture.layers.emplace_back();
    layer.name = "layer0";
    layer.q = random_array(shape.heads, shape.n, shape.d, shape.query_size, 10 * shape.seed);
    layer.k = random_array(shape.kv_heads, shape.n, shape.d, 1, 10 * shape.seed + 1);
    layer.v = random_array(shape.kv_heads, shape.n, shape.d, 1, 10 * shape.seed + 2);
    if (shape.gradient) layer.dout = random_array(shape.heads, shape.n, shape.d, 1, 10 * shape.seed + 3);
    if (shape.extras) shape.extras(layer);
    for (const Made& made : kernels) {
        ObservedKernel kernel;
        kernel.name = made.kernel;
        const RoundingPlan plan = for_head_dim(made.plan, static_cast<int>(shape.d), true);
        for (const attribution::Group& group : attribution::groups_of(layer, {}, 0)) {
            const attribution::RunOutputs run = attribution::run_plan(group, plan);
            for (const Output output : all_outputs)
                for (const Matrix& m : run[output]) {
                    auto& array = kernel.outputs[static_cast<std::size_t>(output)];
                    if (!array) array = HeadArray{1, 0, m.rows, m.cols, {}, Dtype::f64};
                    ++array->heads;
                    array->values.insert(array->values.end(), m.values.begin(), m.values.end());
                }
        }
        layer.observed.push_back(std::move(kernel));
    }
    return capture;
}

inline std::filesystem::path captures_folder() {
    if (const char* set = std::getenv("FAULTLINE_CAPTURES")) return set;
    return test::source_dir() / ".." / "shared" / "captures";
}
inline std::string shipped_capture() {
    return (test::source_dir() / "tests/data/collapsed-layer.safetensors").string();
}

}  // namespace faultline::testing
