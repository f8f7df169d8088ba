// SPDX-License-Identifier: Apache-2.0
// The kernel that puts a function of the card beside its model in lib/special, float by float.
#pragma once

#include <cstdint>

#include <cuda_runtime.h>

#include <faultline/agreement/functions.cuh>

namespace faultline::agreement {

constexpr int binades = 512;
constexpr int histogram_size = 9;  // -4 or less, -3 ... 3, 4 or more

struct FunctionTally {
    unsigned long long mismatches[binades];
    unsigned long long rival_mismatches[function_rivals];
    unsigned long long histogram[histogram_size];  // card - model, in encodings, of mismatches with neither a NaN
    unsigned int first[binades];                   // smallest and largest bits of x with a mismatch
    unsigned int last[binades];
};

FAULTLINE_HD inline std::uint32_t bits_of(float x) { return detail::bits_as<std::uint32_t>(x); }

/// Distance of two floats' encodings of the same sign; what is beyond +-limit, or of unequal signs, is +-limit.
FAULTLINE_HD inline int distance(std::uint32_t card, std::uint32_t model, int limit) {
    const std::int64_t d =
        static_cast<std::int64_t>(card & 0x7FFFFFFFu) - static_cast<std::int64_t>(model & 0x7FFFFFFFu);
    if ((card ^ model) >> 31) return limit;
    return d > limit ? limit : d < -limit ? -limit : static_cast<int>(d);
}

template <class F>
__global__ void compare_function(std::uint32_t base, std::uint32_t* card_bits, FunctionTally* tally) {
    const std::uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    const std::uint32_t x = base + i;
    const std::uint32_t card = bits_of(F::card(detail::bits_as<float>(x)));
    const std::uint32_t model = bits_of(F::model(detail::bits_as<float>(x)));
    card_bits[i] = card;
    if (card != model) {
        atomicAdd(&tally->mismatches[x >> 23], 1ull);
        atomicMin(&tally->first[x >> 23], x);
        atomicMax(&tally->last[x >> 23], x);
        const bool nan = (card & 0x7FFFFFFFu) > 0x7F800000u || (model & 0x7FFFFFFFu) > 0x7F800000u;
        if (!nan) atomicAdd(&tally->histogram[distance(card, model, 4) + 4], 1ull);
    }
    for (int r = 0; r < F::rivals; ++r) {
        const bool differs = card != bits_of(F::rival(r, detail::bits_as<float>(x)));
        const unsigned lanes = __ballot_sync(0xFFFFFFFFu, differs);
        if (differs && (lanes & ((1u << (threadIdx.x & 31)) - 1)) == 0)
            atomicAdd(&tally->rival_mismatches[r], static_cast<unsigned long long>(__popc(lanes)));
    }
}

}  // namespace faultline::agreement
