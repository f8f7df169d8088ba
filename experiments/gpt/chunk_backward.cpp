// SPDX-License-Identifier: Apache-2.0
// The backward of a chunk, in the order of the chain rule. `din`, `dh`, … are gradients of the values of those names.
#include <faultline/gpt/chunk.hpp>

#include <algorithm>

#include <faultline/gemm/gemm.hpp>
#include <faultline/gpt/row_kernels.hpp>

namespace faultline::gpt {
namespace {

template <class T>
MatrixView<T> columns(MatrixView<T> x, std::ptrdiff_t first, std::ptrdiff_t count) {
    return {x.data + first, x.rows, count, x.stride};
}
template <class T>
T* at_offset(std::span<T> flat, std::ptrdiff_t offset) {
    return offset < 0 ? nullptr : flat.data() + offset;
}

/// y = x W: dW += x^T dy, db += the rows of dy, dx = dy W^T.
template <class T>
void linear_backward(MatrixView<const T> x, std::span<const T> weights, std::ptrdiff_t w, std::ptrdiff_t bias,
                     MatrixView<const T> dy, std::span<T> gradient, MatrixView<T> dx) {
    gemm(Transpose::yes, x, Transpose::no, dy, MatrixView<T>(gradient.data() + w, x.cols, dy.cols), true);
    if (bias >= 0) add_rows(dy, gradient.data() + bias);
    gemm(Transpose::no, dy, Transpose::yes, MatrixView<const T>(weights.data() + w, x.cols, dy.cols), dx);
}

}  // namespace

template <class T>
void Chunk<T>::feed_forward_backward(int l, const Weights<T>& weights, std::span<T> gradient) {
    Layer& layer = layers_[at(l)];
    const std::ptrdiff_t width = config_.width, tokens = x_.rows;
    const LayerOffsets& offsets = layout_.layer(l);
    const bool low = !context_->fp32_ffn;
    const std::span<const T> matrices = low ? weights.operands : weights.full;
    const MatrixView<T> dout = dbranch_.shape(tokens, width), da = da_.shape(tokens, 4 * width);
    std::copy_n(dx_.values.data(), tokens * width, dout.data);
    if (low) round(dout);
    show(ModelSite::ffn_output_gradient, l, 1, dout, {});
    linear_backward(MatrixView<const T>(layer.a.view()), matrices, offsets.w_proj, offsets.b_proj,
                    MatrixView<const T>(dout), gradient, da);
    if (low) round(da);
    show(ModelSite::ffn_activation_gradient, l, 1, da,
         {dout, MatrixView<const T>(matrices.data() + offsets.w_proj, 4 * width, width)});
    look(l, "gradient of the ffn activation", MatrixView<const T>(da));
    gelu_backward(MatrixView<const T>(layer.u.view()), MatrixView<const T>(da), da);
    if (low) round(da);
    const MatrixView<T> dh = dh_.shape(tokens, width);
    linear_backward(MatrixView<const T>(layer.h2.view()), matrices, offsets.w_fc, offsets.b_fc, MatrixView<const T>(da),
                    gradient, dh);
    if (low) round(dh);
    norm_backward(MatrixView<const T>(layer.x_mid.view()), MatrixView<const T>(layer.norm2.view()),
                  weights.full.data() + offsets.norm2_gain, MatrixView<const T>(dh), dx_.view(),
                  gradient.data() + offsets.norm2_gain, at_offset(gradient, offsets.norm2_bias));
    look(l, "gradient of the residual stream", MatrixView<const T>(dx_.view()));
}

template <class T>
void Chunk<T>::attend_backward(int l, const Weights<T>& weights, std::span<T> gradient) {
    Layer& layer = layers_[at(l)];
    const std::ptrdiff_t width = config_.width, tokens = x_.rows;
    const LayerOffsets& offsets = layout_.layer(l);
    const MatrixView<T> din = din_.shape(tokens, layout_.in_columns());
    MatrixView<const T> dout = dgated_.view();
    const MatrixView<const T> in = layer.in.view();
    if (config_.output_gate) {
        const MatrixView<T> dheads = dgate_.shape(tokens, width);
        gate_backward(MatrixView<const T>(layer.o.view()), columns(in, 3 * width, width), dout, dheads,
                      columns(din, 3 * width, width));
        round(dheads);
        round(columns(din, 3 * width, width));
        dout = dheads;
    }
    if (keep_) {
        const MatrixView<T> kept = layer.dout.shape(tokens, width);
        std::copy_n(dout.data, tokens * width, kept.data);
    }
    LayerAt where = at_;
    where.layer = l;
    const Heads of = heads(l);
    const MatrixView<T> dq = columns(din, 0, width), dk = columns(din, width, width);
    attention_layer_backward(config_, *context_, where, of.q, of.k, of.v, MatrixView<const T>(layer.o.view()), dout,
                             scales(l), dq, dk, columns(din, 2 * width, width), layer.attention, scratch_);
    look(l, "gradient of q, k, v", MatrixView<const T>(din));
    if (!qk_normed(l)) return;
    const std::span<const T> full = weights.full;
    const std::ptrdiff_t d = config_.head_dim();
    rms_norm_heads_backward(columns(in, 0, width), MatrixView<const T>(layer.q_inverse.view()), d,
                            at_offset(full, offsets.q_gain), dq, at_offset(gradient, offsets.q_gain));
    rms_norm_heads_backward(columns(in, width, width), MatrixView<const T>(layer.k_inverse.view()), d,
                            at_offset(full, offsets.k_gain), dk, at_offset(gradient, offsets.k_gain));
    round(dq);
    round(dk);
}

template <class T>
void Chunk<T>::layer_backward(int l, const Weights<T>& weights, std::span<T> gradient) {
    expect_not(context_->cancelled);
    Layer& layer = layers_[at(l)];
    const std::ptrdiff_t width = config_.width, tokens = x_.rows;
    const LayerOffsets& offsets = layout_.layer(l);
    feed_forward_backward(l, weights, gradient);
    const MatrixView<T> dout = dbranch_.shape(tokens, width), dheads = dgated_.shape(tokens, width);
    std::copy_n(dx_.values.data(), tokens * width, dout.data);
    round(dout);
    const Buffer& heads_out = config_.output_gate ? layer.gated : layer.o;
    linear_backward(heads_out.view(), weights.operands, offsets.w_o, offsets.b_o, MatrixView<const T>(dout), gradient,
                    dheads);
    round(dheads);
    attend_backward(l, weights, gradient);
    const MatrixView<T> dh = dh_.shape(tokens, width);
    linear_backward(MatrixView<const T>(layer.h1.view()), weights.operands, offsets.w_in, offsets.b_in,
                    MatrixView<const T>(din_.view()), gradient, dh);
    round(dh);
    norm_backward(MatrixView<const T>(layer.x_in.view()), MatrixView<const T>(layer.norm1.view()),
                  weights.full.data() + offsets.norm1_gain, MatrixView<const T>(dh), dx_.view(),
                  gradient.data() + offsets.norm1_gain, at_offset(gradient, offsets.norm1_bias));
    look(l, "gradient of the residual stream", MatrixView<const T>(dx_.view()));
}

template <class T>
double Chunk<T>::forward_backward(const Weights<T>& weights, const StepContext& context,
                                  std::span<const std::int32_t> tokens, std::span<const std::int32_t> targets,
                                  int first_sequence, int sequences, int length, std::span<T> gradient,
                                  std::span<T> head_gradient) {
    context_ = &context;
    at_ = {0, first_sequence, sequences, length};
    forward(weights, tokens);
    const std::ptrdiff_t width = config_.width, rows = x_.rows;
    const MatrixView<T> logits = logits_.view();
    const double loss = cross_entropy(logits, targets, context.loss_weight, config_.z_loss);
    round(logits);  // now their gradient
    const MatrixView<const T> dlogits = logits;
    look(-1, "gradient of the logits", dlogits);
    gemm(Transpose::yes, dlogits, Transpose::no, MatrixView<const T>(final_h_.view()),
         MatrixView<T>(head_gradient.data(), config_.vocabulary, width), true);
    const MatrixView<T> dh = dh_.shape(rows, width), dx = dx_.shape(rows, width);
    gemm(Transpose::no, dlogits, Transpose::no,
         MatrixView<const T>(weights.operands.data() + layout_.wte, config_.vocabulary, width), dh);
    round(dh);
    std::fill_n(dx.data, rows * width, T(0));
    norm_backward(MatrixView<const T>(x_.view()), MatrixView<const T>(final_statistics_.view()),
                  weights.full.data() + layout_.final_gain, MatrixView<const T>(dh), dx,
                  gradient.data() + layout_.final_gain, at_offset(gradient, layout_.final_bias));
    for (int l = config_.layers - 1; l >= 0; --l) layer_backward(l, weights, gradient);
    for (std::ptrdiff_t i = 0; i < rows; ++i) {
        T* token = gradient.data() + layout_.wte + tokens[static_cast<std::size_t>(i)] * width;
        T* position = gradient.data() + layout_.wpe + (i % length) * width;
        for (std::ptrdiff_t j = 0; j < width; ++j) {
            token[j] += dx(i, j);
            position[j] += dx(i, j);
        }
    }
    return loss;
}

template double Chunk<float>::forward_backward(const Weights<float>&, const StepContext&, std::span<const std::int32_t>,
                                               std::span<const std::int32_t>, int, int, int, std::span<float>,
                                               std::span<float>);
template double Chunk<double>::forward_backward(const Weights<double>&, const StepContext&,
                                                std::span<const std::int32_t>, std::span<const std::int32_t>, int, int,
                                                int, std::span<double>, std::span<double>);

}  // namespace faultline::gpt
