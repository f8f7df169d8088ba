// SPDX-License-Identifier: Apache-2.0
#include <faultline/gpt/trainer.hpp>

#include <algorithm>
#include <cmath>
#include <limits>

#include <fmt/format.h>

#include <faultline/gpt/share.hpp>
#include <faultline/ranks/sums.hpp>

namespace faultline::gpt {
namespace {

constexpr double nan_value = std::numeric_limits<double>::quiet_NaN();

}  // namespace

/// What a step hook may do.
class Trainer::Control final : public StepControl {
  public:
    explicit Control(Trainer& trainer) : t_(trainer) {}
    [[nodiscard]] int layers() const override { return t_.config_.model.layers; }
    [[nodiscard]] int heads() const override { return t_.config_.model.heads; }
    [[nodiscard]] int head_dim() const override { return t_.config_.model.head_dim(); }
    void enable_qk_norm(int layer, std::span<const double> logit_scale) override {
        QkSwitch& s = t_.qk_switch_.at(static_cast<std::size_t>(layer));
        s.on = true;
        s.logit_scale.assign(logit_scale.begin(), logit_scale.end());
        if (s.logit_scale.empty())
            s.logit_scale.assign(static_cast<std::size_t>(heads()), 1.0 / std::sqrt(static_cast<double>(head_dim())));
    }
    [[nodiscard]] bool qk_norm_enabled(int layer) const override {
        return t_.config_.model.qk_norm != QkNorm::none || t_.qk_switch_.at(static_cast<std::size_t>(layer)).on;
    }
    void reset_optimizer() override {
        if (t_.keeps_state_) t_.before_.optimizer = t_.optimizer_.state();
        t_.optimizer_.reset();
    }
    void set_learning_rate_factor(double factor) override { t_.rate_factor_ = factor; }
    void set_clip_factor(double factor) override { t_.clip_factor_ = factor; }
    void set_fp32_ffn(bool on) override { t_.fp32_ffn_ = on; }
    void set_qk_clip(double tau) override { t_.qk_clip_ = tau; }
    [[nodiscard]] MatrixView<const float> weight(std::string_view name) const override {
        return t_.model_.layout().at(name).of(std::span<const float>(t_.model_.weights()));
    }

