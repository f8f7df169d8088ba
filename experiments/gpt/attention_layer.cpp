// SPDX-License-Identifier: Apache-2.0
#include <faultline/gpt/attention_layer.hpp>

#include <cmath>

#include <faultline/cpu/backend.hpp>
#include <faultline/cpu/row_sums.hpp>
#include <faultline/random/random_stream.hpp>

namespace faultline::gpt {
namespace {

/// Rows of one sequence, columns of one head.
template <class T>
MatrixView<T> head_of(MatrixView<T> x, const LayerAt& at, int sequence, int head, int head_dim) {
    return {x.data + static_cast<std::ptrdiff_t>(sequence) * at.length * x.stride + head * head_dim, at.length,
            head_dim, x.stride};
}

template <class T>
Matrix doubles(MatrixView<const T> x) {
    Matrix m(x.rows, x.cols);
    for (std::ptrdiff_t i = 0; i < x.rows; ++i)
        for (std::ptrdiff_t j = 0; j < x.cols; ++j) m(i, j) = static_cast<double>(x(i, j));
    return m;
}

template <class T>
void assign(const Matrix& from, MatrixView<T> to) {
    for (std::ptrdiff_t i = 0; i < to.rows; ++i)
        for (std::ptrdiff_t j = 0; j < to.cols; ++j) to(i, j) = static_cast<T>(from(i, j));
}

/// Sums the score gradient of the emulated kernel, after whatever changes it, where and in the unit that all read it.
class ZeroSumWatch final : public Instrument {
  public:
    ZeroSumWatch(HeadStatistics& statistics, const HeadGroup& group, const RoundingPlan& plan)
        : statistics_(statistics), gradient_(score_gradient_site(plan.schedule, group.scale, group.softcap > 0)) {}
    [[nodiscard]] bool watches(Site site) const override { return site == gradient_.site; }
    void at(Site, const TileAt& where, MatrixView<double> value, MatrixView<const double>) override {
        TileAt alone = where;
        alone.query0 = 0;
        RowSums rows(static_cast<std::size_t>(value.rows));
        rows.add(alone, value, gradient_.unit);
        for (const double r : rows.sum) statistics_.zero_sum += r;
        for (const double a : rows.magnitude) statistics_.zero_sum_abs += a;
    }

  private:
    HeadStatistics& statistics_;
    ScoreGradientSite gradient_;
};

const AttentionBackend& emulating(const StepContext& context) {
    return context.emulating != nullptr ? *context.emulating : cpu_backend();
}

/// Whether the hook watches a site that the fast kernel does not show. Asked once a layer: there are many sites.
bool watches_beyond_fast(const StepContext& context, int layer) {
    if (context.attention == nullptr) return false;
    for (const SiteInfo& site : sites())
        if (!is_fast_site(site.site) && context.attention->watches(context.step, layer, site.site)) return true;
    return false;
}

/// One head of one sequence on its way through the layer. It is emulated where it has a plan, or where its hook watches a
/// site that the fast kernel does not show.
template <class T>
class HeadPass {
  public:
    HeadPass(const ModelConfig& config, const StepContext& context, const LayerAt& at, int sequence, int head,
             double scale, bool backward, bool watched_beyond_fast)
        : config_(config),
          context_(context),
          at_(at),
          head_(head),
          where_{.layer = at.layer, .head = head},
          options_{.scale = scale, .softcap = config.softcap, .bf16 = config.bf16, .cancelled = context.cancelled},
          emulated_(watched_beyond_fast || config.plan(at.layer, head) != nullptr) {
        if (context.attention != nullptr)
            instrument_ = context.attention->instrument(
                {context.step, context.micro_step, at.layer, head, at.first_sequence + sequence, backward});
    }
    [[nodiscard]] bool emulated() const { return emulated_; }
    [[nodiscard]] const FastOptions& options() const { return options_; }
    [[nodiscard]] Instrument* instrument() const { return instrument_.get(); }
    [[nodiscard]] const TileAt& where() const { return where_; }

    /// The plan, settled for this head size: the head's own, or the fast kernel's.
    [[nodiscard]] RoundingPlan plan() const {
        const RoundingPlan* own = config_.plan(at_.layer, head_);
        return own != nullptr ? for_head_dim(*own, config_.head_dim()) : fast_plan(config_.bf16);
    }
    [[nodiscard]] HeadGroup group(const Matrix& q, const Matrix& k, const Matrix& v, int sequence) const {
        HeadGroup g;
        g.q = {q.view()};
        g.k = k.view();
        g.v = v.view();
        g.scale = options_.scale;
        g.softcap = options_.softcap;
        g.first_head = head_;
        g.layer = at_.layer;
        // Stochastic rounding draws anew in every sequence of every step.
        g.seed = RandomStream(0, context_.step, context_.micro_step, at_.first_sequence + sequence).key;
        return g;
    }

