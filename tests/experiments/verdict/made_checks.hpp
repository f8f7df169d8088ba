// SPDX-License-Identifier: Apache-2.0
// Small layers to judge, quickly.
#pragma once

#include <stdexcept>

#include <faultline/attribution/group_run.hpp>
#include <faultline/verdict/report.hpp>

#include "made_captures.hpp"

namespace faultline::test {

inline const testing::MadeShape shape{.heads = 2, .kv_heads = 1, .n = 96, .d = 32};

inline CheckOptions quick() {
    CheckOptions options;
    options.runs = 16;
    return options;
}

/// Of the first kernel of the first layer.
inline HeadArray& output_of(Capture& capture, Output output) {
    return *capture.layers[0].observed[0].outputs[static_cast<std::size_t>(output)];
}

inline const OutputCheck& output_of(const Check& check, Output output) {
    for (const OutputCheck& o : check.layers.at(0).outputs)
        if (o.output == output) return o;
    throw std::logic_error("not checked");
}

/// The lse that a plan returns for the layer, as fp32.
inline void add_lse(LayerCapture& layer, const RoundingPlan& plan) {
    HeadArray lse{1, layer.heads(), layer.q.rows, 1, {}, Dtype::f32};
    for (const attribution::Group& group : attribution::groups_of(layer, {}, 0))
        for (const Matrix& head :
             attribution::run_plan(group, for_head_dim(plan, static_cast<int>(layer.head_dim()), true)).lse)
            lse.values.insert(lse.values.end(), head.values.begin(), head.values.end());
    layer.observed[0].lse = std::move(lse);
}

}  // namespace faultline::test