  private:
    Trainer& t_;
};

Trainer::Trainer(const TrainConfig& config, const TokenData& data, const WindowOrder& windows, const Hooks& hooks,
                 Ranks* ranks)
    : config_(config),
      data_(data),
      windows_(windows),
      hooks_(hooks),
      model_(config.model, config.seed),
      share_(share_of(ranks, config, model_.groups(config.batch, config.model.context))),
      optimizer_(config.optimizer, model_.layout()),
      update_(model_.weights().size()),
      qk_switch_(static_cast<std::size_t>(config.model.layers)),
      qk_clip_(config.qk_clip) {
    check(config);
    check_tokens(data, config.model.vocabulary, config.model.context);
}
Trainer::~Trainer() = default;

void Trainer::capture(std::function<bool(std::int64_t)> wanted,
                      std::function<void(std::int64_t, int, const Captured&)> take) {
    capture_wanted_ = std::move(wanted);
    capture_take_ = std::move(take);
}

StepContext Trainer::context(int micro_step) const {
    StepContext c;
    c.step = next_;
    c.micro_step = micro_step;
    c.attention = hooks_.attention;
    c.model = hooks_.model;
    c.loss_weight = 1.0 / (static_cast<double>(config_.batch) * config_.accumulate * config_.model.context);
    c.detailed = due(config_.monitor_every);
    c.fp32_ffn = fp32_ffn_;
    c.qk_switch = &qk_switch_;
    c.threads = config_.threads;
    c.share = share_;
    if (cancelled_ && share_.ranks == nullptr) c.cancelled = &cancelled_;
    return c;
}

Batch Trainer::micro_batch(int micro_step, Windows& windows) const {
    windows = training_windows(config_, data_, windows_, next_, micro_step);
    return {windows.tokens, windows.targets, config_.batch, config_.model.context};
}

double Trainer::accumulate(BatchStatistics& statistics) {
    const bool captured = capture_wanted_ && capture_wanted_(next_);
    Captured operands;
    model_.clear_gradient();
    double loss = 0;
    for (int round = 0; round < rounds(share_, config_.accumulate); ++round) {
        if (round > 0) expect_not_cancelled();
        const int m = micro_batch_of(share_, round);
        Windows windows;
        const Batch batch = micro_batch(m, windows);
        model_.keep_operands(captured ? &operands : nullptr);
        const double part = model_.accumulate(context(m), batch, statistics);
        model_.keep_operands(nullptr);
        add_in_rank_order(of_micro_batches(share_), std::span(&loss, 1), std::span(&part, 1));
        if (captured) hand_over(round, operands);
    }
    model_.finish_gradient();
    return loss * context(0).loss_weight;
}

/// Returns the factor that the gradient was multiplied by.
double Trainer::clip(double norm) {
    const double limit = config_.clip * clip_factor_;
    if (!(limit > 0) || norm <= limit) return 1;
    const double factor = limit / (norm + 1e-6);  // PyTorch's clip_grad_norm_
    const auto f = static_cast<float>(factor);
    for (float& g : model_.gradient()) g *= f;
    return factor;
}

void Trainer::propose(double rate) {
    optimizer_.propose(model_.weights(), model_.gradient(), rate, update_);
    std::vector<ParameterUpdate> updates;
    for (const Parameter& p : model_.layout().all())
        updates.push_back(
            {p.name, p.layer, p.role, p.of(std::span<const float>(model_.weights())), p.of(std::span(update_))});
    if (hooks_.model != nullptr)
        for (const ParameterUpdate& u : updates)
            if (hooks_.model->watches(ModelSite::optimizer_update, u.layer)) {
                const ModelAt where{
                    .step = next_, .micro_step = 0, .layer = u.layer, .part = 0, .row0 = 0, .name = u.name};
                hooks_.model->at(ModelSite::optimizer_update, where, u.update, std::span(&u.weight, 1));
            }
    if (hooks_.update != nullptr) hooks_.update->before_apply(next_, updates);
}

void Trainer::stop(const std::string& site, std::ptrdiff_t row, std::ptrdiff_t column) {
    failure_ = NonFinite{next_, site, row, column};
}

/// The pass is a function of its inputs, so going through it again finds the value that went first.
bool Trainer::stop_where_not_finite(double loss, double norm) {
    if (std::isfinite(loss) && std::isfinite(norm)) return false;
    model_.clear_gradient();
    FiniteWatch first;
    int m = 0;
    for (int round = 0; round < rounds(share_, config_.accumulate) && first.found_at < 0; ++round) {
        m = micro_batch_of(share_, round);
        Windows windows;
        const Batch batch = micro_batch(m, windows);
        StepContext looking = context(m);
        looking.find_non_finite = true;
        BatchStatistics ignored(static_cast<std::size_t>(config_.model.layers * config_.model.heads));
        (void)model_.accumulate(looking, batch, ignored);
        first = model_.first_non_finite();
    }
    find_first_of_ranks(m, first);
    if (first.found_at < 0) first.site = "weight gradients";  // every activation is finite: a sum over tokens was not
    stop(first.site, first.row, first.column);
    return true;
}

void Trainer::apply() {
    const std::span<float> weights = model_.weights();
    for (std::size_t i = 0; i < weights.size(); ++i) weights[i] += update_[i];
}

/// Per head: where the largest logit S passes tau, W_Q and W_K of the head times sqrt(tau / S).
void Trainer::qk_clip() {
    if (!(qk_clip_ > 0)) return;
    const int heads = config_.model.heads, d = config_.model.head_dim();
    for (const Parameter& p : model_.layout().all()) {
        if (p.role != Role::w_q && p.role != Role::w_k) continue;
        for (int h = 0; h < heads; ++h) {
            const double largest = report_.max_logit[static_cast<std::size_t>(p.layer * heads + h)];
            if (!(largest > qk_clip_)) continue;
            const auto factor = static_cast<float>(std::sqrt(qk_clip_ / largest));
            const MatrixView<float> w = p.of(model_.weights());
            for (std::ptrdiff_t i = 0; i < w.rows; ++i)
                for (std::ptrdiff_t j = h * d; j < (h + 1) * d; ++j) w(i, j) *= factor;
        }
    }
}

void Trainer::cancel_when(std::function<bool()> cancelled, bool to_save) {
    cancelled_ = std::move(cancelled);
    keeps_state_ = to_save && cancelled_;
}

/// Ranks leave a step together.
void Trainer::expect_not_cancelled() const {
    if (cancelled_ && any_together(share_.ranks, cancelled_)) throw PassCancelled{};
}

void Trainer::remember() {
    before_ = {qk_switch_, rate_factor_, clip_factor_, qk_clip_, fp32_ffn_, {}, report_, {}};
    if (hooks_.step != nullptr) before_.hook = hooks_.step->save();
}

void Trainer::put_back() {
    qk_switch_ = std::move(before_.qk_switch);
    rate_factor_ = before_.rate_factor;
    clip_factor_ = before_.clip_factor;
    qk_clip_ = before_.qk_clip;
    fp32_ffn_ = before_.fp32_ffn;
    report_ = std::move(before_.report);
    if (before_.optimizer) optimizer_.restore(std::move(*before_.optimizer));
    if (hooks_.step != nullptr) hooks_.step->load(before_.hook);
}

const StepReport& Trainer::step() {
    if (keeps_state_) remember();
    try {
        return whole_step();
    } catch (const PassCancelled&) {
        abandoned_ = true;
        if (keeps_state_) put_back();
    }
    return report_;
}

const StepReport& Trainer::whole_step() {
    if (hooks_.step != nullptr) {
        Control control(*this);
        hooks_.step->before_step(next_, next_ == 0 ? nullptr : &report_, control);
    }
    BatchStatistics statistics(static_cast<std::size_t>(config_.model.layers * config_.model.heads));
    const double loss = accumulate(statistics);
    const double norm = norm_of(model_.gradient());
    if (stop_where_not_finite(loss, norm)) return report_;
    clip(norm);
    const double rate = learning_rate(config_.schedule, next_, config_.steps) * rate_factor_;
    const Optimizer::State before = optimizer_.state();
    propose(rate);
    const double update_norm = norm_of(update_);
    expect_same_update(update_norm);
    if (!std::isfinite(update_norm)) {
        optimizer_.restore(before);
        for (const Parameter& p : model_.layout().all()) {
            FiniteWatch watch;
            watch.look(-1, p.name.c_str(), MatrixView<const float>(p.of(std::span<const float>(update_))));
            if (watch.found_at < 0) continue;
            stop("update of " + p.name, watch.row, watch.column);
            break;
        }
        return report_;
    }
    const bool last = next_ + 1 == config_.steps;
    const bool validate = config_.validate_every > 0 && ((next_ + 1) % config_.validate_every == 0 || last);
    const std::vector<float> vectors(model_.reparametrisation().state().begin(),
                                     model_.reparametrisation().state().end());
    std::vector<float> weights;  // a validation may be given up, with the step that it is of
    if (validate && keeps_state_) weights.assign(model_.weights().begin(), model_.weights().end());
    apply();
    fill_report(statistics, loss, norm, rate);
    qk_clip();
    model_.prepare();
    report_spectra(config_.model, model_.layout(), model_.weights(), last || due(config_.monitor_every), report_);
    try {
        report_.validation_loss = validate ? validation_loss() : nan_value;
    } catch (const PassCancelled&) {
        if (keeps_state_) {
            optimizer_.restore(before);
            std::ranges::copy(weights, model_.weights().begin());
            model_.reparametrisation().restore(vectors);
            model_.prepare();
        }
        throw;
    }
    share_hooks_parts();
    if (hooks_.step != nullptr) hooks_.step->after_step(report_);
    ++next_;
    return report_;
}

double Trainer::validation_loss() {
    // Rank r of R has batches r, r + R, …; adding to zeros changes no bit of them.
    const int ranks = share_.ranks == nullptr ? 1 : share_.ranks->size();
    std::vector<double> own(static_cast<std::size_t>(config_.validation_batches), 0.0), losses = own;
    for (int first = 0; first < config_.validation_batches; first += ranks) {
        if (first > 0) expect_not_cancelled();
        const int b = first + (share_.ranks == nullptr ? 0 : share_.ranks->rank());
        if (b >= config_.validation_batches) continue;  // in the last round
        const Windows windows = validation_windows(config_, data_, b);
        own[static_cast<std::size_t>(b)] = model_.loss(
            {windows.tokens, windows.targets, config_.batch, config_.model.context}, config_.threads, context(0));
    }
    add_in_rank_order(share_.ranks, std::span(losses), std::span<const double>(own));
    double total = 0;
    for (const double loss : losses) total += loss;
    const auto length = static_cast<double>(config_.model.context);
    return total / (static_cast<double>(config_.validation_batches) * config_.batch * length);
}

void Trainer::fill_report(const BatchStatistics& s, double loss, double norm, double rate) {
    StepReport& r = report_;
    r.step = next_;
    r.loss = loss;
    r.grad_norm = norm;
    r.learning_rate = rate;
    r.layers = config_.model.layers;
    r.heads = config_.model.heads;
    r.max_logit = s.max_logit;
    r.zero_sum = s.zero_sum;
    r.zero_sum_abs = s.zero_sum_abs;
    r.zero_sum_total.resize(s.zero_sum.size(), 0.0);
    r.qk_rms.resize(s.zero_sum.size());
    r.saturated.assign(s.zero_sum.size(), nan_value);
    r.entropy = r.saturated;
    const double tokens = static_cast<double>(config_.batch) * config_.accumulate * config_.model.context;
    for (std::size_t i = 0; i < s.zero_sum.size(); ++i) {
        r.zero_sum_total[i] += s.zero_sum[i];
        r.qk_rms[i] = (s.q_rms[i] / tokens) * (s.k_rms[i] / tokens);
        if (!(s.rows[i] > 0)) continue;
        r.saturated[i] = s.saturated[i] / s.rows[i];
        r.entropy[i] = s.entropy[i] / s.rows[i];
    }
    r.qk_normed.clear();
    for (const QkSwitch& layer : qk_switch_)
        r.qk_normed.push_back(layer.on || config_.model.qk_norm != QkNorm::none ? 1 : 0);
    r.extras.clear();
}

}  // namespace faultline::gpt
