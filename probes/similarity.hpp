// SPDX-License-Identifier: Apache-2.0
// Low-rank structural similarity of the terms of a weight gradient's error: with delta wrong by e_t in row t, W_Q's
// gradient is wrong by scale sum_t e_t (PK)[t]^T X[t], a sum of rank-1 terms (arXiv 2510.04212, section 3.2). Where the terms
// are alike, a coherent e drives the weight along one direction. The paper shows heat-maps; these are numbers.
//
// A term is a_t b_t^T with a_t row t of A [terms, m] and b_t row t of B [terms, n]. Nothing here forms it: the inner product
// of two terms is (a_t . a_s)(b_t . b_s).
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include <faultline/tensor/matrix.hpp>

namespace faultline {

/// [terms, terms]: cosine of each pair of terms, in [-1, 1]; NaN in the rows and columns of terms that are 0 or not finite.
/// Works in terms^2 (m + n) operations.
[[nodiscard]] Matrix term_cosines(MatrixView<const double> a, MatrixView<const double> b);

struct TermStructure {
    std::vector<double>
        energies;  ///< [terms] falling: squared singular values of the terms, flattened and of unit length,
                   ///< as rows of a [terms, m n] matrix, over their number: sums to 1
    double effective_rank = 0;   ///< exp(-sum p log p) of them: 1 where all terms are one direction up to sign
    double stable_rank = 0;      ///< 1 / energies[0]
    double mean_cosine = 0;      ///< of pairs of different terms; NaN for fewer than two
    double mean_abs_cosine = 0;  ///< of |cosine|
    std::size_t used = 0;        ///< terms that are finite and not 0
    /// Part of the first k energies in all of them; 1 where there are no more than k.
    [[nodiscard]] double leading(std::size_t k) const;
};
/// From term_cosines(): its eigenvalues over the terms used.
[[nodiscard]] TermStructure term_structure(const Matrix& cosines);

/// The sum of the terms with weights: A^T diag(w) B [m, n]. With w = scale e it is the error of the weight's gradient itself.
[[nodiscard]] Matrix weighted_sum(MatrixView<const double> a, MatrixView<const double> b,
                                  std::span<const double> weights);
/// |sum w_t a_t b_t^T|_F / sum |w_t| |a_t| |b_t|: 1 where every term pushes the same way, some 1/sqrt(terms) for random
/// ones. NaN where the denominator is 0 or not finite. From the factors.
[[nodiscard]] double resultant(MatrixView<const double> a, MatrixView<const double> b, std::span<const double> weights);

/// Principal angles, rising, radians in [0, pi/2], between the spaces that the columns of U [n, p] and V [n, q] span; as many
/// as the smaller of the two ranks (columns that the others span to 2^-40 do not count). Björck and Golub, Math. Comp. 27
/// (1973): small angles from their sines. Empty where a space is; one NaN where an element is not finite.
/// std::invalid_argument where the numbers of rows differ.
[[nodiscard]] std::vector<double> principal_angles(MatrixView<const double> u, MatrixView<const double> v);

}  // namespace faultline
