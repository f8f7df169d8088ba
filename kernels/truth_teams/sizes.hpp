// SPDX-License-Identifier: Apache-2.0
// What memory a Driver needs.
#pragma once

#include <algorithm>
#include <cstddef>

#include <faultline/truth/fast_inputs.hpp>
#include <faultline/truth_teams/columns.hpp>

namespace faultline::truth_teams {

/// Doubles of a team that works on a row: a number for each thread and three rows.
constexpr std::ptrdiff_t row_memory(std::ptrdiff_t team_size, std::ptrdiff_t n_k) {
    return team_size + 3 * padded(n_k);
}

constexpr std::size_t row_matrices = 11, softcap_matrices = 4;

/// Bytes of one row of a strip.
inline std::size_t bytes_of_row(std::ptrdiff_t n_k, std::ptrdiff_t d, std::ptrdiff_t d_v, bool has_cap) {
    const auto width = static_cast<std::size_t>(padded(n_k)),
               product = static_cast<std::size_t>(padded(std::max(d, d_v)));
    const std::size_t matrices = row_matrices + (has_cap ? softcap_matrices : 0);
    const std::size_t chunks = sizeof(double) * width / rows_per_chunk + 1;
    return sizeof(double) * (matrices * width + 2 * product + 1) + sizeof(RowState) + chunks +
           static_cast<std::size_t>(d + d_v) * (2 * sizeof(double) + sizeof(std::int64_t) + 1);
}
/// What a strip takes beside its rows: alignment of its arrays, and the last chunk.
inline std::size_t bytes_beside_rows(std::ptrdiff_t n_k) {
    constexpr std::size_t arrays = 32, granule = 512;
    return arrays * granule + sizeof(double) * static_cast<std::size_t>(padded(n_k));
}
/// What a Driver allocates with all rows in one strip, as an upper bound.
inline std::size_t bytes_of_all_rows(const detail::FastInputs& in) {
    constexpr std::size_t arrays = 80, granule = 512;
    const auto heads = static_cast<std::size_t>(in.q.size()), n_q = static_cast<std::size_t>(in.n_q);
    const auto n_k = static_cast<std::size_t>(padded(in.n_k)),
               cols = static_cast<std::size_t>(padded(in.d) + padded(in.d_v));
    const std::size_t masks = (in.problem.bias.size() + in.problem.dropout.size()) * n_q * n_k;
    // q and dout with their running maxima, k and v twice with theirs, dk and dv with sums, values, bounds, exponents
    const std::size_t doubles = masks + cols * (heads * n_q + n_q + 3 * n_k + 6 * n_k) + 4 * heads * n_q + 16 * n_k;
    return sizeof(double) * doubles + arrays * granule + bytes_beside_rows(in.n_k) +
           heads * n_q * bytes_of_row(in.n_k, in.d, in.d_v, in.problem.softcap > 0);
}

}  // namespace faultline::truth_teams
