// SPDX-License-Identifier: Apache-2.0
// The fast path over one key/value head and its query heads on a back end that has teams: the host (one thread a team)
// or a CUDA device (one block a team). Rows are taken in strips of as many as there is memory for; where one strip is
// not all, its p and ds are computed again, to the same bits, for each of the two passes that dk and dv need. Results
// depend neither on the strips nor on the number of threads.
//
// A Backend has
//   T* allocate<T>(n), T* upload(values, n)   memory of the side that computes, until it is gone
//   void download(from, n, to)
//   std::size_t room()                        bytes that may still be allocated
//   int team_size()                           the most threads that a team has
//   void run(job, teams, doubles)             job(team, index, memory) for index < teams, with so many doubles each
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include <faultline/base/error.hpp>
#include <faultline/truth/elementary.hpp>
#include <faultline/truth/fast_head.hpp>
#include <faultline/truth/fast_inputs.hpp>
#include <faultline/truth/problem.hpp>
#include <faultline/truth_teams/columns.hpp>
#include <faultline/truth_teams/product_job.hpp>
#include <faultline/truth_teams/sent_inputs.hpp>
#include <faultline/truth_teams/sizes.hpp>

namespace faultline::truth_teams {

template <class Backend>
class Driver {
  public:
    Driver(Backend& backend, const detail::FastInputs& inputs)
        : backend_(backend), given_(inputs), in_(sent_inputs(backend, inputs)) {}

    void run(bool first_key_is_sink, GroupTruth& truth, detail::FastReport& report) {
        const std::ptrdiff_t rows = in_.heads * in_.n_q;
        for (Columns* columns : {&dk_, &dv_}) *columns = new_columns(columns == &dk_ ? in_.d : in_.d_v);
        allocate_strip(rows);
        std::vector<RowState> states;
        const bool whole = strip_.count == rows;
        each_strip(rows, [&] {
            softmax_and_gradient();
            outputs(truth, report);
            raise_references();
            rows_to_host(states, truth, report);
        });
        if (first_key_is_sink) sinks(states, truth, report);
        if (report.lost_row) {
            for (const detail::Undecided& e : detail::all_elements(given_.problem))
                if (e.output == detail::Output::dk || e.output == detail::Output::dv) report.undecided.push_back(e);
            return;
        }
        each_strip(rows, [&] {
            if (!whole) again();
            for (const bool is_dk : {false, true})
                backend_.run(ColumnSumsJob{of(is_dk), of_output(is_dk)}, divided(keys(), keys_per_sum), 0);
        });
        for (const Columns& columns : {dk_, dv_})
            backend_.run(ColumnPowerJob{columns, keys()}, divided(keys(), keys_per_team), 0);
        each_strip(rows, [&] {
            if (!whole) again();
            for (const bool is_dk : {false, true}) {
                backend_.run(ScaleColumnsJob{of(is_dk), of_output(is_dk)}, strip_.count, 0);
                add_columns(is_dk);
            }
        });
        for (const bool is_dk : {false, true}) backend_.run(FinishColumnsJob{in_, of_output(is_dk), is_dk}, in_.n_k, 0);
        fetch(dk_.out, 0, in_.n_k, in_.d, truth.dk, 0, {detail::Output::dk, 0, 0, 0}, report);
        fetch(dv_.out, 0, in_.n_k, in_.d_v, truth.dv, 0, {detail::Output::dv, 0, 0, 0}, report);
    }

  private:
    static std::ptrdiff_t divided(std::ptrdiff_t n, std::ptrdiff_t by) { return (n + by - 1) / by; }
    [[nodiscard]] std::ptrdiff_t keys() const { return padded(in_.n_k); }
    [[nodiscard]] std::ptrdiff_t product_stride() const { return padded(std::max(in_.d, in_.d_v)); }
    [[nodiscard]] ColumnsOf of(bool is_dk) const { return {in_, strip_, is_dk}; }
    [[nodiscard]] Columns of_output(bool is_dk) const { return is_dk ? dk_ : dv_; }

    template <class Values>
    auto sent(const Values& values) {
        return backend_.upload(values.data(), values.size());
    }

    Elements new_elements(std::size_t n) {
        return {backend_.template allocate<double>(n), backend_.template allocate<double>(n),
                backend_.template allocate<std::int64_t>(n), backend_.template allocate<unsigned char>(n)};
    }
    Columns new_columns(std::ptrdiff_t cols) {
        const auto all = static_cast<std::size_t>(in_.n_k * padded(cols));
        const auto width = static_cast<std::size_t>(keys());
        Columns c{};
        const std::vector<double> none(width, detail::none_exponent), zeros(width, 0.0);
        c.reference = sent(none);
        c.magnitude = sent(zeros);
        c.error = sent(zeros);
        c.power = sent(zeros);
        c.acc = backend_.template allocate<double>(all);
        c.low = backend_.template allocate<double>(all);
        c.out = new_elements(static_cast<std::size_t>(in_.n_k * cols));
        return c;
    }

