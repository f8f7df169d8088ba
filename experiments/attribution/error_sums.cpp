// SPDX-License-Identifier: Apache-2.0
#include <faultline/attribution/error_sums.hpp>

#include <cmath>
#include <limits>

namespace faultline {
namespace {

// Sums of squares of errors near 1e-300 underflow a double; an x87 long double holds them, and where that is not wider
// than a double (other processors), or the truth itself does not fit a double, WideReal does.
using Ordinary = long double;
constexpr bool ordinary_is_wide = std::numeric_limits<long double>::max_exponent > 2048;

WideReal widened(Ordinary x) {
    if (x == 0 || !std::isfinite(x)) return {static_cast<double>(x)};
    int exponent = 0;
    const Ordinary mantissa = std::frexp(x, &exponent);
    return {static_cast<double>(mantissa), exponent};
}
WideReal widened(const WideReal& x) { return x; }

Ordinary magnitude(Ordinary x) { return std::abs(x); }
WideReal magnitude(const WideReal& x) { return abs(x); }

Ordinary element(const CertifiedMatrix& truth, std::ptrdiff_t i, std::ptrdiff_t j, Ordinary) {
    return truth.value[truth.index(i, j)];
}
WideReal element(const CertifiedMatrix& truth, std::ptrdiff_t i, std::ptrdiff_t j, WideReal) { return truth.at(i, j); }

/// All sums of one head in the arithmetic Real.
template <class Real>
struct HeadSums {
    Real error_squared{}, truth_squared{}, error_dot_truth{}, sum{};
    Real row_mean_sum{}, row_mean_abs{};
    Real row_mean{}, row_spread{};  // Welford 1962: a sum of squares less the squared sum would cancel where t is large
    Real along_squared{}, along_sum{}, along_abs{};
    std::size_t count = 0, nonfinite = 0, rows = 0;

