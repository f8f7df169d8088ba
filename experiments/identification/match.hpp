// SPDX-License-Identifier: Apache-2.0
// How many output elements of an observed kernel a plan reproduces bit for bit.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <faultline/attribution/group_run.hpp>

namespace faultline {

/// Elements compared. Two NaNs are equal whatever their payloads; zeros of either sign are equal, because a matrix unit
/// returns +0 where another order of the same operations leaves -0.
struct Match {
    std::size_t equal = 0;
    std::size_t within_one_ulp = 0;  ///< those equal included; ulp of the observed value in the format it is stored in
    std::size_t total = 0;

    /// 1 where nothing was compared.
    [[nodiscard]] double share() const {
        return total == 0 ? 1 : static_cast<double>(equal) / static_cast<double>(total);
    }
    [[nodiscard]] double near_share() const {
        return total == 0 ? 1 : static_cast<double>(within_one_ulp) / static_cast<double>(total);
    }
    [[nodiscard]] std::size_t differing() const { return total - equal; }
    void add(const Match& other);
    friend bool operator==(const Match&, const Match&) = default;
};

/// By Output; an output that the capture does not have was compared in no element.
struct OutputMatches {
    std::array<Match, 4> outputs;
    Match lse;  ///< of a ranking, where the capture has one: breaks ties, and counts in none of the sums
    [[nodiscard]] const Match& operator[](Output output) const { return outputs[static_cast<std::size_t>(output)]; }
    [[nodiscard]] Match all() const;
    void add(const OutputMatches& other);
    friend bool operator==(const OutputMatches&, const OutputMatches&) = default;
};

namespace identification {

/// Which rows of an output: of a single head every other one is searched, and the rest is held out.
enum class Rows : unsigned char { all, even, odd };

/// One key head of one layer with what a kernel returned for it: what a plan is run on. The capture outlives it.
struct Unit {
    const LayerCapture* layer = nullptr;
    std::size_t layer_index = 0;  ///< among the layers identified together
    attribution::Group group;
    Rows rows = Rows::all;  ///< of every output, that are compared
};

/// One bit per element compared of an output, 1 where plan and kernel are equal: all matrices after each other, then zeros to a
/// whole word.
using EqualFlags = std::array<std::vector<std::uint64_t>, 4>;

/// Compares a run with what `kernel` returned for this unit, by attribution::SameElement. `flags` may be null.
[[nodiscard]] OutputMatches compare(const Unit& unit, const attribution::RunOutputs& run, const ObservedKernel& kernel,
                                    EqualFlags* flags = nullptr);

/// Elements that one of two runs has equal and the other not, all outputs together.
struct Flips {
    std::size_t won = 0, lost = 0;
    [[nodiscard]] bool none() const { return won == 0 && lost == 0; }
    /// (won - lost) / sqrt(won + lost): McNemar's statistic, the size of a difference in units of what chance would make of
    /// as many flips; 0 without any.
    [[nodiscard]] double z() const;
    void add(const Flips& other) {
        won += other.won;
        lost += other.lost;
    }
    friend bool operator==(const Flips&, const Flips&) = default;
};
[[nodiscard]] Flips flips(const EqualFlags& before, const EqualFlags& after);

}  // namespace identification
}  // namespace faultline