    /// The rows' matrices with their pointers, so that their number stands once.
    std::vector<double**> row_arrays() {
        std::vector<double**> arrays{&strip_.s_high, &strip_.s_low,       &strip_.a_high,     &strip_.a_low,
                                     &strip_.p_high, &strip_.p_low,       &strip_.p_exponent, &strip_.ds_high,
                                     &strip_.ds_low, &strip_.ds_exponent, &strip_.ds_error};
        if (in_.has_cap())
            arrays.insert(arrays.end(),
                          {&strip_.slope_high, &strip_.slope_low, &strip_.slope_exponent, &strip_.slope_error});
        return arrays;
    }
    void allocate_strip(std::ptrdiff_t rows) {
        const std::vector<double**> arrays = row_arrays();
        const auto width = static_cast<std::size_t>(keys()), product = static_cast<std::size_t>(product_stride());
        const std::size_t each = bytes_of_row(in_.n_k, in_.d, in_.d_v, in_.has_cap());
        const std::size_t fixed = bytes_beside_rows(in_.n_k);
        const std::size_t room = backend_.room();
        const std::size_t fits = room > fixed ? (room - fixed) / each : 0;
        if (fits == 0)
            throw WorkError("truth: one row of " + std::to_string(in_.n_k) + " keys needs " +
                            std::to_string(each >> 10) + " KiB of the device's memory and " +
                            std::to_string(room >> 10) + " KiB are free: expected more memory or shorter sequences");
        capacity_ = std::min(rows, static_cast<std::ptrdiff_t>(fits));
        strip_.count = capacity_;
        const auto count = static_cast<std::size_t>(capacity_);
        for (double** array : arrays) *array = backend_.template allocate<double>(count * width);
        strip_.product_high = backend_.template allocate<double>(count * product);
        strip_.product_low = backend_.template allocate<double>(count * product);
        strip_.row_power = backend_.template allocate<double>(count);
        strip_.state = backend_.template allocate<RowState>(count);
        strip_.o = new_elements(count * static_cast<std::size_t>(in_.d_v));
        strip_.dq = new_elements(count * static_cast<std::size_t>(in_.d));
        partial_ =
            backend_.template allocate<double>(static_cast<std::size_t>(divided(capacity_, rows_per_chunk)) * width);
    }

    template <class F>
    void each_strip(std::ptrdiff_t rows, const F& f) {
        for (strip_.first = 0; strip_.first < rows; strip_.first += capacity_) {
            strip_.count = std::min(capacity_, rows - strip_.first);
            f();
        }
        strip_.first = 0;
        strip_.count = std::min(capacity_, rows);
    }

    [[nodiscard]] std::ptrdiff_t row_memory() const { return truth_teams::row_memory(backend_.team_size(), in_.n_k); }

    /// out <- left right, rows of the strip by `cols` columns.
    template <bool has_low, class StepsOf>
    void product(const StepsOf& steps, std::ptrdiff_t rows, std::ptrdiff_t cols, const double* left_high,
                 const double* left_low, std::ptrdiff_t row_stride, std::ptrdiff_t step_stride, const double* right,
                 std::ptrdiff_t right_stride, const double* row_power, const double* col_power, double* high,
                 double* low, std::ptrdiff_t out_stride, bool resume, bool finish) {
        constexpr std::ptrdiff_t narrow = 64;
        const auto run = [&]<int columns>(std::integral_constant<int, columns>) {
            const ProductJob<StepsOf, columns, has_low> job{
                steps,        rows,      cols,      left_high, left_low, row_stride, step_stride, right,
                right_stride, row_power, col_power, high,      low,      out_stride, resume,      finish};
            backend_.run(job, job.teams(), 0);
        };
        if (cols <= narrow)
            run(std::integral_constant<int, 2>{});
        else
            run(std::integral_constant<int, 4>{});
    }
    void dots(const double* left, std::ptrdiff_t count, const double* right, const double* left_power,
              const double* right_power) {
        const DotSteps steps{in_, strip_.first, count};
        product<false>(steps, strip_.count, keys(), left + strip_.first * padded(count), nullptr, padded(count), 1,
                       right, keys(), left_power + strip_.first, right_power, strip_.s_high, strip_.s_low, keys(),
                       false, true);
    }
    void row_product(const double* right, std::ptrdiff_t cols, const double* col_power) {
        product<true>(KeySteps{in_, strip_.first}, strip_.count, cols, strip_.a_high, strip_.a_low, keys(), 1, right,
                      padded(cols), strip_.row_power, col_power, strip_.product_high, strip_.product_low,
                      product_stride(), false, true);
    }
    void add_columns(bool is_dk) {
        const Columns columns = of_output(is_dk);
        const std::ptrdiff_t cols = is_dk ? in_.d : in_.d_v;
        const double* right = (is_dk ? in_.q : in_.dout) + strip_.first * padded(cols);
        product<true>(QuerySteps{in_, strip_.first, strip_.count}, in_.n_k, cols, strip_.a_high, strip_.a_low, 1,
                      keys(), right, padded(cols), columns.power, is_dk ? in_.q_columns : in_.dout_columns, columns.acc,
                      columns.low, padded(cols), strip_.first > 0, false);
    }

