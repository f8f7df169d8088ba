// SPDX-License-Identifier: Apache-2.0
// What memory a Driver needs: what bounds its strips, and what is known before it begins.
#pragma once

#include <algorithm>
#include <cstddef>

#include <faultline/truth/elementary.hpp>
#include <faultline/truth/truth.hpp>
#include <faultline/truth_teams/columns.hpp>

namespace faultline::truth_teams {

/// Doubles of a team that works on a row: a number for each thread and three rows.
constexpr std::ptrdiff_t row_memory(std::ptrdiff_t team_size, std::ptrdiff_t n_k) {
    return team_size + 3 * padded(n_k);
}

/// What one piece of memory is rounded up to, in bytes.
inline constexpr std::size_t piece_bytes = 512;

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
    constexpr std::size_t arrays = 32;
    return arrays * piece_bytes + sizeof(double) * static_cast<std::size_t>(padded(n_k));
}
/// What a Driver takes for a problem, in bytes, from its shapes alone: known before any work. A sink is a key of its own, with a
/// bias for each head, as the fast path has it.
class TruthNeed {
  public:
    /// team_size: the most threads that a team has.
    TruthNeed(const TruthProblem& problem, std::ptrdiff_t team_size)
        : heads_(problem.q.size()),
          n_q_(problem.q.front().rows),
          n_k_(problem.k.rows + (problem.sink.empty() ? 0 : 1)),
          d_(problem.k.cols),
          d_v_(problem.v.cols),
          biases_(problem.sink.empty() ? problem.bias.size() : heads_),
          dropouts_(problem.sink.empty() || problem.dropout.empty() ? problem.dropout.size() : heads_),
          has_cap_(problem.softcap > 0),
          team_(sizeof(double) * static_cast<std::size_t>(row_memory(team_size, n_k_))) {}

    /// What the inputs take, each piece rounded (sent_inputs), to the byte.
    [[nodiscard]] std::size_t inputs() const {
        const std::size_t heads = heads_, n_q = number(n_q_), n_k = number(n_k_), keys = number(padded(n_k_));
        std::size_t sum = piece(sizeof(detail::ExpConstants)) + piece(sizeof(std::ptrdiff_t) * number(d_));
        for (const std::ptrdiff_t columns : {d_, d_v_}) {  // q and k; dout and v
            const std::size_t cols = number(padded(columns));
            sum += doubles(heads * n_q * cols) + doubles(n_k * cols) + doubles(number(columns) * keys);
            sum += 2 * doubles(heads * n_q) + doubles(keys);                       // powers and widths
            sum += 2 * doubles(cols) + doubles(n_k * cols) + doubles(n_q * cols);  // columns and running maxima
        }
        for (const std::size_t masks : {biases_, dropouts_})
            if (masks > 0) sum += doubles(masks * n_q * n_k);
        return sum;
    }
    /// The same of dk and dv in the making.
    [[nodiscard]] std::size_t sums() const {
        const std::size_t n_k = number(n_k_), keys = number(padded(n_k_));
        std::size_t sum = 0;
        for (const std::ptrdiff_t columns : {d_, d_v_})
            sum += 4 * doubles(keys) + 2 * doubles(n_k * number(padded(columns))) + 3 * doubles(n_k * number(columns)) +
                   piece(n_k * number(columns));
        return sum;
    }
    [[nodiscard]] std::size_t row() const { return bytes_of_row(n_k_, d_, d_v_, has_cap_); }
    /// Of a team that works on a row.
    [[nodiscard]] std::size_t team() const { return team_; }
    /// With strips of one row and one team.
    [[nodiscard]] std::size_t least() const { return fixed() + row() + team_; }
    /// With all rows in one strip.
    [[nodiscard]] std::size_t all(std::size_t teams) const {
        return fixed() + heads_ * number(n_q_) * row() + teams * team_;
    }
    [[nodiscard]] std::ptrdiff_t keys() const { return n_k_; }

  private:
    static std::size_t number(std::ptrdiff_t n) { return static_cast<std::size_t>(n); }
    static std::size_t piece(std::size_t bytes) { return (bytes + piece_bytes - 1) / piece_bytes * piece_bytes; }
    static std::size_t doubles(std::size_t count) { return piece(count * sizeof(double)); }
    [[nodiscard]] std::size_t fixed() const { return inputs() + sums() + bytes_beside_rows(n_k_); }

    std::size_t heads_;
    std::ptrdiff_t n_q_, n_k_, d_, d_v_;
    std::size_t biases_, dropouts_;
    bool has_cap_;
    std::size_t team_;
};

}  // namespace faultline::truth_teams
