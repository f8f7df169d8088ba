// SPDX-License-Identifier: Apache-2.0
#include <faultline/gpt_device/pass.hpp>

#include <type_traits>
#include <utility>

#include <cuda_runtime_api.h>

#include <faultline/base/error.hpp>
#include <faultline/gpt_device/cuda_resources.hpp>
#include <faultline/gpt_device/emulated_layers.hpp>
#include <faultline/gpt_device/gate.hpp>
#include <faultline/gpt_device/qk_rows.hpp>

namespace faultline::gpt {
namespace {

using on_device::Bf16;
using on_device::Product;

/// E: type of the operands of products.
template <class E>
class PassOf final : public Pass {
  public:
    using Pass::Pass;

    void forward_backward(Watch watch) override {
        watch_ = watch;
        faulty_ = faults_.any();
        hooked_ = true;
        if (faulty_) faults_.name_tiles();
        forward();
        head(true);
        backward();
        if (faulty_) faults_.join_records();
        on_device::sum_losses(at<double>(memory_.losses), tokens(), scalars(), loss_sum(), stream_);
        join();
    }

    void loss() override {
        watch_ = Watch::nothing;
        faulty_ = hooked_ = false;
        forward();
        head(false);
        on_device::sum_losses(at<double>(memory_.losses), tokens(), nullptr, loss_sum(), stream_);
    }

    void round_weights() override {
        if constexpr (std::is_same_v<E, Bf16>)
            on_device::round_weights(weights(), static_cast<std::size_t>(layout_.size()), at<Bf16>(memory_.operands),
                                     stream_);
    }

    std::ptrdiff_t first_non_finite(const SiteOfPass& site) override {
        auto* found = reinterpret_cast<long long*>(loss_sum() + 1);
        if (site.is_operand)
            on_device::find_non_finite(at<E>(site.region), site.count, found, stream_);
        else
            on_device::find_non_finite(at<float>(site.region), site.count, found, stream_);
        long long index = -1;
        if (cudaMemcpyAsync(&index, found, sizeof index, cudaMemcpyDeviceToHost, stream_) != cudaSuccess ||
            cudaStreamSynchronize(stream_) != cudaSuccess)
            throw WorkError("device cuda: looking for the value that is not finite failed");
        return index;
    }

