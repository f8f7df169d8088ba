// SPDX-License-Identifier: Apache-2.0
// What can be said of a run on the device without one.
#include <fmt/format.h>

#include <faultline/base/error.hpp>
#include <faultline/gpt_device/device_trainer.hpp>
#include <faultline/ranks/ranks.hpp>

namespace faultline::gpt {

TrainConfig on_the_device(TrainConfig config, const DeviceOptions& options) {
    const int ranks = options.ranks == nullptr ? 1 : options.ranks->size();
    // Each rank would time the products of its own update, take another algorithm than the next, and drift off.
    if (ranks > 1 && !options.deterministic && config.optimizer.kind == OptimizerKind::muon)
        throw RequestError(
            "device cuda: deterministic: false: Muon's products would be chosen by each rank for itself, and the ranks' "
            "weights drift apart: expected --deterministic, adamw or sgd, or one rank");
    config.also.emplace_back("device", "cuda");
    config.also.emplace_back("deterministic", options.deterministic ? "true" : "false");
    config.also.emplace_back("ranks", std::to_string(ranks));
    // Of two ranks there is one addition in fp32, whoever makes it; of more, gathered ones stand in another order than NCCL's.
    const Reduce reduce = options.exchange.reduce;
    const bool gathers = reduce == Reduce::gather || (reduce == Reduce::automatic && options.exchange.share_card);
    const char* const sums = reduce == Reduce::nccl_bf16 ? "bf16" : gathers && ranks > 2 ? "gather" : "fp32";
    if (ranks > 1) config.also.emplace_back("reduce", sums);
    return config;
}

int micro_batches_of_a_rank(int ranks, const TrainConfig& config) {
    if (config.accumulate % ranks != 0)
        throw RequestError(
            fmt::format("ranks: {}: expected a divisor of accumulate, {}: on the device each rank takes whole "
                        "micro-batches of a step",
                        ranks, config.accumulate));
    return config.accumulate / ranks;
}

}  // namespace faultline::gpt
