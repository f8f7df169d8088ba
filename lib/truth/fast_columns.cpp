// SPDX-License-Identifier: Apache-2.0
// dk and dv: sums over the queries, each key's column of ds or p on the scale of its own largest entry.
#include <algorithm>
#include <cmath>
#include <limits>

#include <faultline/base/clones.hpp>
#include <faultline/truth/elementary.hpp>
#include <faultline/truth/fast_head.hpp>
#include <faultline/truth/products.hpp>

namespace faultline::detail {

FAULTLINE_CLONES
static void p_errors(const double* __restrict high, const double* __restrict exponent, RelativeError relative,
                     std::ptrdiff_t count, double* __restrict error) {
    for (std::ptrdiff_t j = 0; j < count; ++j) {
        const double e = high[j] * relative_error(relative, exponent[j]);
        error[j] = high[j] == 0 ? 0 : e;
    }
}

FAULTLINE_CLONES
static void raise_exponents(const double* __restrict high, const double* __restrict exponent,
                            const double* __restrict error, std::ptrdiff_t count, double* __restrict reference) {
    for (std::ptrdiff_t j = 0; j < count; ++j) {
        const double own = size_exponent(high[j], error[j], exponent[j]);
        const double e = own < none_exponent ? none_exponent : own;
        reference[j] = e > reference[j] ? e : reference[j];
    }
}

/// As scale_row, with a reference for each key, adding to each key's magnitude and error.
FAULTLINE_CLONES
static void scale_columns(const double* __restrict high, const double* __restrict low,
                          const double* __restrict exponent, const double* __restrict error,
                          const double* __restrict reference, std::ptrdiff_t count, double* __restrict out_high,
                          double* __restrict out_low, double* __restrict magnitude, double* __restrict out_error) {
    for (std::ptrdiff_t j = 0; j < count; ++j) {
        const ScaledTerm scaled = scaled_to({high[j], low[j], exponent[j]}, error[j], reference[j]);
        out_high[j] = scaled.value.high;
        out_low[j] = scaled.value.low;
        magnitude[j] += scaled.magnitude;
        out_error[j] += scaled.error;
    }
}

namespace {

constexpr std::ptrdiff_t block_keys =
    64;  // columns transposed at a time: 64 x n_q numbers stay in the second-level cache

/// One of dk (rows of ds with q) and dv (rows of p with dout).
class ColumnWorker {
  public:
    ColumnWorker(const FastInputs& in, std::vector<HeadRows>& heads, Output output, GroupTruth& truth,
                 FastReport& report)
        : in_(in),
          heads_(heads),
          output_(output),
          out_(output == Output::dk ? truth.dk : truth.dv),
          report_(report),
          stride_(round_up_to_lanes(in.n_q * static_cast<std::ptrdiff_t>(heads.size()))) {
        for (AlignedVector* a : {&reference_, &magnitude_, &error_, &p_error_, &row_high_, &row_low_})
            a->resize(static_cast<std::size_t>(block_keys));
        for (AlignedVector* a : {&high_, &low_}) a->resize(static_cast<std::size_t>(block_keys * stride_));
        for (AlignedVector* a : {&sigma_, &acc_, &rest_, &bound_})
            a->resize(static_cast<std::size_t>(round_up_to_lanes(std::max(in.d, in.d_v))));
    }

    void run() {
        for (std::ptrdiff_t first = 0; first < in_.n_k; first += block_keys) {
            const std::ptrdiff_t keys = std::min(block_keys, in_.n_k - first);
            scale_block(first, round_up_to_lanes(keys));
            for (std::ptrdiff_t j = 0; j < keys; ++j) sum_column(first, j);
        }
    }

  private:
    struct Source {
        WideRow row;
        const double* error;
    };

    Source source(std::size_t h, std::ptrdiff_t i, std::ptrdiff_t first, std::ptrdiff_t count) {
        HeadRows& rows = heads_[h];
        WideRow row = output_ == Output::dk ? rows.ds(i) : rows.p(i);
        row = {row.high + first, row.low + first, row.exponent + first};
        if (output_ == Output::dk) return {row, rows.ds_error.row(i) + first};
        p_errors(row.high, row.exponent, rows.p_error[static_cast<std::size_t>(i)], count, p_error_.data());
        return {row, p_error_.data()};
    }

    /// The first query that may see key j.
    [[nodiscard]] std::ptrdiff_t first_query(std::ptrdiff_t j) const {
        return in_.problem.causal ? std::clamp<std::ptrdiff_t>(j - (in_.n_k - in_.n_q), 0, in_.n_q) : 0;
    }