  private:
    [[nodiscard]] const ModelConfig& model() const { return config_.model; }
    [[nodiscard]] int tokens() const { return config_.batch * config_.model.context; }
    [[nodiscard]] int width() const { return config_.model.width; }
    /// Of q, k, v and, where there is one, the gate.
    [[nodiscard]] int in_columns() const { return static_cast<int>(layout_.in_columns()); }
    [[nodiscard]] const float* weights() const { return at<float>(memory_.weights); }
    [[nodiscard]] const float* vector(std::ptrdiff_t offset) const { return offset < 0 ? nullptr : weights() + offset; }
    [[nodiscard]] const E* operand(std::ptrdiff_t offset) const {
        return offset < 0 ? nullptr : at<E>(memory_.operands) + offset;
    }
    [[nodiscard]] float* gradient(std::ptrdiff_t offset) const { return at<float>(memory_.micro_gradient) + offset; }
    [[nodiscard]] bool head_by_head(int layer) const {
        return how_.on_tensor_cores() && !switched_scales(layer).empty();
    }
    [[nodiscard]] on_device::HeadParts parts_of(int layer) const {
        if (watch_ == Watch::nothing) return {};
        const on_device::PartCounts counts = how_.parts();
        const auto slots = static_cast<std::size_t>(layer) * static_cast<std::size_t>(config_.batch) *
                           static_cast<std::size_t>(model().heads);
        const auto two = [&](std::size_t region, int parts) {
            return at<double>(region) + 2 * slots * static_cast<std::size_t>(parts);
        };
        return {at<float>(memory_.largest) + slots * static_cast<std::size_t>(counts.largest),
                two(memory_.rms, counts.rms), two(memory_.zero_sums, counts.zero_sums),
                watch_ == Watch::rows ? two(memory_.rows, counts.rows) : nullptr};
    }
    [[nodiscard]] on_device::QkRows<E> qk_rows_of(int layer) const {
        const E* in = at<E>(memory_.layers[static_cast<std::size_t>(layer)].in);
        return {in, in + width(), static_cast<std::size_t>(in_columns())};
    }
    [[nodiscard]] on_device::QkGains gains_of(int layer) const {
        const LayerOffsets& of = layout_.layer(layer);
        return {vector(of.q_gain), vector(of.k_gain)};
    }
    [[nodiscard]] const E* gate_of(const LayerRegions& layer) const { return at<E>(layer.in) + 3 * width(); }
    [[nodiscard]] on_device::GateShape gate_shape() const { return {tokens(), width(), in_columns()}; }
    /// q, k and v as attention takes them; QK norm, where it is on, is done here, and `rms`, if not null, filled.
    [[nodiscard]] on_device::AttentionInputs<E> inputs_of(int layer, double* rms) {
        const on_device::QkRows<E> rows = qk_rows_of(layer);
        const auto two_widths = static_cast<std::size_t>(2 * width());
        const bool normed = qk_normed(layer);
        E* hats = normed ? at<E>(memory_.hats) : nullptr;
        if (normed || rms != nullptr)
            on_device::qk_rows(rows, how_.shape(), static_cast<float>(model().norm_epsilon), gains_of(layer), hats,
                               normed ? hats + width() : nullptr, two_widths, rms, stream_);
        const E* v = rows.q + 2 * width();
        if (!normed) return {rows.q, rows.k, v, rows.stride, rows.stride, nullptr};
        const float* scales =
            switched_scales(layer).empty() ? nullptr : at<float>(memory_.scales) + layer * model().heads;
        return {hats, hats + width(), v, two_widths, rows.stride, scales};
    }

