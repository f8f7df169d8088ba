// SPDX-License-Identifier: Apache-2.0
// Where a model's parameters lie in one flat array, and what they begin as. Weights are [in, out], y = x W.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <faultline/gpt/hooks.hpp>
#include <faultline/gpt/model_config.hpp>
#include <faultline/tensor/matrix_view.hpp>

namespace faultline::gpt {

/// One parameter: a view of the flat array. W_Q, W_K, W_V (and W_gate) of a layer lie side by side in one [width, 3 width]
/// matrix, so that one product makes q, k and v; hence a stride.
struct Parameter {
    std::string name;  ///< "layer0.w_q"
    int layer = -1;
    Role role = Role::gain;
    std::ptrdiff_t offset = 0;
    std::ptrdiff_t rows = 1;
    std::ptrdiff_t cols = 0;
    std::ptrdiff_t stride = 0;
    double deviation = 0;  ///< of the normal numbers it begins as
    double start = 0;      ///< or this value, where deviation is 0

    template <class T>
    [[nodiscard]] MatrixView<T> of(std::span<T> flat) const {
        return {flat.data() + offset, rows, cols, stride};
    }
    [[nodiscard]] bool is_matrix() const { return role != Role::gain; }
};

/// Offsets of a layer's blocks; -1 where the model has none.
struct LayerOffsets {
    std::ptrdiff_t norm1_gain = -1, norm1_bias = -1, w_in = -1, b_in = -1, q_gain = -1, k_gain = -1, w_o = -1, b_o = -1;
    std::ptrdiff_t norm2_gain = -1, norm2_bias = -1, w_fc = -1, b_fc = -1, w_proj = -1, b_proj = -1;
};

class ParameterLayout {
  public:
    explicit ParameterLayout(const ModelConfig& config);
    [[nodiscard]] std::span<const Parameter> all() const { return all_; }
    [[nodiscard]] std::ptrdiff_t size() const { return size_; }  ///< of the flat array
    [[nodiscard]] std::size_t layers() const { return layers_.size(); }
    [[nodiscard]] const LayerOffsets& layer(int l) const { return layers_[static_cast<std::size_t>(l)]; }
    /// Columns of w_in: q, k, v and, with a gate, the gate.
    [[nodiscard]] std::ptrdiff_t in_columns() const { return in_columns_; }
    std::ptrdiff_t wte = 0, wpe = 0, final_gain = 0, final_bias = -1;
    /// The parameter of this name; std::out_of_range.
    [[nodiscard]] const Parameter& at(std::string_view name) const;
    /// Index in all() of the reparametrisation scale of matrix parameter i, or -1.
    [[nodiscard]] int gamma_of(std::size_t parameter) const { return gamma_[parameter]; }

    /// GPT-2's start: normal of deviation 0.02 for matrices, W_O and the feed-forward's second by 1/sqrt(2 layers) of that,
    /// gains 1, biases 0. Element (i, j) of a parameter is a function of (seed, index of the parameter, i cols + j) alone.
    template <class T>
    void initialize(std::uint64_t seed, std::span<T> flat, int threads = 1) const;

  private:
    std::ptrdiff_t add(const std::string& name, int layer, Role role, std::ptrdiff_t rows, std::ptrdiff_t cols,
                       double deviation, double start);
    std::vector<Parameter> all_;
    std::vector<LayerOffsets> layers_;
    std::vector<int> gamma_;
    std::ptrdiff_t in_columns_ = 0;
    std::ptrdiff_t size_ = 0;
};

}  // namespace faultline::gpt
