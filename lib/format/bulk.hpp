// SPDX-License-Identifier: Apache-2.0
// Rounding of whole arrays, the same bits as round() element by element, at the speed of vector units. Kernels for
// AVX-512, AVX2 and baseline x86-64 are chosen at run time.
#pragma once

#include <faultline/format/format.hpp>
#include <faultline/random/random_stream.hpp>

#include <cstddef>
#include <cstdint>
#include <span>

namespace faultline {

/// The random_bits with which round_bulk rounds the element of this counter: 32 random bits in the upper half, the lower
/// half 0. So the probability of rounding away from zero is the discarded fraction truncated to 32 bits, which is exact
/// for normal bf16, tf32 and fp16 results from float. Reproduces any one element:
///   round(x[i], f, Rounding::stochastic, stochastic_bits(stream, first_counter + i)).
[[nodiscard]] FAULTLINE_HD constexpr std::uint64_t stochastic_bits(RandomStream stream, std::uint64_t counter);

/// values[i] = round(values[i], f, mode, stochastic_bits(stream, first_counter + i)). The stream and the counter matter to
/// Rounding::stochastic alone; arrays rounded in pieces with the counters continued give the same as in one piece.
/// Errors: std::invalid_argument where a float cannot hold the numbers of f (fits_float).
void round_bulk(std::span<float> values, Format f, Rounding mode = Rounding::nearest_even, RandomStream stream = {},
                std::uint64_t first_counter = 0);
void round_bulk(std::span<double> values, Format f, Rounding mode = Rounding::nearest_even, RandomStream stream = {},
                std::uint64_t first_counter = 0);

/// The same into another array of the same length; the two are disjoint or the same, not shifted against each other.
/// Errors: std::invalid_argument where the lengths differ. From double to float there is one rounding, not two.
void round_bulk(std::span<const float> from, std::span<float> to, Format f, Rounding mode = Rounding::nearest_even,
                RandomStream stream = {}, std::uint64_t first_counter = 0);
void round_bulk(std::span<const double> from, std::span<double> to, Format f, Rounding mode = Rounding::nearest_even,
                RandomStream stream = {}, std::uint64_t first_counter = 0);
void round_bulk(std::span<const double> from, std::span<float> to, Format f, Rounding mode = Rounding::nearest_even,
                RandomStream stream = {}, std::uint64_t first_counter = 0);

}  // namespace faultline

#include <faultline/format/stochastic_bits.hpp>