  private:
    const ModelConfig& config_;
    const StepContext& context_;
    const LayerAt& at_;
    int head_;
    TileAt where_;
    FastOptions options_;
    bool emulated_;
    std::unique_ptr<Instrument> instrument_;
};

}  // namespace

template <class T>
void attention_layer_forward(const ModelConfig& config, const StepContext& context, const LayerAt& at,
                             MatrixView<const T> q, MatrixView<const T> k, MatrixView<const T> v,
                             const std::vector<double>& scale, MatrixView<T> o, AttentionState<T>& state,
                             FastScratch<T>& scratch) {
    const auto count = static_cast<std::size_t>(at.sequences * config.heads);
    const auto length = static_cast<std::size_t>(at.length);
    state.lse.resize(count * length);
    state.emulated.resize(count);
    state.heads.assign(count, HeadStatistics{.detailed = context.detailed});
    const bool beyond = watches_beyond_fast(context, at.layer);
    for (int b = 0; b < at.sequences; ++b)
        for (int h = 0; h < config.heads; ++h) {
            const auto slot = static_cast<std::size_t>(b * config.heads + h);
            const HeadPass<T> pass(config, context, at, b, h, scale[static_cast<std::size_t>(h)], false, beyond);
            const auto head = [&](auto x) { return head_of(x, at, b, h, config.head_dim()); };
            HeadStatistics& statistics = state.heads[slot];
            expect_not(context.cancelled);
            if (!pass.emulated()) {
                fast_forward(head(q), head(k), head(v), pass.options(), head(o),
                             std::span(state.lse).subspan(slot * length, length), statistics, scratch,
                             pass.instrument(), pass.where());
                continue;
            }
            const Matrix dq = doubles(head(q)), dk = doubles(head(k)), dv = doubles(head(v));
            state.emulated[slot] =
                emulating(context).forward(pass.group(dq, dk, dv, b), pass.plan(), pass.instrument());
            assign(state.emulated[slot].heads[0].o, head(o));
            head_statistics(head(q), head(k), pass.options(), statistics, scratch);
        }
}

template <class T>
void attention_layer_backward(const ModelConfig& config, const StepContext& context, const LayerAt& at,
                              MatrixView<const T> q, MatrixView<const T> k, MatrixView<const T> v,
                              MatrixView<const T> o, MatrixView<const T> dout, const std::vector<double>& scale,
                              MatrixView<T> dq, MatrixView<T> dk, MatrixView<T> dv, AttentionState<T>& state,
                              FastScratch<T>& scratch) {
    const auto length = static_cast<std::size_t>(at.length);
    const bool beyond = watches_beyond_fast(context, at.layer);
    for (int b = 0; b < at.sequences; ++b)
        for (int h = 0; h < config.heads; ++h) {
            const auto slot = static_cast<std::size_t>(b * config.heads + h);
            const HeadPass<T> pass(config, context, at, b, h, scale[static_cast<std::size_t>(h)], true, beyond);
            const auto head = [&](auto x) { return head_of(x, at, b, h, config.head_dim()); };
            HeadStatistics& statistics = state.heads[slot];
            expect_not(context.cancelled);
            if (!pass.emulated()) {
                fast_backward(head(q), head(k), head(v), head(o),
                              std::span<const T>(state.lse).subspan(slot * length, length), head(dout), pass.options(),
                              head(dq), head(dk), head(dv), statistics, scratch, pass.instrument(), pass.where());
                continue;
            }
            const Matrix mq = doubles(head(q)), mk = doubles(head(k)), mv = doubles(head(v)), md = doubles(head(dout));
            HeadGroup group = pass.group(mq, mk, mv, b);
            group.dout = {md.view()};
            const RoundingPlan plan = pass.plan();
            ZeroSumWatch watch(statistics, group, plan);
            std::vector<Instrument*> parts;
            if (pass.instrument() != nullptr) parts.push_back(pass.instrument());
            if (context.zero_sums) parts.push_back(&watch);
            Instruments instruments(parts);
            const GroupBackward gradient =
                emulating(context).backward(group, state.emulated[slot], plan, parts.empty() ? nullptr : &instruments);
            assign(gradient.dq[0], head(dq));
            assign(gradient.dk, head(dk));
            assign(gradient.dv, head(dv));
            state.emulated[slot] = {};
        }
}

#define FAULTLINE_INSTANTIATE(T)                                                                                       \
    template void attention_layer_forward(const ModelConfig&, const StepContext&, const LayerAt&, MatrixView<const T>, \
                                          MatrixView<const T>, MatrixView<const T>, const std::vector<double>&,        \
                                          MatrixView<T>, AttentionState<T>&, FastScratch<T>&);                         \
    template void attention_layer_backward(                                                                            \
        const ModelConfig&, const StepContext&, const LayerAt&, MatrixView<const T>, MatrixView<const T>,              \
        MatrixView<const T>, MatrixView<const T>, MatrixView<const T>, const std::vector<double>&, MatrixView<T>,      \
        MatrixView<T>, MatrixView<T>, AttentionState<T>&, FastScratch<T>&);
FAULTLINE_INSTANTIATE(float)
FAULTLINE_INSTANTIATE(double)
#undef FAULTLINE_INSTANTIATE

}  // namespace faultline::gpt
