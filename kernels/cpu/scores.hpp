// SPDX-License-Identifier: Apache-2.0
// The logits and their exponentials, used by both passes: scaled scores with mask and bias, scale (s - reference) in the
// form that the kernel uses, and exp.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

#include <faultline/base/clones.hpp>
#include <faultline/cpu/attention.hpp>
#include <faultline/cpu/stage.hpp>
#include <faultline/cpu/tiles.hpp>

namespace faultline::cpu {

inline constexpr double infinity = std::numeric_limits<double>::infinity();

/// The sites of one pass: the forward and the recomputation in the backward go the same way.
struct ScoreSites {
    Site accumulate, cast, softcap, scale, argument, exp;
    bool backward;
};
inline constexpr ScoreSites forward_sites{Site::s_accumulate, Site::s_cast, Site::softcap, Site::s_scale,
                                          Site::exp_argument, Site::exp,    false};
inline constexpr ScoreSites backward_sites{Site::bwd_s_accumulate,
                                           Site::bwd_s_cast,
                                           Site::bwd_softcap,
                                           Site::bwd_s_scale,
                                           Site::bwd_exp_argument,
                                           Site::bwd_exp,
                                           true};

/// The scale as the kernel holds it. Under a softcap a score is tanh(scale q k^T / c) once it has passed Site::softcap, and
/// c takes the place of the scale in all that follows (FlashAttention-2, flash_api.cpp:130-137).
struct Scales {
    double exponent;      ///< c of exp2(s c - m c); 1 where the scores are scaled before
    double bwd_exponent;  ///< the same with the backward's base
    double natural;       ///< scale, or the cap, for lse
    double gradient;      ///< scale, for dq, dk
    double cap;           ///< 0: no softcap
    double into_cap;      ///< scale/cap, where the scale stands in the exponent
    double inverse_keep;  ///< 1/keep, 1 where nothing is dropped
    double inputs;        ///< sqrt(scale) where q and k are scaled, else 1
    double inverse;       ///< 1/scale, where the accumulator of the scores starts at -lse/scale
    double log2e;         ///< log2(e), where scores are turned into log2 units in a step of their own

    /// How many nats a unit of the scores is, where the row maximum is taken.
    [[nodiscard]] double logit_per_score(const Schedule& schedule) const {
        if (schedule.scale_at == ScaleAt::exponent) return natural;
        return schedule.exp_base == ExpBase::two ? std::numbers::ln2 : 1.0;
    }

