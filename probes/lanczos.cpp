// SPDX-License-Identifier: Apache-2.0
#include <faultline/probes/lanczos.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <stdexcept>

#include <faultline/base/clones.hpp>

#include "lanczos_passes.hpp"

namespace faultline {
namespace {

using lanczos_detail::Passes;
using lanczos_detail::Rows;

/// Bits of every choice are the same; only speed differs.
const Passes& best_for_this_machine() {
#if defined(FAULTLINE_LANCZOS_X86)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("x86-64-v4")) return lanczos_detail::passes_v4;
    if (__builtin_cpu_supports("x86-64-v3")) return lanczos_detail::passes_v3;
#endif
    return lanczos_detail::passes_plain;
}
const Passes& passes() {
    static const Passes& best = best_for_this_machine();
    return best;
}

/// In lanes, as the passes add.
double squared_norm(std::span<const double> x) {
    double lane[8] = {};
    std::size_t i = 0;
    for (; i + 8 <= x.size(); i += 8)
        for (std::size_t l = 0; l < 8; ++l) lane[l] += x[i + l] * x[i + l];
    for (std::size_t l = 0; i + l < x.size(); ++l) lane[l] += x[i + l] * x[i + l];
    return ((lane[0] + lane[4]) + (lane[2] + lane[6])) + ((lane[1] + lane[5]) + (lane[3] + lane[7]));
}

/// Numbers that begin where a cache line does: the passes load 64 bytes at a time. Not set.
class Aligned {
  public:
    explicit Aligned(std::size_t count)
        : count_(count), values_(std::make_unique_for_overwrite<double[]>(count + line)) {}
    [[nodiscard]] std::span<double> span() const {
        const auto at = reinterpret_cast<std::uintptr_t>(values_.get()) / sizeof(double) % line;
        return {values_.get() + (at == 0 ? 0 : line - at), count_};
    }

