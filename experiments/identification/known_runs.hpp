// SPDX-License-Identifier: Apache-2.0
// What plans have of one kernel, kept for as long as the kernel is searched: the search comes to one plan by several ways (from
// two starts, as a pair and as a step, on the rows searched, on those held out, and on all).
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>

#include <faultline/identification/match.hpp>

namespace faultline::identification {

/// A run of a plan compared with the kernel, the two halves of its rows apart. Without the lse.
struct ComparedRun {
    struct Half {
        EqualFlags equal;
        OutputMatches matches;
    };
    Half even, odd;

    [[nodiscard]] EqualFlags equal_in(Rows rows) const;
    [[nodiscard]] OutputMatches matches_in(Rows rows) const;
};

/// Compares a run with what the kernel returned for this unit, whatever rows are its.
[[nodiscard]] std::shared_ptr<const ComparedRun> compared(const Unit& unit, const attribution::RunOutputs& run,
                                                          const ObservedKernel& kernel);

/// What names a plan by what it computes: two plans of one key compute the same, bit for bit.
[[nodiscard]] std::string key_of(const RoundingPlan& plan);

/// The runs of one kernel. Every member may be called by any thread.
class KnownRuns {
  public:
    /// Null where there is none.
    [[nodiscard]] std::shared_ptr<const ComparedRun> find(const Unit& unit, const std::string& key) const;
    /// Forgets nothing; past some 256 MiB keeps no more.
    void keep(const Unit& unit, const std::string& key, std::shared_ptr<const ComparedRun> run);

  private:
    using Key = std::tuple<const LayerCapture*, std::ptrdiff_t, std::ptrdiff_t, std::string>;
    static Key key(const Unit& unit, const std::string& plan);

    mutable std::mutex mutex_;
    std::map<Key, std::shared_ptr<const ComparedRun>> runs_;
    std::size_t bytes_ = 0;
};

}  // namespace faultline::identification
