// SPDX-License-Identifier: Apache-2.0
#include <faultline/gpt/row_kernels.hpp>

#include <limits>

#include <faultline/base/clones.hpp>
#include <faultline/format/round_lane.hpp>
#include <faultline/gpt/vector_math.hpp>

// Each kernel is written once, as a template that is inlined into two functions: one for float, compiled for every
// instruction set, one for double.
namespace faultline::gpt {
namespace {

#define FAULTLINE_INLINE [[gnu::always_inline]] inline
// A lambda that is inlined into the clone around it: without the attribute g++ compiles it once, for the baseline.
#define FAULTLINE_LAMBDA __attribute__((always_inline))

template <class T>
FAULTLINE_INLINE void norm_statistics_rows(MatrixView<const T> x, T epsilon, MatrixView<T> statistics) {
    for (std::ptrdiff_t i = 0; i < x.rows; ++i) {
        const T* row = x.row(i);
        Vector<T> sum{};
        for_vectors<T>(x.cols, [&](auto j, auto count) FAULTLINE_LAMBDA { sum += load(row + j, count); });
        const T mean = joined_sum<T>(sum) / static_cast<T>(x.cols);
        Vector<T> squares{};
        for_vectors<T>(x.cols, [&](auto j, auto count) FAULTLINE_LAMBDA {
            const Vector<T> d = filled_beyond<T>(load(row + j, count) - mean, count, T(0));
            squares += d * d;
        });
        statistics(i, 0) = mean;
        statistics(i, 1) = T(1) / std::sqrt(joined_sum<T>(squares) / static_cast<T>(x.cols) + epsilon);
    }
}

template <class T>
FAULTLINE_INLINE void norm_apply_rows(MatrixView<const T> x, MatrixView<const T> statistics, const T* gain,
                                      const T* bias, MatrixView<T> y) {
    for (std::ptrdiff_t i = 0; i < x.rows; ++i) {
        const T mean = statistics(i, 0), rstd = statistics(i, 1);
        for_vectors<T>(x.cols, [&](auto j, auto count) FAULTLINE_LAMBDA {
            Vector<T> v = ((load(x.row(i) + j, count) - mean) * rstd) * load(gain + j, count);
            if (bias != nullptr) v += load(bias + j, count);
            store(y.row(i) + j, v, count);
        });
    }
}

/// dx = rstd (g - mean(g) - xhat mean(g xhat)), g = dy gain, xhat = (x - mean) rstd.
template <class T>
FAULTLINE_INLINE void norm_backward_rows(MatrixView<const T> x, MatrixView<const T> statistics, const T* gain,
                                         MatrixView<const T> dy, MatrixView<T> dx, T* dgain, T* dbias) {
    for (std::ptrdiff_t i = 0; i < x.rows; ++i) {
        const T mean = statistics(i, 0), rstd = statistics(i, 1);
        Vector<T> sum{}, dot{};
        for_vectors<T>(x.cols, [&](auto j, auto count) FAULTLINE_LAMBDA {
            const Vector<T> out = load(dy.row(i) + j, count);
            const Vector<T> g = out * load(gain + j, count);
            const Vector<T> xhat = (load(x.row(i) + j, count) - mean) * rstd;
            sum += g;
            dot += g * xhat;
            store(dgain + j, load(dgain + j, count) + out * xhat, count);
            if (dbias != nullptr) store(dbias + j, load(dbias + j, count) + out, count);
        });
        const T mean_g = joined_sum<T>(sum) / static_cast<T>(x.cols);
        const T mean_dot = joined_sum<T>(dot) / static_cast<T>(x.cols);
        for_vectors<T>(x.cols, [&](auto j, auto count) FAULTLINE_LAMBDA {
            const Vector<T> g = load(dy.row(i) + j, count) * load(gain + j, count);
            const Vector<T> xhat = (load(x.row(i) + j, count) - mean) * rstd;
            const Vector<T> grad = ((g - mean_g) - xhat * mean_dot) * rstd;
            store(dx.row(i) + j, load(dx.row(i) + j, count) + grad, count);
        });
    }
}

template <class T>
constexpr T gelu_scale = static_cast<T>(0.79788456080286535587989211986876);  // sqrt(2/pi)
template <class T>
constexpr T gelu_cubic = static_cast<T>(0.044715);

template <class T>
FAULTLINE_INLINE Vector<T> sigmoid(Vector<T> x) {
    return T(1) / (T(1) + exp_of(-x));
}

template <class T>
FAULTLINE_INLINE void gelu_rows(MatrixView<const T> x, MatrixView<T> y) {
    for (std::ptrdiff_t i = 0; i < x.rows; ++i)
        for_vectors<T>(x.cols, [&](auto j, auto count) FAULTLINE_LAMBDA {
            const Vector<T> v = load(x.row(i) + j, count);
            const Vector<T> u = gelu_scale<T> * (v + gelu_cubic<T> * (v * v * v));
            store(y.row(i) + j, v * sigmoid<T>(u + u), count);
        });
}

template <class T>
FAULTLINE_INLINE void gelu_backward_rows(MatrixView<const T> x, MatrixView<const T> dy, MatrixView<T> dx) {
    for (std::ptrdiff_t i = 0; i < x.rows; ++i)
        for_vectors<T>(x.cols, [&](auto j, auto count) FAULTLINE_LAMBDA {
            const Vector<T> v = load(x.row(i) + j, count);
            const Vector<T> u = gelu_scale<T> * (v + gelu_cubic<T> * (v * v * v));
            const Vector<T> s = sigmoid<T>(u + u);
            const Vector<T> du = gelu_scale<T> * (T(1) + (T(3) * gelu_cubic<T>)*(v * v));
            const Vector<T> slope = s + (v * (s * (T(1) - s))) * (du + du);
            store(dx.row(i) + j, load(dy.row(i) + j, count) * slope, count);
        });
}

template <class T>
FAULTLINE_INLINE void gate_rows(MatrixView<const T> x, MatrixView<const T> g, MatrixView<T> y) {
    for (std::ptrdiff_t i = 0; i < x.rows; ++i)
        for_vectors<T>(x.cols, [&](auto j, auto count) FAULTLINE_LAMBDA {
            store(y.row(i) + j, load(x.row(i) + j, count) * sigmoid<T>(load(g.row(i) + j, count)), count);
        });
}

template <class T>
FAULTLINE_INLINE void gate_backward_rows(MatrixView<const T> x, MatrixView<const T> g, MatrixView<const T> dy,
                                         MatrixView<T> dx, MatrixView<T> dg) {
    for (std::ptrdiff_t i = 0; i < x.rows; ++i)
        for_vectors<T>(x.cols, [&](auto j, auto count) FAULTLINE_LAMBDA {
            const Vector<T> s = sigmoid<T>(load(g.row(i) + j, count));
            const Vector<T> out = load(dy.row(i) + j, count), in = load(x.row(i) + j, count);
            store(dx.row(i) + j, out * s, count);
            store(dg.row(i) + j, (out * in) * (s * (T(1) - s)), count);
        });
}

/// log sum exp of a row; `exps` gets exp(x - max), `sum` their sum.
template <class T>
FAULTLINE_INLINE T log_sum_exp(const T* row, std::ptrdiff_t n, T* exps, T& sum) {
    constexpr T lowest = -std::numeric_limits<T>::infinity();
    Vector<T> best = Vector<T>{} + lowest;
    for_vectors<T>(n, [&](auto j, auto count) FAULTLINE_LAMBDA {
        const Vector<T> v = filled_beyond<T>(load(row + j, count), count, lowest);
        best = v > best ? v : best;
    });
    const T maximum = joined_max<T>(best);
    Vector<T> sums{};
    for_vectors<T>(n, [&](auto j, auto count) FAULTLINE_LAMBDA {
        const Vector<T> e = filled_beyond<T>(exp_of(load(row + j, count) - maximum), count, T(0));
        if (exps != nullptr) store(exps + j, e, count);
        sums += e;
    });
    sum = joined_sum<T>(sums);
    return maximum + std::log(sum);
}

template <class T>
FAULTLINE_INLINE double cross_entropy_rows(MatrixView<T> logits, std::span<const std::int32_t> targets, double weight,
                                           double z_loss) {
    double total = 0;
    for (std::ptrdiff_t i = 0; i < logits.rows; ++i) {
        T* row = logits.row(i);
        const auto target = static_cast<std::ptrdiff_t>(targets[static_cast<std::size_t>(i)]);
        const T at_target = row[target];
        T sum = 0;
        const T lse = log_sum_exp(row, logits.cols, row, sum);
        total += static_cast<double>(lse) - static_cast<double>(at_target);
        const T factor = static_cast<T>(weight * (1 + 2 * z_loss * static_cast<double>(lse))) / sum;
        for_vectors<T>(logits.cols, [&](auto j, auto count)
                                        FAULTLINE_LAMBDA { store(row + j, load(row + j, count) * factor, count); });
        row[target] -= static_cast<T>(weight);
    }
    return total;
}

template <class T>
FAULTLINE_INLINE double cross_entropy_loss_rows(MatrixView<const T> logits, std::span<const std::int32_t> targets) {
    double total = 0;
    for (std::ptrdiff_t i = 0; i < logits.rows; ++i) {
        T sum = 0;
        const T lse = log_sum_exp(logits.row(i), logits.cols, static_cast<T*>(nullptr), sum);
        total += static_cast<double>(lse) - static_cast<double>(logits(i, targets[static_cast<std::size_t>(i)]));
    }
    return total;
}

template <class T>
FAULTLINE_INLINE void rms_norm_heads_rows(MatrixView<const T> x, std::ptrdiff_t head_dim, const T* gain, T epsilon,
                                          MatrixView<T> y, MatrixView<T> inverse) {
    for (std::ptrdiff_t i = 0; i < x.rows; ++i)
        for (std::ptrdiff_t h = 0; h < x.cols / head_dim; ++h) {
            const T* from = x.row(i) + h * head_dim;
            T* to = y.row(i) + h * head_dim;
            Vector<T> squares{};
            for_vectors<T>(head_dim, [&](auto j, auto count) FAULTLINE_LAMBDA {
                const Vector<T> v = load(from + j, count);
                squares += v * v;
            });
            const T factor = T(1) / std::sqrt(joined_sum<T>(squares) / static_cast<T>(head_dim) + epsilon);
            inverse(i, h) = factor;
            for_vectors<T>(head_dim, [&](auto j, auto count) FAULTLINE_LAMBDA {
                Vector<T> v = load(from + j, count) * factor;
                if (gain != nullptr) v = v * load(gain + j, count);
                store(to + j, v, count);
            });
        }
}

/// With n = x inverse: dx = inverse (g - n mean(g n)), g = dy gain.
template <class T>
FAULTLINE_INLINE void rms_norm_heads_backward_rows(MatrixView<const T> x, MatrixView<const T> inverse,
                                                   std::ptrdiff_t head_dim, const T* gain, MatrixView<T> dy, T* dgain) {
    for (std::ptrdiff_t i = 0; i < x.rows; ++i)
        for (std::ptrdiff_t h = 0; h < x.cols / head_dim; ++h) {
            const T* from = x.row(i) + h * head_dim;
            T* out = dy.row(i) + h * head_dim;
            const T factor = inverse(i, h);
            Vector<T> dot{};
            for_vectors<T>(head_dim, [&](auto j, auto count) FAULTLINE_LAMBDA {
                const Vector<T> n = load(from + j, count) * factor;
                Vector<T> g = load(out + j, count);
                if (dgain != nullptr) store(dgain + j, load(dgain + j, count) + g * n, count);
                if (gain != nullptr) g = g * load(gain + j, count);
                dot += g * n;
            });
            const T mean = joined_sum<T>(dot) / static_cast<T>(head_dim);
            for_vectors<T>(head_dim, [&](auto j, auto count) FAULTLINE_LAMBDA {
                const Vector<T> n = load(from + j, count) * factor;
                Vector<T> g = load(out + j, count);
                if (gain != nullptr) g = g * load(gain + j, count);
                store(out + j, (g - n * mean) * factor, count);
            });
        }
}

template <class T>
FAULTLINE_INLINE void add_to(MatrixView<const T> x, MatrixView<T> y) {
    for (std::ptrdiff_t i = 0; i < x.rows; ++i)
        for_vectors<T>(x.cols, [&](auto j, auto count) FAULTLINE_LAMBDA {
            store(y.row(i) + j, load(y.row(i) + j, count) + load(x.row(i) + j, count), count);
        });
}

template <class T>
FAULTLINE_INLINE void add_bias_to(const T* bias, MatrixView<T> y) {
    for (std::ptrdiff_t i = 0; i < y.rows; ++i)
        for_vectors<T>(y.cols, [&](auto j, auto count) FAULTLINE_LAMBDA {
            store(y.row(i) + j, load(y.row(i) + j, count) + load(bias + j, count), count);
        });
}

template <class T>
FAULTLINE_INLINE void add_rows_to(MatrixView<const T> dy, T* dbias) {
    for (std::ptrdiff_t i = 0; i < dy.rows; ++i)
        for_vectors<T>(dy.cols, [&](auto j, auto count) FAULTLINE_LAMBDA {
            store(dbias + j, load(dbias + j, count) + load(dy.row(i) + j, count), count);
        });
}

}  // namespace

FAULTLINE_CLONES void norm_statistics(MatrixView<const float> x, float epsilon, MatrixView<float> statistics) {
    norm_statistics_rows<float>(x, epsilon, statistics);
}
void norm_statistics(MatrixView<const double> x, double epsilon, MatrixView<double> statistics) {
    norm_statistics_rows<double>(x, epsilon, statistics);
}
FAULTLINE_CLONES void norm_apply(MatrixView<const float> x, MatrixView<const float> statistics, const float* gain,
                                 const float* bias, MatrixView<float> y) {
    norm_apply_rows<float>(x, statistics, gain, bias, y);
}
void norm_apply(MatrixView<const double> x, MatrixView<const double> statistics, const double* gain, const double* bias,
                MatrixView<double> y) {
    norm_apply_rows<double>(x, statistics, gain, bias, y);
}
FAULTLINE_CLONES void norm_backward(MatrixView<const float> x, MatrixView<const float> statistics, const float* gain,
                                    MatrixView<const float> dy, MatrixView<float> dx, float* dgain, float* dbias) {
    norm_backward_rows<float>(x, statistics, gain, dy, dx, dgain, dbias);
}
void norm_backward(MatrixView<const double> x, MatrixView<const double> statistics, const double* gain,
                   MatrixView<const double> dy, MatrixView<double> dx, double* dgain, double* dbias) {
    norm_backward_rows<double>(x, statistics, gain, dy, dx, dgain, dbias);
}
FAULTLINE_CLONES void gelu(MatrixView<const float> x, MatrixView<float> y) { gelu_rows<float>(x, y); }
void gelu(MatrixView<const double> x, MatrixView<double> y) { gelu_rows<double>(x, y); }
FAULTLINE_CLONES void gelu_backward(MatrixView<const float> x, MatrixView<const float> dy, MatrixView<float> dx) {
    gelu_backward_rows<float>(x, dy, dx);
}
void gelu_backward(MatrixView<const double> x, MatrixView<const double> dy, MatrixView<double> dx) {
    gelu_backward_rows<double>(x, dy, dx);
}
FAULTLINE_CLONES void gate(MatrixView<const float> x, MatrixView<const float> g, MatrixView<float> y) {
    gate_rows<float>(x, g, y);
}
void gate(MatrixView<const double> x, MatrixView<const double> g, MatrixView<double> y) { gate_rows<double>(x, g, y); }
FAULTLINE_CLONES void gate_backward(MatrixView<const float> x, MatrixView<const float> g, MatrixView<const float> dy,
                                    MatrixView<float> dx, MatrixView<float> dg) {
    gate_backward_rows<float>(x, g, dy, dx, dg);
}
void gate_backward(MatrixView<const double> x, MatrixView<const double> g, MatrixView<const double> dy,
                   MatrixView<double> dx, MatrixView<double> dg) {
    gate_backward_rows<double>(x, g, dy, dx, dg);
}
FAULTLINE_CLONES double cross_entropy(MatrixView<float> logits, std::span<const std::int32_t> targets, double weight,
                                      double z_loss) {
    return cross_entropy_rows<float>(logits, targets, weight, z_loss);
}
double cross_entropy(MatrixView<double> logits, std::span<const std::int32_t> targets, double weight, double z_loss) {
    return cross_entropy_rows<double>(logits, targets, weight, z_loss);
}
FAULTLINE_CLONES double cross_entropy_loss(MatrixView<const float> logits, std::span<const std::int32_t> targets) {
    return cross_entropy_loss_rows<float>(logits, targets);
}
double cross_entropy_loss(MatrixView<const double> logits, std::span<const std::int32_t> targets) {
    return cross_entropy_loss_rows<double>(logits, targets);
}
FAULTLINE_CLONES void rms_norm_heads(MatrixView<const float> x, std::ptrdiff_t head_dim, const float* gain,
                                     float epsilon, MatrixView<float> y, MatrixView<float> inverse) {
    rms_norm_heads_rows<float>(x, head_dim, gain, epsilon, y, inverse);
}
void rms_norm_heads(MatrixView<const double> x, std::ptrdiff_t head_dim, const double* gain, double epsilon,
                    MatrixView<double> y, MatrixView<double> inverse) {
    rms_norm_heads_rows<double>(x, head_dim, gain, epsilon, y, inverse);
}
FAULTLINE_CLONES void rms_norm_heads_backward(MatrixView<const float> x, MatrixView<const float> inverse,
                                              std::ptrdiff_t head_dim, const float* gain, MatrixView<float> dy,
                                              float* dgain) {
    rms_norm_heads_backward_rows<float>(x, inverse, head_dim, gain, dy, dgain);
}
void rms_norm_heads_backward(MatrixView<const double> x, MatrixView<const double> inverse, std::ptrdiff_t head_dim,
                             const double* gain, MatrixView<double> dy, double* dgain) {
    rms_norm_heads_backward_rows<double>(x, inverse, head_dim, gain, dy, dgain);
}
FAULTLINE_CLONES void add(MatrixView<const float> x, MatrixView<float> y) { add_to<float>(x, y); }
void add(MatrixView<const double> x, MatrixView<double> y) { add_to<double>(x, y); }
FAULTLINE_CLONES void add_bias(const float* bias, MatrixView<float> y) { add_bias_to<float>(bias, y); }
void add_bias(const double* bias, MatrixView<double> y) { add_bias_to<double>(bias, y); }
FAULTLINE_CLONES void add_rows(MatrixView<const float> dy, float* dbias) { add_rows_to<float>(dy, dbias); }
void add_rows(MatrixView<const double> dy, double* dbias) { add_rows_to<double>(dy, dbias); }

FAULTLINE_CLONES void round_bf16(MatrixView<float> x) {
    const bool whole = x.stride == x.cols;
    const std::ptrdiff_t rows = whole ? 1 : x.rows, cols = whole ? x.rows * x.cols : x.cols;
    for (std::ptrdiff_t i = 0; i < rows; ++i) {
        float* row = x.row(i);
        for (std::ptrdiff_t j = 0; j < cols; ++j) row[j] = faultline::round<bf16>(row[j]);
    }
}

}  // namespace faultline::gpt
