// SPDX-License-Identifier: Apache-2.0
// What a layer of a capture has beyond scores and a mask: softcap, sinks, dropout.
#pragma once

#include <faultline/attribution/capture.hpp>

namespace faultline::detail {

/// Fills softcap, sink, dropout and keep of a layer whose q, k and v have been read. RequestError: a sink that is not one
/// finite logit per query head; a dropout mask that does not broadcast to [batch, heads, queries, keys] or holds anything
/// but 0 and 1; a mask without its keep, or a keep without mask; a keep outside (0, 1]; a softcap below 0.
void read_extras(const TensorSet& file, const CaptureOptions& options, LayerCapture& layer);

}  // namespace faultline::detail