    /// y = x W (+ b).
    void linear(const E* x, int in, std::ptrdiff_t w, std::ptrdiff_t b, int out, E* y) {
        products_.run({.m = tokens(), .n = out, .k = in}, x, operand(w), y, operand(b));
    }
    /// dW = x^T dy, perhaps beside what follows on the stream; `read` is behind it: dy stays as it is until then.
    void weight_gradient(const E* x, int in, std::ptrdiff_t w, const E* dy, int out, on_device::Mark& read) {
        run_beside({.transpose_a = true, .m = in, .n = out, .k = tokens()}, x, dy, gradient(w));
        if (products_beside_) read.set(beside_.stream());
    }
    void run_beside(const Product& p, const E* a, const E* b, float* c) {
        if (!products_beside_) return products_.run(p, a, b, c);
        fork();
        products_beside_->run(p, a, b, c);
    }
    /// What comes on beside_ waits for what is on the stream now; and what comes on the stream for all that is on beside_.
    void fork() {
        beside_.follow(stream_);
        forked_ = true;
    }
    void join() {
        if (std::exchange(forked_, false)) beside_.join(stream_);
    }
    /// dx = dy W^T.
    void operand_gradient(const E* dy, int out, std::ptrdiff_t w, int in, E* dx) {
        products_.run({.transpose_b = true, .m = tokens(), .n = in, .k = out}, dy, operand(w), dx);
    }
    /// db = the sum of the rows of dy; b < 0: there is none, or it is made elsewhere.
    void bias_gradient(const E* dy, int out, std::ptrdiff_t b) {
        if (b < 0) return;
        float* parts = room_for_rows(out);
        const int count = on_device::sum_rows(dy, tokens(), out, parts, stream_);
        sums_.push_back({parts, count, out, out, gradient(b)});
    }
    /// That of a branch's bias where its gradient has been altered behind the norm that would have summed it: in its order, so
    /// that a fault of magnitude 0 changes no bit.
    void altered_bias_gradient(const E* dy, std::ptrdiff_t b) {
        if (b < 0) return;
        const int c = width();
        float* parts = room_for(static_cast<std::size_t>(on_device::norm_parts(c)) * static_cast<std::size_t>(c));
        const int count = on_device::sum_rows_as_norm(dy, tokens(), c, parts, stream_);
        sums_.push_back({parts, count, c, c, gradient(b)});
    }
    /// For partial sums, until they are added up.
    [[nodiscard]] float* room_for(std::size_t floats) {
        return at<float>(memory_.partials) + std::exchange(partials_used_, partials_used_ + floats);
    }
    [[nodiscard]] float* room_for_rows(int columns) {
        return room_for(static_cast<std::size_t>(on_device::sum_slabs) * static_cast<std::size_t>(columns));
    }
    void add_up_partials() {
        on_device::add_partials(sums_.data(), static_cast<int>(sums_.size()), stream_);
        sums_.clear();
        partials_used_ = 0;
    }
    [[nodiscard]] on_device::StatisticsRounding rounding() const {
        const NormStatistics where = model().norm_statistics;
        return {where == NormStatistics::bf16 || where == NormStatistics::bf16_forward,
                where == NormStatistics::bf16 || where == NormStatistics::bf16_backward};
    }
    /// The faults at a site of the model, or of the attention's.
    template <class T>
    void faults_at(ModelSite site, int layer, int part, T* values, int columns) {
        if (faulty_) faults_.at(site, layer, part, values, 0, tokens(), columns);
    }
    template <class T>
    void faults_at(Site site, int layer, T* values) {
        if (faulty_) faults_.at(site, layer, values, head_by_head(layer));
    }
    /// Norm `part` of a layer: out = x + the last branch (not at the first norm), h = norm(out).
    void norm(int layer, int part, const float* x, bool has_branch, float* out, std::size_t statistics,
              std::ptrdiff_t gain, std::ptrdiff_t bias, std::size_t h) {
        const int before = part == 1 ? layer : layer - 1;  // the layer that the branch is of
        const bool at_sum = faulty_ && has_branch && faults_.stands_at(ModelSite::residual_add, before);
        const bool at_statistics = faulty_ && faults_.stands_at(ModelSite::layer_norm_statistics, layer);
        if (at_sum) {
            on_device::add(x, at<E>(memory_.dbranch), out, tokens(), width(), stream_);
            faults_at(ModelSite::residual_add, before, 1 - part, out, width());
            x = out;
            has_branch = false;
        }
        on_device::add_and_norm(x, has_branch ? at<E>(memory_.dbranch) : nullptr, out, at<float>(statistics),
                                vector(gain), vector(bias), static_cast<float>(model().norm_epsilon), rounding(),
                                tokens(), width(), at<E>(h), stream_);
        if (!at_statistics) return;
        faults_at(ModelSite::layer_norm_statistics, layer, part, at<float>(statistics), 2);
        on_device::norm_from_statistics(has_branch ? out : x, at<float>(statistics), vector(gain), vector(bias),
                                        tokens(), width(), at<E>(h), stream_);
    }
    /// dout: where the gradient of the branch below is wanted; its_bias: where the sum of dout's rows is the gradient of that
    /// branch's bias, else < 0.
    void norm_backward(std::size_t x, std::size_t statistics, std::ptrdiff_t gain, bool first, E* dout,
                       std::ptrdiff_t its_bias) {
        const int c = width(), columns = on_device::norm_columns(c, model().bias);
        float* parts = room_for(static_cast<std::size_t>(on_device::norm_parts(c)) * static_cast<std::size_t>(columns));
        const int count =
            on_device::norm_backward(at<E>(memory_.dh), at<float>(x), at<float>(statistics), vector(gain), model().bias,
                                     first, tokens(), c, at<float>(memory_.dx), dout, parts, stream_);
        sums_.push_back({parts, count, columns, model().bias ? 2 * c : c, gradient(gain)});
        if (its_bias >= 0) sums_.push_back({parts + 2 * c, count, columns, c, gradient(its_bias)});
    }

