// SPDX-License-Identifier: Apache-2.0
#include <faultline/truth/fast_head.hpp>

#include <algorithm>
#include <cmath>
#include <limits>

#include <faultline/truth/elementary.hpp>
#include <faultline/truth/problem.hpp>
#include <faultline/truth/products.hpp>
#include <faultline/truth/softcap_row.hpp>

namespace faultline::detail {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr double natural_log_2 = 0.6931471805599454;  // rounded up
// Relative error of scale (s_j - s_w): the subtraction, the product, and the scale's own.
constexpr double scaled_difference_error = add_error + mul_error + 1.01 * u2;
// Relative errors beyond this are left to the slow path: products of two of them must not matter.
constexpr double tolerable_error = 0x1p-60;

/// One row's way from inputs to outputs; the arrays are reused from row to row.
class RowWorker {
  public:
    RowWorker(const FastInputs& in, std::size_t head, HeadRows& rows, GroupTruth& truth, FastReport& report)
        : in_(in),
          head_(head),
          rows_(rows),
          out_(truth.heads[head]),
          report_(report),
          has_cap_(in.problem.softcap > 0),
          score_scale_(has_cap_ ? DoubleDouble{1, 0} : in.scale),
          score_scale_error_(has_cap_ ? 0 : in.scale_error),
          score_scale_size_(has_cap_ ? 1 : in.scale_size),
          cap_(has_cap_ ? static_cast<std::size_t>(round_up_to_lanes(in.n_k)) : 0) {
        const auto keys = static_cast<std::size_t>(round_up_to_lanes(in.n_k));
        const auto wide = std::max(keys, static_cast<std::size_t>(round_up_to_lanes(std::max(in.d, in.d_v))));
        for (AlignedVector* a : {&s_high_, &s_low_, &d_high_, &d_low_, &x_high_, &x_low_, &a_high_, &a_low_, &sigma_,
                                 &acc_, &low_, &error_, &scratch_[0], &scratch_[1], &scratch_[2]})
            a->resize(wide);
    }

    void run(std::ptrdiff_t i) {
        i_ = i;
        p_ = rows_.p(i);
        ds_ = rows_.ds(i);
        seen_ = causal_end(in_.problem, i);
        width_ = round_up_to_lanes(seen_);
        bias_ = bias_row(in_.problem, head_, i);
        kept_ = dropout_row(in_.problem, head_, i);
        if (seen_ == 0 ||
            (bias_ != nullptr && std::all_of(bias_, bias_ + seen_, [](double b) { return std::isinf(b); }))) {
            out_.lse.value[static_cast<std::size_t>(i)] = -infinity;  // the rest is 0 already
            keep_hidden(0);
            return;
        }
        if (!(score() && softmax())) {
            lose();
            return;
        }
        log_sum_exp();
        gradient();
        output();
        query_gradient();
        keep_row();
        if (kept_ != nullptr) drop(p_.high, p_.low, p_.exponent);  // dv is made of what was kept
    }

  private:
    /// out <- row i of a (whose sides are given) times the transposed keys; returns the error bound of each.
    double dot_row(const double* a, std::ptrdiff_t count, const DotSide& left, const AlignedMatrix& b,
                   const DotSide& right, double* high, double* low) {
        const double left_power = left.power[static_cast<std::size_t>(i_)];
        for (std::ptrdiff_t j = 0; j < width_; ++j) {
            sigma_[static_cast<std::size_t>(j)] =
                6 * left_power * right.power[static_cast<std::size_t>(j)];  // 1.5 * 2^2
            high[j] = sigma_[static_cast<std::size_t>(j)];
            low[j] = 0;
        }
        accumulate(a, count, b.values.data(), b.stride, width_, high, low);
        finish(sigma_.data(), width_, high, low, high, low);
        // Lemma 2: if all bits of every partial sum fit below sigma, nothing was rounded.
        const double bits =
            left.width[static_cast<std::size_t>(i_)] + right.widest + 4 + std::log2(static_cast<double>(count));
        return bits <= 106 ? 0 : accumulation_error(count) * 4 * left_power * right.largest_power;
    }

