// SPDX-License-Identifier: Apache-2.0
// A capture: what attention layers got, and what real kernels returned for it. Read from safetensors, a folder of .npy
// files, or our own HDF5; tensors are found by name:
//   LAYER.q LAYER.k LAYER.v LAYER.do       inputs, [batch, heads, seq, head_dim]; k, v may have fewer heads (GQA, MQA)
//   LAYER.mask                             optional, added to the scaled score: [.., n_q, n_k] with leading dimensions that
//                                          broadcast to [batch, heads]
//   LAYER.KERNEL.dsink                     optional, [heads]: gradient of the sinks' logits
//   LAYER.sink                             optional, [heads]: the logit of each query head's sink, which is in the softmax's
//                                          denominator and has no value
//   LAYER.dropout                          optional, 1 or true where p is kept, shaped as the mask; with it
//   LAYER.keep                             the probability of being kept, one number; or as metadata "keep" of all layers
//   LAYER.softcap                          optional, one number c: scores are c tanh(scale q k^T / c), and the mask is added
//                                          to that; or as metadata "softcap" of all layers
//   LAYER.KERNEL.{o,dq,dk,dv,lse}          what KERNEL returned for exactly these inputs
// Batches of sequences of different length (cu_seqlens, seqused, block_table) become a layer for each sequence, sequences.hpp;
// inputs with scales the numbers that they stand for, scaled_inputs.hpp.
#pragma once

#include <array>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <faultline/plan/plan.hpp>
#include <faultline/tensor/matrix_view.hpp>
#include <faultline/tensor/tensor.hpp>

namespace faultline {

/// The outputs that are attributed.
enum class Output : unsigned char { o, dq, dk, dv };
inline constexpr std::array<Output, 4> all_outputs{Output::o, Output::dq, Output::dk, Output::dv};
[[nodiscard]] std::string_view name(Output output);
[[nodiscard]] std::optional<Output> find_output(std::string_view name);

/// A [batch, heads, rows, cols] array in binary64 (every low format is exact in it), row-major.
struct HeadArray {
    std::ptrdiff_t batch = 0, heads = 0, rows = 0, cols = 0;
    std::vector<double> values;
    Dtype dtype = Dtype::f64;  ///< what the file held

    [[nodiscard]] bool empty() const { return values.empty(); }
    /// Head `head` of batch element `b`: [rows, cols].
    [[nodiscard]] MatrixView<const double> operator()(std::ptrdiff_t b, std::ptrdiff_t head) const {
        return {values.data() + (b * heads + head) * rows * cols, rows, cols};
    }
};

struct ObservedKernel {
    std::string name;                                 ///< "flash"
    std::array<std::optional<HeadArray>, 4> outputs;  ///< by Output
    std::optional<HeadArray> lse;                     ///< [batch, heads, seq, 1]
    std::vector<double> dsink;                        ///< [heads], or empty: of the sinks' logits, over batch and rows
    [[nodiscard]] const std::optional<HeadArray>& operator[](Output output) const {
        return outputs[static_cast<std::size_t>(output)];
    }
};

struct LayerCapture {
    std::string name;               ///< "layer1"
    HeadArray q, k, v, dout;        ///< dout empty: forward only
    std::optional<HeadArray> bias;  ///< [1 or batch, 1 or heads, n_q, n_k]
    bool causal = true;
    std::optional<double> scale;           ///< empty: 1/sqrt(head_dim), the real number
    double softcap = 0;                    ///< 0: none
    std::vector<double> sink;              ///< per query head, or empty
    std::optional<HeadArray> dropout;      ///< [1 or batch, 1 or heads, n_q, n_k], 1 kept, 0 dropped
    double keep = 1;                       ///< what is kept is divided by it
    std::vector<ObservedKernel> observed;  ///< in the order of their names

    [[nodiscard]] Extras extras() const { return {softcap > 0, !sink.empty(), dropout.has_value()}; }
    [[nodiscard]] std::ptrdiff_t heads() const { return q.heads; }
    [[nodiscard]] std::ptrdiff_t kv_heads() const { return k.heads; }
    [[nodiscard]] std::ptrdiff_t head_dim() const { return q.cols; }
};

struct Capture {
    std::string path;
    std::vector<LayerCapture> layers;             ///< in natural order of their names: layer2 before layer10
    std::map<std::string, std::string> metadata;  ///< as the file has it
    std::vector<std::string> unused;              ///< tensors whose names say nothing to us, of any layer or of none
    const LayerCapture& operator[](std::string_view layer) const;  ///< RequestError if missing
};

/// Degenerate inputs that are refused unless asked for, each with one sentence: they are legitimate numerically, and
/// nearly always a mistake in a capture.
struct Allowances {
    bool single_key = false;   ///< a sequence of one key: softmax is constant, dq and dk are 0
    bool masked_rows = false;  ///< rows that see no key: o = 0, gradients 0 by convention
    bool mask_min = false;     ///< a mask of the format's most negative finite number in place of -inf: read as -inf
};

/// Caps that fp32 kernels can work with: scale/c, and c times a tanh, stay far inside its range.
inline constexpr double least_softcap = 1e-30, most_softcap = 1e30;
[[nodiscard]] constexpr bool is_softcap(double c) { return c == 0 || (c >= least_softcap && c <= most_softcap); }

struct CaptureOptions {
    std::vector<std::string> layers;  ///< empty: all
    std::optional<bool> causal;       ///< empty: the metadata's "causal", or true where there is no mask tensor
    std::optional<double>
        scale;  ///< empty: 1/sqrt(head_dim); the metadata's "scale" must agree with it to 1e-6 or is used
    std::optional<double> softcap;  ///< of every layer; empty: what the capture says; 0: none
    Allowances allow;
};

/// Reads and checks a capture. RequestError, one sentence with file, field and expectation: missing tensor, shapes that
/// disagree, NaN or infinity in inputs, zero heads, unknown layer, and the degenerate inputs above.
[[nodiscard]] Capture read_capture(const std::string& path, const CaptureOptions& options = {});
/// The same of tensors that are in memory already; their `source` stands for the file.
[[nodiscard]] Capture capture_of(const TensorSet& tensors, const CaptureOptions& options = {});

/// The layers that have an input, in natural order. RequestError if there is none.
[[nodiscard]] std::vector<std::string> layer_names(const TensorSet& tensors);

}  // namespace faultline
