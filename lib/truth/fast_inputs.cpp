// SPDX-License-Identifier: Apache-2.0
#include <faultline/truth/fast_inputs.hpp>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

#include <faultline/truth/elementary.hpp>

namespace faultline::detail {
namespace {

// fp32's smallest subnormal is 2^-149 and its largest number below 2^128. Four factors of this range, and their low
// parts 2^-106 below, stay normal doubles.
constexpr double smallest_input = 0x1p-180;
constexpr double largest_input = 0x1p180;
constexpr double largest_bias = 0x1p1000;

bool in_range(MatrixView<const double> a) {
    for (std::ptrdiff_t i = 0; i < a.rows; ++i)
        for (std::ptrdiff_t j = 0; j < a.cols; ++j) {
            const double size = std::fabs(a(i, j));
            if (size != 0 && (size < smallest_input || size > largest_input)) return false;
        }
    return true;
}

/// The smallest power of two that is at least x; 2^-400 for less.
double power_above(double x) {
    if (x < 0x1p-400) return 0x1p-400;
    int exponent = 0;
    const double mantissa = std::frexp(x, &exponent);
    return std::ldexp(1.0, mantissa == 0.5 ? exponent - 1 : exponent);
}

/// Exponent of the lowest bit of a normal x.
int unit_exponent(double x) {
    const auto bits = std::bit_cast<std::uint64_t>(x);
    constexpr std::uint64_t leading = std::uint64_t{1} << 52;
    const int exponent = static_cast<int>((bits >> 52) & 0x7ff) - 1023;
    return exponent - 52 + std::countr_zero((bits & (leading - 1)) | leading);
}

DotSide dot_side(MatrixView<const double> a) {
    DotSide side;
    side.power.assign(static_cast<std::size_t>(round_up_to_lanes(a.rows)), 0x1p-400);
    for (std::ptrdiff_t i = 0; i < a.rows; ++i) {
        double squares = 0;
        int unit = 2000;
        for (std::ptrdiff_t c = 0; c < a.cols; ++c) {
            squares += a(i, c) * a(i, c);
            if (a(i, c) != 0) unit = std::min(unit, unit_exponent(a(i, c)));
        }
        const double power = power_above(std::sqrt(squares) * (1 + 0x1p-20));
        side.power[static_cast<std::size_t>(i)] = power;
        side.width.push_back(squares == 0 ? 0 : std::ilogb(power) - unit);
        side.largest_power = std::max(side.largest_power, power);
        side.widest = std::max(side.widest, side.width.back());
    }
    return side;
}

/// Sides of matrices of one shape, taken together; `upwards` if the sums run over the first rows, else over the last.
ColumnSide column_side(const std::vector<MatrixView<const double>>& matrices, bool upwards) {
    const std::ptrdiff_t rows = matrices.front().rows;
    const std::ptrdiff_t cols = matrices.front().cols;
    ColumnSide side;
    side.running = AlignedMatrix(rows, cols);
    for (std::ptrdiff_t n = 0; n < rows; ++n) {
        const std::ptrdiff_t r = upwards ? n : rows - 1 - n;
        double* top = side.running.row(r);
        if (n > 0) std::copy_n(side.running.row(upwards ? r - 1 : r + 1), side.running.stride, top);
        for (const auto& a : matrices)
            for (std::ptrdiff_t c = 0; c < cols; ++c) top[c] = std::max(top[c], std::fabs(a(r, c)));
    }
    const double* last = side.running.row(upwards ? rows - 1 : 0);
    for (std::ptrdiff_t c = 0; c < side.running.stride; ++c) side.power.push_back(power_above(last[c]));
    return side;
}

}  // namespace

bool fast_path_applies(const TruthProblem& problem) {
    if (problem.k.rows == 0 || problem.q.front().rows == 0) return false;
    if (!in_range(problem.k) || !in_range(problem.v)) return false;
    for (std::size_t h = 0; h < problem.q.size(); ++h)
        if (!in_range(problem.q[h]) || !in_range(problem.dout[h])) return false;
    for (const auto& bias : problem.bias)
        for (std::ptrdiff_t i = 0; i < bias.rows; ++i)
            for (std::ptrdiff_t j = 0; j < bias.cols; ++j)
                if (std::fabs(bias(i, j)) > largest_bias && !std::isinf(bias(i, j))) return false;
    // Below 2^-100 of a cap (or beyond) nothing is asked for that a kernel computes.
    constexpr double smallest_factor = 0x1p-100, largest_cap = 0x1p100;
    if (problem.softcap != 0 && (problem.softcap < smallest_factor || problem.softcap > largest_cap)) return false;
    if (problem.keep < smallest_factor) return false;
    for (const double logit : problem.sink)
        if (std::fabs(logit) > largest_bias) return false;
    const double scale = std::fabs(problem.scale.value);
    return problem.scale.kind != Scale::Kind::exact || scale == 0 ||
           (scale >= smallest_input && scale <= largest_input);
}

FastInputs::FastInputs(const TruthProblem& given)
    : problem(given),
      n_q(given.q.front().rows),
      n_k(given.k.rows),
      d(given.k.cols),
      d_v(given.v.cols),
      k(aligned_copy(given.k)),
      v(aligned_copy(given.v)),
      k_transposed(aligned_transpose(given.k)),
      v_transposed(aligned_transpose(given.v)),
      k_dot(dot_side(given.k)),
      v_dot(dot_side(given.v)) {
    for (std::size_t h = 0; h < given.q.size(); ++h) {
        q.push_back(aligned_copy(given.q[h]));
        dout.push_back(aligned_copy(given.dout[h]));
        q_dot.push_back(dot_side(given.q[h]));
        dout_dot.push_back(dot_side(given.dout[h]));
    }
    k_columns = column_side({given.k}, true);
    v_columns = column_side({given.v}, true);
    q_columns = column_side(given.q, false);
    dout_columns = column_side(given.dout, false);
    for (std::ptrdiff_t c = 0; c < d; ++c) {
        std::ptrdiff_t count = 0;
        while (count < n_k && given.k(count, c) == given.k(0, c)) ++count;
        constant_keys.push_back(count);
    }
    if (given.scale.kind == Scale::Kind::exact) {
        scale = {given.scale.value, 0};
    } else {
        scale = inverse_sqrt(static_cast<unsigned long>(d));
        scale_error = u2;
    }
    scale_size = std::fabs(scale.high) * (1 + 0x1p-40);
    if (given.keep != 1) {
        inverse_keep = DoubleDouble{1, 0} / DoubleDouble{given.keep, 0};
        inverse_keep_error = div_error;
    }
    if (given.softcap > 0) {
        softcap.cap = given.softcap;
        softcap.positive = scale.high < 0 ? -1 : 1;
        softcap.factor = scale / DoubleDouble{given.softcap, 0};
        softcap.scale_error = scale_error;
    }
}

}  // namespace faultline::detail
