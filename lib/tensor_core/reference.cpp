// SPDX-License-Identifier: Apache-2.0
#include <faultline/tensor_core/reference.hpp>

#include <algorithm>
#include <cmath>
#include <vector>

#include <faultline/tensor_core/fused_add.hpp>

namespace faultline::reference {
namespace {

/// Neighbours are added, level by level; an odd one at the end of a level moves up unchanged.
float tree(std::vector<float> level) {
    while (level.size() > 1) {
        std::vector<float> next;
        for (std::size_t i = 0; i + 1 < level.size(); i += 2) next.push_back(level[i] + level[i + 1]);
        if (level.size() % 2 == 1) next.push_back(level.back());
        level = std::move(next);
    }
    return level.front();
}

}  // namespace

double dot(const Accumulation& accumulation, const double* a, std::ptrdiff_t a_step, const double* b,
           std::ptrdiff_t b_step, std::ptrdiff_t k, double c) {
    using Kind = Accumulation::Kind;
    const auto x = [&](std::ptrdiff_t i) { return a[i * a_step]; };
    const auto y = [&](std::ptrdiff_t i) { return b[i * b_step]; };
    const auto xf = [&](std::ptrdiff_t i) { return static_cast<float>(x(i)); };
    const auto yf = [&](std::ptrdiff_t i) { return static_cast<float>(y(i)); };
    if (k == 0) return c;
    switch (accumulation.kind) {
        case Kind::exact:
            for (std::ptrdiff_t i = 0; i < k; ++i) c += x(i) * y(i);
            return c;
        case Kind::sequential: {
            float r = static_cast<float>(c);
            for (std::ptrdiff_t i = 0; i < k; ++i) r += xf(i) * yf(i);
            return static_cast<double>(r);
        }
        case Kind::fma: {
            float r = static_cast<float>(c);
            for (std::ptrdiff_t i = 0; i < k; ++i) r = std::fma(xf(i), yf(i), r);
            return static_cast<double>(r);
        }
        case Kind::pairwise: {
            std::vector<float> products;
            for (std::ptrdiff_t i = 0; i < k; ++i) products.push_back(xf(i) * yf(i));
            return static_cast<double>(static_cast<float>(c) + tree(std::move(products)));
        }
        case Kind::fused:
            break;
    }
    const MatrixUnit& unit = accumulation.unit;
    for (std::ptrdiff_t first = 0; first < k; first += unit.terms) {
        const int count = static_cast<int>(std::min<std::ptrdiff_t>(unit.terms, k - first));
        c = fused::add(
            unit, [&](int i) { return x(first + i); }, [&](int i) { return y(first + i); }, count, c);
    }
    return c;
}

void multiply_accumulate(const Accumulation& accumulation, MatrixView<const double> a, MatrixView<const double> b,
                         MatrixView<double> c) {
    for (std::ptrdiff_t i = 0; i < c.rows; ++i)
        for (std::ptrdiff_t j = 0; j < c.cols; ++j)
            c(i, j) = dot(accumulation, a.row(i), 1, b.data + j, b.stride, a.cols, c(i, j));
}

}  // namespace faultline::reference
