// SPDX-License-Identifier: Apache-2.0
// A run of six steps of a model of two layers, on a text of squares.
#pragma once

#include <faultline/gpt/trainer.hpp>

#include "texts.hpp"

namespace faultline::gpt::quick_run {

inline const TokenData& text() {
    static const TokenData data = tokens_of_text(test::text_of_squares(900));
    return data;
}

inline TrainConfig quick() {
    TrainConfig c;
    c.model.layers = 2;
    c.model.width = 16;
    c.model.heads = 2;
    c.model.context = 70;  // two query blocks, and three sequences a chunk, so two chunks
    c.batch = 5;
    c.steps = 6;
    c.schedule = {.learning_rate = 1e-2, .warmup = 2};
    c.monitor_every = 2;
    c.validate_every = 3;
    c.validation_batches = 1;
    return c;
}

}  // namespace faultline::gpt::quick_run
