// SPDX-License-Identifier: Apache-2.0
// When an element of a plan's output is that of a kernel: the one comparison that attribution and identification share.
#pragma once

#include <cmath>
#include <span>

#include <faultline/attribution/group_run.hpp>
#include <faultline/format/bulk.hpp>
#include <faultline/format/format.hpp>

namespace faultline::attribution {

/// Compares what a plan computes with what a file holds. The plan's value is first rounded to the type of the file, which
/// changes nothing for a plan that stores that type and lets one that rounds less (`exact`) stand for a kernel whose only
/// error is its last rounding. Two NaNs are equal whatever their payloads.
class SameElement {
  public:
    /// `dtype`: of the observed tensor.
    explicit SameElement(Dtype dtype) : format_(with_saturation(format_of(dtype), false)) {}

    struct Answer {
        bool equal = false;
        bool within_one_ulp = false;  ///< equal included; ulp of the observed value in the file's type
    };
    [[nodiscard]] Answer operator()(double plan, double observed) const {
        return of_stored(round(plan, format_, Rounding::nearest_even), observed);
    }

    /// A row of the plan's values as the file would store them, in bulk.
    void store(std::span<double> row) const { round_bulk(row, format_, Rounding::nearest_even); }
    /// The answer for a value that is stored already.
    [[nodiscard]] Answer of_stored(double stored, double observed) const {
        const bool equal = stored == observed || (std::isnan(stored) && std::isnan(observed));
        return {equal, equal || std::abs(stored - observed) <= ulp(observed, format_)};
    }

  private:
    Format format_;
};

}  // namespace faultline::attribution
