// SPDX-License-Identifier: Apache-2.0
// Outputs of several runs over parts of the keys, merged by their log-sum-exp (kernels/cpu/split_merge.hpp), an element at a
// time.
#pragma once

#include <cstddef>

#include <faultline/emulated/machine.hpp>
#include <faultline/special/binary64.hpp>

namespace faultline::emulated {

struct SplitMerge {
    const double* split_lse;  ///< [splits, rows]; -inf where the split sees no key
    double* weights;          ///< [rows, 2 splits]: memory for a tree
    View<double> split_o;     ///< [splits * rows, d_v], normalised
    int splits;
    std::ptrdiff_t rows;

    /// log sum_s exp(lse_s) of row i, as a tree over s xor half, …, 1; every operation rounded.
    template <class Round>
    [[nodiscard]] FAULTLINE_HD double lse_of(std::ptrdiff_t i, Round&& rounded) const {
        double top = split_lse[i];
        for (int s = 1; s < splits; ++s) {
            const double lse = split_lse[s * rows + i];
            top = top < lse ? lse : top;
        }
        if (top == infinity() || top == -infinity()) return top;
        int lanes = 1;
        while (lanes < splits) lanes *= 2;
        double* part = weights + i * 2 * splits;
        for (int s = 0; s < lanes; ++s)
            part[s] = s < splits ? rounded(binary64_functions::exp(rounded(split_lse[s * rows + i] - top))) : 0.0;
        for (int half = lanes / 2; half > 0; half /= 2)
            for (int s = 0; s < half; ++s) part[s] = rounded(part[s] + part[s + half]);
        return rounded(rounded(binary64_functions::log(part[0])) + top);
    }

    /// sum_s exp(lse_s - total) o_s of element (i, c), in the order of s, product and sum in one rounding.
    template <class Round>
    [[nodiscard]] FAULTLINE_HD double output(std::ptrdiff_t i, std::ptrdiff_t c, double total, Round&& rounded) const {
        double o = 0;
        if (total == infinity() || total == -infinity()) return o;
        for (int s = 0; s < splits; ++s) {
            const double weight = rounded(binary64_functions::exp(rounded(split_lse[s * rows + i] - total)));
            o = rounded(fma(weight, split_o(s * rows + i, c), o));
        }
        return o;
    }
};

}  // namespace faultline::emulated