    /// du from the gradient dy of the feed-forward's output; and that of b_fc.
    void gelu_gradient(int l, const E* dy, E* du) {
        const int c = width(), columns = 4 * c;
        const LayerOffsets& to = layout_.layer(l);
        operand_gradient(dy, c, to.w_proj, columns, du);
        faults_at(ModelSite::ffn_activation_gradient, l, 1, du, columns);
        float* parts = to.b_fc < 0 ? nullptr : room_for_rows(columns);
        const int count = on_device::gelu_backward(at<E>(memory_.layers[static_cast<std::size_t>(l)].u), tokens(),
                                                   columns, du, parts, stream_);
        if (parts != nullptr) sums_.push_back({parts, count, columns, columns, gradient(to.b_fc)});
    }
    void attention_forward(int l) {
        const LayerRegions& layer = memory_.layers[static_cast<std::size_t>(l)];
        on_device::HeadParts seen = parts_of(l);
        double* rms = std::exchange(seen.rms, nullptr);
        if (how_.rms_by_kernel()) std::swap(rms, seen.rms);
        if (looks_at_all_at_once()) rms = nullptr;
        const on_device::AttentionInputs<E> inputs = inputs_of(l, rms);
        run_attention(l, inputs, seen);
        if (seen.rows != nullptr && how_.on_tensor_cores() && (faulty_ || !looks_at_all_at_once()))
            look_at_rows(l, inputs, stream_);
        faults_at(Site::lse, l, at<float>(layer.lse));
        faults_at(Site::o_cast, l, at<E>(layer.o));
    }
    /// Where no kernel of a layer has the rows of q and k in its hands. (A launch a layer, beside its attention: that then waits for
    /// the multiprocessors, and 4 layers of width 256 take 5% longer.)
    [[nodiscard]] bool looks_at_all_at_once() const {
        bool normed = false;
        for (int l = 0; l < model().layers; ++l) normed |= qk_normed(l);
        return watch_ != Watch::nothing && !how_.rms_by_kernel() && !normed;
    }
    /// Beside the backward, behind the first of its products there: in front of the head's gradient the head would wait for it. Faults
    /// in lse are not in what is seen: with faults each layer's rows are looked at before them.
    void look_at_all() {
        if (!looks_at_all_at_once()) return;
        const auto offset = [this](std::size_t l) { return memory_.plan[memory_.layers[l].in].offset; };
        const std::size_t step = model().layers > 1 ? (offset(1) - offset(0)) / sizeof(E) : 0;
        fork();
        on_device::rms_of_layers<E>(qk_rows_of(0), step, model().layers, how_.shape(), parts_of(0).rms,
                                    beside_.stream());
        if (watch_ != Watch::rows || !how_.on_tensor_cores() || faulty_) return;
        for (int l = 0; l < model().layers; ++l) look_at_rows(l, inputs_of(l, nullptr), beside_.stream());
    }
    void look_at_rows(int l, const on_device::AttentionInputs<E>& inputs, on_device::Stream stream) {
        if constexpr (std::is_same_v<E, Bf16>)
            how_.look_at_rows(inputs, switched_scales(l), at<float>(memory_.layers[static_cast<std::size_t>(l)].lse),
                              parts_of(l).rows, stream);
    }
    void run_attention(int l, const on_device::AttentionInputs<E>& inputs, const on_device::HeadParts& seen) {
        const LayerRegions& layer = memory_.layers[static_cast<std::size_t>(l)];
        if (how_.emulated() != nullptr)
            return emulated_layers().forward(*how_.emulated(), l, inputs, how_.scales(switched_scales(l)), hooked_,
                                             seen, at<E>(layer.o));
        if constexpr (std::is_same_v<E, Bf16>)
            if (how_.on_tensor_cores())
                return how_.forward(l, inputs, switched_scales(l), at<E>(layer.o), at<float>(layer.lse), seen,
                                    faulty_ ? faults_.altered_forward(l) : nullptr,
                                    faults_.any() && faults_.samples_forward(l), stream_);
        on_device::fast_forward(inputs, how_.shape(), at<E>(layer.o), at<float>(layer.lse), seen,
                                faulty_ ? faults_.forward(l) : nullptr, stream_);
    }
    void attention_backward(int l) {
        const LayerRegions& layer = memory_.layers[static_cast<std::size_t>(l)];
        const E* dout = at<E>(memory_.dheads);
        E* din = at<E>(memory_.din);
        const on_device::AttentionInputs<E> inputs = inputs_of(l, nullptr);
        if (kept_ != nullptr) keep(inputs, dout, at<E>(layer.h1), (*kept_)[static_cast<std::size_t>(l)]);
        run_attention_backward(l, inputs, dout, din);
        for (const Site site : {Site::dq_cast, Site::dk_cast, Site::dv_cast}) faults_at(site, l, din);
        if (!qk_normed(l)) return;
        const LayerOffsets& of = layout_.layer(l);  // q's gain, then k's
        on_device::qk_norm_backward(qk_rows_of(l), how_.shape(), static_cast<float>(model().norm_epsilon), gains_of(l),
                                    din, din + width(), static_cast<std::size_t>(in_columns()),
                                    of.q_gain < 0 ? nullptr : gradient(of.q_gain),
                                    room_for(std::size_t{512} * static_cast<std::size_t>(width())), stream_);
    }
    void keep(const on_device::AttentionInputs<E>& inputs, const E* dout, const E* x, Operands& to) {
        const auto c = static_cast<std::size_t>(width());
        const on_device::EmulatedLayers<E> rows = emulated_layers();
        to = {rows.fetch(inputs.q, inputs.qk_stride), rows.fetch(inputs.k, inputs.qk_stride),
              rows.fetch(inputs.v, inputs.v_stride), rows.fetch(dout, c), rows.fetch(x, c)};
    }
    [[nodiscard]] on_device::EmulatedLayers<E> emulated_layers() const {
        return {static_cast<std::size_t>(tokens()), static_cast<std::size_t>(width()),
                static_cast<std::size_t>(how_.shape().gradient_row()), stream_};
    }
    void run_attention_backward(int l, const on_device::AttentionInputs<E>& inputs, const E* dout, E* din) {
        if (how_.emulated() != nullptr)
            return emulated_layers().backward(*how_.emulated(), l, inputs, how_.scales(switched_scales(l)), hooked_,
                                              dout, parts_of(l).zero_sums, din);
        const LayerRegions& layer = memory_.layers[static_cast<std::size_t>(l)];
        if constexpr (std::is_same_v<E, Bf16>)
            if (how_.on_tensor_cores())
                return how_.backward(l, inputs, switched_scales(l), at<E>(layer.o), at<float>(layer.lse), dout, din,
                                     at<char>(memory_.attention), deterministic_, parts_of(l),
                                     faulty_ ? faults_.altered_backward(l) : nullptr,
                                     faults_.any() && faults_.samples_backward(l), stream_);
        float* delta = at<float>(memory_.delta);
        on_device::fast_delta(at<E>(layer.o), dout, how_.shape(), delta, stream_);
        faults_at(Site::delta, l, delta);
        on_device::fast_backward(inputs, at<float>(layer.lse), dout, how_.shape(), delta, din, parts_of(l),
                                 faulty_ ? faults_.backward(l) : nullptr, stream_);
    }

