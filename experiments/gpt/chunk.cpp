// SPDX-License-Identifier: Apache-2.0
// The forward, and what both passes share; the backward is in chunk_backward.cpp.
#include <faultline/gpt/chunk.hpp>

#include <algorithm>
#include <cmath>

#include <faultline/format/format.hpp>
#include <faultline/gemm/gemm.hpp>
#include <faultline/gpt/row_kernels.hpp>

namespace faultline::gpt {
namespace {

template <class T>
const T* at_offset(std::span<const T> weights, std::ptrdiff_t offset) {
    return offset < 0 ? nullptr : weights.data() + offset;
}

/// Columns [first, first + count).
template <class T>
MatrixView<T> columns(MatrixView<T> x, std::ptrdiff_t first, std::ptrdiff_t count) {
    return {x.data + first, x.rows, count, x.stride};
}

/// Sums over rows of the rms of each head's columns. Squares of a row are one chain of additions; eight rows go side by
/// side, because a chain alone waits for itself.
template <class T>
void add_rms(MatrixView<const T> x, int heads, double* sums) {
    constexpr std::ptrdiff_t together = 8;
    const std::ptrdiff_t d = x.cols / heads;
    for (std::ptrdiff_t first = 0; first < x.rows; first += together)
        for (int h = 0; h < heads; ++h) {
            const T* rows[together];
            for (std::ptrdiff_t i = 0; i < together; ++i) rows[i] = x.row(std::min(first + i, x.rows - 1)) + h * d;
            T squares[together] = {};
            for (std::ptrdiff_t j = 0; j < d; ++j)
                for (std::ptrdiff_t i = 0; i < together; ++i) squares[i] += rows[i][j] * rows[i][j];
            for (std::ptrdiff_t i = 0; i < std::min(together, x.rows - first); ++i)
                sums[h] += std::sqrt(static_cast<double>(squares[i]) / static_cast<double>(d));
        }
}

}  // namespace

template <class T>
void Chunk<T>::round(MatrixView<T> value) const {
    if constexpr (std::is_same_v<T, float>)
        if (config_.bf16) round_bf16(value);
}

template <class T>
void Chunk<T>::show(ModelSite site, int layer, int part, MatrixView<T> value,
                    std::initializer_list<MatrixView<const T>> operands) {
    if constexpr (std::is_same_v<T, float>) {
        ModelHook* hook = context_->model;
        if (hook == nullptr || !hook->watches(site, layer)) return;
        const ModelAt where{.step = context_->step,
                            .micro_step = context_->micro_step,
                            .layer = layer,
                            .part = part,
                            .row0 = static_cast<std::ptrdiff_t>(at_.first_sequence) * at_.length,
                            .name = {}};
        hook->at(site, where, value, std::span(operands.begin(), operands.size()));
    }
}

template <class T>
void Chunk<T>::linear(MatrixView<const T> x, std::span<const T> weights, std::ptrdiff_t w, std::ptrdiff_t bias,
                      MatrixView<T> y, bool rounded) {
    gemm(Transpose::no, x, Transpose::no, MatrixView<const T>(weights.data() + w, x.cols, y.cols), y);
    if (bias >= 0) add_bias(weights.data() + bias, y);
    if (rounded) round(y);
}

template <class T>
void Chunk<T>::norm(int layer, int part, MatrixView<const T> x, std::ptrdiff_t gain, std::ptrdiff_t bias,
                    const Weights<T>& weights, Buffer& statistics, Buffer& out) {
    const MatrixView<T> s = statistics.shape(x.rows, 2);
    norm_statistics(x, static_cast<T>(config_.norm_epsilon), s);
    show(ModelSite::layer_norm_statistics, layer, part, s, {x});
    look(layer, "norm statistics", MatrixView<const T>(s));
    const MatrixView<T> y = out.shape(x.rows, x.cols);
    const auto apply = [&] {
        norm_apply(x, MatrixView<const T>(s), weights.full.data() + gain, at_offset(weights.full, bias), y);
    };
    // What the forward has applied stands in s for the backward.
    const NormStatistics rounded = config_.norm_statistics;
    if (rounded == NormStatistics::bf16_backward) apply();
    const MatrixView<T> exact = norm_exact_.shape(rounded == NormStatistics::bf16_forward ? x.rows : 0, 2);
    std::copy_n(s.data, exact.rows * 2, exact.data);
    if (rounded != NormStatistics::fp32) {
        if constexpr (std::is_same_v<T, float>)
            round_bf16(s);
        else
            for (std::ptrdiff_t i = 0; i < s.rows * 2; ++i) s.data[i] = faultline::round(s.data[i], bf16);
    }
    if (rounded != NormStatistics::bf16_backward) apply();
    std::copy_n(exact.data, exact.rows * 2, s.data);
}

template <class T>
bool Chunk<T>::qk_normed(int l) const {
    if (config_.qk_norm != QkNorm::none) return true;
    return context_->qk_switch != nullptr && (*context_->qk_switch)[at(l)].on;
}

template <class T>
std::vector<double> Chunk<T>::scales(int l) const {
    const double standard = 1.0 / std::sqrt(static_cast<double>(config_.head_dim()));
    if (config_.qk_norm == QkNorm::none && qk_normed(l)) return (*context_->qk_switch)[at(l)].logit_scale;
    return std::vector<double>(static_cast<std::size_t>(config_.heads), standard);
}

template <class T>
typename Chunk<T>::Heads Chunk<T>::heads(int l) const {
    const Layer& layer = layers_[at(l)];
    const std::ptrdiff_t width = config_.width;
    const MatrixView<const T> in = layer.in.view();
    if (qk_normed(l)) return {layer.q_hat.view(), layer.k_hat.view(), columns(in, 2 * width, width)};
    return {columns(in, 0, width), columns(in, width, width), columns(in, 2 * width, width)};
}

template <class T>
void Chunk<T>::embed(const Weights<T>& weights, std::span<const std::int32_t> tokens) {
    const std::ptrdiff_t width = config_.width;
    const MatrixView<T> x = x_.shape(static_cast<std::ptrdiff_t>(tokens.size()), width);
    for (std::ptrdiff_t i = 0; i < x.rows; ++i) {
        const T* token = weights.full.data() + layout_.wte + tokens[static_cast<std::size_t>(i)] * width;
        const T* position = weights.full.data() + layout_.wpe + (i % at_.length) * width;
        for (std::ptrdiff_t j = 0; j < width; ++j) x(i, j) = token[j] + position[j];
    }
    look(-1, "embedding", MatrixView<const T>(x));
}

template <class T>
void Chunk<T>::attend(int l, const Weights<T>& weights) {
    Layer& layer = layers_[at(l)];
    const std::ptrdiff_t width = config_.width, tokens = x_.rows;
    const LayerOffsets& offsets = layout_.layer(l);
    const MatrixView<T> in = layer.in.shape(tokens, layout_.in_columns());
    linear(layer.h1.view(), weights.operands, offsets.w_in, offsets.b_in, in, true);
    look(l, "q, k, v", MatrixView<const T>(in));
    const MatrixView<const T> q = columns(MatrixView<const T>(in), 0, width);
    const MatrixView<const T> k = columns(MatrixView<const T>(in), width, width);
    add_rms(q, config_.heads, q_rms_.data() + l * config_.heads);
    add_rms(k, config_.heads, k_rms_.data() + l * config_.heads);
    if (qk_normed(l)) {
        const std::ptrdiff_t d = config_.head_dim();
        const auto epsilon = static_cast<T>(config_.norm_epsilon);
        const MatrixView<T> q_hat = layer.q_hat.shape(tokens, width), k_hat = layer.k_hat.shape(tokens, width);
        rms_norm_heads(q, d, at_offset(weights.full, offsets.q_gain), epsilon, q_hat,
                       layer.q_inverse.shape(tokens, config_.heads));
        rms_norm_heads(k, d, at_offset(weights.full, offsets.k_gain), epsilon, k_hat,
                       layer.k_inverse.shape(tokens, config_.heads));
        round(q_hat);
        round(k_hat);
    }
    LayerAt where = at_;
    where.layer = l;
    const Heads of = heads(l);
    const MatrixView<T> o = layer.o.shape(tokens, width);
    attention_layer_forward(config_, *context_, where, of.q, of.k, of.v, scales(l), o, layer.attention, scratch_);
    look(l, "attention output", MatrixView<const T>(o));
    if (!config_.output_gate) return;
    const MatrixView<T> gated = layer.gated.shape(tokens, width);
    gate(MatrixView<const T>(o), columns(MatrixView<const T>(in), 3 * width, width), gated);
    round(gated);
}

template <class T>
void Chunk<T>::feed_forward(int l, const Weights<T>& weights) {
    Layer& layer = layers_[at(l)];
    const std::ptrdiff_t width = config_.width, tokens = x_.rows;
    const LayerOffsets& offsets = layout_.layer(l);
    const bool low = !context_->fp32_ffn;
    const std::span<const T> matrices = low ? weights.operands : weights.full;
    const MatrixView<T> u = layer.u.shape(tokens, 4 * width), a = layer.a.shape(tokens, 4 * width);
    if (low) round(layer.h2.view());
    linear(layer.h2.view(), matrices, offsets.w_fc, offsets.b_fc, u, low);
    gelu(MatrixView<const T>(u), a);
    if (low) round(a);
    look(l, "ffn activation", MatrixView<const T>(a));
    const MatrixView<T> out = branch_.shape(tokens, width);
    linear(layer.a.view(), matrices, offsets.w_proj, offsets.b_proj, out, low);
    show(ModelSite::ffn_output, l, 1, out,
         {layer.a.view(), MatrixView<const T>(matrices.data() + offsets.w_proj, 4 * width, width)});
    look(l, "ffn output", MatrixView<const T>(out));
}

template <class T>
void Chunk<T>::layer_forward(int l, const Weights<T>& weights) {
    expect_not(context_->cancelled);
    Layer& layer = layers_[at(l)];
    const std::ptrdiff_t width = config_.width, tokens = x_.rows;
    const LayerOffsets& offsets = layout_.layer(l);
    const MatrixView<T> x = x_.view();
    const auto add_branch = [&](int part, MatrixView<const T> before) {
        add(MatrixView<const T>(branch_.view()), x);
        show(ModelSite::residual_add, l, part, x, {before, branch_.view()});
        look(l, "residual stream", MatrixView<const T>(x));
    };
    const auto keep = [&](Buffer& buffer) { std::copy_n(x.data, tokens * width, buffer.shape(tokens, width).data); };
    keep(layer.x_in);
    norm(l, 0, x, offsets.norm1_gain, offsets.norm1_bias, weights, layer.norm1, layer.h1);
    round(layer.h1.view());
    attend(l, weights);
    const MatrixView<T> out = branch_.shape(tokens, width);
    const MatrixView<const T> heads_out = config_.output_gate ? layer.gated.view() : layer.o.view();
    linear(heads_out, weights.operands, offsets.w_o, offsets.b_o, out, true);
    show(ModelSite::attention_projection, l, 0, out,
         {heads_out, MatrixView<const T>(weights.operands.data() + offsets.w_o, width, width)});
    look(l, "attention projection", MatrixView<const T>(out));
    add_branch(0, layer.x_in.view());
    keep(layer.x_mid);
    norm(l, 1, x, offsets.norm2_gain, offsets.norm2_bias, weights, layer.norm2, layer.h2);
    feed_forward(l, weights);
    add_branch(1, layer.x_mid.view());
}

template <class T>
void Chunk<T>::head(const Weights<T>& weights) {
    const std::ptrdiff_t width = config_.width;
    norm(config_.layers, 0, x_.view(), layout_.final_gain, layout_.final_bias, weights, final_statistics_, final_h_);
    round(final_h_.view());
    const MatrixView<const T> wte(weights.operands.data() + layout_.wte, config_.vocabulary, width);
    const MatrixView<T> logits = logits_.shape(x_.rows, config_.vocabulary);
    gemm(Transpose::no, MatrixView<const T>(final_h_.view()), Transpose::yes, wte, logits);
    round(logits);
    show(ModelSite::logits, config_.layers, 0, logits, {final_h_.view(), wte});
    look(-1, "logits", MatrixView<const T>(logits));
}

template <class T>
void Chunk<T>::forward(const Weights<T>& weights, std::span<const std::int32_t> tokens) {
    layers_.resize(static_cast<std::size_t>(config_.layers));
    const auto slots = static_cast<std::size_t>(config_.layers * config_.heads);
    q_rms_.assign(slots, 0);
    k_rms_.assign(slots, 0);
    finite_ = {};
    embed(weights, tokens);
    for (int l = 0; l < config_.layers; ++l) layer_forward(l, weights);
    head(weights);
}

template <class T>
double Chunk<T>::loss(const Weights<T>& weights, const StepContext& context, std::span<const std::int32_t> tokens,
                      std::span<const std::int32_t> targets, int first_sequence, int sequences, int length) {
    context_ = &context;
    at_ = {0, first_sequence, sequences, length};
    forward(weights, tokens);
    return cross_entropy_loss(MatrixView<const T>(logits_.view()), targets);
}

template <class T>
typename Chunk<T>::Operands Chunk<T>::operands(int layer) const {
    const Heads of = heads(layer);
    const Layer& kept = layers_[at(layer)];
    return {of.q, of.k, of.v, kept.dout.view(), kept.h1.view()};
}

template class Chunk<float>;
template class Chunk<double>;

}  // namespace faultline::gpt
