// SPDX-License-Identifier: Apache-2.0
// Outputs of several runs over parts of the keys, merged by their log-sum-exp: the combine kernel of FlashAttention-2's
// split-KV path (csrc/flash_attn/src/flash_fwd_kernel.h, combine_attn_seqk_parallel), and ring attention.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include <faultline/cpu/stage.hpp>
#include <faultline/special/binary64.hpp>

namespace faultline::cpu {

struct SplitMerge {
    std::vector<Matrix> o;                 ///< per split [rows, d_v], normalised
    std::vector<std::vector<double>> lse;  ///< per split, per row; -inf where the split sees no key

    SplitMerge(int splits, std::ptrdiff_t rows, std::ptrdiff_t cols)
        : o(static_cast<std::size_t>(splits), Matrix(rows, cols)),
          lse(static_cast<std::size_t>(splits), std::vector<double>(static_cast<std::size_t>(rows))) {}

    /// out[row] <- log sum_i exp(lse_i), every operation rounded; the sum as a tree over i xor half, …, 1 as the combine
    /// kernel's allreduce does it. out: [rows, 1].
    template <class Round>
    void merged_lse(Round&& rounded, MatrixView<double> out) const {
        std::size_t lanes = 1;
        while (lanes < lse.size()) lanes *= 2;
        for (std::ptrdiff_t r = 0; r < out.rows; ++r) {
            const auto row = static_cast<std::size_t>(r);
            const double top = largest(row);
            out(r, 0) = top;
            if (std::isinf(top)) continue;
            std::vector<double> part(lanes, 0.0);
            for (std::size_t i = 0; i < lse.size(); ++i)
                part[i] = rounded(binary64_functions::exp(rounded(lse[i][row] - top)));
            for (std::size_t half = lanes / 2; half > 0; half /= 2)
                for (std::size_t i = 0; i < half; ++i) part[i] = rounded(part[i] + part[i + half]);
            out(r, 0) = rounded(rounded(binary64_functions::log(part[0])) + top);
        }
    }

    /// out <- sum_i exp(lse_i - lse) o_i, in the order of i, product and sum in one rounding.
    template <class Round>
    void merged_output(const std::vector<double>& total, Round&& rounded, MatrixView<double> out) const {
        for (std::ptrdiff_t r = 0; r < out.rows; ++r) {
            const auto row = static_cast<std::size_t>(r);
            for (std::ptrdiff_t c = 0; c < out.cols; ++c) out(r, c) = 0;
            if (std::isinf(total[row])) continue;
            for (std::size_t i = 0; i < o.size(); ++i) {
                const double weight = rounded(binary64_functions::exp(rounded(lse[i][row] - total[row])));
                for (std::ptrdiff_t c = 0; c < out.cols; ++c)
                    out(r, c) = rounded(std::fma(weight, o[i](r, c), out(r, c)));
            }
        }
    }

  private:
    [[nodiscard]] double largest(std::size_t row) const {
        double top = lse.front()[row];
        for (const auto& split : lse) top = std::max(top, split[row]);
        return top;
    }
};

}  // namespace faultline::cpu