    void forward() {
        const int c = width();
        E* branch = at<E>(memory_.dbranch);
        on_device::embed(ids(input_.tokens), weights() + layout_.wte, weights() + layout_.wpe, tokens(),
                         model().context, c, at<float>(memory_.layers[0].x_in), stream_);
        for (int l = 0; l < model().layers; ++l) {
            const LayerRegions& to = memory_.layers[static_cast<std::size_t>(l)];
            const LayerOffsets& from = layout_.layer(l);
            const float* before =
                l == 0 ? at<float>(to.x_in) : at<float>(memory_.layers[static_cast<std::size_t>(l - 1)].x_mid);
            norm(l, 0, before, l > 0, at<float>(to.x_in), to.statistics1, from.norm1_gain, from.norm1_bias, to.h1);
            linear(at<E>(to.h1), c, from.w_in, from.b_in, in_columns(), at<E>(to.in));
            attention_forward(l);
            if (model().output_gate) on_device::gate(at<E>(to.o), gate_of(to), gate_shape(), at<E>(to.gated), stream_);
            linear(at<E>(to.gated), c, from.w_o, from.b_o, c, branch);
            faults_at(ModelSite::attention_projection, l, 0, branch, c);
            norm(l, 1, at<float>(to.x_in), true, at<float>(to.x_mid), to.statistics2, from.norm2_gain, from.norm2_bias,
                 to.h2);
            linear(at<E>(to.h2), c, from.w_fc, from.b_fc, 4 * c, at<E>(to.u));
            on_device::gelu(at<E>(to.u), static_cast<std::size_t>(tokens()) * 4 * static_cast<std::size_t>(c),
                            at<E>(to.a), stream_);
            linear(at<E>(to.a), 4 * c, from.w_proj, from.b_proj, c, branch);
            faults_at(ModelSite::ffn_output, l, 1, branch, c);
        }
        norm(model().layers, 0, at<float>(memory_.layers.back().x_mid), true, at<float>(memory_.x_out),
             memory_.final_statistics, layout_.final_gain, layout_.final_bias, memory_.final_h);
    }

