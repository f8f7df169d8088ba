// SPDX-License-Identifier: Apache-2.0
#include <faultline/gpt/model.hpp>

#include <algorithm>

#include <faultline/base/parallel.hpp>
#include <faultline/format/bulk.hpp>
#include <faultline/gpt/share.hpp>

namespace faultline::gpt {
namespace {

constexpr std::ptrdiff_t small_model = 4'000'000;

template <class T>
void to_bf16(std::span<T> values) {
    if constexpr (std::is_same_v<T, float>) round_bulk(values, bf16);
}

template <class T>
void add_to(std::span<const T> from, std::span<T> to) {
    for (std::size_t i = 0; i < to.size(); ++i) to[i] += from[i];
}

ModelConfig checked(const ModelConfig& config) {
    check(config);
    return config;
}

}  // namespace

template <class T>
Gpt<T>::Gpt(const ModelConfig& config, std::uint64_t seed)
    : config_(checked(config)),
      layout_(config_),
      weights_(static_cast<std::size_t>(layout_.size())),
      gradient_(weights_.size()),
      micro_gradient_(weights_.size()),
      reparametrisation_(layout_) {
    layout_.initialize(seed, std::span(weights_));
    prepare();
}

template <class T>
void Gpt<T>::prepare() {
    if (reparametrisation_.active()) {
        effective_ = weights_;
        reparametrisation_.apply(std::span<const T>(weights_), std::span(effective_));
    }
    if (std::is_same_v<T, double> || !config_.bf16) return;
    operands_ = reparametrisation_.active() ? effective_ : weights_;
    to_bf16(std::span(operands_));
}

template <class T>
Weights<T> Gpt<T>::passed_weights() const {
    const std::span<const T> full = reparametrisation_.active() ? effective_ : weights_;
    return {full, operands_.empty() ? full : std::span<const T>(operands_)};
}

int groups_of_batch(std::ptrdiff_t parameters, int sequences, int length) {
    const int per_chunk = std::max(1, chunk_tokens / length);
    return std::min((sequences + per_chunk - 1) / per_chunk, parameters <= small_model ? 8 : 2);
}

template <class T>
typename Gpt<T>::Cut Gpt<T>::cut(int sequences, int length) const {
    const int per_chunk = std::max(1, chunk_tokens / length);
    const int chunks = (sequences + per_chunk - 1) / per_chunk;
    return {per_chunk, chunks, groups_of_batch(layout_.size(), sequences, length)};
}

template <class T>
typename Gpt<T>::TokenRange Gpt<T>::tokens_of(const Share& share, int sequences, int length, int rank) const {
    const Cut how = cut(sequences, length);
    const GroupRange range = groups_of(share, how.groups, rank);
    const auto token = [&](int group) {
        const int sequence = std::min(sequences, group * how.chunks / how.groups * how.sequences_per_chunk);
        return static_cast<std::size_t>(sequence) * static_cast<std::size_t>(length);
    };
    return {token(range.first), token(range.last) - token(range.first)};
}

template <class T>
void Gpt<T>::clear_gradient() {
    std::ranges::fill(gradient_, T(0));
}

template <class T>
void Gpt<T>::collect(const Chunk<T>& chunk, BatchStatistics& statistics) const {
    const int heads = config_.heads;
    for (int l = 0; l < config_.layers; ++l)
        for (int b = 0; b < chunk.sequences(); ++b)
            for (int h = 0; h < heads; ++h) {
                const HeadStatistics& seen = chunk.attention(l).heads[static_cast<std::size_t>(b * heads + h)];
                const auto at = static_cast<std::size_t>(l * heads + h);
                statistics.max_logit[at] = std::max(statistics.max_logit[at], seen.max_logit);
                statistics.zero_sum[at] += seen.zero_sum;
                statistics.zero_sum_abs[at] += seen.zero_sum_abs;
                statistics.saturated[at] += seen.saturated;
                statistics.entropy[at] += seen.entropy;
                statistics.rows[at] += seen.rows;
            }
    for (std::size_t i = 0; i < statistics.q_rms.size(); ++i) {
        statistics.q_rms[i] += chunk.q_rms()[i];
        statistics.k_rms[i] += chunk.k_rms()[i];
    }
}

template <class T>
void Gpt<T>::run_chunk(const StepContext& context, const Batch& batch, const Cut& how, int chunk, Group& group) {
    const int first = chunk * how.sequences_per_chunk;
    const int sequences = std::min(how.sequences_per_chunk, batch.sequences - first);
    const auto begin = static_cast<std::size_t>(first) * static_cast<std::size_t>(batch.length);
    const auto count = static_cast<std::size_t>(sequences) * static_cast<std::size_t>(batch.length);
    std::unique_ptr<Chunk<T>> worker = workspaces_.take(config_, layout_);
    worker->keep_operands(kept_ != nullptr);
    group.statistics.loss_sum += worker->forward_backward(
        passed_weights(), context, batch.tokens.subspan(begin, count), batch.targets.subspan(begin, count), first,
        sequences, batch.length, std::span(group.gradient), std::span(group.head_gradient));
    collect(*worker, group.statistics);
    if (kept_ != nullptr) keep(*worker, begin);
    const FiniteWatch& found = worker->finite();
    if (found.found_at >= 0 && (group.finite.found_at < 0 || found.found_at < group.finite.found_at))
        group.finite = found;
    workspaces_.give_back(std::move(worker));
}

template <class T>
void Gpt<T>::keep(const Chunk<T>& chunk, std::size_t first_token) {
    const auto copy = [&](MatrixView<const T> from, std::vector<T>& to) {
        for (std::ptrdiff_t i = 0; i < from.rows; ++i)
            std::copy_n(from.row(i), from.cols,
                        to.begin() + (static_cast<std::ptrdiff_t>(first_token) + i) * from.cols);
    };
    for (int l = 0; l < config_.layers; ++l) {
        const typename Chunk<T>::Operands of = chunk.operands(l);
        Operands& to = (*kept_)[static_cast<std::size_t>(l)];
        copy(of.q, to.q);
        copy(of.k, to.k);
        copy(of.v, to.v);
        copy(of.dout, to.dout);
        copy(of.x, to.x);
    }
}

template <class T>
double Gpt<T>::accumulate(const StepContext& context, const Batch& batch, BatchStatistics& statistics) {
    const Cut how = cut(batch);
    if (kept_ != nullptr) {
        kept_->resize(static_cast<std::size_t>(config_.layers));
        for (Operands& layer : *kept_)
            for (std::vector<T>* values : {&layer.q, &layer.k, &layer.v, &layer.dout, &layer.x})
                values->resize(batch.tokens.size() * static_cast<std::size_t>(config_.width));
    }
    groups_.resize(static_cast<std::size_t>(how.groups));
    const GroupRange own = own_groups(context.share, how.groups);
    for (Group& group : groups_) group.finite = {};
    const auto run_group = [&](std::size_t g) {
        Group& group = groups_[g];
        group.gradient.assign(weights_.size(), T(0));
        group.head_gradient.assign(
            static_cast<std::size_t>(config_.vocabulary) * static_cast<std::size_t>(config_.width), T(0));
        group.statistics = BatchStatistics(static_cast<std::size_t>(config_.layers * config_.heads));
        const int index = static_cast<int>(g);
        for (int c = index * how.chunks / how.groups; c < (index + 1) * how.chunks / how.groups; ++c)
            run_chunk(context, batch, how, c, group);
    };
    parallel_for(static_cast<std::size_t>(own.last - own.first), context.threads,
                 [&](std::size_t g) { run_group(static_cast<std::size_t>(own.first) + g); });
    if (context.find_non_finite) return 0;
    const std::span<const Group> mine =
        std::span(groups_).subspan(static_cast<std::size_t>(own.first), static_cast<std::size_t>(own.last - own.first));
    double loss = 0;
    std::vector<const BatchStatistics*> seen;
    std::vector<std::span<const double>> losses;
    for (const Group& group : mine) {
        seen.push_back(&group.statistics);
        losses.emplace_back(&group.statistics.loss_sum, 1);
    }
    add_in_rank_order(of_groups(context.share), std::span(&loss, 1), std::span<const std::span<const double>>(losses));
    add_statistics(context.share, seen, statistics);
    add_groups(context, mine);
    return loss;
}

/// In bf16 precision a product's weight gradient comes out of the product as bf16, micro-batch by micro-batch.
template <class T>
void Gpt<T>::add_groups(const StepContext& context, std::span<const Group> groups) {
    std::vector<T> head(static_cast<std::size_t>(config_.vocabulary) * static_cast<std::size_t>(config_.width));
    std::ranges::fill(micro_gradient_, T(0));
    std::vector<std::span<const T>> all, of_head;
    for (const Group& group : groups) {
        all.emplace_back(group.gradient);
        of_head.emplace_back(group.head_gradient);
    }
    Ranks* const dividing = of_groups(context.share);
    add_in_rank_order(dividing, std::span(micro_gradient_), std::span<const std::span<const T>>(all));
    add_in_rank_order(dividing, std::span(head), std::span<const std::span<const T>>(of_head));
    if (config_.bf16) {
        to_bf16(std::span(head));
        for (const Parameter& p : layout_.all()) {
            const bool linear = p.role != Role::embedding && (p.is_matrix() || p.name.find(".b_") != std::string::npos);
            const bool ffn = p.name.ends_with("_fc") || p.name.ends_with("_proj");
            if (!linear || (ffn && context.fp32_ffn)) continue;
            const MatrixView<T> view = p.of(std::span(micro_gradient_));
            for (std::ptrdiff_t i = 0; i < view.rows; ++i)
                to_bf16(std::span(view.row(i), static_cast<std::size_t>(view.cols)));
        }
    }
    const std::span<T> wte = std::span(micro_gradient_).subspan(static_cast<std::size_t>(layout_.wte), head.size());
    add_to(std::span<const T>(head), wte);
    add_in_rank_order(of_micro_batches(context.share), std::span(gradient_), std::span<const T>(micro_gradient_));
}

template <class T>
void Gpt<T>::finish_gradient() {
    if (reparametrisation_.active()) reparametrisation_.pull_back(std::span<const T>(weights_), std::span(gradient_));
}

template <class T>
double Gpt<T>::loss(const Batch& batch, int threads, const StepContext& switches) {
    const Cut how = cut(batch);
    std::vector<double> losses(static_cast<std::size_t>(how.chunks));
    StepContext context{};  // without hooks
    context.fp32_ffn = switches.fp32_ffn;
    context.qk_switch = switches.qk_switch;
    context.cancelled = switches.cancelled;
    parallel_for(losses.size(), threads, [&](std::size_t c) {
        const int first = static_cast<int>(c) * how.sequences_per_chunk;
        const int sequences = std::min(how.sequences_per_chunk, batch.sequences - first);
        const auto begin = static_cast<std::size_t>(first) * static_cast<std::size_t>(batch.length);
        const auto count = static_cast<std::size_t>(sequences) * static_cast<std::size_t>(batch.length);
        std::unique_ptr<Chunk<T>> worker = workspaces_.take(config_, layout_);
        losses[c] = worker->loss(passed_weights(), context, batch.tokens.subspan(begin, count),
                                 batch.targets.subspan(begin, count), first, sequences, batch.length);
        workspaces_.give_back(std::move(worker));
    });
    double total = 0;
    for (const double loss : losses) total += loss;
    return total;
}

template <class T>
FiniteWatch Gpt<T>::first_non_finite() const {
    FiniteWatch first;
    for (const Group& group : groups_)
        if (group.finite.found_at >= 0 && (first.found_at < 0 || group.finite.found_at < first.found_at))
            first = group.finite;
    return first;
}

template class Gpt<float>;
template class Gpt<double>;

}  // namespace faultline::gpt
