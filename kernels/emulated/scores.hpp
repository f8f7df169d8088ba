// SPDX-License-Identifier: Apache-2.0
// The logits and their exponentials, of both passes: kernels/cpu/scores.hpp, tile by tile and site by site.
#pragma once

#include <faultline/emulated/problem.hpp>
#include <faultline/emulated/stage.hpp>
#include <faultline/plan/polynomial_columns.hpp>
#include <faultline/special/binary64.hpp>
#include <faultline/special/ex2_approx.hpp>
#include <faultline/special/ex2_polynomial.hpp>
#include <faultline/special/lg2_approx.hpp>

namespace faultline::emulated {

/// The sites of one pass: the forward and the recomputation in the backward go the same way.
struct ScoreSites {
    Site accumulate, cast, softcap, scale, argument, exp;
    bool backward;
};
FAULTLINE_HD constexpr ScoreSites forward_sites() {
    return {Site::s_accumulate, Site::s_cast, Site::softcap, Site::s_scale, Site::exp_argument, Site::exp, false};
}
FAULTLINE_HD constexpr ScoreSites backward_sites() {
    return {Site::bwd_s_accumulate,
            Site::bwd_s_cast,
            Site::bwd_softcap,
            Site::bwd_s_scale,
            Site::bwd_exp_argument,
            Site::bwd_exp,
            true};
}

/// The part of a score tile that a team has: `rows` and `keys` of the tile that `row_tile` and `key_tile` make.
FAULTLINE_HD inline Place score_place(const HeadProblem& x, const TileRange& row_tile, const TileRange& key_tile,
                                      std::ptrdiff_t row0, std::ptrdiff_t key0) {
    Place where;
    where.head = x.head;
    where.query0 = row_tile.first;
    where.key0 = key_tile.first;
    where.q_tile = row_tile.index;
    where.k_tile = key_tile.index;
    if (x.causal) where.visible0 = row_tile.first + x.n_k() - x.n_q() + 1 - key_tile.first;
    where.biased = x.bias.data != nullptr;
    where.i0 = row0 - row_tile.first;
    where.j0 = key0 - key_tile.first;
    where.cols = key_tile.count;
    return where;
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

/// s <- tanh(scale s / c): cap_scores of kernels/cpu/scores.hpp.
template <class Stage>
FAULTLINE_HD void cap_scores(Stage& stage, Site site, const Place& where, const ScaleValues& scales,
                             const View<double>& s) {
    const Schedule& schedule = stage.plan().schedule;
    const double scale = schedule.scale_at == ScaleAt::scores ? scales.gradient : 1.0;
    const bool one_constant = schedule.scale_at == ScaleAt::exponent;
    const Format& rule = stage.rule(site).format;
    const bool bf16_or_fp16 = rule == Format{.precision = 8, .emin = -126, .emax = 127} ||
                              rule == Format{.precision = 11, .emin = -14, .emax = 15};
    const bool of_function = !is_exact(rule) && rule.precision < 24 && !bf16_or_fp16;
    const auto argument = [&](double x) { return of_function ? to_float(x) : stage.intermediate(site, x); };
    stage.pass(
        site, where, s,
        [&](double x, std::ptrdiff_t, std::ptrdiff_t) {
            if (one_constant) {
                x = x * scales.into_cap;
            } else {
                if (scale != 1.0) x = argument(x * scale);
                x = x / scales.cap;
            }
            return binary64_functions::tanh(argument(x));
        },
        [&](double x, std::ptrdiff_t, std::ptrdiff_t) {
            return binary64_functions::tanh(x * (one_constant ? scales.into_cap : scale / scales.cap));
        });
}

FAULTLINE_HD inline double binary_logarithm(double x, Functions functions) {
    constexpr double log2e = 1.442695040888963407359924681001892137;
    return functions == Functions::hopper ? static_cast<double>(lg2_approx(static_cast<float>(x)))
                                          : binary64_functions::log(x) * log2e;
}

/// s <- q k^T, cast, capped, and where the plan scales scores: scaled, biased. Masked elements become -inf. `capped`, where
/// it has memory, keeps tanh. `subtracted`, where given, is taken off each row: the sum starts at its negative.
template <class Stage>
FAULTLINE_HD_CALLED void scores(Stage& stage, const ScoreSites& at, const Place& where, const HeadProblem& x,
                                const View<double>& s, const View<double>& capped, const double* subtracted = nullptr) {
    const Schedule& schedule = stage.plan().schedule;
    const ScaleValues& scales = x.scales;
    const std::ptrdiff_t row0 = where.query0 + where.i0, key0 = where.key0 + where.j0;
    const Operands of_scores{x.q.row(row0), x.q.stride, 1, x.k.row(key0), x.k.stride, 1, x.q.cols};
    if (subtracted != nullptr)
        each(stage.team(), s.rows, s.cols, [&](std::ptrdiff_t i, std::ptrdiff_t j) { s(i, j) = -subtracted[i]; });
    stage.accumulate(at.accumulate, where, s, of_scores, subtracted == nullptr ? Begin::At::zero : Begin::At::c);
    stage.pass(at.cast, where, s);
    if (scales.cap > 0) {
        cap_scores(stage, at.softcap, where, scales, s);
        if (capped.data != nullptr)
            each(stage.team(), s.rows, s.cols, [&](std::ptrdiff_t i, std::ptrdiff_t j) { capped(i, j) = s(i, j); });
    }
    const bool biased = x.bias.data != nullptr;
    const double natural = schedule.scale_at == ScaleAt::scores || scales.cap > 0 ? scales.natural : 1.0;
    const bool to_log2 = (at.backward ? schedule.bwd_exp_base : schedule.exp_base) == ExpBase::two;
    const bool scale_here = schedule.scale_at != ScaleAt::exponent;
    const auto bias = [&](std::ptrdiff_t i, std::ptrdiff_t j) { return x.bias(row0 + i, key0 + j); };
    if (scale_here && (natural != 1.0 || to_log2 || biased)) {
        stage.pass(
            at.scale, where, s,
            [&](double y, std::ptrdiff_t i, std::ptrdiff_t j) {
                y = y * natural;
                if (biased) y = stage.intermediate(at.scale, y) + bias(i, j);
                return to_log2 ? stage.intermediate(at.scale, y) * scales.log2e : y;
            },
            [&](double y, std::ptrdiff_t i, std::ptrdiff_t j) {
                y = y * natural;
                if (biased) y = y + bias(i, j);
                return to_log2 ? y * scales.log2e : y;
            });
    } else if (biased) {
        const double unscale = 1.0 / scales.natural;
        stage.pass(
            at.scale, where, s,
            [&](double y, std::ptrdiff_t i, std::ptrdiff_t j) {
                return y + stage.intermediate(at.scale, bias(i, j) * unscale);
            },
            [&](double y, std::ptrdiff_t i, std::ptrdiff_t j) { return y + bias(i, j) * unscale; });
    }
    if (x.causal && key0 + s.cols > visible_keys(row0, x.n_q(), x.n_k(), true))  // the first row does not see all
        each(stage.team(), s.rows, s.cols, [&](std::ptrdiff_t i, std::ptrdiff_t j) {
            if (key0 + j >= visible_keys(row0 + i, x.n_q(), x.n_k(), true)) s(i, j) = -infinity();
        });
}

/// x <- exp(scale (s - reference[i])); without a reference it is subtracted already. `shift` has memory for a number of each
/// row.
template <class Stage>
FAULTLINE_HD_CALLED void probabilities(Stage& stage, const ScoreSites& at, const Place& where,
                                       const ScaleValues& scales, const double* reference, bool reference_is_scaled,
                                       double* shift, const View<double>& x) {
    const Schedule& schedule = stage.plan().schedule;
    const ArgumentForm form = at.backward ? schedule.bwd_argument : schedule.argument;
    const ExpBase base = at.backward ? schedule.bwd_exp_base : schedule.exp_base;
    const double c = at.backward ? scales.bwd_exponent : scales.exponent;
    const double offset = at.backward ? 0.0 : schedule.max_offset;
    const bool scaled_before = schedule.scale_at != ScaleAt::exponent;  // c = 1: nothing to fuse or to scale
    const bool in_fp32 = is_fp32(stage.rule(at.argument).format);
    const auto or_zero = [](double r) { return r == -infinity() ? 0.0 : r; };
    const bool subtracted = reference == nullptr;
    each_row(stage.team(), x.rows, [&](std::ptrdiff_t i) {  // what is subtracted from s c, as the kernel holds it
        if (subtracted) return;
        if (reference_is_scaled) {
            shift[i] = reference[i];
            return;
        }
        const double scaled = reference[i] == -infinity() ? 0.0 : stage.intermediate(at.argument, reference[i] * c);
        shift[i] = offset == 0 ? scaled : stage.intermediate(at.argument, scaled - offset);
    });
    stage.pass(
        at.argument,
        [&](double s, std::ptrdiff_t i, std::ptrdiff_t) {
            if (subtracted) return s * c;
            if ((form == ArgumentForm::subtract_then_scale || scaled_before) && !reference_is_scaled) {
                double y = s - or_zero(reference[i]);
                if (!scaled_before) y = stage.intermediate(at.argument, y) * c;
                return offset != 0 ? stage.intermediate(at.argument, y) + offset : y;
            }
            if (form == ArgumentForm::fused && !scaled_before)
                return in_fp32 && is_float(s) && is_float(c) && is_float(shift[i])
                           ? static_cast<double>(
                                 fmaf(static_cast<float>(s), static_cast<float>(c), static_cast<float>(-shift[i])))
                           : fma(s, c, -shift[i]);
            return (scaled_before ? s : stage.intermediate(at.argument, s * c)) - shift[i];
        },
        [&](double s, std::ptrdiff_t i, std::ptrdiff_t) {
            if (subtracted) return s * c;
            const double r = or_zero(reference[i]);
            return reference_is_scaled ? s * c - r : (s - r) * c + offset;
        },
        at.exp,
        [&](double a, std::ptrdiff_t, std::ptrdiff_t j) {
            if (!at.backward && takes_polynomial(schedule, where.j0 + j, where.cols))
                return static_cast<double>(exp2_polynomial(static_cast<float>(a)));
            return exponential(a, base, schedule.functions);
        },
        [&](double a, std::ptrdiff_t, std::ptrdiff_t) { return exponential(a, base); }, where, x);
}

/// t <- t o M / keep, rounded at the site: where dropout scales p itself.
template <class Stage>
FAULTLINE_HD void drop_and_scale(Stage& stage, Site site, const Place& where, const HeadProblem& x,
                                 const View<double>& t) {
    if (x.kept.data == nullptr) return;
    const std::ptrdiff_t row0 = where.query0 + where.i0, key0 = where.key0 + where.j0;
    each(stage.team(), t.rows, t.cols, [&](std::ptrdiff_t i, std::ptrdiff_t j) {
        const double kept = x.drops(row0 + i, key0 + j) ? 0.0 : t(i, j);
        t(i, j) = kept * x.scales.inverse_keep;
    });
    stage.pass(site, where, t);
}
/// t <- t o M, the elements that are kept.
template <class Stage>
FAULTLINE_HD void drop(Stage& stage, const Place& where, const HeadProblem& x, const View<double>& t) {
    if (x.kept.data == nullptr) return;
    const std::ptrdiff_t row0 = where.query0 + where.i0, key0 = where.key0 + where.j0;
    each(stage.team(), t.rows, t.cols, [&](std::ptrdiff_t i, std::ptrdiff_t j) {
        if (x.drops(row0 + i, key0 + j)) t(i, j) = 0.0;
    });
}

}  // namespace faultline::emulated
