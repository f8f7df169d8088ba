// SPDX-License-Identifier: Apache-2.0
#include <faultline/format/bulk.hpp>

#include <stdexcept>
#include <string>

namespace faultline {
namespace {

template <class From, class To>
void round_array(std::span<const From> from, std::span<To> to, Format f, Rounding mode, RandomStream stream,
                 std::uint64_t first_counter) {
    if (from.size() != to.size()) {
        throw std::invalid_argument("round_bulk: " + std::to_string(from.size()) + " values into an array of " +
                                    std::to_string(to.size()) + ": expected equal lengths");
    }
    for (std::size_t i = 0; i < from.size(); ++i) {
        const std::uint64_t random = mode == Rounding::stochastic ? stochastic_bits(stream, first_counter + i) : 0;
        to[i] = static_cast<To>(round(static_cast<double>(from[i]), f, mode, random));
    }
}

}  // namespace

void round_bulk(std::span<float> values, Format f, Rounding mode, RandomStream stream, std::uint64_t first_counter) {
    round_array<float, float>(values, values, f, mode, stream, first_counter);
}
void round_bulk(std::span<double> values, Format f, Rounding mode, RandomStream stream, std::uint64_t first_counter) {
    round_array<double, double>(values, values, f, mode, stream, first_counter);
}
void round_bulk(std::span<const float> from, std::span<float> to, Format f, Rounding mode, RandomStream stream,
                std::uint64_t first_counter) {
    round_array<float, float>(from, to, f, mode, stream, first_counter);
}
void round_bulk(std::span<const double> from, std::span<double> to, Format f, Rounding mode, RandomStream stream,
                std::uint64_t first_counter) {
    round_array<double, double>(from, to, f, mode, stream, first_counter);
}
void round_bulk(std::span<const double> from, std::span<float> to, Format f, Rounding mode, RandomStream stream,
                std::uint64_t first_counter) {
    round_array<double, float>(from, to, f, mode, stream, first_counter);
}

}  // namespace faultline