    /// Logits piece by piece; with gradients, that of wte from the head, and dh.
    void head(bool with_gradient) {
        const int c = width(), vocabulary = model().vocabulary, rows = static_cast<int>(head_tokens(config_));
        E* logits = at<E>(memory_.logits);
        const E* wte = operand(layout_.wte);
        const auto weight =
            static_cast<float>(1.0 / (static_cast<double>(config_.batch) * config_.accumulate * model().context));
        for (int first = 0; first < tokens(); first += rows) {
            const std::size_t begin = static_cast<std::size_t>(first) * static_cast<std::size_t>(c);
            const E* h = at<E>(memory_.final_h) + begin;
            products_.run({.transpose_b = true, .m = rows, .n = vocabulary, .k = c}, h, wte, logits);
            if (faulty_) faults_.at(ModelSite::logits, model().layers, 0, logits, first, rows, vocabulary);
            on_device::cross_entropy(logits, ids(input_.targets) + first, rows, vocabulary,
                                     with_gradient ? weight : 0.0F, static_cast<float>(model().z_loss),
                                     at<double>(memory_.losses) + first, stream_);
            if (!with_gradient) continue;
            run_beside({.transpose_a = true, .m = vocabulary, .n = c, .k = rows, .add = first > 0}, logits, h,
                       gradient(layout_.wte));
            products_.run({.m = rows, .n = c, .k = vocabulary}, logits, wte, at<E>(memory_.dh) + begin);
            if (products_beside_) join();  // logits are written anew
        }
    }

