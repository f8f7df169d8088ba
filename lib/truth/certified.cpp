// SPDX-License-Identifier: Apache-2.0
#include <faultline/truth/certified.hpp>

#include <algorithm>
#include <cmath>

namespace faultline {
namespace {

/// In WideReal throughout: a square of 2^-600 already leaves the range of double.
template <class Element>
WideReal root_of_squares(std::ptrdiff_t rows, std::ptrdiff_t cols, const Element& element) {
    WideReal sum;
    for (std::ptrdiff_t i = 0; i < rows; ++i)
        for (std::ptrdiff_t j = 0; j < cols; ++j) {
            const WideReal x = element(i, j);
            sum = sum + x * x;
        }
    return sqrt(sum);
}

}  // namespace

double CertifiedMatrix::operator()(std::ptrdiff_t i, std::ptrdiff_t j) const {
    const std::size_t at_ij = index(i, j);
    return exponent[at_ij] == 0 ? value[at_ij] : at(i, j).to_double();
}

bool CertifiedMatrix::wide() const {
    return std::any_of(exponent.begin(), exponent.end(), [](std::int64_t e) { return e != 0; });
}

void CertifiedMatrix::copy_to(MatrixView<double> out) const {
    for (std::ptrdiff_t i = 0; i < rows; ++i)
        for (std::ptrdiff_t j = 0; j < cols; ++j) out(i, j) = (*this)(i, j);
}

WideReal frobenius_norm(const CertifiedMatrix& a) {
    return root_of_squares(a.rows, a.cols, [&](std::ptrdiff_t i, std::ptrdiff_t j) { return a.at(i, j); });
}

WideReal frobenius_bound(const CertifiedMatrix& a) {
    return root_of_squares(a.rows, a.cols, [&](std::ptrdiff_t i, std::ptrdiff_t j) { return a.bound_at(i, j); });
}

WideReal frobenius_distance(MatrixView<const double> observed, const CertifiedMatrix& truth) {
    return root_of_squares(truth.rows, truth.cols, [&](std::ptrdiff_t i, std::ptrdiff_t j) {
        return WideReal(observed(i, j)) - truth.at(i, j);
    });
}

}  // namespace faultline