    /// x = s - s_w for a pivot w with s_w (almost) the largest.
    bool score() {
        s_error_ = dot_row(in_.problem.q[head_].row(i_), in_.d, in_.q_dot[head_], in_.k_transposed, in_.k_dot,
                           s_high_.data(), s_low_.data());
        if (has_cap_) s_error_ = cap_.apply(in_, s_error_, width_, s_high_.data(), s_low_.data(), report_.negligible);
        w_ = first_pivot();
        constexpr int most_attempts = 4;
        for (int attempt = 0; attempt < most_attempts; ++attempt) {
            product_size_ = subtract_pivot(s_high_.data(), s_low_.data(), bias_, score_scale_, w_, seen_, width_,
                                           x_high_.data(), x_low_.data(), scratch_[0].data());
            const double top = largest(x_high_.data(), width_);
            if (top <= 0) return true;
            w_ = std::find(x_high_.begin(), x_high_.begin() + width_, top) - x_high_.begin();
        }
        return false;
    }

    /// In double, where a huge bias may hide the scores: the differences that follow are what decides.
    std::ptrdiff_t first_pivot() const {
        std::ptrdiff_t w = -1;
        double top = -infinity;
        for (std::ptrdiff_t j = 0; j < seen_; ++j) {
            const double s =
                score_scale_.high * s_high_[static_cast<std::size_t>(j)] + (bias_ == nullptr ? 0 : bias_[j]);
            if (s > top) {
                top = s;
                w = j;
            }
        }
        return w;
    }

    bool softmax() {
        exp(x_high_.data(), x_low_.data(), width_, p_.high, p_.low, p_.exponent);
        for (std::ptrdiff_t j = 0; j < seen_ && !report_.negligible; ++j)
            report_.negligible = p_.high[j] == 0 && x_high_[static_cast<std::size_t>(j)] > -infinity;
        // the pivot, whose p is 1 so far, stands apart until the outputs
        p_.high[w_] = 0;
        p_.low[w_] = 0;
        p_.exponent[w_] = no_exponent;
        tail_exponent_ = largest_exponent(p_.exponent, width_);
        p_w_ = {1, 0};
        p_w_error_ = 0;
        error_of_p_ = {0, 0};
        rows_.p_error[static_cast<std::size_t>(i_)] = error_of_p_;
        if (tail_exponent_ == none_exponent) return true;
        return normalise();
    }

    /// p <- p / (1 + tail); relative errors of what there is.
    bool normalise() {
        // |x| <= (|exponent| + 1.02) ln 2, and an absolute error of x is a relative one of p
        const double x_relative = bias_ == nullptr ? scaled_difference_error : add_error;
        const double beta = 1.01 * natural_log_2 * x_relative;
        const double alpha =
            1.01 * (2 * score_scale_size_ * s_error_ + scaled_difference_error * product_size_) + exp_error + 2 * beta;
        const double flushed = scale_row(p_, tail_exponent_, width_, a_high_.data(), a_low_.data());
        tail_ = tree_sum(a_high_.data(), a_low_.data(), width_);
        tail_error_ = tail_.high * (alpha + beta * (std::fabs(tail_exponent_) - flush_exponent) +
                                    tree_depth(width_) * add_error) +
                      flushed * flushed_term;
        // the tail on the scale of the pivot's 1
        DoubleDouble tail;
        double sum_error = flushed_term * 8 * static_cast<double>(width_);
        if (tail_exponent_ >= flush_exponent) {
            const double factor = power_of_two(tail_exponent_);
            tail = {tail_.high * factor, tail_.low * factor};
            sum_error = tail_error_ * factor;
        }
        const DoubleDouble sum = DoubleDouble{1, 0} + tail;
        p_w_ = DoubleDouble{1, 0} / sum;
        // relative errors of 1 + tail and of its inverse; both operations are exact where the tail is lost on the 1
        const double rounding = tail.high == 0 ? 0 : add_error + div_error;
        p_w_error_ = 1.01 * (sum_error / sum.high + rounding);
        multiply(p_.high, p_.low, p_w_, width_);
        error_of_p_ = {1.01 * (alpha + p_w_error_ + mul_error), 1.01 * beta};
        rows_.p_error[static_cast<std::size_t>(i_)] = error_of_p_;
        return error_of_p_.alpha + error_of_p_.beta * (std::fabs(tail_exponent_) - flush_exponent) <= tolerable_error;
    }