    void scale_block(std::ptrdiff_t first, std::ptrdiff_t count) {
        std::fill(reference_.begin(), reference_.end(), none_exponent);
        std::fill(magnitude_.begin(), magnitude_.end(), 0.0);
        std::fill(error_.begin(), error_.end(), 0.0);
        const std::ptrdiff_t begin = first_query(first);
        for (std::size_t h = 0; h < heads_.size(); ++h)
            for (std::ptrdiff_t i = begin; i < in_.n_q; ++i) {
                const Source s = source(h, i, first, count);
                raise_exponents(s.row.high, s.row.exponent, s.error, count, reference_.data());
            }
        for (std::size_t h = 0; h < heads_.size(); ++h)
            for (std::ptrdiff_t i = begin; i < in_.n_q; ++i) {
                const Source s = source(h, i, first, count);
                scale_columns(s.row.high, s.row.low, s.row.exponent, s.error, reference_.data(), count,
                              row_high_.data(), row_low_.data(), magnitude_.data(), error_.data());
                const std::ptrdiff_t at = static_cast<std::ptrdiff_t>(h) * in_.n_q + i;
                for (std::ptrdiff_t j = 0; j < count; ++j) {
                    high_[static_cast<std::size_t>(j * stride_ + at)] = row_high_[static_cast<std::size_t>(j)];
                    low_[static_cast<std::size_t>(j * stride_ + at)] = row_low_[static_cast<std::size_t>(j)];
                }
            }
    }

    void sum_column(std::ptrdiff_t first, std::ptrdiff_t j) {
        const auto key = static_cast<std::size_t>(j);
        const bool is_dk = output_ == Output::dk;
        const double reference = reference_[key];
        if (reference == none_exponent || (is_dk && in_.scale_size == 0)) return;  // exactly 0
        const ColumnSide& columns = is_dk ? in_.q_columns : in_.dout_columns;
        const std::ptrdiff_t padded = round_up_to_lanes(out_.cols);
        // sums of n positive doubles, and their use below, err by less than this factor
        const double slack = 1 + 0x1p-20;
        const double power = magnitude_[key] == 0 ? 1 : std::ldexp(1.0, std::ilogb(magnitude_[key] * slack) + 1);
        for (std::ptrdiff_t c = 0; c < padded; ++c) {
            const auto at = static_cast<std::size_t>(c);
            sigma_[at] = 6 * power * columns.power[at];
            acc_[at] = sigma_[at];
            rest_[at] = 0;
        }
        const std::ptrdiff_t begin = first_query(first + j);
        for (std::size_t h = 0; h < heads_.size(); ++h) {
            const AlignedMatrix& b = is_dk ? in_.q[h] : in_.dout[h];
            const std::ptrdiff_t at = j * stride_ + static_cast<std::ptrdiff_t>(h) * in_.n_q + begin;
            accumulate(high_.data() + at, low_.data() + at, in_.n_q - begin, b.row(begin), b.stride, padded,
                       acc_.data(), rest_.data());
        }
        finish(sigma_.data(), padded, acc_.data(), rest_.data(), acc_.data(), rest_.data());
        const bool has_keep = !is_dk && in_.problem.keep != 1;
        if (is_dk || has_keep) multiply(acc_.data(), rest_.data(), is_dk ? in_.scale : in_.inverse_keep, padded);
        const double factor = is_dk ? in_.scale_size : in_.inverse_keep.high * (1 + 0x1p-40);
        const double own = is_dk ? mul_error + in_.scale_error : (has_keep ? mul_error + in_.inverse_keep_error : 0);
        const double* top = columns.running.row(begin);
        const double sums =
            accumulation_error((in_.n_q - begin) * static_cast<std::ptrdiff_t>(heads_.size())) * 4 * power;
        for (std::ptrdiff_t c = 0; c < padded; ++c) {
            const auto at = static_cast<std::size_t>(c);
            const double error = factor * (error_[key] * top[c] + sums * columns.power[at]) + own * std::fabs(acc_[at]);
            bound_[at] = top[c] == 0 ? 0 : 1.01 * error;
        }
        left_.clear();
        settle_row(acc_.data(), rest_.data(), bound_.data(), reference, out_, first + j, left_);
        for (const std::ptrdiff_t c : left_) report_.undecided.push_back({output_, 0, first + j, c});
    }

    const FastInputs& in_;
    std::vector<HeadRows>& heads_;
    Output output_;
    CertifiedMatrix& out_;
    FastReport& report_;
    std::ptrdiff_t stride_;
    AlignedVector reference_, magnitude_, error_, p_error_, row_high_, row_low_;  // [block_keys]
    AlignedVector high_, low_;                                                    // [block_keys, heads * n_q]
    AlignedVector sigma_, acc_, rest_, bound_;                                    // [d or d_v]
    std::vector<std::ptrdiff_t> left_;
};

}  // namespace

void fast_columns(const FastInputs& in, std::vector<HeadRows>& heads, GroupTruth& truth, FastReport& report) {
    if (report.lost_row) {
        for (const Undecided& e : all_elements(in.problem))
            if (e.output == Output::dk || e.output == Output::dv) report.undecided.push_back(e);
        return;
    }
    ColumnWorker(in, heads, Output::dv, truth, report).run();
    ColumnWorker(in, heads, Output::dk, truth, report).run();
}

}  // namespace faultline::detail
