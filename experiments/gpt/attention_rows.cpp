// SPDX-License-Identifier: Apache-2.0
#include <faultline/gpt/attention_rows.hpp>

#include <algorithm>
#include <limits>

#include <faultline/base/clones.hpp>
#include <faultline/gpt/vector_math.hpp>

namespace faultline::gpt {
namespace {

#define FAULTLINE_INLINE [[gnu::always_inline]] inline
#define FAULTLINE_LAMBDA __attribute__((always_inline))

/// tanh by the sigmoid: its absolute error, 2^-24 of the cap, is what the scores near the cap have anyway.
template <class T>
FAULTLINE_INLINE Vector<T> tanh_of(Vector<T> x) {
    return T(1) - T(2) / (T(1) + exp_of(x + x));
}

template <class T>
FAULTLINE_INLINE Vector<T> maximum(Vector<T> a, Vector<T> b) {
    return a > b ? a : b;
}

template <class T>
FAULTLINE_INLINE void scale_rows(MatrixView<T> s, std::ptrdiff_t first, T scale, T cap, T* row_max) {
    constexpr T lowest = -std::numeric_limits<T>::infinity();
    for (std::ptrdiff_t i = 0; i < s.rows; ++i) {
        T* row = s.row(i);
        Vector<T> best = Vector<T>{} + lowest;
        for_vectors<T>(std::min(first + i + 1, s.cols), [&](auto j, auto count) FAULTLINE_LAMBDA {
            Vector<T> v = load(row + j, count) * scale;
            if (cap > 0) v = cap * tanh_of<T>(v / cap);
            store(row + j, v, count);
            best = maximum<T>(best, filled_beyond<T>(v, count, lowest));
        });
        row_max[i] = joined_max<T>(best);
    }
}

template <class T>
FAULTLINE_INLINE void exponential_rows(MatrixView<T> s, std::ptrdiff_t first, const T* reference, T* row_sum) {
    for (std::ptrdiff_t i = 0; i < s.rows; ++i) {
        T* row = s.row(i);
        const std::ptrdiff_t seen = std::min(first + i + 1, s.cols);
        Vector<T> sum{};
        for_vectors<T>(seen, [&](auto j, auto count) FAULTLINE_LAMBDA {
            const Vector<T> e = filled_beyond<T>(exp_of(load(row + j, count) - reference[i]), count, T(0));
            store(row + j, e, count);
            sum += e;
        });
        std::fill(row + seen, row + s.cols, T(0));
        if (row_sum != nullptr) row_sum[i] = joined_sum<T>(sum);
    }
}

template <class T>
FAULTLINE_INLINE void dot_rows(MatrixView<const T> a, MatrixView<const T> b, T* dots) {
    for (std::ptrdiff_t i = 0; i < a.rows; ++i) {
        Vector<T> sum{};
        for_vectors<T>(a.cols, [&](auto j, auto count)
                                   FAULTLINE_LAMBDA { sum += load(a.row(i) + j, count) * load(b.row(i) + j, count); });
        dots[i] = joined_sum<T>(sum);
    }
}

template <class T>
FAULTLINE_INLINE void gradient_rows(MatrixView<const T> p, const T* delta, MatrixView<T> dp) {
    for (std::ptrdiff_t i = 0; i < p.rows; ++i)
        for_vectors<T>(p.cols, [&](auto j, auto count) FAULTLINE_LAMBDA {
            store(dp.row(i) + j, load(p.row(i) + j, count) * (load(dp.row(i) + j, count) - delta[i]), count);
        });
}

template <class T>
FAULTLINE_INLINE void cap_rows(MatrixView<const T> s, T cap, MatrixView<T> ds) {
    for (std::ptrdiff_t i = 0; i < s.rows; ++i)
        for_vectors<T>(s.cols, [&](auto j, auto count) FAULTLINE_LAMBDA {
            const Vector<T> t = load(s.row(i) + j, count) / cap;
            store(ds.row(i) + j, load(ds.row(i) + j, count) * (T(1) - t * t), count);
        });
}

template <class T>
FAULTLINE_INLINE void sum_rows(MatrixView<const T> x, double& sum, double& magnitude) {
    for (std::ptrdiff_t i = 0; i < x.rows; ++i) {
        Vector<T> plain{}, positive{};
        for_vectors<T>(x.cols, [&](auto j, auto count) FAULTLINE_LAMBDA {
            const Vector<T> v = load(x.row(i) + j, count);
            plain += v;
            positive += maximum<T>(v, -v);
        });
        sum += static_cast<double>(joined_sum<T>(plain));
        magnitude += static_cast<double>(joined_sum<T>(positive));
    }
}

template <class T>
FAULTLINE_INLINE void copy_scaled(MatrixView<const T> from, T factor, MatrixView<T> to) {
    for (std::ptrdiff_t i = 0; i < from.rows; ++i)
        for_vectors<T>(from.cols, [&](auto j, auto count) FAULTLINE_LAMBDA {
            store(to.row(i) + j, load(from.row(i) + j, count) * factor, count);
        });
}

template <class T>
FAULTLINE_INLINE void divide(MatrixView<T> x, const T* divisor) {
    for (std::ptrdiff_t i = 0; i < x.rows; ++i)
        for_vectors<T>(x.cols, [&](auto j, auto count) FAULTLINE_LAMBDA {
            store(x.row(i) + j, load(x.row(i) + j, count) / divisor[i], count);
        });
}

template <class T>
double negative_entropy_of(const T* e, std::ptrdiff_t seen, T sum) {
    double total = 0;
    for (std::ptrdiff_t j = 0; j < seen; ++j) {
        const double p = static_cast<double>(e[j]) / static_cast<double>(sum);
        if (p > 0) total += p * std::log(p);
    }
    return total;
}

}  // namespace

double negative_entropy(const float* e, std::ptrdiff_t seen, float sum) { return negative_entropy_of(e, seen, sum); }
double negative_entropy(const double* e, std::ptrdiff_t seen, double sum) { return negative_entropy_of(e, seen, sum); }

FAULTLINE_CLONES void scale_scores(MatrixView<float> s, std::ptrdiff_t first, float scale, float cap, float* row_max) {
    scale_rows<float>(s, first, scale, cap, row_max);
}
void scale_scores(MatrixView<double> s, std::ptrdiff_t first, double scale, double cap, double* row_max) {
    scale_rows<double>(s, first, scale, cap, row_max);
}
FAULTLINE_CLONES void exponentials(MatrixView<float> s, std::ptrdiff_t first, const float* reference, float* row_sum) {
    exponential_rows<float>(s, first, reference, row_sum);
}
void exponentials(MatrixView<double> s, std::ptrdiff_t first, const double* reference, double* row_sum) {
    exponential_rows<double>(s, first, reference, row_sum);
}
FAULTLINE_CLONES void row_dots(MatrixView<const float> a, MatrixView<const float> b, float* dots) {
    dot_rows<float>(a, b, dots);
}
void row_dots(MatrixView<const double> a, MatrixView<const double> b, double* dots) { dot_rows<double>(a, b, dots); }
FAULTLINE_CLONES void score_gradient(MatrixView<const float> p, const float* delta, MatrixView<float> dp) {
    gradient_rows<float>(p, delta, dp);
}
void score_gradient(MatrixView<const double> p, const double* delta, MatrixView<double> dp) {
    gradient_rows<double>(p, delta, dp);
}
FAULTLINE_CLONES void through_cap(MatrixView<const float> s, float cap, MatrixView<float> ds) {
    cap_rows<float>(s, cap, ds);
}
void through_cap(MatrixView<const double> s, double cap, MatrixView<double> ds) { cap_rows<double>(s, cap, ds); }
FAULTLINE_CLONES void add_sums(MatrixView<const float> x, double& sum, double& magnitude) {
    sum_rows<float>(x, sum, magnitude);
}
void add_sums(MatrixView<const double> x, double& sum, double& magnitude) { sum_rows<double>(x, sum, magnitude); }
FAULTLINE_CLONES void scaled_copy(MatrixView<const float> from, float factor, MatrixView<float> to) {
    copy_scaled<float>(from, factor, to);
}
void scaled_copy(MatrixView<const double> from, double factor, MatrixView<double> to) {
    copy_scaled<double>(from, factor, to);
}
FAULTLINE_CLONES void divide_rows(MatrixView<float> x, const float* divisor) { divide<float>(x, divisor); }
void divide_rows(MatrixView<double> x, const double* divisor) { divide<double>(x, divisor); }

}  // namespace faultline::gpt