    void log_sum_exp() { settle_one(add(logit(w_), log_of_sum()), out_.lse, Output::lse, 0); }

    /// s_j itself.
    [[nodiscard]] WideSum logit(std::ptrdiff_t j) const {
        const auto at = static_cast<std::size_t>(j);
        const DoubleDouble product = DoubleDouble{s_high_[at], s_low_[at]} * score_scale_;
        const double bias = bias_ == nullptr ? 0 : bias_[j];
        const DoubleDouble s = product + DoubleDouble{bias, 0};
        const double error = score_scale_size_ * s_error_ + (mul_error + score_scale_error_) * std::fabs(product.high) +
                             (bias == 0 ? 0 : add_error * std::fabs(s.high));
        return {s, 0, 1.01 * error};
    }

    /// HeadTruth::s, p where they are asked for (dp, ds: gradient()).
    void keep_row() {
        if (out_.s.rows == 0) return;
        for (std::ptrdiff_t j = 0; j < seen_; ++j) {
            const std::size_t at = out_.s.index(i_, j);
            if (p_.high[j] == 0) {
                out_.s.value[at] = -infinity;
                continue;
            }
            const double relative =
                j == w_ ? p_w_error_ : error_of_p_.alpha + error_of_p_.beta * std::fabs(p_.exponent[j]);
            settle(logit(j), out_.s, at);
            settle({{p_.high[j], p_.low[j]}, p_.exponent[j], 1.01 * relative * p_.high[j]}, out_.p, at);
        }
        keep_hidden(seen_);
    }

    void keep_gradient() {
        if (out_.s.rows == 0) return;
        const double* ds_error = rows_.ds_error.row(i_);
        for (std::ptrdiff_t j = 0; j < seen_; ++j)
            if (ds_.exponent[j] > none_exponent)
                settle({{ds_.high[j], ds_.low[j]}, ds_.exponent[j], ds_error[j]}, out_.ds, out_.ds.index(i_, j));
    }

    /// What dropout takes is 0.
    void drop(double* high, double* low, double* exponent = nullptr) const {
        for (std::ptrdiff_t j = 0; j < seen_; ++j) {
            if (kept_[j] != 0) continue;
            high[j] = low[j] = 0;
            if (exponent != nullptr) exponent[j] = no_exponent;
        }
    }

    /// x over the probability to be kept.
    [[nodiscard]] WideSum over_keep(const WideSum& x) const {
        if (in_.problem.keep == 1) return x;
        const DoubleDouble value = x.value * in_.inverse_keep;
        return {
            value, x.exponent,
            1.01 * (x.error * in_.inverse_keep.high + std::fabs(value.high) * (mul_error + in_.inverse_keep_error))};
    }

    void keep_hidden(std::ptrdiff_t from) {
        if (out_.s.rows == 0) return;
        for (std::ptrdiff_t j = from; j < in_.n_k; ++j) out_.s.value[out_.s.index(i_, j)] = -infinity;
    }

    /// ln(1 + tail)
    [[nodiscard]] WideSum log_of_sum() const {
        if (tail_exponent_ == none_exponent) return {{}, none_exponent, 0};
        // below 2^-300 it is the tail itself, to 2^-300 of it
        if (tail_exponent_ < flush_exponent)
            return {tail_, tail_exponent_, tail_error_ + tail_.high * tail_.high * 0x1p-300};
        const double factor = power_of_two(tail_exponent_);
        const DoubleDouble tail{tail_.high * factor, tail_.low * factor};
        const double own = tail.high <= log1p_small ? log1p_error * tail.high : log1p_error;
        return {log1p(tail), 0, tail_error_ * factor + own};
    }