  private:
    static constexpr std::size_t line = 8;
    std::size_t count_;
    std::unique_ptr<double[]> values_;
};

/// A number of (-1, 1), of nobody's choice, for each element of the first vector.
double any(std::uint32_t i) {
    std::uint32_t x = i * 2654435761U + 12345U;
    x ^= x >> 16;
    x *= 2246822519U;
    x ^= x >> 13;
    x *= 3266489917U;
    x ^= x >> 16;
    return static_cast<double>(x) * 0x1p-31 - 1.0;
}

/// An upper bidiagonal matrix: alpha[j] at (j, j), beta[j] at (j, j + 1); the last beta is what the space that was built is off an
/// invariant one by.
struct Bidiagonal {
    std::vector<double> alpha, beta;
};

constexpr int most_values = 4;  // the three that are wanted and their neighbour

using Values = std::array<double, most_values>;

constexpr int points =
    4;  // of an interval that are looked at beside each other: a division waits for the one before it
using Points = std::array<double, std::size_t{most_values} * points>;

/// Of each m: eigenvalues above it of the symmetric matrix T with zeros on the diagonal and the roots of `squares` beside it. The
/// pivots of m - T are formed; as many are negative as eigenvalues lie above m (Golub and Van Loan, 8.4).
FAULTLINE_CLONES void count_above(const double* squares, std::size_t count, const Points& m, Points& above) {
    constexpr double least = std::numeric_limits<double>::min();
    Points pivot = m, negative{};
    for (std::size_t i = 0; i < count; ++i)
        for (std::size_t v = 0; v < pivot.size(); ++v) {
            const double divisor = std::abs(pivot[v]) < least ? -least : pivot[v];
            pivot[v] = m[v] - squares[i] / divisor;
            negative[v] += pivot[v] < 0 ? 1.0 : 0.0;
        }
    above = negative;
}

/// Its largest singular values, square or with the last beta in a column of its own (then nearer to those of W, whose left space it
/// has whole), as the eigenvalues of the symmetric matrix with zeros on the diagonal and alpha_0, beta_0, alpha_1, … beside it, by
/// section of intervals: bounds from below, within `tolerance` of the largest. `low`: such bounds that are known.
Values largest_values(const Bidiagonal& b, bool square, double tolerance, const Values& low) {
    const std::size_t n = b.alpha.size();
    std::vector<double> squares;
    double bound = 0;  // of the norm: Gershgorin's
    for (std::size_t j = 0; j < n; ++j) {
        const double before = j > 0 ? b.beta[j - 1] : 0, after = j + 1 < n || !square ? b.beta[j] : 0;
        squares.push_back(b.alpha[j] * b.alpha[j]);
        if (after > 0) squares.push_back(after * after);
        bound = std::max({bound, b.alpha[j] + before, b.alpha[j] + after});
    }
    Values from = low, to;
    to.fill(bound * (1 + 0x1p-50));
    while (true) {
        Points at, above{};
        bool moves = false;
        for (std::size_t v = 0; v < most_values; ++v) {
            for (std::size_t p = 0; p < points; ++p)
                at[v * points + p] = from[v] + (to[v] - from[v]) * (static_cast<double>(p + 1) / (points + 1));
            moves |=
                at[v * points] > from[v] && at[v * points + points - 1] < to[v] && to[v] - from[v] > tolerance * bound;
        }
        if (!moves) return from;
        count_above(squares.data(), squares.size(), at, above);
        for (std::size_t v = 0; v < most_values; ++v) {
            const double before = from[v];
            for (std::size_t p = 0; p < points; ++p) {
                const double x = at[v * points + p];
                if (above[v * points + p] > static_cast<double>(v)) {
                    from[v] = x;
                } else {
                    if (x > before) to[v] = x;
                    break;
                }
            }
        }
    }
}

/// |last element| of the left singular vector that belongs to a value: by the recurrence from the last element on, toward which the
/// vector of a value that has been found falls off.
double last_element(const Bidiagonal& b, double value) {
    // Eigenvector (v_0, u_0, v_1, u_1, …) of the same matrix: value x_i = e_i-1 x_i-1 + e_i x_i+1.
    double next = 0, here = 1, squares_u = 1, after = 0;
    bool of_u = true;
    for (std::size_t i = 2 * b.alpha.size() - 1; i-- > 0;) {
        const double beside = i % 2 == 0 ? b.alpha[i / 2] : b.beta[i / 2];
        const double before = (value * here - after * next) / beside;
        next = here;
        here = before;
        after = beside;
        of_u = !of_u;
        if (of_u) squares_u += here * here;
        if (std::abs(here) > 0x1p400) return 0;
    }
    return 1 / std::sqrt(squares_u);
}

/// What the first `count` may be off, relative to the largest.
double error_of(const Bidiagonal& b, const Values& values, int count) {
    Values residual{};
    for (std::size_t v = 0; v <= static_cast<std::size_t>(count); ++v)
        residual[v] = b.beta.back() * last_element(b, values[v]);
    double most = 0;
    for (std::size_t v = 0; v < static_cast<std::size_t>(count); ++v) {
        double gap = values[v] - (values[v + 1] + residual[v + 1]);
        if (v > 0) gap = std::min(gap, values[v - 1] - values[v]);
        const double by_gap = gap > 0 ? residual[v] * residual[v] / gap : residual[v];
        most = std::max(most, std::min(residual[v], by_gap));
    }
    return most / values[0];
}

/// log2, straight between powers of two: the C library's differs between processors, and with it could the number of steps.
double about_log2(double x) {
    int exponent = 0;
    const double fraction = std::frexp(x, &exponent);
    return exponent + 2 * (fraction - 1);
}

/// Steps after which to look whether the values are found: the error falls by about the same factor in each.
struct Looks {
    static constexpr int first = 12, most = 8, least = 3;
    int at = first, before = 0;
    double error_before = 1;