    void softmax_and_gradient() {
        dots(in_.q, in_.d, in_.k_transposed, in_.q_power, in_.k_power);
        backend_.run(SoftmaxJob{in_, strip_}, strip_.count, row_memory());
        dots(in_.dout, in_.d_v, in_.v_transposed, in_.dout_power, in_.v_power);
        backend_.run(GradientJob{in_, strip_}, strip_.count, row_memory());
    }
    /// p and ds of the strip as they were when its outputs had been made.
    void again() {
        softmax_and_gradient();
        backend_.run(RestoreJob{in_, strip_}, strip_.count, 0);
    }
    void outputs(GroupTruth& truth, detail::FastReport& report) {
        row_product(in_.v, in_.d_v, in_.v_columns);
        backend_.run(OutputJob{in_, strip_, product_stride()}, strip_.count, row_memory());
        row_product(in_.k, in_.d, in_.k_columns);
        backend_.run(QueryJob{in_, strip_, product_stride()}, strip_.count, row_memory());
        each_head([&](std::size_t h, std::ptrdiff_t index, std::ptrdiff_t query, std::ptrdiff_t count) {
            HeadTruth& head = truth.heads[h];
            fetch(strip_.o, index, count, in_.d_v, head.o, query, {detail::Output::o, h, 0, 0}, report);
            fetch(strip_.dq, index, count, in_.d, head.dq, query, {detail::Output::dq, h, 0, 0}, report);
        });
    }
    void raise_references() {
        const std::ptrdiff_t chunks = divided(strip_.count, rows_per_chunk);
        for (const bool is_dk : {false, true}) {
            backend_.run(ChunkReferenceJob{of(is_dk), partial_}, chunks * divided(keys(), keys_per_team), 0);
            backend_.run(ReferenceJob{partial_, chunks, keys(), of_output(is_dk).reference},
                         divided(keys(), keys_per_team), 0);
        }
    }

    /// f(head, first index in the strip, its query, count) for each head that has rows in the strip.
    template <class F>
    void each_head(const F& f) const {
        for (std::ptrdiff_t index = 0; index < strip_.count;) {
            const std::ptrdiff_t row = strip_.first + index;
            const std::ptrdiff_t count = std::min(strip_.count - index, in_.n_q - in_.query(row));
            f(static_cast<std::size_t>(in_.head(row)), index, in_.query(row), count);
            index += count;
        }
    }

    /// Rows [index, index + count) of device elements to rows from `row` on of `out`; `name` says what is undecided.
    void fetch(const Elements& from, std::ptrdiff_t index, std::ptrdiff_t count, std::ptrdiff_t cols,
               CertifiedMatrix& out, std::ptrdiff_t row, detail::Undecided name, detail::FastReport& report) {
        const auto n = static_cast<std::size_t>(count * cols);
        const std::ptrdiff_t at = index * cols;
        const std::size_t to = out.index(row, 0);
        backend_.download(from.value + at, n, out.value.data() + to);
        backend_.download(from.bound + at, n, out.bound.data() + to);
        backend_.download(from.exponent + at, n, out.exponent.data() + to);
        decided_.resize(n);
        backend_.download(from.decided + at, n, decided_.data());
        for (std::size_t e = 0; e < n; ++e) {
            if (decided_[e] != 0) continue;
            name.row = row + static_cast<std::ptrdiff_t>(e) / cols;
            name.col = static_cast<std::ptrdiff_t>(e) % cols;
            report.undecided.push_back(name);
        }
    }