    void backward() {
        const int c = width();
        E* dbranch = at<E>(memory_.dbranch);
        E *da = at<E>(memory_.da), *dh = at<E>(memory_.dh), *dheads = at<E>(memory_.dheads), *din = at<E>(memory_.din);
        // The branch's gradient is altered between a norm and its bias: then that is summed behind the faults.
        const auto altered = [this](int l) { return faulty_ && faults_.stands_at(ModelSite::ffn_output_gradient, l); };
        const auto bias_above = [&](int l) { return altered(l) ? -1 : layout_.layer(l).b_proj; };
        const int last = model().layers - 1;
        norm_backward(memory_.x_out, memory_.final_statistics, layout_.final_gain, true, dbranch, bias_above(last));
        for (int l = last; l >= 0; --l) {
            const LayerRegions& of = memory_.layers[static_cast<std::size_t>(l)];
            const LayerOffsets& to = layout_.layer(l);
            faults_at(ModelSite::ffn_output_gradient, l, 1, dbranch, c);
            weight_gradient(at<E>(of.a), 4 * c, to.w_proj, dbranch, c, dbranch_read_);
            if (altered(l)) altered_bias_gradient(dbranch, to.b_proj);
            da_read_.wait(stream_);
            gelu_gradient(l, dbranch, da);
            weight_gradient(at<E>(of.h2), c, to.w_fc, da, 4 * c, da_read_);
            operand_gradient(da, 4 * c, to.w_fc, c, dh);
            dbranch_read_.wait(stream_);
            norm_backward(of.x_mid, of.statistics2, to.norm2_gain, false, dbranch, to.b_o);
            weight_gradient(at<E>(of.gated), c, to.w_o, dbranch, c, dbranch_read_);
            operand_gradient(dbranch, c, to.w_o, c, dheads);
            din_read_.wait(stream_);
            if (model().output_gate)
                on_device::gate_backward(at<E>(of.o), gate_of(of), gate_shape(), dheads, din + 3 * c, stream_);
            attention_backward(l);
            weight_gradient(at<E>(of.h1), c, to.w_in, din, in_columns(), din_read_);
            if (l == last) look_at_all();
            bias_gradient(din, in_columns(), to.b_in);
            operand_gradient(din, in_columns(), to.w_in, c, dh);
            dbranch_read_.wait(stream_);
            norm_backward(of.x_in, of.statistics1, to.norm1_gain, false, l > 0 ? dbranch : nullptr,
                          l > 0 ? bias_above(l - 1) : -1);
            add_up_partials();
            if (!layer_done) continue;
            join();
            layer_done(l);
        }
        join();
        for (on_device::Mark* mark : {&dbranch_read_, &da_read_, &din_read_}) mark->clear();
        add_up_what_was_seen();
        on_device::embedding_backward(at<float>(memory_.dx), ids(input_.order), ids(input_.starts), model().bf16,
                                      tokens(), model().context, c, model().vocabulary, gradient(layout_.wte),
                                      gradient(layout_.wpe), stream_);
    }

    /// On the stream of the backward. On another, by which the graph would fork once more, all gaps between kernels grow, of this
    /// graph and of the update's, by 0.2 to 0.3 microseconds: 4 layers of width 256 take 3% longer.
    void add_up_what_was_seen() {
        if (watch_ == Watch::nothing) return;
        on_device::LayersByHead by_head;
        for (int l = 0; l < model().layers; ++l)
            if (head_by_head(l)) by_head.set(l);
        on_device::add_up(parts_of(0), how_.parts(), model().layers, config_.batch, model().heads, by_head, scalars(),
                          at<on_device::HeadTotals>(memory_.totals), stream_);
    }

    on_device::Mark dbranch_read_, da_read_, din_read_;  ///< behind the products beside that read these
    std::vector<on_device::Partials> sums_;              ///< that the layer's end adds up
    std::size_t partials_used_ = 0;
    bool forked_ = false;
};

}  // namespace

std::unique_ptr<Pass> make_pass(const TrainConfig& config, const ParameterLayout& layout, const RunMemory& memory,
                                const AttentionOnDevice& how, const DeviceFaults& faults, char* base,
                                on_device::Stream stream, bool deterministic) {
    if (config.model.bf16)
        return std::make_unique<PassOf<Bf16>>(config, layout, memory, how, faults, base, stream, deterministic);
    return std::make_unique<PassOf<float>>(config, layout, memory, how, faults, base, stream, deterministic);
}

}  // namespace faultline::gpt