    /// delta, and the row of ds.
    void gradient() {
        const double error = dot_row(in_.problem.dout[head_].row(i_), in_.d_v, in_.dout_dot[head_], in_.v_transposed,
                                     in_.v_dot, d_high_.data(), d_low_.data());
        if (kept_ != nullptr) drop(d_high_.data(), d_low_.data());
        const DoubleDouble pivot{d_high_[static_cast<std::size_t>(w_)], d_low_[static_cast<std::size_t>(w_)]};
        for (std::ptrdiff_t j = 0; j < seen_ && out_.dp.rows > 0; ++j)
            if (p_.high[j] != 0 || j == w_)
                settle(over_keep({{d_high_[static_cast<std::size_t>(j)], d_low_[static_cast<std::size_t>(j)]},
                                  0,
                                  kept_ != nullptr && kept_[j] == 0 ? 0 : error}),
                       out_.dp, out_.dp.index(i_, j));
        subtract(d_high_.data(), d_low_.data(), pivot, width_);
        double* const scratch[3] = {scratch_[0].data(), scratch_[1].data(), scratch_[2].data()};
        const WideSum rest = weighted_sum(p_, error_of_p_, d_high_.data(), d_low_.data(), 2 * error, width_, scratch);
        settle_one(over_keep(add(WideSum{pivot, 0, error}, rest)), out_.delta, Output::delta, 0);
        double* ds_error = rows_.ds_error.row(i_);
        softmax_gradient(p_, error_of_p_, d_high_.data(), d_low_.data(), 2 * error, rest, width_, ds_, ds_error);
        if (rest.exponent == none_exponent) {
            ds_.exponent[w_] = no_exponent;  // exactly 0; high and low are 0 as p's were
        } else {
            const DoubleDouble ds = -(p_w_ * rest.value);
            ds_.high[w_] = ds.high;
            ds_.low[w_] = ds.low;
            ds_.exponent[w_] = rest.exponent;
            ds_error[w_] = 1.01 * p_w_.high * (rest.error + std::fabs(rest.value.high) * (p_w_error_ + mul_error));
        }
        if (in_.problem.keep != 1) {
            multiply(ds_.high, ds_.low, in_.inverse_keep, width_);
            for (std::ptrdiff_t j = 0; j < width_; ++j)
                ds_error[j] = 1.01 * (ds_error[j] * in_.inverse_keep.high +
                                      std::fabs(ds_.high[j]) * (mul_error + in_.inverse_keep_error));
        }
        keep_gradient();
        if (has_cap_) cap_.chain(width_, ds_, ds_error);
    }

    /// acc_ <- sigma for sums below magnitude times the columns' largest
    void start(double magnitude_power, const ColumnSide& columns, std::ptrdiff_t cols) {
        for (std::ptrdiff_t c = 0; c < round_up_to_lanes(cols); ++c) {
            const auto at = static_cast<std::size_t>(c);
            sigma_[at] = 6 * magnitude_power * columns.power[at];
            acc_[at] = sigma_[at];
            low_[at] = 0;
        }
    }

    void output() {
        const bool apart = tail_exponent_ < -200 && tail_exponent_ != none_exponent;
        if (!apart) restore_pivot();
        const double reference = apart ? tail_exponent_ : 0;
        const double flushed = scale_row(p_, reference, width_, a_high_.data(), a_low_.data());
        if (kept_ != nullptr) drop(a_high_.data(), a_low_.data());
        for (std::ptrdiff_t j = 0; j < width_; ++j)
            scratch_[0][static_cast<std::size_t>(j)] = a_high_[static_cast<std::size_t>(j)];
        const double magnitude = upper_sum(scratch_[0].data(), width_);
        const double power = magnitude == 0 ? 0x1p-300 : std::ldexp(1.0, std::ilogb(magnitude) + 1);
        start(power, in_.v_columns, in_.d_v);
        const std::ptrdiff_t padded = round_up_to_lanes(in_.d_v);
        accumulate(a_high_.data(), a_low_.data(), seen_, in_.v.values.data(), in_.v.stride, padded, acc_.data(),
                   low_.data());
        finish(sigma_.data(), padded, acc_.data(), low_.data(), acc_.data(), low_.data());
        const double relative = error_of_p_.alpha + error_of_p_.beta * (std::fabs(reference) - flush_exponent);
        const double terms = magnitude * relative + flushed * flushed_term;
        const double* top = in_.v_columns.running.row(seen_ - 1);
        for (std::ptrdiff_t c = 0; c < padded; ++c) {
            const auto at = static_cast<std::size_t>(c);
            const double sums = accumulation_error(seen_) * 4 * power * in_.v_columns.power[at];
            error_[at] = top[c] == 0 ? 0 : 1.01 * (terms * top[c] + sums);
        }
        if (apart) {
            output_apart();
            restore_pivot();
            return;
        }
        if (in_.problem.keep != 1) {
            multiply(acc_.data(), low_.data(), in_.inverse_keep, padded);
            for (std::ptrdiff_t c = 0; c < padded; ++c) {
                const auto at = static_cast<std::size_t>(c);
                error_[at] = 1.01 * (error_[at] * in_.inverse_keep.high +
                                     std::fabs(acc_[at]) * (mul_error + in_.inverse_keep_error));
            }
        }
        settle_all(acc_.data(), low_.data(), 0, out_.o, Output::o);
    }

