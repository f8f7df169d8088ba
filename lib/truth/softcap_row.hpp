// SPDX-License-Identifier: Apache-2.0
// One row of scores under a softcap, for the fast path: c tanh(u) with u = scale q k^T / c, and the slope 1 - tanh^2(u) that
// the chain rule needs, which has an exponent of its own, so that it keeps its digits where tanh is next to 1.
// With E = e^(-2|u|): tanh|u| = (1 - E)/(1 + E) and the slope is 4E/(1 + E)^2. Bounds: docs/numerics-truth.md, lemma 5.
#pragma once

#include <faultline/truth/aligned.hpp>
#include <faultline/truth/fast_inputs.hpp>
#include <faultline/truth/row_passes.hpp>

namespace faultline::detail {

class SoftcapRow {
  public:
    /// Arrays of `width` entries, a multiple of 8.
    explicit SoftcapRow(std::size_t width);

    /// s_j = q k^T, off by at most `error` each, becomes c tanh(scale s_j / c); returns what those are off by at most.
    /// Keeps the slopes. `vanished` is set where a slope below e^(-2^40) was taken for 0.
    double apply(const FastInputs& in, double error, std::ptrdiff_t count, double* s_high, double* s_low,
                 bool& vanished);

    /// ds_j <- ds_j slope_j, with its errors.
    void chain(std::ptrdiff_t count, const WideRow& ds, double* error) const;

  private:
    AlignedVector x_high_, x_low_;                          // -2|u|
    AlignedVector high_, low_, exponent_, relative_error_;  // of E, then of the slope
};

}  // namespace faultline::detail
