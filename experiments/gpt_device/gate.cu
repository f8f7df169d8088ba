// SPDX-License-Identifier: Apache-2.0
#include <faultline/gpt_device/elements.cuh>
#include <faultline/gpt_device/gate.hpp>

namespace faultline::gpt::on_device {
namespace {

constexpr int threads = 256;

/// What a thread has: eight neighbours of a row, in o and in the gate.
struct Place {
    std::size_t o, gate;
    bool inside;
    __device__ explicit Place(const GateShape& shape) {
        const std::size_t octet = std::size_t{blockIdx.x} * threads + threadIdx.x, of_row = shape.width / 8;
        const std::size_t row = octet / of_row, column = octet % of_row * 8;
        inside = row < static_cast<std::size_t>(shape.tokens);
        o = octet * 8;
        gate = row * shape.stride + column;
    }
};

template <class E>
__global__ void __launch_bounds__(threads) gate_elements(const E* o, const E* gate, GateShape shape, E* gated) {
    const Place at(shape);
    if (!at.inside) return;
    Octet v = load8(o + at.o);
    const Octet g = load8(gate + at.gate);
#pragma unroll
    for (int i = 0; i < 8; ++i) v.x[i] *= sigmoid_for<E>(g.x[i]);
    store8(gated + at.o, v);
}

template <class E>
__global__ void __launch_bounds__(threads)
    gate_backward_elements(const E* o, const E* gate, GateShape shape, E* dout, E* dgate) {
    const Place at(shape);
    if (!at.inside) return;
    const Octet v = load8(o + at.o), g = load8(gate + at.gate);
    Octet d = load8(dout + at.o), dg;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float s = sigmoid_for<E>(g.x[i]);
        dg.x[i] = (d.x[i] * v.x[i]) * (s * (1.0f - s));
        d.x[i] *= s;
    }
    store8(dout + at.o, d);
    store8(dgate + at.gate, dg);
}

unsigned blocks_of(const GateShape& shape) {
    return static_cast<unsigned>((static_cast<std::size_t>(shape.tokens) * shape.width / 8 + threads - 1) / threads);
}

}  // namespace

template <class E>
void gate(const E* o, const E* gate, const GateShape& shape, E* gated, Stream stream) {
    gate_elements<<<blocks_of(shape), threads, 0, stream>>>(o, gate, shape, gated);
    check_launch("the output gate");
}
template <class E>
void gate_backward(const E* o, const E* gate, const GateShape& shape, E* dout, E* dgate, Stream stream) {
    gate_backward_elements<<<blocks_of(shape), threads, 0, stream>>>(o, gate, shape, dout, dgate);
    check_launch("the output gate's backward");
}

#define FAULTLINE_FOR(E)                                                  \
    template void gate(const E*, const E*, const GateShape&, E*, Stream); \
    template void gate_backward(const E*, const E*, const GateShape&, E*, E*, Stream);
FAULTLINE_FOR(float)
FAULTLINE_FOR(Bf16)
#undef FAULTLINE_FOR

}  // namespace faultline::gpt::on_device
