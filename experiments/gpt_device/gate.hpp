// SPDX-License-Identifier: Apache-2.0
// The output gate of a layer, as gate() and gate_backward() of row_kernels.hpp: o sigmoid(g), element by element. Functions launch
// on the stream and do not wait; WorkError where a launch fails.
#pragma once

#include <faultline/gpt_device/stream.hpp>

namespace faultline::gpt::on_device {

/// o is [tokens, width]; rows of the gate and of its gradient are `stride` elements apart. width a multiple of 8.
struct GateShape {
    int tokens, width, stride;
};

/// gated [tokens, width] = o sigmoid(gate).
template <class E>
void gate(const E* o, const E* gate, const GateShape& shape, E* gated, Stream stream);
/// dout [tokens, width], of the gated output, becomes that of o; dgate is assigned.
template <class E>
void gate_backward(const E* o, const E* gate, const GateShape& shape, E* dout, E* dgate, Stream stream);

}  // namespace faultline::gpt::on_device
