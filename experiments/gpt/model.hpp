// SPDX-License-Identifier: Apache-2.0
// A GPT-2 with its weights: loss and gradient of a batch.
//
// Order of summation, the same for any number of threads: a batch is cut into chunks of some 256 tokens (whole sequences),
// the chunks into at most 8 groups of neighbours (2 for models above 4 million parameters, whose gradients would take too
// much room). Within a group products add up over tokens in ascending order; groups are added in ascending order. So the
// bits depend on how many sequences a batch has, and not on who computed them: threads, or ranks (share.hpp).
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include <faultline/gpt/chunk.hpp>
#include <faultline/gpt/model_config.hpp>
#include <faultline/gpt/parameters.hpp>
#include <faultline/gpt/reparametrisation.hpp>
#include <faultline/gpt/step_context.hpp>

namespace faultline::gpt {

/// A batch is cut in chunks of some so many tokens, whole sequences: the tiles that a model hook sees.
inline constexpr int chunk_tokens = 256;

/// Token ids [sequences, length] and the ids that follow them.
struct Batch {
    std::span<const std::int32_t> tokens;
    std::span<const std::int32_t> targets;
    int sequences = 0;
    int length = 0;  ///< at most the context
};

/// Chunk workspaces, as many as there are threads at work.
template <class T>
class WorkspacePool {
  public:
    std::unique_ptr<Chunk<T>> take(const ModelConfig& config, const ParameterLayout& layout) {
        {
            const std::lock_guard lock(mutex_);
            if (!free_.empty()) {
                std::unique_ptr<Chunk<T>> chunk = std::move(free_.back());
                free_.pop_back();
                return chunk;
            }
        }
        return std::make_unique<Chunk<T>>(config, layout);
    }
    void give_back(std::unique_ptr<Chunk<T>> chunk) {
        const std::lock_guard lock(mutex_);
        free_.push_back(std::move(chunk));
    }

  private:
    std::mutex mutex_;
    std::vector<std::unique_ptr<Chunk<T>>> free_;
};

/// Groups that a micro-batch of so many sequences of `length` tokens is cut into, of a model of so many parameters.
[[nodiscard]] int groups_of_batch(std::ptrdiff_t parameters, int sequences, int length);

template <class T>
class Gpt {
  public:
    /// Weights as ParameterLayout::initialize. RequestError where the configuration makes no model.
    Gpt(const ModelConfig& config, std::uint64_t seed);
    Gpt(const Gpt&) = delete;
    Gpt& operator=(const Gpt&) = delete;

    [[nodiscard]] const ModelConfig& config() const { return config_; }
    [[nodiscard]] const ParameterLayout& layout() const { return layout_; }
    /// The flat weights; after a change, prepare() before the next pass.
    [[nodiscard]] std::span<T> weights() { return weights_; }
    [[nodiscard]] std::span<const T> weights() const { return weights_; }
    void prepare();

    /// Adds the gradient of context.loss_weight (sum of losses, and the z-loss) to gradient(). Returns the sum of the
    /// losses in nats; `statistics` gets what the layers saw, added to what it has. Token ids must be in the vocabulary.
    /// Where context.share divides the groups, all ranks call it with the same batch; where it divides micro-batches, each with
    /// its own: gradient and statistics are added over all ranks' either way, the loss that is returned over a micro-batch.
    /// With find_non_finite this rank's part is gone through alone, and nothing is added. PassCancelled where context.cancelled
    /// says so; gradient and statistics are of no use then.
    double accumulate(const StepContext& context, const Batch& batch, BatchStatistics& statistics);
    void clear_gradient();
    /// After the last accumulate of a step: the gradient of the parameters themselves, through the reparametrisation.
    void finish_gradient();
    [[nodiscard]] std::span<T> gradient() { return gradient_; }

    /// Sum of the losses over the batch, no hooks. Of `switches` those count that are of the model: QK norm that was turned
    /// on, the feed-forward in fp32; and what may cancel it.
    [[nodiscard]] double loss(const Batch& batch, int threads, const StepContext& switches = {});

    /// What the last accumulate with find_non_finite came upon first; found_at < 0: nothing.
    [[nodiscard]] FiniteWatch first_non_finite() const;
    /// Groups that a batch of so many sequences is cut into.
    [[nodiscard]] int groups(int sequences, int length) const { return cut(sequences, length).groups; }
    /// Tokens [first, first + count) of a batch that a rank has in its groups.
    struct TokenRange {
        std::size_t first = 0, count = 0;
    };
    [[nodiscard]] TokenRange tokens_of(const Share& share, int sequences, int length, int rank) const;
    /// What attention worked on in an accumulate, and the input x of the layer's q, k and v: [tokens, width] each, per
    /// layer.
    struct Operands {
        std::vector<T> q, k, v, dout, x;
    };
    /// The next accumulates leave their operands here; null: nowhere.
    void keep_operands(std::vector<Operands>* layers) { kept_ = layers; }
    /// State beside the weights that a checkpoint needs.
    [[nodiscard]] SigmaReparametrisation<T>& reparametrisation() { return reparametrisation_; }
    [[nodiscard]] const SigmaReparametrisation<T>& reparametrisation() const { return reparametrisation_; }

  private:
    struct Group {
        std::vector<T> gradient, head_gradient;
        double loss = 0;
        BatchStatistics statistics;
        FiniteWatch finite;
    };
    struct Cut {
        int sequences_per_chunk, chunks, groups;
    };
    [[nodiscard]] Cut cut(int sequences, int length) const;
    [[nodiscard]] Cut cut(const Batch& batch) const { return cut(batch.sequences, batch.length); }
    [[nodiscard]] Weights<T> passed_weights() const;
    void run_chunk(const StepContext& context, const Batch& batch, const Cut& how, int chunk, Group& group);
    void collect(const Chunk<T>& chunk, BatchStatistics& statistics) const;
    void keep(const Chunk<T>& chunk, std::size_t first_token);
    void add_groups(const StepContext& context, std::span<const Group> groups);

    ModelConfig config_;
    ParameterLayout layout_;
    std::vector<T> weights_, effective_, operands_, gradient_, micro_gradient_;
    SigmaReparametrisation<T> reparametrisation_;
    WorkspacePool<T> workspaces_;
    std::vector<Group> groups_;
    std::vector<Operands>* kept_ = nullptr;
};

}  // namespace faultline::gpt
