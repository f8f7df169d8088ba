// SPDX-License-Identifier: Apache-2.0
// One output of one head against its truth: the cells' statistics under the null model, and where an error is largest.
#pragma once

#include <cstddef>
#include <vector>

#include <faultline/tensor/matrix.hpp>
#include <faultline/truth/wide_real.hpp>
#include <faultline/verdict/cells.hpp>
#include <faultline/verdict/statistics.hpp>

namespace faultline::verdict {

/// Root of the sum of squares, which neither overflows nor underflows.
class Norm {
  public:
    void add(double x);  ///< values that are not finite are left out
    [[nodiscard]] double rms(double count) const;
    [[nodiscard]] WideReal squared() const;

  private:
    double scale_ = 0, sum_ = 0;
};

/// Where a size comes from: the row with most of a cell's squared error, or with its largest element.
struct Worst {
    std::ptrdiff_t row = -1, feature = -1;  ///< -1: the cell is no size; the feature of an element alone
    double share = 0;                       ///< of the cell's sum in that row
    double truth = 0;                       ///< rms of the row's truth over that of the head's
};

struct HeadValues {
    const Matrix* truth = nullptr;
    const Matrix* plan = nullptr;
    const Matrix* observed = nullptr;
    std::vector<const Matrix*> runs;  ///< of the null model
};

struct HeadLayout {
    std::vector<double> floor;      ///< [rows] what the null model leaves out, per element
    bool common_floor = false;      ///< that error may be one and the same in all rows (lse: a constant's rounding)
    std::ptrdiff_t block = 1;       ///< rows of a block
    std::vector<double> direction;  ///< unit vector along the mean key, or empty
    double slack = 1;
    bool sizes_and_shift = false;  ///< lse, one column: neither growth, features nor scatter
};

struct HeadCells {
    std::vector<Cell> cells;
    std::vector<CellNull> null;
    std::vector<double> observed, plan;  ///< statistics
    std::vector<double> observed_sums, plan_sums;
    std::vector<Worst> worst;           ///< of the observed values, by cell
    std::vector<double> run_sizes;      ///< by run: the size over the whole head
    std::vector<WideReal> run_squared;  ///< by run: the squared error norm
    std::size_t nonfinite = 0;          ///< elements of the kernel, where the truth is finite
    std::size_t nonfinite_of_plan = 0;  ///< of those the ones that are the plan's too: both NaN, or the same infinity
    std::size_t finite = 0;             ///< lse: rows without a key that have a finite one
};

[[nodiscard]] HeadCells head_cells(const HeadValues& values, const HeadLayout& layout);

}  // namespace faultline::verdict
