// SPDX-License-Identifier: Apache-2.0
#include <faultline/cpu/zero_sum.hpp>

#include <cmath>

namespace faultline::cpu {

ZeroSumProjection::ZeroSumProjection(ZeroSum kind, const Mask& mask, bool exact)
    : kind_(kind), exact_(exact), mask_(mask) {
    const auto rows = static_cast<std::size_t>(mask.n_q);
    row_sum_.assign(rows, 0.0);
    p_sum_.assign(rows, 0.0);
    largest_.assign(rows, -1.0);
    largest_key_.assign(rows, -1);
}

void ZeroSumProjection::collect(const TileAt& where, MatrixView<const double> p, MatrixView<const double> ds) {
    for (std::ptrdiff_t i = 0; i < ds.rows; ++i) {
        const auto row = static_cast<std::size_t>(where.query0 + i);
        for (std::ptrdiff_t j = 0; j < ds.cols; ++j) {
            row_sum_[row] = rounded(row_sum_[row] + ds(i, j));
            p_sum_[row] = rounded(p_sum_[row] + p(i, j));
            if (std::abs(ds(i, j)) > largest_[row]) {
                largest_[row] = std::abs(ds(i, j));
                largest_key_[row] = where.key0 + j;
            }
        }
    }
}

void ZeroSumProjection::finish(MatrixView<const double> k) {
    dq_part_ = Matrix(mask_.n_q, k.cols);
    dk_part_ = Matrix(mask_.n_k, k.cols);
}

double ZeroSumProjection::weight(std::ptrdiff_t query, std::ptrdiff_t key, double p) const {
    const std::ptrdiff_t visible = visible_keys(query, mask_.n_q, mask_.n_k, mask_.causal);
    if (key >= visible) return 0;
    if (mask_.bias.data != nullptr && mask_.bias(query, key) == -infinity) return 0;
    if (kind_ == ZeroSum::weighted) {
        const double sum = p_sum_[static_cast<std::size_t>(query)];
        return sum > 0 ? p / sum : 0;
    }
    if (mask_.bias.data == nullptr) return 1.0 / static_cast<double>(visible);
    std::ptrdiff_t open = 0;
    for (std::ptrdiff_t j = 0; j < visible; ++j) open += mask_.bias(query, j) != -infinity;
    return 1.0 / static_cast<double>(open);
}

void ZeroSumProjection::adjust_tile(const TileAt& where, MatrixView<const double>, MatrixView<double> ds) const {
    if (kind_ != ZeroSum::largest) return;
    for (std::ptrdiff_t i = 0; i < ds.rows; ++i) {
        const auto row = static_cast<std::size_t>(where.query0 + i);
        const std::ptrdiff_t j = largest_key_[row] - where.key0;
        if (largest_key_[row] >= 0 && j >= 0 && j < ds.cols) ds(i, j) = rounded(ds(i, j) - row_sum_[row]);
    }
}

void ZeroSumProjection::accumulate_rank_one(const TileAt& where, MatrixView<const double> p, MatrixView<const double> k,
                                            MatrixView<const double> q) {
    if (kind_ == ZeroSum::largest) return;
    Matrix w(p.rows, p.cols);
    for (std::ptrdiff_t i = 0; i < p.rows; ++i)
        for (std::ptrdiff_t j = 0; j < p.cols; ++j) {
            const double r = row_sum_[static_cast<std::size_t>(where.query0 + i)];
            w(i, j) = rounded(r * weight(where.query0 + i, where.key0 + j, p(i, j)));
        }
    Matrix w_t(w.cols, w.rows);
    transpose(w.view(), w_t.view());
    const Accumulation sums = exact_ ? exact_sum : fp32_sequential;
    multiply_accumulate(sums, w.view(), k, dq_part_.view(where.query0, w.rows));
    multiply_accumulate(sums, w_t.view(), q, dk_part_.view(where.key0, w.cols));
}

void ZeroSumProjection::apply_rank_one(MatrixView<const double>, Matrix& dq, Matrix& dk) const {
    if (kind_ == ZeroSum::largest) return;
    for (std::size_t i = 0; i < dq.values.size(); ++i) dq.values[i] = rounded(dq.values[i] - dq_part_.values[i]);
    for (std::size_t i = 0; i < dk.values.size(); ++i) dk.values[i] = rounded(dk.values[i] - dk_part_.values[i]);
}

}  // namespace faultline::cpu