    /// The row's mass sits on one key: what the others add may show only where that key's v is 0.
    void output_apart() {
        for (std::ptrdiff_t c = 0; c < in_.d_v; ++c) {
            const auto at = static_cast<std::size_t>(c);
            const double v = kept_ != nullptr && kept_[w_] == 0 ? 0 : in_.v.row(w_)[c];
            const DoubleDouble own = p_w_ * v;
            const WideSum base{own, 0,
                               1.01 * std::fabs(own.high) * p_w_error_ +
                                   (p_w_.low == 0 && p_w_.high == 1 ? 0 : mul_double_error * std::fabs(own.high))};
            const WideSum tail{
                {acc_[at], low_[at]}, acc_[at] == 0 && error_[at] == 0 ? none_exponent : tail_exponent_, error_[at]};
            settle_one(over_keep(add(base, tail)), out_.o, Output::o, c);
        }
    }

    void query_gradient() {
        const double* ds_error = rows_.ds_error.row(i_);
        const double reference = largest_exponent(ds_, ds_error, width_, scratch_[0].data());
        if (reference == none_exponent || in_.scale_size == 0) return;  // exactly 0
        double* const scratch[2] = {scratch_[0].data(), scratch_[1].data()};
        const ScaledRow scaled = scale_row(ds_, ds_error, reference, width_, a_high_.data(), a_low_.data(), scratch);
        const double power = scaled.magnitude == 0 ? 1 : std::ldexp(1.0, std::ilogb(scaled.magnitude) + 1);
        start(power, in_.k_columns, in_.d);
        const std::ptrdiff_t padded = round_up_to_lanes(in_.d);
        accumulate(a_high_.data(), a_low_.data(), seen_, in_.k.values.data(), in_.k.stride, padded, acc_.data(),
                   low_.data());
        finish(sigma_.data(), padded, acc_.data(), low_.data(), acc_.data(), low_.data());
        multiply(acc_.data(), low_.data(), in_.scale, padded);
        const double* top = in_.k_columns.running.row(seen_ - 1);
        for (std::ptrdiff_t c = 0; c < padded; ++c) {
            const auto at = static_cast<std::size_t>(c);
            const double sums = accumulation_error(seen_) * 4 * power * in_.k_columns.power[at];
            const double error =
                in_.scale_size * (scaled.error * top[c] + sums) + (mul_error + in_.scale_error) * std::fabs(acc_[at]);
            error_[at] = top[c] == 0 ? 0 : 1.01 * error;
        }
        // sum_j ds_j = 0 unless a cap's slopes stand in it: over keys that agree in a column its gradient is exactly 0
        for (std::ptrdiff_t c = 0; c < in_.d; ++c)
            if (!has_cap_ && in_.constant_keys[static_cast<std::size_t>(c)] >= seen_) {
                acc_[static_cast<std::size_t>(c)] = 0;
                low_[static_cast<std::size_t>(c)] = 0;
                error_[static_cast<std::size_t>(c)] = 0;
            }
        left_.clear();
        settle_row(acc_.data(), low_.data(), error_.data(), reference, out_.dq, i_, left_);
        for (const std::ptrdiff_t c : left_) {
            if (has_cap_)
                report_.undecided.push_back({Output::dq, head_, i_, c});
            else
                query_gradient_centred(c);
        }
    }