    /// lse and delta, which the host makes with the processor's own functions.
    void rows_to_host(std::vector<RowState>& states, GroupTruth& truth, detail::FastReport& report) {
        const std::size_t before = states.size();
        states.resize(before + static_cast<std::size_t>(strip_.count));
        backend_.download(strip_.state, static_cast<std::size_t>(strip_.count), states.data() + before);
        each_head([&](std::size_t h, std::ptrdiff_t index, std::ptrdiff_t query, std::ptrdiff_t count) {
            HeadTruth& head = truth.heads[h];
            for (std::ptrdiff_t n = 0; n < count; ++n) {
                const RowState& s = states[before + static_cast<std::size_t>(index + n)];
                const std::ptrdiff_t i = query + n;
                report.lost_row |= s.lost;
                report.negligible |= s.negligible;
                if (s.empty) head.lse.value[static_cast<std::size_t>(i)] = -std::numeric_limits<double>::infinity();
                if (s.empty) continue;
                if (s.lost || !detail::settle(log_sum_exp(s), head.lse, head.lse.index(i, 0)))
                    report.undecided.push_back({detail::Output::lse, h, i, 0});
                if (s.lost || !detail::settle(s.delta, head.delta, head.delta.index(i, 0)))
                    report.undecided.push_back({detail::Output::delta, h, i, 0});
            }
        });
    }
    [[nodiscard]] WideSum log_sum_exp(const RowState& s) const {
        using namespace detail;
        const DoubleDouble product = s.pivot_score * in_.score_scale();
        const DoubleDouble logit = product + DoubleDouble{s.pivot_bias, 0};
        const double error = in_.score_scale_size() * s.score_error +
                             (mul_error + in_.score_scale_error()) * std::fabs(product.high) +
                             (s.pivot_bias == 0 ? 0 : add_error * std::fabs(logit.high));
        return detail::add(WideSum{logit, 0, 1.01 * error}, log_of_sum(s));
    }
    /// ln(1 + tail)
    [[nodiscard]] static WideSum log_of_sum(const RowState& s) {
        using namespace detail;
        if (s.tail_exponent == none_exponent) return {{}, none_exponent, 0};
        // below 2^-300 it is the tail itself, to 2^-300 of it
        if (s.tail_exponent < flush_exponent)
            return {s.tail, s.tail_exponent, s.tail_error + s.tail.high * s.tail.high * 0x1p-300};
        const double factor = power_of_two(s.tail_exponent);
        const DoubleDouble tail{s.tail.high * factor, s.tail.low * factor};
        const double own = tail.high <= log1p_small ? log1p_error * tail.high : log1p_error;
        return {log1p(tail), 0, s.tail_error * factor + own};
    }

    void sinks(const std::vector<RowState>& states, GroupTruth& truth, detail::FastReport& report) const {
        const std::ptrdiff_t width = padded(in_.n_q);
        for (std::size_t h = 0; h < truth.heads.size(); ++h) {
            truth.heads[h].dsink = CertifiedMatrix(1, 1);
            if (report.lost_row) {
                report.undecided.push_back({detail::Output::dsink, h, 0, 0});
                continue;
            }
            const auto n = static_cast<std::size_t>(width);
            detail::AlignedVector high(n), low(n), exponent(n, detail::no_exponent), error(n);
            for (std::size_t i = 0; i < static_cast<std::size_t>(in_.n_q); ++i) {
                const RowState& s = states[h * static_cast<std::size_t>(in_.n_q) + i];
                if (s.empty) continue;
                high[i] = s.first_ds.high;
                low[i] = s.first_ds.low;
                exponent[i] = s.first_ds.exponent;
                error[i] = s.first_ds_error;
            }
            detail::sink_gradient({high.data(), low.data(), exponent.data()}, error.data(), width, h, truth, report);
        }
    }

    Backend& backend_;
    const detail::FastInputs& given_;
    FlatInputs in_;
    Strip strip_{};
    std::ptrdiff_t capacity_ = 0;
    Columns dk_{}, dv_{};
    double* partial_ = nullptr;
    std::vector<unsigned char> decided_;
};

/// detail::FastValues of a back end.
template <class Backend>
void fast_values(Backend& backend, const TruthProblem& problem, bool first_key_is_sink, GroupTruth& truth,
                 detail::FastReport& report) {
    if (truth.heads.front().s.rows > 0)
        throw RequestError(
            "truth: s, p, dp and ds are kept by the processor's truth alone: expected keep_matrices = false");
    const detail::FastInputs inputs(problem);
    Driver<Backend>(backend, inputs).run(first_key_is_sink, truth, report);
}

}  // namespace faultline::truth_teams
