// SPDX-License-Identifier: Apache-2.0
#include <faultline/gpt_device/exchange.hpp>

#include <chrono>
#include <cstdio>
#include <thread>
#include <utility>

#include <fmt/format.h>

#include <faultline/base/error.hpp>
#include <faultline/gpt_device/cards.hpp>
#include <faultline/gpt_device/exchange_kernels.hpp>
#include <faultline/ranks/sums.hpp>

namespace faultline::gpt {

int rounds_of(const Ranks* ranks, const TrainConfig& config) {
    if (ranks == nullptr) return config.accumulate;
    return micro_batches_of_a_rank(ranks->size(), config);
}

GradientRange range_of_layer(const ParameterLayout& layout, int layer) {
    const auto layers = static_cast<int>(layout.layers());
    const std::ptrdiff_t first = layout.layer(layer).norm1_gain,
                         last = layer + 1 < layers ? layout.layer(layer + 1).norm1_gain : layout.final_gain;
    return {static_cast<std::size_t>(first), static_cast<std::size_t>(last - first)};
}

std::vector<GradientRange> ranges_beside_layers(const ParameterLayout& layout) {
    const auto first = static_cast<std::size_t>(layout.layer(0).norm1_gain),
               last = static_cast<std::size_t>(layout.final_gain);
    return {{0, first}, {last, static_cast<std::size_t>(layout.size()) - last}};
}

Exchange::Exchange(Ranks* ranks, const TrainConfig& config, const ParameterLayout& layout,
                   const ExchangeOptions& options)
    : ranks_(ranks),
      layout_(layout),
      rounds_(rounds_of(ranks, config)),
      options_(options),
      heads_(static_cast<std::size_t>(config.model.layers * config.model.heads)) {
    if (!active()) return;
    cards_ = on_device::cards_of(*ranks, options_.share_card);
    const bool shared = cards_ < ranks->size();
    if (shared && (options_.reduce == Reduce::nccl || options_.reduce == Reduce::nccl_bf16))
        throw RequestError(fmt::format(
            "reduce: {}: NCCL takes no two ranks on one card: expected auto or gather where ranks share one",
            options_.reduce == Reduce::nccl ? "fp32" : "bf16"));
    together(ranks, [&] {
        if (options_.overlapped) side_.emplace();
    });
    const bool asked = options_.reduce == Reduce::gather || shared;
    if (asked || (options_.reduce == Reduce::automatic && ranks->size() == 2)) {
        gather_ = on_device::Gather::among(*ranks, bytes_of_part(), why_nccl_);
        if (gathers()) return;
        if (asked)
            throw RequestError(
                shared ? fmt::format("ranks: they share a card and cannot gather there: {}: expected a card each",
                                     why_nccl_)
                       : fmt::format("reduce: gather: {}: expected cards of one machine that reach each other's "
                                     "memory, or auto, fp32 or bf16",
                                     why_nccl_));
    }
    // All that one rank may fail in comes before the cards are joined, where the ranks wait for each other in NCCL.
    together(ranks, [&] {
        seen_.emplace(heads_ * sizeof(on_device::HeadTotals), "what the heads saw");
        if (options_.reduce != Reduce::nccl_bf16) return;
        const std::size_t bytes = count() * sizeof(on_device::Bf16);
        rounded_.emplace(bytes, fmt::format("{:.2f} GiB: a gradient in bf16", static_cast<double>(bytes) * 0x1p-30));
    });
    nccl_.emplace(*ranks);
}

std::string Exchange::text() const {
    if (!active()) return "none: one rank adds micro-batches in ascending order";
    const std::string own =
        fmt::format("each of {} ranks adds its micro-batches in ascending order, then ", ranks_->size());
    const char* const when = options_.overlapped ? "layer by layer during the backward" : "at the end of the backward";
    if (gathers())
        return fmt::format(
            "{}the ranks' gradients (fp32) and losses (fp64) are copied from card to card, {}, and added in "
            "the order of ranks{}",
            own, when,
            cards_ < ranks_->size() ? fmt::format("; {} ranks share {}", ranks_->size(),
                                                  cards_ == 1 ? "a card" : fmt::format("{} cards", cards_))
                                    : "");
    const std::string instead = why_nccl_.empty() ? "" : fmt::format("; not copied from card to card: {}", why_nccl_);
    return fmt::format("{}{} adds the ranks' gradients ({}) {} and losses (fp64), an element's terms in its order{}",
                       own, nccl_->text(), rounded_ ? "rounded to bf16, in bf16" : "fp32", when, instead);
}

void Exchange::add(float* gradient, const GradientRange& of, on_device::Stream stream) {
    float* const values = gradient + of.first;
    if (!rounded_) return nccl_->add(values, of.count, stream);
    auto* const rounded = reinterpret_cast<on_device::Bf16*>(rounded_->data()) + of.first;
    on_device::round_weights(values, of.count, rounded, stream);
    nccl_->add(rounded, of.count, stream);
    on_device::widen(rounded, of.count, values, stream);
}

void Exchange::send(float* gradient, const GradientRange& of, on_device::Stream stream) {
    if (!std::exchange(begun_, true)) gather_->begin(stream);
    gather_->copy(of.first * sizeof(float), gradient + of.first, of.count * sizeof(float), stream);
}

void Exchange::layer_done(int layer, float* gradient, on_device::Stream main) {
    if (!options_.overlapped || !active()) return;
    side_->follow(main);
    if (gathers())
        send(gradient, range_of_layer(layout_, layer), side_->stream());
    else
        add(gradient, range_of_layer(layout_, layer), side_->stream());
}

void Exchange::add(on_device::HeadTotals* totals, on_device::Stream stream) {
    constexpr std::size_t fields = sizeof(on_device::HeadTotals) / sizeof(double);
    auto* const seen = reinterpret_cast<on_device::HeadTotals*>(seen_->data());
    on_device::copy(seen, totals, heads_ * sizeof(on_device::HeadTotals), stream);
    nccl_->largest(reinterpret_cast<double*>(seen), fields * heads_, stream);
    nccl_->add(reinterpret_cast<double*>(totals), fields * heads_, stream);
    on_device::take_largest(seen, heads_, totals, stream);
}

void Exchange::finish(float* gradient, double* loss, on_device::HeadTotals* totals, on_device::Stream main) {
    if (!active()) return;
    if (gathers()) return gather(gradient, loss, totals, main);
    const on_device::Stream stream = options_.overlapped ? side_->stream() : main;
    if (options_.overlapped) {
        side_->follow(main);
        for (const GradientRange& of : ranges_beside_layers(layout_)) add(gradient, of, stream);
    } else {
        add(gradient, {0, static_cast<std::size_t>(layout_.size())}, stream);
    }
    nccl_->add(loss, 1, stream);
    if (totals != nullptr) add(totals, stream);
    if (options_.overlapped) side_->join(main);
}

void Exchange::gather(float* gradient, double* loss, on_device::HeadTotals* totals, on_device::Stream main) {
    const on_device::Stream stream = options_.overlapped ? side_->stream() : main;
    if (options_.overlapped) side_->follow(main);
    const std::vector<GradientRange> all{{0, count()}};
    for (const GradientRange& of : options_.overlapped ? ranges_beside_layers(layout_) : all)
        send(gradient, of, stream);
    gather_->copy(loss_at(), loss, sizeof *loss, stream);
    if (totals != nullptr) gather_->copy(totals_at(), totals, heads_ * sizeof *totals, stream);
    gather_->done(stream);
    begun_ = false;
    if (options_.overlapped) side_->join(main);  // what was copied may change now
    gather_->wait(main);
    on_device::add_in_rank_order(gather_->parts(), loss_at(), loss, totals_at(), totals, totals != nullptr ? heads_ : 0,
                                 main);
}

void Exchange::hand_over(int round, Training::Captured& layers, const std::function<void(int)>& take) const {
    if (!active()) return take(micro_batch(round));
    const auto each = [&](auto&& move) {
        for (auto& layer : layers)
            for (std::vector<float>* values : {&layer.q, &layer.k, &layer.v, &layer.dout, &layer.x})
                move(std::span(*values));
    };
    if (!ranks_->first()) return each([&](std::span<float> part) { ranks_->send(0, std::as_bytes(part)); });
    take(micro_batch(round));
    for (int from = 1; from < ranks_->size(); ++from) {
        each([&](std::span<float> part) { ranks_->receive(from, std::as_writable_bytes(part)); });
        take(round * ranks_->size() + from);
    }
}

void Exchange::first_of_ranks(int micro_batch, NonFinite& found) const {
    if (!active()) return;
    int best = -1;
    const std::string mine = fmt::format("{} {} {} {}", micro_batch, found.row, found.column, found.site);
    for (const std::string& text : all_texts(ranks_, mine)) {
        int in = 0, end = 0;
        long row = 0, column = 0;
        if (std::sscanf(text.c_str(), "%d %ld %ld %n", &in, &row, &column, &end) < 3) continue;
        if (best >= 0 && best <= in) continue;
        best = in;
        found = {found.step, text.substr(static_cast<std::size_t>(end)), row, column};
    }
}

void Exchange::call_off() noexcept {
    if (nccl_) nccl_->call_off();
    if (gathers()) gather_->call_off();
}

void Exchange::part(on_device::Stream main) {
    if (!gathers()) return;
    wait(main);
    gather_->part();
}

bool Exchange::let_go(on_device::Stream main) noexcept {
    if (!gathers()) return false;
    const auto idle = [&] { return on_device::idle(main) && (!side_ || on_device::idle(side_->stream())); };
    for (int i = 0; i < 20 && !idle(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(25));
    if (!idle()) return false;
    gather_->let_go();
    return true;
}

void Exchange::wait(on_device::Stream main) {
    if (!active()) return on_device::wait(main);
    if (gathers()) return on_device::wait(main, *ranks_, [] {});
    nccl_->wait(main);
}

}  // namespace faultline::gpt
