// SPDX-License-Identifier: Apache-2.0
#include <faultline/gpt_device/elements.cuh>
#include <faultline/gpt_device/exchange_kernels.hpp>

namespace faultline::gpt::on_device {
namespace {

__global__ void widen_octets(const Bf16* from, std::size_t octets, float* to) {
    const std::size_t o = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (o < octets) store8(to + 8 * o, load8(from + 8 * o));
}

}  // namespace

void widen(const Bf16* from, std::size_t count, float* to, Stream stream) {
    constexpr int threads = 256;
    widen_octets<<<static_cast<unsigned>((count / 8 + threads - 1) / threads), threads, 0, stream>>>(from, count / 8,
                                                                                                     to);
    check_launch("widen");
}

}  // namespace faultline::gpt::on_device
