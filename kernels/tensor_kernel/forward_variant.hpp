// SPDX-License-Identifier: Apache-2.0
// What of a plan the tensor-core forward compiles in: one kernel for each variant.
#pragma once

#include <faultline/plan/schedule.hpp>

namespace faultline::tensor_kernel {

/// Everything else is as in presets fa3 and fa2: S and P V on the matrix unit with fp32 accumulators, ex2.approx, row sums of unrounded p in
/// quad order, p cast to nearest even, the output rescaled in fp32, divided by the row sum at the end, and cast.
struct ForwardVariant {
    ArgumentForm argument = ArgumentForm::fused;
    bool polynomial = false;  ///< exp2 by special/ex2_polynomial.hpp in columns 0 to 95 of each 128-key tile
    bool stable = false;      ///< Algorithm 1 of arXiv 2510.04212
    RowSumAdds row_sum_adds = RowSumAdds::unrounded;  ///< not two_sums

    friend constexpr bool operator==(const ForwardVariant&, const ForwardVariant&) = default;
};

/// A variant as a type: nvcc 13.0 writes host code that does not compile for a kernel with a class value as its argument.
template <ArgumentForm argument = ArgumentForm::fused, bool polynomial = false, bool stable = false,
          RowSumAdds row_sum_adds = RowSumAdds::unrounded>
struct Compiled {
    static constexpr ForwardVariant value{argument, polynomial, stable, row_sum_adds};
};

}  // namespace faultline::tensor_kernel