    void plan(int steps, double error) {
        const double by_step = (about_log2(error_before) - about_log2(error)) / (steps - before);
        const double left = about_log2(error) - about_log2(lanczos_error);
        before = steps;
        error_before = error;
        at = steps + (by_step > 0 ? std::clamp(static_cast<int>(left / by_step) + 1, least, most) : most);
    }
};

/// next(v, beta, u, y): u = W v - beta u and y = W^T u. `rank`: W has no higher one.
template <class Next>
LeadingValues iterate(std::ptrdiff_t rows, std::ptrdiff_t cols, std::ptrdiff_t rank, int count, const Next& next) {
    if (count < 1 || count >= most_values)
        throw std::invalid_argument("leading singular values: expected a count from 1 to 3");
    // One more than the rank: the first vector has a part that W does not see.
    const std::ptrdiff_t most = std::min({rows, cols, rank + 1}), stride = (cols + 7) / 8 * 8;
    LeadingValues found{std::vector<double>(static_cast<std::size_t>(count), 0.0)};
    const auto width = static_cast<std::size_t>(cols);
    const Aligned left(static_cast<std::size_t>(rows)), right(width), room(static_cast<std::size_t>(most)),
        basis(static_cast<std::size_t>(most * stride));
    const std::span<double> u = left.span(), y = right.span();
    const auto vector = [&](std::ptrdiff_t j) { return basis.span().data() + j * stride; };
    const auto append = [&](double norm, std::ptrdiff_t j) {
        for (std::size_t i = 0; i < width; ++i) vector(j)[i] = y[i] / norm;
    };
    std::ranges::fill(u, 0.0);
    for (std::size_t i = 0; i < width; ++i) y[i] = any(static_cast<std::uint32_t>(i));
    if (most > 0) append(std::sqrt(squared_norm(y)), 0);
    constexpr double nothing = 1e-13;                  // of the largest: what rounding leaves of a vector in the space
    constexpr double rough = 0x1p-32, fine = 0x1p-53;  // of the values at a look, and at the end
    Bidiagonal b;
    Values values{};
    Looks look;
    double largest = 0, beta = 0;
    for (std::ptrdiff_t j = 0; j < most; ++j) {
        const double* v = vector(j);
        next(v, beta, u.data(), y.data());
        const double alpha = std::sqrt(squared_norm(u));
        if (!std::isfinite(alpha)) {
            found.values.assign(found.values.size(), std::numeric_limits<double>::quiet_NaN());
            return found;
        }
        largest = std::max(largest, alpha);
        if (!(alpha > nothing * largest)) break;
        for (double& x : u) x /= alpha;
        for (std::size_t i = 0; i < width; ++i) y[i] = y[i] / alpha - alpha * v[i];
        const double before = squared_norm(y);
        const Rows<double> all{vector(0), j + 1, cols, stride};
        passes().orthogonalise(all, y.data(), room.span().data());
        double rest = squared_norm(y);
        if (rest < before / 2) {  // twice is enough (Parlett, The Symmetric Eigenvalue Problem, 6.9)
            passes().orthogonalise(all, y.data(), room.span().data());
            rest = squared_norm(y);
        }
        beta = std::sqrt(rest);
        largest = std::max(largest, beta);
        b.alpha.push_back(alpha);
        b.beta.push_back(beta);
        found.steps = static_cast<int>(j + 1);
        if (!(beta > nothing * largest)) break;
        if (found.steps == look.at) {
            values = largest_values(b, true, rough, values);
            const double error = error_of(b, values, count);
            if (error <= lanczos_error) break;
            look.plan(found.steps, error);
        }
        if (j + 1 < most) append(beta, j + 1);
    }
    if (b.alpha.empty()) return found;
    values = largest_values(b, false, fine, values);
    for (std::size_t i = 0; i < std::min(found.values.size(), b.alpha.size()); ++i) found.values[i] = values[i];
    return found;
}

Rows<float> rows_of(MatrixView<const float> w) { return {w.data, w.rows, w.cols, w.stride}; }

}  // namespace

LeadingValues leading_singular_values(MatrixView<const float> w, int count) {
    const Rows<float> rows = rows_of(w);
    return iterate(w.rows, w.cols, w.cols, count, [&](const double* v, double beta, double* u, double* y) {
        passes().next_left(rows, v, beta, u, y);
    });
}

LeadingValues leading_product_singular_values(MatrixView<const float> w_q, MatrixView<const float> w_k, int count) {
    const Rows<float> q = rows_of(w_q), k = rows_of(w_k);
    const Aligned in_k(static_cast<std::size_t>(k.cols)), in_q(static_cast<std::size_t>(q.cols));
    double *const right = in_k.span().data(), *const left = in_q.span().data();
    return iterate(w_q.rows, w_k.rows, w_q.cols, count, [&](const double* v, double beta, double* u, double* y) {
        passes().multiply_transposed(k, v, right);
        passes().next_left(q, right, beta, u, left);
        passes().multiply(k, left, y);
    });
}

}  // namespace faultline
