// SPDX-License-Identifier: Apache-2.0
// From a cell's sums under the null model to the statistic of the observed one.
#pragma once

#include <vector>

#include <faultline/verdict/cells.hpp>

namespace faultline::verdict {

/// What the runs of the null model say of one cell.
struct CellNull {
    Direction direction = Direction::shift;
    double runs = 0;
    double spread =
        0;  ///< signed: rms of the sums, whose mean is 0 by construction, with the floor in it; else the standard
            ///< deviation of their logarithms
    double center = 0;   ///< mean of the logarithms; 0 for signed sums
    double slack = 0;    ///< logarithm that a size may be larger by
    bool exact = false;  ///< a size that is 0 in every run: the plan makes no error here
    double floor = 0;    ///< of a size: how far what the null model leaves out may move the root (an element itself)

    /// Student's statistic of an observed sum: with `runs` degrees of freedom for a signed sum, runs - 1 for a size, whose
    /// root may be t floors larger besides. Infinite for an error where every run is exact and the floor is 0.
    [[nodiscard]] double t(double observed) const;
    [[nodiscard]] double degrees() const { return is_signed(direction) ? runs : runs - 1; }
    /// log10 of the chance of a statistic as far out: two-sided for signed sums, above for sizes.
    [[nodiscard]] double log10_p(double t) const;

    /// Statistics that t(observed) lies between in size whatever the exact truth is, where that may move the sum, its root or
    /// the element by `doubt` (cell_doubts), of the observed value and of every run alike. Both t(observed) where doubt is 0.
    struct Range {
        double least = 0, most = 0;
    };
    [[nodiscard]] Range t_range(double observed, double doubt) const;
};

/// The runs' sums of one cell as they go by.
class NullSums {
  public:
    explicit NullSums(Direction direction) : direction_(direction) {}
    void add(double sum);
    /// `floor_variance`: of a signed sum, of a size's root or of an element, from what the null model leaves out. `slack`:
    /// as in CheckOptions.
    [[nodiscard]] CellNull null(double floor_variance, double slack) const;

  private:
    Direction direction_;
    double runs_ = 0, squares_ = 0;  // squares: of signed sums, or of the logarithms' distances from their mean
    double mean_ = 0;                // of the logarithms: Welford 1962
    bool all_zero_ = true;
};

}  // namespace faultline::verdict
