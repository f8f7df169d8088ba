// SPDX-License-Identifier: Apache-2.0
// The gradient of the sinks' logits: one number for each query head, where every row of every batch element meets
// (dsink_h = -sum over batch and rows of p_sink delta), beside the truth.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include <faultline/truth/truth.hpp>
#include <faultline/truth/wide_real.hpp>

namespace faultline {

struct SinkGradient {
    std::vector<WideReal> truth;  ///< per query head, in the order of LayerAttribution::head_indices; nat/logit
    std::vector<WideReal> bound;  ///< of the truth's error
    std::vector<double> plan;     ///< as the plan leaves it; of several batch elements the sum of theirs in binary64
    struct Observed {
        std::string kernel;
        std::vector<double> values;
    };
    std::vector<Observed> observed;

    /// |values - truth| / |truth| over the heads (Euclidean norm). Infinite where the truth is 0 and the values are not; 0
    /// where both are.
    [[nodiscard]] WideReal rel_error(const std::vector<double>& values) const;
    /// Head at which the values are furthest from the truth.
    [[nodiscard]] std::size_t worst(const std::vector<double>& values) const;
};

namespace attribution {

/// Adds a group's heads, batch element by batch element. `first`: the place of its first head among the vectors.
void add_sink_gradient(const GroupTruth& truth, const std::vector<double>& plan, std::size_t first, SinkGradient& all);

}  // namespace attribution
}  // namespace faultline