    /// What scaled scores are multiplied with for the base of the exponential.
    [[nodiscard]] double score_unit(ExpBase base) const { return base == ExpBase::two ? log2e : 1.0; }
    Scales(const RoundingPlan& plan, const HeadGroup& in) {
        const double scale = in.scale;
        const Rule& rule = plan[Site::scale];
        // One number for the whole call: where the site is asked to round stochastically, to nearest.
        const Rounding rounding = rule.rounding == Rounding::stochastic ? Rounding::nearest_even : rule.rounding;
        const auto rounded = [&](double x) { return faultline::round(x, rule.format, rounding); };
        const auto in_log2 = [](ExpBase base) { return base == ExpBase::two ? std::numbers::log2e : 1.0; };
        // The host computes scale*log2(e) from the float scale in double and rounds once (flash_api.cpp).
        gradient = rounded(scale);
        cap = rounded(in.softcap);
        natural = cap > 0 ? cap : gradient;
        into_cap = cap > 0 ? rounded(gradient / cap) : 0;
        inverse_keep = in.dropout.empty() ? 1.0 : rounded(1 / in.keep);
        const bool here = plan.schedule.scale_at == ScaleAt::exponent;
        exponent = here ? rounded(natural * in_log2(plan.schedule.exp_base)) : 1.0;
        bwd_exponent = here ? rounded(natural * in_log2(plan.schedule.bwd_exp_base)) : 1.0;
        log2e = rounded(std::numbers::log2e);
        inputs = plan.schedule.scale_at == ScaleAt::inputs ? rounded(std::sqrt(scale)) : 1.0;
        inverse = rounded(1.0 / scale);
    }
};

inline bool is_float(double x) { return static_cast<double>(static_cast<float>(x)) == x; }
/// x <- fma(x, c, -shift[i]): the kernel's fma in fp32 where its three operands are floats. A wider one (a counterfactual
/// with an exact score, scale or lse) makes it one of binary64, whose result the site then rounds.
void fused_argument_fp32(MatrixView<double> tile, double c, const double* shift);
/// x <- tanh x.
void hyperbolic_tangent(MatrixView<double> tile);
/// exp2 or exp, element by element, of any argument including -inf.
void exponential(MatrixView<double> tile, ExpBase base);

/// The same in the kernel's function: ex2.approx where the plan has the card's and the base is two.
void exponential(MatrixView<double> tile, ExpBase base, Functions functions);
/// The same of a forward tile, whose columns may take it by a polynomial (Schedule::exp_poly_every).
void exponential_of_tile(MatrixView<double> tile, const Schedule& schedule);
/// Natural logarithm of a row sum in the kernel's function (__logf of a Hopper card), before any rounding of ours.
double logarithm(double sum, Functions functions);
/// The binary one: lg2.approx, or the binary64 function, before any rounding of ours.
double binary_logarithm(double sum, Functions functions);

/// The additive bias of a tile, if there is one.
struct Mask {
    bool causal;
    std::ptrdiff_t n_q, n_k;
    MatrixView<const double> bias;    ///< data == nullptr: none
    const double* sink = nullptr;     ///< the head's, if there is one
    MatrixView<const double> kept{};  ///< dropout's mask; data == nullptr: none
    double keep = 1;
};

/// tile <- tile o M, the elements that are kept.
inline void drop(const Mask& mask, const TileAt& where, MatrixView<double> tile) {
    if (mask.kept.data == nullptr) return;
    for_each(tile,
             [&](double x, auto i, auto j) { return mask.kept(where.query0 + i, where.key0 + j) == 0 ? 0.0 : x; });
}
/// tile <- tile o M / keep, rounded at the site: where dropout scales p itself.
template <class I>
void drop_and_scale(Stage<I>& stage, Site site, const TileAt& where, const Mask& mask, const Scales& scales,
                    MatrixView<double> tile) {
    if (mask.kept.data == nullptr) return;
    drop(mask, where, tile);
    for_each(tile, [&](double x, auto, auto) { return x * scales.inverse_keep; });
    stage.pass(site, where, tile);
}

inline TileAt score_place(const Mask& mask, int head, const TileRange& rows, const TileRange& keys) {
    TileAt where{0, head, rows.first, keys.first, rows.index, keys.index};
    if (mask.causal) where.visible0 = rows.first + mask.n_k - mask.n_q + 1 - keys.first;
    where.biased = mask.bias.data != nullptr;
    return where;
}

/// s <- tanh(scale s / c), as the kernel comes to the argument: one constant where the scale stands in the exponent, else
/// what is left of the scale, and then the division by the cap.
template <class I>
void cap_scores(Stage<I>& stage, Site site, const TileAt& where, const Scales& scales, const Schedule& schedule,
                MatrixView<double> s) {
    const double scale = schedule.scale_at == ScaleAt::scores ? scales.gradient : 1.0;
    const bool one_constant = schedule.scale_at == ScaleAt::exponent;
    // The argument is a tensor where tensors are bf16 or fp16; a rule of fewer bits than fp32 that is neither stands for what
    // the function returns (tanh.approx), whose argument is in a register.
    const Format& rule = stage.rule(site).format;
    const bool of_function = !is_exact(rule) && rule.precision < fp32.precision && rule != bf16 && rule != fp16;
    const auto round_argument = [&](MatrixView<double> t) {
        if (of_function)
            for_each(t, [](double x, auto, auto) { return static_cast<double>(static_cast<float>(x)); });
        else
            stage.round_intermediate(site, t);
    };
    stage.pass(
        site, where, s,
        [&](MatrixView<double> t) {
            if (one_constant) {
                for_each(t, [&](double x, auto, auto) { return x * scales.into_cap; });
            } else {
                if (scale != 1.0) {
                    for_each(t, [&](double x, auto, auto) { return x * scale; });
                    round_argument(t);
                }
                for_each(t, [&](double x, auto, auto) { return x / scales.cap; });
            }
            round_argument(t);
            hyperbolic_tangent(t);
        },
        [&](MatrixView<double> t) {
            const double factor = one_constant ? scales.into_cap : scale / scales.cap;
            for_each(t, [&](double x, auto, auto) { return x * factor; });
            hyperbolic_tangent(t);
        });
}

/// s_tile <- q k^T, cast, and where the plan scales scores: scaled, biased. Masked elements become -inf.
/// Under a softcap the tile holds tanh in place of q k^T, which `capped`, where it has memory, keeps. `subtracted`, where
/// given, is taken off each row: the accumulator starts at its negative (LseIn::accumulator).
template <class I>
void scores(Stage<I>& stage, const ScoreSites& at, const TileAt& where, MatrixView<const double> q,
            MatrixView<const double> k_t, const Scales& scales, const RoundingPlan& plan, const Mask& mask,
            MatrixView<double> s, MatrixView<double> capped = {}, const double* subtracted = nullptr) {
    for_each(s, [&](double, auto i, auto) { return subtracted == nullptr ? 0.0 : -subtracted[i]; });
    stage.accumulate(at.accumulate, where, q, k_t, s);
    stage.pass(at.cast, where, s);
    if (scales.cap > 0) {
        cap_scores(stage, at.softcap, where, scales, plan.schedule, s);
        if (capped.data != nullptr) copy(s, capped);
    }
    const bool scale_here = plan.schedule.scale_at != ScaleAt::exponent;
    const ExpBase base = at.backward ? plan.schedule.bwd_exp_base : plan.schedule.exp_base;
    const double natural = plan.schedule.scale_at == ScaleAt::scores || scales.cap > 0 ? scales.natural : 1.0;
    const bool to_log2 = base == ExpBase::two;
    if (scale_here && (natural != 1.0 || to_log2 || mask.bias.data != nullptr)) {
        const auto scaled = [&](MatrixView<double> t) {
            for_each(t, [&](double x, auto, auto) { return x * natural; });
        };
        const auto biased = [&](MatrixView<double> t) {
            if (mask.bias.data == nullptr) return;
            for_each(t, [&](double x, auto i, auto j) { return x + mask.bias(where.query0 + i, where.key0 + j); });
        };
        stage.pass(
            at.scale, where, s,
            [&](MatrixView<double> t) {
                scaled(t);
                if (mask.bias.data != nullptr) stage.round_intermediate(at.scale, t);
                biased(t);
                if (!to_log2) return;
                stage.round_intermediate(at.scale, t);
                for_each(t, [&](double x, auto, auto) { return x * scales.log2e; });
            },
            [&](MatrixView<double> t) {
                scaled(t);
                biased(t);
                if (to_log2) for_each(t, [&](double x, auto, auto) { return x * scales.log2e; });
            });
    } else if (mask.bias.data != nullptr) {
        // Kernels that scale in the exponent add bias/scale to the raw score (FlashAttention-2 does so with ALiBi).
        const double unscale = 1.0 / scales.natural;
        stage.pass(
            at.scale, where, s,
            [&](MatrixView<double> t) {
                for_each(t, [&](double x, auto i, auto j) {
                    return x +
                           stage.round_intermediate(at.scale, mask.bias(where.query0 + i, where.key0 + j) * unscale);
                });
            },
            [&](MatrixView<double> t) {
                for_each(t, [&](double x, auto i, auto j) {
                    return x + mask.bias(where.query0 + i, where.key0 + j) * unscale;
                });
            });
    }
    if (mask.causal) {
        for (std::ptrdiff_t i = 0; i < s.rows; ++i) {
            const std::ptrdiff_t visible = visible_keys(where.query0 + i, mask.n_q, mask.n_k, true) - where.key0;
            for (std::ptrdiff_t j = std::max<std::ptrdiff_t>(0, visible); j < s.cols; ++j) s(i, j) = -infinity;
        }
    }
}

/// x <- exp x, in the pass's function.
template <class I>
void exponentials(Stage<I>& stage, const ScoreSites& at, const TileAt& where, ExpBase base, const RoundingPlan& plan,
                  MatrixView<double> x) {
    stage.pass(
        at.exp, where, x,
        [&](MatrixView<double> t) {
            if (at.backward)
                exponential(t, base, plan.schedule.functions);
            else
                exponential_of_tile(t, plan.schedule);
        },
        [&](MatrixView<double> t) { exponential(t, base); });
}

/// x <- exp(scale (s - reference[i])), reference per row in the units of s (row max) or already scaled (lse): the form
/// says how. reference_is_scaled: it is what the backward subtracts (lse in log2 units). Without a reference it is subtracted
/// already, and the argument is x times the constant.
template <class I>
void probabilities(Stage<I>& stage, const ScoreSites& at, const TileAt& where, ArgumentForm form, ExpBase base,
                   const Scales& scales, const RoundingPlan& plan, const double* reference, bool reference_is_scaled,
                   MatrixView<double> x) {
    const double c = at.backward ? scales.bwd_exponent : scales.exponent;
    const double offset = at.backward ? 0.0 : plan.schedule.max_offset;
    if (reference == nullptr) {
        const auto scaled = [&](MatrixView<double> t) { for_each(t, [&](double s, auto, auto) { return s * c; }); };
        stage.pass(at.argument, where, x, scaled, scaled);
        return exponentials(stage, at, where, base, plan, x);
    }
    const auto shift_of = [&](std::ptrdiff_t i) {  // what is subtracted from s c, as the kernel holds it
        if (reference_is_scaled) return reference[i];
        const double scaled = reference[i] == -infinity ? 0.0 : stage.round_intermediate(at.argument, reference[i] * c);
        return offset == 0 ? scaled : stage.round_intermediate(at.argument, scaled - offset);
    };
    const auto exactly = [&](MatrixView<double> t) {
        for (std::ptrdiff_t i = 0; i < t.rows; ++i) {
            double* row = t.row(i);
            const double r = reference[i] == -infinity ? 0.0 : reference[i];
            if (reference_is_scaled)
                for (std::ptrdiff_t j = 0; j < t.cols; ++j) row[j] = row[j] * c - r;
            else
                for (std::ptrdiff_t j = 0; j < t.cols; ++j) row[j] = (row[j] - r) * c + offset;
        }
    };
    const auto in_kernel = [&](MatrixView<double> t) {
        std::vector<double> shift(static_cast<std::size_t>(t.rows));
        for (std::ptrdiff_t i = 0; i < t.rows; ++i) shift[static_cast<std::size_t>(i)] = shift_of(i);
        // c = 1, nothing to fuse or to scale: whatever the form, what is there is subtracted, in one rounding.
        const bool scaled_before = plan.schedule.scale_at != ScaleAt::exponent;
        if ((form == ArgumentForm::subtract_then_scale || scaled_before) && !reference_is_scaled) {
            for_each(t, [&](double s, auto i, auto) { return s - (reference[i] == -infinity ? 0.0 : reference[i]); });
            if (!scaled_before) {
                stage.round_intermediate(at.argument, t);
                for_each(t, [&](double s, auto, auto) { return s * c; });
            }
            if (offset != 0) {
                stage.round_intermediate(at.argument, t);
                for_each(t, [&](double s, auto, auto) { return s + offset; });
            }
        } else if (form == ArgumentForm::fused && !scaled_before) {
            if (stage.rule(at.argument).format == fp32)
                fused_argument_fp32(t, c, shift.data());
            else  // wider than fp32: the product is rounded to binary64, 2^-53 relative
                for_each(t,
                         [&](double s, auto i, auto) { return std::fma(s, c, -shift[static_cast<std::size_t>(i)]); });
        } else {
            if (!scaled_before) {
                for_each(t, [&](double s, auto, auto) { return s * c; });
                stage.round_intermediate(at.argument, t);
            }
            for_each(t, [&](double s, auto i, auto) { return s - shift[static_cast<std::size_t>(i)]; });
        }
    };
    stage.pass(at.argument, where, x, in_kernel, exactly);
    exponentials(stage, at, where, base, plan, x);
}

}  // namespace faultline::cpu
