// SPDX-License-Identifier: Apache-2.0
// A layer's attention by EmulatedAttention where operands and results are the device's: there and back. Private to this folder.
#pragma once

#include <cstddef>
#include <vector>

#include <faultline/gpt_device/attention.hpp>
#include <faultline/gpt_device/cuda_resources.hpp>
#include <faultline/gpt_device/emulated_attention.hpp>
#include <faultline/gpt_device/host_rows.hpp>

namespace faultline::gpt::on_device {

/// E: type of the operands of products. Every function waits; WorkError where the device, or the emulation, fails.
template <class E>
class EmulatedLayers {
  public:
    /// gradient_row: elements from row to row of dq, dk and dv, which stand side by side.
    EmulatedLayers(std::size_t tokens, std::size_t width, std::size_t gradient_row, Stream stream)
        : tokens_(tokens), width_(width), gradient_row_(gradient_row), stream_(stream) {}

    /// [tokens, width] from rows `stride` elements apart.
    [[nodiscard]] std::vector<float> fetch(const E* from, std::size_t stride) const {
        return fetch_rows(from, tokens_, width_, stride, stream_);
    }
    /// o [tokens, width]; seen: the parts of the layer that are wanted, one a head of a sequence.
    void forward(EmulatedAttention& by, int layer, const AttentionInputs<E>& in, const std::vector<double>& scales,
                 bool instrumented, const HeadParts& seen, E* o) const {
        store(by.forward(layer, operands(in), scales, instrumented, seen.rows != nullptr), o, width_);
        const EmulatedAttention::Seen saw = by.seen(layer);
        if (seen.largest != nullptr)
            upload(seen.largest, saw.largest.data(), saw.largest.size() * sizeof(float), stream_);
        if (seen.rows != nullptr) upload(seen.rows, saw.rows.data(), saw.rows.size() * sizeof(double), stream_);
        wait(stream_);
    }
    /// din: dq, dk and dv from dout [tokens, width]; sums: HeadParts::zero_sums, or null.
    void backward(EmulatedAttention& by, int layer, const AttentionInputs<E>& in, const std::vector<double>& scales,
                  bool instrumented, const E* dout, double* sums, E* din) const {
        const EmulatedAttention::Gradients gradients =
            by.backward(layer, operands(in), scales, fetch(dout, width_), instrumented, sums != nullptr);
        store(gradients.q, din, gradient_row_);
        store(gradients.k, din + width_, gradient_row_);
        store(gradients.v, din + 2 * width_, gradient_row_);
        const EmulatedAttention::Seen saw = by.seen(layer);
        if (sums != nullptr) upload(sums, saw.zero_sums.data(), saw.zero_sums.size() * sizeof(double), stream_);
        wait(stream_);
    }

  private:
    [[nodiscard]] EmulatedAttention::Operands operands(const AttentionInputs<E>& in) const {
        return {fetch(in.q, in.qk_stride), fetch(in.k, in.qk_stride), fetch(in.v, in.v_stride)};
    }
    void store(const std::vector<float>& from, E* to, std::size_t stride) const {
        store_rows(from, tokens_, width_, to, stride, stream_);
    }

    std::size_t tokens_, width_, gradient_row_;
    Stream stream_;
};

}  // namespace faultline::gpt::on_device
