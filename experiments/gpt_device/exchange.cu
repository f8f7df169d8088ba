// SPDX-License-Identifier: Apache-2.0
#include <faultline/gpt_device/elements.cuh>
#include <faultline/gpt_device/exchange_kernels.hpp>

namespace faultline::gpt::on_device {
namespace {

__global__ void widen_octets(const Bf16* from, std::size_t octets, float* to) {
    const std::size_t o = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (o < octets) store8(to + 8 * o, load8(from + 8 * o));
}

__global__ void take_largest_of_heads(const HeadTotals* from, std::size_t count, HeadTotals* to) {
    const std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (i < count) to[i].largest = from[i].largest;
}

constexpr int threads = 256;
unsigned blocks_of(std::size_t count) { return static_cast<unsigned>((count + threads - 1) / threads); }

}  // namespace

void take_largest(const HeadTotals* from, std::size_t count, HeadTotals* to, Stream stream) {
    take_largest_of_heads<<<blocks_of(count), threads, 0, stream>>>(from, count, to);
    check_launch("take_largest");
}

void widen(const Bf16* from, std::size_t count, float* to, Stream stream) {
    widen_octets<<<blocks_of(count / 8), threads, 0, stream>>>(from, count / 8, to);
    check_launch("widen");
}

}  // namespace faultline::gpt::on_device
