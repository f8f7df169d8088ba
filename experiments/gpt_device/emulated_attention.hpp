// SPDX-License-Identifier: Apache-2.0
// Attention of the device's trainer under plans that no kernel of its tensor cores runs: the emulated kernel, head by head, with
// operands and results in the host's memory on the way. Private to this folder.
#pragma once

#include <cstdint>
#include <vector>

#include <faultline/cpu/backend.hpp>
#include <faultline/gpt/attention_layer.hpp>
#include <faultline/gpt_device/crew.hpp>

namespace faultline::gpt {

class EmulatedAttention {
  public:
    /// `model` outlives it. backend: who emulates; null: the card, which is first asked for in a forward.
    EmulatedAttention(const ModelConfig& model, int batch, const AttentionBackend* backend = nullptr);

    /// What is passed on belongs to this micro-step from now on. hook: instruments of heads, or null.
    void begin(std::int64_t step, int micro_step, AttentionHook* hook);

    /// [tokens, width] each, heads side by side, sequence after sequence.
    struct Operands {
        std::vector<float> q, k, v;
    };
    struct Gradients {
        std::vector<float> q, k, v;
    };
    /// What a layer's heads saw, as HeadParts has it with one part each: [batch, heads]. `rows` is empty where it was not asked for.
    struct Seen {
        std::vector<float> largest;
        std::vector<double> zero_sums, rows;
    };
    /// o [tokens, width]. scale: of each head. instrumented: by the hook. rows: entropies and saturated rows are wanted. WorkError.
    std::vector<float> forward(int layer, const Operands& in, const std::vector<double>& scale, bool instrumented,
                               bool rows);
    /// Behind the layer's forward, of the same operands. sums: those of the score gradient are wanted.
    Gradients backward(int layer, const Operands& in, const std::vector<double>& scale, const std::vector<float>& dout,
                       bool instrumented, bool sums);
    /// Of the layer's last forward, and of its backward the sums.
    [[nodiscard]] Seen seen(int layer) const;

  private:
    /// work(sequence), with several at a time.
    void for_sequences(const std::function<void(std::size_t)>& work);
    [[nodiscard]] StepContext context(bool instrumented);
    [[nodiscard]] LayerAt at(int layer, std::size_t sequence) const;
    template <class T>
    [[nodiscard]] MatrixView<T> of_sequence(T* all, std::size_t sequence) const;
    [[nodiscard]] AttentionState<float>& state(int layer, std::size_t sequence) {
        return states_[static_cast<std::size_t>(layer) * batch_ + sequence];
    }

    const ModelConfig& model_;
    std::size_t batch_;
    const AttentionBackend* backend_;
    std::int64_t step_ = 0;
    int micro_step_ = 0;
    AttentionHook* hook_ = nullptr;
    std::vector<AttentionState<float>> states_;  ///< [layer, sequence]
    std::vector<FastScratch<float>> scratch_;    ///< [sequence]
    Crew crew_;
};

}  // namespace faultline::gpt
