// SPDX-License-Identifier: Apache-2.0
// Families of inputs that benign random tensors never reach, each the numeric shape of a kind of fault report. Every value
// of q, k, v and dO is exact in fp32, fp16, bf16, e5m2 and e4m3 alike, so that no difference between formats is one of
// inputs.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <faultline/attribution/capture.hpp>
#include <faultline/format/block.hpp>
#include <faultline/plan/plan.hpp>
#include <faultline/tensor/tensor.hpp>

namespace faultline {

struct InputShape {
    std::ptrdiff_t batch = 1, heads = 2, kv_heads = 2;
    std::ptrdiff_t queries = 128, keys = 128;
    std::ptrdiff_t head_dim = 64;
    bool causal = true;  ///< families with a mask of their own are not causal, whatever this says
};

/// Fewer have no room for what the families put beside each other.
inline constexpr std::ptrdiff_t least_keys = 8;

struct InputFamily {
    std::string_view name;
    std::string_view description;  ///< what the inputs are
    std::string_view reaches;      ///< which fault they show
    bool masked = false;           ///< has a mask tensor
    bool extras = false;           ///< has a softcap, sinks or dropout, or is several sequences: not for the search
    bool sequences = false;        ///< four sequences of different length, one layer each: make_layers
};

/// All of them, in the order of `faultline generate --list`.
[[nodiscard]] std::span<const InputFamily> input_families();
[[nodiscard]] const InputFamily* find_family(std::string_view name);

/// A layer of that family, named as it; depends on the arguments alone. RequestError where the shape cannot hold it: a size
/// below 1, query heads that key heads do not divide, a causal row without a key, fewer than least_keys.
[[nodiscard]] LayerCapture make_inputs(const InputFamily& family, const InputShape& shape, std::uint64_t seed);

/// The layers of a family: one, or one for each of its sequences, NAME[0], NAME[1], … (batch and queries are then not the
/// shape's).
[[nodiscard]] std::vector<LayerCapture> make_layers(const InputFamily& family, const InputShape& shape,
                                                    std::uint64_t seed);

/// What the plan returns for the layer, as an observed kernel of that name in the types that the plan stores. `cancelled` is
/// polled by the threads that run, from tile to tile; where it says so the layer is left as it was.
void observe(LayerCapture& layer, const RoundingPlan& plan, const std::string& kernel, std::uint64_t seed, int threads,
             const std::function<bool()>& cancelled = {});

/// The layers as the tensors of one file: inputs in `dtype`, which must hold them exactly, masks in float32. With `blocks`,
/// one of mxfp8, inputs in that format, LAYER.X and LAYER.X_scale. Layers NAME[0], NAME[1], … that follow one another are
/// written as one packed batch, those of "paged" with k and v in a cache.
[[nodiscard]] TensorSet tensors_of(const std::vector<LayerCapture>& layers, Dtype dtype,
                                   const std::optional<BlockFormat>& blocks = {});

namespace generation {

/// The values that all five formats hold: 0 and +-{1, 1.25, 1.5, 1.75} 2^e with -6 <= e <= 8 (e5m2 has three significant
/// bits; e4m3 is normal from 2^-6 and ends at 448 = 1.75 2^8).
inline constexpr double smallest_value = 0x1p-6;
inline constexpr double largest_value = 448;
/// The value of the grid nearest to x.
[[nodiscard]] double on_grid(double x);

}  // namespace generation
}  // namespace faultline