    HeadSums(MatrixView<const double> value, const CertifiedMatrix& truth, const double* direction) {
        for (std::ptrdiff_t i = 0; i < value.rows; ++i) {
            Real row_sum{}, along{};
            std::size_t in_row = 0;
            for (std::ptrdiff_t j = 0; j < value.cols; ++j) {
                const Real t = element(truth, i, j, Real{});
                truth_squared = truth_squared + t * t;
                if (!std::isfinite(value(i, j))) {
                    ++nonfinite;
                    continue;
                }
                const Real e = Real(value(i, j)) - t;
                error_squared = error_squared + e * e;
                error_dot_truth = error_dot_truth + e * t;
                row_sum = row_sum + e;
                if (direction != nullptr) along = along + e * Real(direction[j]);
                ++in_row;
            }
            if (in_row == 0) continue;
            sum = sum + row_sum;
            count += in_row;
            ++rows;
            const Real mean = row_sum / Real(static_cast<double>(in_row));
            row_mean_sum = row_mean_sum + mean;
            row_mean_abs = row_mean_abs + magnitude(mean);
            const Real away = mean - row_mean;
            row_mean = row_mean + away / Real(static_cast<double>(rows));
            row_spread = row_spread + away * (mean - row_mean);
            along_squared = along_squared + along * along;
            along_sum = along_sum + along;
            along_abs = along_abs + magnitude(along);
        }
    }
};

double ratio(const WideReal& a, const WideReal& b) { return b == WideReal(0.0) ? 0.0 : (a / b).to_double(); }

}  // namespace

ErrorSums::ErrorSums(MatrixView<const double> value, const CertifiedMatrix& truth, const double* direction) {
    const auto take = [&](const auto& s) {
        error_squared_ = widened(s.error_squared);
        truth_squared_ = widened(s.truth_squared);
        error_dot_truth_ = widened(s.error_dot_truth);
        sum_ = widened(s.sum);
        count_ = s.count;
        nonfinite_ = s.nonfinite;
        rows_ = s.rows;
        row_mean_sum_ = widened(s.row_mean_sum);
        row_mean_abs_ = widened(s.row_mean_abs);
        row_mean_ = widened(s.row_mean);
        row_spread_ = widened(s.row_spread);
        along_squared_ = widened(s.along_squared);
        along_sum_ = widened(s.along_sum);
        along_abs_ = widened(s.along_abs);
    };
    if (ordinary_is_wide && !truth.wide())
        take(HeadSums<Ordinary>(value, truth, direction));
    else
        take(HeadSums<WideReal>(value, truth, direction));
    has_direction_ = direction != nullptr;
    if (count_ > 0) {
        heads_ = 1;
        head_mean_sum_ = sum_ / WideReal(static_cast<double>(count_));
        head_mean_abs_ = abs(head_mean_sum_);
    }
}

void ErrorSums::join(const ErrorSums& next) {
    if (next.rows_ > 0) {  // Chan, Golub and LeVeque 1983
        const WideReal ours(static_cast<double>(rows_)), theirs(static_cast<double>(next.rows_));
        const WideReal away = next.row_mean_ - row_mean_;
        row_mean_ = row_mean_ + away * (theirs / (ours + theirs));
        row_spread_ = row_spread_ + next.row_spread_ + away * away * (ours * theirs / (ours + theirs));
    }
    error_squared_ = error_squared_ + next.error_squared_;
    truth_squared_ = truth_squared_ + next.truth_squared_;
    error_dot_truth_ = error_dot_truth_ + next.error_dot_truth_;
    sum_ = sum_ + next.sum_;
    count_ += next.count_;
    nonfinite_ += next.nonfinite_;
    rows_ += next.rows_;
    heads_ += next.heads_;
    rows_independent_ = rows_independent_ && next.rows_independent_;
    row_mean_sum_ = row_mean_sum_ + next.row_mean_sum_;
    row_mean_abs_ = row_mean_abs_ + next.row_mean_abs_;
    head_mean_sum_ = head_mean_sum_ + next.head_mean_sum_;
    head_mean_abs_ = head_mean_abs_ + next.head_mean_abs_;
    has_direction_ = has_direction_ || next.has_direction_;
    along_squared_ = along_squared_ + next.along_squared_;
    along_sum_ = along_sum_ + next.along_sum_;
    along_abs_ = along_abs_ + next.along_abs_;
}

ErrorMeasure ErrorSums::measure() const {
    ErrorMeasure m;
    m.error_norm = sqrt(error_squared_);
    m.nonfinite = nonfinite_;
    const WideReal zero(0.0);
    if (nonfinite_ > 0)  // an output with a NaN in it has no size of error
        m.rel_error = WideReal(std::numeric_limits<double>::infinity());
    else if (truth_squared_ == zero)
        m.rel_error = error_squared_ == zero ? zero : WideReal(std::numeric_limits<double>::infinity());
    else
        m.rel_error = m.error_norm / sqrt(truth_squared_);
    m.gain = ratio(error_dot_truth_, truth_squared_);
    const double nan = std::numeric_limits<double>::quiet_NaN();
    m.row_coherence = rows_independent_ ? ratio(abs(row_mean_sum_), row_mean_abs_) : nan;
    m.head_coherence = heads_ == 1 ? nan : ratio(abs(head_mean_sum_), head_mean_abs_);
    if (count_ > 0 && error_squared_ > zero) {
        const WideReal n(static_cast<double>(count_));
        m.signed_bias = ratio(sum_ / n, sqrt(error_squared_ / n));
    }
    if (rows_ > 1 && rows_independent_) {
        const WideReal n(static_cast<double>(rows_));
        const WideReal variance = row_spread_ / WideReal(static_cast<double>(rows_ - 1));
        if (variance > zero) m.t_statistic = ratio(row_mean_, sqrt(variance / n));
    }
    m.mean_key_share = has_direction_ ? ratio(along_squared_, error_squared_) : nan;
    m.mean_key_sign = has_direction_ ? ratio(along_sum_, along_abs_) : nan;
    return m;
}

}  // namespace faultline
