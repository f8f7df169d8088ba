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

/// Elements of a head that are NaN or infinite where the truth is finite, in rows, and the first of them in the order of memory.
struct NotFinite {
    std::size_t elements = 0, rows = 0;
    std::ptrdiff_t row = -1, feature = -1;  ///< of the first; -1: there is none; an lse has no feature
    double value = 0;                       ///< of the first
    double beside = 0;  ///< at the same place: of the kernel the plan's own run, of the plan the kernel
};

/// What is compared, all [rows, cols].
struct HeadValues {
    Matrix truth;     ///< the double nearest to it
    Matrix bound;     ///< certified: |truth - what it stands for| is at most this, up to an ulp of the double
    Matrix plan;      ///< the plan's own run
    Matrix observed;  ///< the kernel
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
    /// By cell: how far the truth's bound may move a signed sum, a size's or scatter's root, an element. 0: not at all.
    std::vector<double> doubt;
    std::vector<Worst> worst;           ///< of the observed values, by cell
    std::vector<double> run_sizes;      ///< by run: the size over the whole head
    std::vector<WideReal> run_squared;  ///< by run: the squared error norm; infinite where an element is not finite
    NotFinite nonfinite;                ///< of the kernel
    std::size_t nonfinite_of_plan = 0;  ///< of those the ones that are the plan's too: both NaN, or the same infinity
    NotFinite plan_nonfinite;           ///< of the plan's own run
    /// Finite in the kernel and not in the plan's own run, which says no size of error there: they count as 0 in every sum.
    std::size_t unpredicted = 0;
    std::size_t finite = 0;  ///< lse: rows without a key that have a finite one
};

/// The runs of the null model go by twice, in their order, and none is kept: first for the size of the rows' errors, then
/// for the cells' sums in units of it.
class HeadTest {
  public:
    HeadTest(HeadValues values, HeadLayout layout);
    void add_size(const Matrix& run);
    void sizes_are_whole();
    void add_sums(const Matrix& run);
    [[nodiscard]] HeadCells result() &&;

  private:
    void count_nonfinite();
    [[nodiscard]] std::vector<double> sums_of(const Matrix& values) const;
    [[nodiscard]] double floor_variance(const Cell& cell) const;

    HeadValues values_;
    HeadLayout layout_;
    double runs_ = 0;
    std::vector<Norm> row_errors_;
    std::vector<double> sigma_;      // [rows] rms error of the row over the runs, with the floor
    std::vector<Cell> cells_;        // all; what an lse has none of is left out at the end
    std::vector<NullSums> of_runs_;  // by cell
    HeadCells head_;
};

}  // namespace faultline::verdict