    /// In a collapsed head the two keys that matter agree in many columns, and their ds cancel there. Since sum_j ds_j = 0,
    /// dq_c = scale sum_j ds_j (k_jc - k_wc), in which such terms are exactly 0.
    void query_gradient_centred(std::ptrdiff_t c) {
        double* const scratch[3] = {scratch_[0].data(), scratch_[1].data(), scratch_[2].data()};
        WideSum sum =
            centred_sum(ds_, rows_.ds_error.row(i_), in_.k_transposed.row(c), in_.k.row(w_)[c], width_, scratch);
        sum.value = sum.value * in_.scale;
        sum.error = 1.01 * (sum.error * in_.scale_size + (mul_error + in_.scale_error) * std::fabs(sum.value.high));
        settle_one(sum, out_.dq, Output::dq, c);
    }

    void restore_pivot() {
        p_.high[w_] = p_w_.high;
        p_.low[w_] = p_w_.low;
        p_.exponent[w_] = 0;
    }

    void settle_one(const WideSum& x, CertifiedMatrix& out, Output output, std::ptrdiff_t c) {
        if (!settle(x, out, out.index(i_, c))) report_.undecided.push_back({output, head_, i_, c});
    }

    void settle_all(const double* high, const double* low, double exponent, CertifiedMatrix& out, Output output) {
        left_.clear();
        settle_row(high, low, error_.data(), exponent, out, i_, left_);
        for (const std::ptrdiff_t c : left_) report_.undecided.push_back({output, head_, i_, c});
    }

    /// All of the row goes the slow way.
    void lose() {
        report_.lost_row = true;
        for (std::ptrdiff_t j = 0; j < width_; ++j) {
            p_.high[j] = 0;
            p_.low[j] = 0;
            p_.exponent[j] = no_exponent;
        }
        for (std::ptrdiff_t c = 0; c < in_.d_v; ++c) report_.undecided.push_back({Output::o, head_, i_, c});
        for (std::ptrdiff_t c = 0; c < in_.d; ++c) report_.undecided.push_back({Output::dq, head_, i_, c});
        report_.undecided.push_back({Output::lse, head_, i_, 0});
        report_.undecided.push_back({Output::delta, head_, i_, 0});
    }

    const FastInputs& in_;
    std::size_t head_;
    HeadRows& rows_;
    HeadTruth& out_;
    FastReport& report_;
    bool has_cap_;
    DoubleDouble score_scale_;  // what is still to be multiplied into s: the scale, or 1 where the cap has it
    double score_scale_error_, score_scale_size_;
    SoftcapRow cap_;
    AlignedVector s_high_, s_low_, d_high_, d_low_, x_high_, x_low_, a_high_, a_low_, sigma_, acc_, low_, error_,
        scratch_[3];
    std::vector<std::ptrdiff_t> left_;

    std::ptrdiff_t i_ = 0, seen_ = 0, width_ = 0, w_ = 0;
    const double* bias_ = nullptr;
    const double* kept_ = nullptr;  // null: nothing is dropped
    WideRow p_{}, ds_{};
    double s_error_ = 0;
    double product_size_ = 0;
    DoubleDouble p_w_;                // of the pivot
    double p_w_error_ = 0;            // relative
    RelativeError error_of_p_{0, 0};  // of the others, and of the pivot too
    double tail_exponent_ = 0;        // of the largest p beside the pivot's, none_exponent when there is no other key
    DoubleDouble tail_;               // sum of the others before normalisation, times 2^tail_exponent
    double tail_error_ = 0;
};

}  // namespace

HeadRows::HeadRows(std::ptrdiff_t n_q, std::ptrdiff_t n_k)
    : p_high(n_q, n_k),
      p_low(n_q, n_k),
      p_exponent(n_q, n_k),
      p_error(static_cast<std::size_t>(n_q), RelativeError{0, 0}),
      ds_high(n_q, n_k),
      ds_low(n_q, n_k),
      ds_exponent(n_q, n_k),
      ds_error(n_q, n_k) {
    std::fill(p_exponent.values.begin(), p_exponent.values.end(), no_exponent);
    std::fill(ds_exponent.values.begin(), ds_exponent.values.end(), no_exponent);
}

void fast_head(const FastInputs& in, std::size_t head, HeadRows& rows, GroupTruth& truth, FastReport& report) {
    RowWorker worker(in, head, rows, truth, report);
    for (std::ptrdiff_t i = 0; i < in.n_q; ++i) worker.run(i);
}

}  // namespace faultline::detail
