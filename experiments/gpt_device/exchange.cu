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

/// Of a rank, whose own is not among the others'.
template <class T>
__device__ const T* part_of(const GatheredParts& parts, int rank, std::size_t offset, const T* own) {
    if (rank == parts.rank) return own;
    const int place = rank < parts.rank ? rank : rank - 1;
    return reinterpret_cast<const T*>(parts.others + static_cast<std::size_t>(place) * parts.bytes + offset);
}

__global__ void add_parts(GatheredParts parts, std::size_t loss_at, double* loss, std::size_t totals_at,
                          HeadTotals* totals, std::size_t heads) {
    const std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (i == 0) {
        double sum = *part_of<double>(parts, 0, loss_at, loss);
        for (int r = 1; r < parts.ranks; ++r) sum += *part_of<double>(parts, r, loss_at, loss);
        *loss = sum;
    }
    if (i >= heads) return;
    HeadTotals sum = part_of<HeadTotals>(parts, 0, totals_at, totals)[i];
    for (int r = 1; r < parts.ranks; ++r) {
        const HeadTotals next = part_of<HeadTotals>(parts, r, totals_at, totals)[i];
        sum.largest = fmax(sum.largest, next.largest);
        sum.q_rms += next.q_rms;
        sum.k_rms += next.k_rms;
        sum.zero_sum += next.zero_sum;
        sum.zero_sum_abs += next.zero_sum_abs;
        sum.saturated += next.saturated;
        sum.entropy += next.entropy;
    }
    totals[i] = sum;
}

constexpr int threads = 256;
unsigned blocks_of(std::size_t count) { return static_cast<unsigned>((count + threads - 1) / threads); }

}  // namespace

void add_in_rank_order(const GatheredParts& parts, std::size_t loss_at, double* loss, std::size_t totals_at,
                       HeadTotals* totals, std::size_t heads, Stream stream) {
    add_parts<<<blocks_of(heads > 0 ? heads : 1), threads, 0, stream>>>(parts, loss_at, loss, totals_at, totals, heads);
    check_launch("add_in_rank_order");
}

void take_largest(const HeadTotals* from, std::size_t count, HeadTotals* to, Stream stream) {
    take_largest_of_heads<<<blocks_of(count), threads, 0, stream>>>(from, count, to);
    check_launch("take_largest");
}

void widen(const Bf16* from, std::size_t count, float* to, Stream stream) {
    widen_octets<<<blocks_of(count / 8), threads, 0, stream>>>(from, count / 8, to);
    check_launch("widen");
}

}  // namespace faultline::gpt::on_device
