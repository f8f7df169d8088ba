// SPDX-License-Identifier: Apache-2.0
// Forward and backward of some sequences of a batch: the unit of work of one thread, small enough that its activations
// stay in the second-level cache. Private to this folder.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include <faultline/gpt/attention_layer.hpp>
#include <faultline/gpt/finite_watch.hpp>
#include <faultline/gpt/parameters.hpp>

namespace faultline::gpt {

/// The weights as the passes use them.
template <class T>
struct Weights {
    std::span<const T> full;      ///< after reparametrisation, unrounded: norms, embeddings, and products without casts
    std::span<const T> operands;  ///< operands of products: rounded to bf16 in that precision, else the same array
};

template <class T>
class Chunk {
  public:
    Chunk(const ModelConfig& config, const ParameterLayout& layout) : config_(config), layout_(layout) {}

    /// tokens and targets [sequences, length]. The loss's gradient is added to `gradient` (the layout's, without what the
    /// head's product adds to wte) and to `head_gradient` [vocabulary, width] (that). Statistics stay in layer_statistics().
    double forward_backward(const Weights<T>& weights, const StepContext& context, std::span<const std::int32_t> tokens,
                            std::span<const std::int32_t> targets, int first_sequence, int sequences, int length,
                            std::span<T> gradient, std::span<T> head_gradient);
    /// The sum of the losses alone.
    double loss(const Weights<T>& weights, const StepContext& context, std::span<const std::int32_t> tokens,
                std::span<const std::int32_t> targets, int first_sequence, int sequences, int length);

    [[nodiscard]] const AttentionState<T>& attention(int layer) const { return layers_[at(layer)].attention; }
    [[nodiscard]] int sequences() const { return at_.sequences; }
    /// Sum over tokens of rms(q), rms(k) before any norm: [layer, head].
    [[nodiscard]] std::span<const double> q_rms() const { return q_rms_; }
    [[nodiscard]] std::span<const double> k_rms() const { return k_rms_; }
    [[nodiscard]] const FiniteWatch& finite() const { return finite_; }
    /// q, k, v as attention got them, dO, and x, the normed residual stream that W_Q, W_K, W_V multiply: [tokens, width], of
    /// the last forward_backward; for captures.
    struct Operands {
        MatrixView<const T> q, k, v, dout, x;
    };
    [[nodiscard]] Operands operands(int layer) const;
    /// Keeps dO of every layer from now on.
    void keep_operands(bool keep) { keep_ = keep; }

  private:
    struct Buffer {
        std::vector<T> values;
        std::ptrdiff_t rows = 0, cols = 0;
        MatrixView<T> shape(std::ptrdiff_t r, std::ptrdiff_t c) {
            rows = r;
            cols = c;
            const auto count = static_cast<std::size_t>(r * c);
            values.reserve(count);  // as much and no more: host_memory.hpp knows it in advance
            if (values.size() < count) values.resize(count);
            return view();
        }
        MatrixView<T> view() { return {values.data(), rows, cols}; }
        [[nodiscard]] MatrixView<const T> view() const { return {values.data(), rows, cols}; }
    };
    struct Layer {
        Buffer x_in, norm1, h1, in, q_hat, k_hat, q_inverse, k_inverse, o, gated, x_mid, norm2, h2, u, a, dout;
        AttentionState<T> attention;
    };
    static std::size_t at(int layer) { return static_cast<std::size_t>(layer); }

    void embed(const Weights<T>& weights, std::span<const std::int32_t> tokens);
    void forward(const Weights<T>& weights, std::span<const std::int32_t> tokens);
    void layer_forward(int l, const Weights<T>& weights);
    void attend(int l, const Weights<T>& weights);
    void feed_forward(int l, const Weights<T>& weights);
    void head(const Weights<T>& weights);
    void layer_backward(int l, const Weights<T>& weights, std::span<T> gradient);
    void feed_forward_backward(int l, const Weights<T>& weights, std::span<T> gradient);
    void attend_backward(int l, const Weights<T>& weights, std::span<T> gradient);

    void norm(int layer, int part, MatrixView<const T> x, std::ptrdiff_t gain, std::ptrdiff_t bias,
              const Weights<T>& weights, Buffer& statistics, Buffer& out);
    void round(MatrixView<T> value) const;
    void show(ModelSite site, int layer, int part, MatrixView<T> value,
              std::initializer_list<MatrixView<const T>> operands);
    void look(int layer, const char* name, MatrixView<const T> value) {
        if (context_->find_non_finite) finite_.look(layer, name, value);
    }
    /// y = x W (+ b) from the layout's block at `w`, rounded where products are.
    void linear(MatrixView<const T> x, std::span<const T> weights, std::ptrdiff_t w, std::ptrdiff_t bias,
                MatrixView<T> y, bool rounded);
    [[nodiscard]] bool qk_normed(int l) const;
    [[nodiscard]] std::vector<double> scales(int l) const;
    struct Heads {
        MatrixView<const T> q, k, v;
    };
    [[nodiscard]] Heads heads(int l) const;

    const ModelConfig& config_;
    const ParameterLayout& layout_;
    const StepContext* context_ = nullptr;
    LayerAt at_;
    std::vector<Layer> layers_;
    Buffer x_, branch_, norm_exact_, final_statistics_, final_h_, logits_;
    Buffer dx_, dbranch_, dh_, da_, din_, dgated_, dgate_;
    std::vector<double> q_rms_, k_rms_;
    FiniteWatch finite_;
    FastScratch<T> scratch_;
    bool keep_ = false;
};

}  // namespace faultline::gpt
