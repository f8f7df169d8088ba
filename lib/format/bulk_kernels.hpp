// SPDX-License-Identifier: Apache-2.0
// The loops behind round_bulk. Private to lib/format.
#pragma once

#include <faultline/format/bulk.hpp>

#include <cstddef>

namespace faultline::detail {

/// to[i] = (To) from[i] rounded, `mode` not stochastic, lane.family not none. from and to are the same or disjoint.
void round_float(const float* from, float* to, std::size_t count, LaneFormat<float> lane, Rounding mode);
void round_double(const double* from, double* to, std::size_t count, LaneFormat<double> lane, Rounding mode);

/// Stochastic to a shared format with shift <= 16: whole groups of stochastic_group elements, the first one group `group`.
/// Sixteen random bits are all that such an element sees, so half of the blocks need not be computed.
void round_stochastic_shared(const float* from, float* to, std::size_t groups, LaneFormat<float> lane,
                             std::uint64_t key, std::uint64_t group);

/// The 32 random bits of each element of one group: stochastic_bits >> 32.
void stochastic_words(std::uint32_t* words, std::uint64_t key, std::uint64_t group);

/// Stochastic with given random bits (the upper half of stochastic_bits), any count.
void round_with_words(const float* from, float* to, std::size_t count, LaneFormat<float> lane,
                      const std::uint32_t* words);
void round_with_words(const double* from, double* to, std::size_t count, LaneFormat<double> lane,
                      const std::uint32_t* words);

}  // namespace faultline::detail
