// SPDX-License-Identifier: Apache-2.0
// The logits and their exponentials, element by element, of both passes: kernels/cpu/scores.hpp.
#pragma once

#include <faultline/emulated/dot.hpp>
#include <faultline/emulated/problem.hpp>
#include <faultline/special/binary64.hpp>
#include <faultline/special/ex2_approx.hpp>
#include <faultline/special/ex2_polynomial.hpp>
#include <faultline/special/lg2_approx.hpp>

namespace faultline::emulated {

/// The sites of one pass: the forward and the recomputation in the backward go the same way.
struct ScoreSites {
    Site accumulate, cast, scale, argument, exp;
    bool backward;
};
FAULTLINE_HD constexpr ScoreSites forward_sites() {
    return {Site::s_accumulate, Site::s_cast, Site::s_scale, Site::exp_argument, Site::exp, false};
}
FAULTLINE_HD constexpr ScoreSites backward_sites() {
    return {Site::bwd_s_accumulate, Site::bwd_s_cast, Site::bwd_s_scale, Site::bwd_exp_argument, Site::bwd_exp, true};
}

/// The score of row i and column j of a tile of `cols` columns; -inf behind the causal mask.
FAULTLINE_HD_CALLED inline double score(const Sites& sites, const ScoreSites& at, const Place& where,
                                        const HeadProblem& x, std::ptrdiff_t i, std::ptrdiff_t j, std::ptrdiff_t cols) {
    const Schedule& schedule = sites.plan.schedule;
    const std::ptrdiff_t row = where.query0 + i, key = where.key0 + j, counter = i * cols + j;
    double s =
        dot(sites.plan[at.accumulate].accumulation, x.q.cols, 0.0, Strided{x.q.row(row), 1}, Strided{x.k.row(key), 1});
    s = sites.rounded(at.accumulate, where, counter, s);
    s = sites.rounded(at.cast, where, counter, s);
    const bool biased = x.bias.data != nullptr;
    const double bias = biased ? x.bias(row, key) : 0.0;
    const double natural = schedule.scale_at == ScaleAt::scores ? x.scales.natural : 1.0;
    const bool to_log2 = (at.backward ? schedule.bwd_exp_base : schedule.exp_base) == ExpBase::two;
    const bool scale_here = schedule.scale_at != ScaleAt::exponent;
    const double raw = s;
    if (scale_here && (natural != 1.0 || to_log2 || biased)) {
        s = sites.pass(
            at.scale, where, counter,
            [&] {
                double y = raw * natural;
                if (biased) y = sites.intermediate(at.scale, y) + bias;
                return to_log2 ? sites.intermediate(at.scale, y) * x.scales.log2e : y;
            },
            [&] {
                double y = raw * natural;
                if (biased) y = y + bias;
                return to_log2 ? y * x.scales.log2e : y;
            });
    } else if (biased) {
        const double unscale = 1.0 / x.scales.natural;
        s = sites.pass(
            at.scale, where, counter, [&] { return raw + sites.intermediate(at.scale, bias * unscale); },
            [&] { return raw + bias * unscale; });
    }
    return key >= visible_keys(row, x.n_q(), x.n_k(), x.causal) ? -infinity() : s;
}

/// What is subtracted from s c: the row maximum or lse of a row.
struct Reference {
    double value;    ///< in the units of s, or already scaled
    double shift;    ///< as the kernel subtracts it
    bool is_scaled;  ///< lse in log2 units or logits

    [[nodiscard]] FAULTLINE_HD double or_zero() const { return value == -infinity() ? 0.0 : value; }
};

FAULTLINE_HD inline Reference reference_of(const Sites& sites, const ScoreSites& at, double value, bool is_scaled,
                                           double c, double offset) {
    if (is_scaled) return {value, value, true};
    const double scaled = value == -infinity() ? 0.0 : sites.intermediate(at.argument, value * c);
    return {value, offset == 0 ? scaled : sites.intermediate(at.argument, scaled - offset), false};
}

/// The argument of the exponential. `floats`: every score of the tile, c and every row's shift is a float, so that the
/// kernel's fma in fp32 is one operation.
FAULTLINE_HD_CALLED inline double argument(const Sites& sites, const ScoreSites& at, const Place& where,
                                           std::ptrdiff_t counter, ArgumentForm form, double c, double offset,
                                           const Reference& reference, bool floats, double s) {
    const bool scaled_before = sites.plan.schedule.scale_at != ScaleAt::exponent;
    return sites.pass(
        at.argument, where, counter,
        [&] {
            if (form == ArgumentForm::subtract_then_scale && !reference.is_scaled) {
                double x = s - reference.or_zero();
                if (!scaled_before) x = sites.intermediate(at.argument, x) * c;
                return offset != 0 ? sites.intermediate(at.argument, x) + offset : x;
            }
            if (form == ArgumentForm::fused && !scaled_before)
                return floats ? static_cast<double>(fmaf(static_cast<float>(s), static_cast<float>(c),
                                                         static_cast<float>(-reference.shift)))
                              : fma(s, c, -reference.shift);
            return (scaled_before ? s : sites.intermediate(at.argument, s * c)) - reference.shift;
        },
        [&] {
            const double r = reference.or_zero();
            return reference.is_scaled ? s * c - r : (s - r) * c + offset;
        });
}

FAULTLINE_HD inline double exponential(double x, ExpBase base) {
    return base == ExpBase::two ? binary64_functions::exp2(x) : binary64_functions::exp(x);
}
FAULTLINE_HD_CALLED inline double exponential(double x, ExpBase base, Functions functions) {
    if (functions == Functions::correctly_rounded || base == ExpBase::e) return exponential(x, base);
    return static_cast<double>(exp2f_cuda(static_cast<float>(x)));
}
FAULTLINE_HD inline double logarithm(double x, Functions functions) {
    return functions == Functions::hopper ? static_cast<double>(logf_fast_cuda(static_cast<float>(x)))
                                          : binary64_functions::log(x);
}

/// Whether column j of a forward tile takes exp2 by the polynomial (Schedule::exp_poly_every).
FAULTLINE_HD inline bool by_polynomial(const Schedule& schedule, std::ptrdiff_t j, std::ptrdiff_t cols) {
    constexpr std::ptrdiff_t fragment = 32;
    if (schedule.exp_poly_every == 0) return false;
    const std::ptrdiff_t columns = schedule.block_k > 0 ? schedule.block_k : cols;  // a last tile is padded to it
    const std::ptrdiff_t fragments = (columns + fragment - 1) / fragment;
    const std::ptrdiff_t f = j / fragment, pair = j % fragment / 2 * 2;
    return f >= schedule.exp_poly_skip && f < fragments - 1 &&
           pair % schedule.exp_poly_every >= schedule.exp_poly_every - schedule.exp_poly_count;
}

/// exp of an argument, rounded.
FAULTLINE_HD_CALLED inline double probability(const Sites& sites, const ScoreSites& at, const Place& where,
                                              std::ptrdiff_t i, std::ptrdiff_t j, std::ptrdiff_t cols, double x) {
    const Schedule& schedule = sites.plan.schedule;
    const ExpBase base = at.backward ? schedule.bwd_exp_base : schedule.exp_base;
    return sites.pass(
        at.exp, where, i * cols + j,
        [&] {
            if (!at.backward && by_polynomial(schedule, j, cols))
                return static_cast<double>(exp2_polynomial(static_cast<float>(x)));
            return exponential(x, base, schedule.functions);
        },
        [&] { return exponential(x, base); });
}

}  // namespace faultline::emulated
