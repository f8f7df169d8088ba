// SPDX-License-Identifier: Apache-2.0
// What the cases share: the head sizes of a kind, values at a site, and MPFR.
#pragma once

#include <cmath>
#include <functional>
#include <limits>
#include <numbers>

#include <faultline/truth/mpfr_real.hpp>

#include "heads.hpp"

namespace faultline::testing {

inline constexpr std::ptrdiff_t head_sizes[] = {64, 96, 128, 256};

/// Keeps every tile that passes a site, as it leaves it.
class Seen final : public Instrument {
  public:
    explicit Seen(Site site) : site_(site) {}
    [[nodiscard]] bool watches(Site site) const override { return site == site_; }
    void at(Site, const TileAt& where, MatrixView<double> value, MatrixView<const double> exact) override {
        tiles.push_back({where, Matrix(MatrixView<const double>(value)), Matrix(exact)});
    }
    struct Tile {
        TileAt where;
        Matrix value, exact;
    };
    std::vector<Tile> tiles;
    [[nodiscard]] double last() const { return tiles.back().value(0, 0); }

  private:
    Site site_;
};

inline constexpr mpfr_prec_t judge_bits = 320;

/// fl(x) to `precision` bits, to nearest even, as MPFR rounds (exponents here are all in range).
inline double rounded_mpfr(mpfr_srcptr x, mpfr_prec_t precision) {
    detail::Real r(precision);
    mpfr_set(r, x, MPFR_RNDN);
    return mpfr_get_d(r, MPFR_RNDN);
}

/// The constant of the exponent as a kernel's host code makes it: the scale as a float, times log2(e) in double, as a float.
inline double exponent_constant_mpfr(std::ptrdiff_t d) {
    detail::Real x(judge_bits);
    mpfr_set_si(x, d, MPFR_RNDN);
    mpfr_rec_sqrt(x, x, MPFR_RNDN);
    const double scale = rounded_mpfr(x, 24);
    detail::Real log2e(judge_bits);
    mpfr_set_ui(log2e, 2, MPFR_RNDN);
    mpfr_log(log2e, log2e, MPFR_RNDN);
    mpfr_ui_div(log2e, 1, log2e, MPFR_RNDN);
    mpfr_mul_d(log2e, log2e, scale, MPFR_RNDN);
    return rounded_mpfr(log2e, 24);
}

/// The winner's exponent under a fused scale-and-subtract, s c - fl(s c), in MPFR.
inline double fused_residual_mpfr(double s, double c) {
    detail::Real product(judge_bits);
    mpfr_set_d(product, s, MPFR_RNDN);
    mpfr_mul_d(product, product, c, MPFR_RNDN);
    const double rounded = rounded_mpfr(product, 24);
    mpfr_sub_d(product, product, rounded, MPFR_RNDN);
    return rounded_mpfr(product, 24);  // the fma rounds once
}

/// 2^x as a float, correctly rounded.
inline double exp2_mpfr(double x) {
    detail::Real r(judge_bits);
    mpfr_set_d(r, x, MPFR_RNDN);
    mpfr_exp2(r, r, MPFR_RNDN);
    return rounded_mpfr(r, 24);
}

/// A plan with every bf16 site in another 16-bit format, and its matrix instructions for that.
inline RoundingPlan in_format(RoundingPlan plan, const Format& format) {
    for (const Site site : plan.rounding_sites()) {
        Rule rule = plan[site];
        if (rule.format == bf16) rule.format = format;
        if (rule.accumulation == find_accumulation("hopper-mma-bf16") && format == fp16)
            rule.accumulation = *find_accumulation("hopper-mma-fp16");
        plan.set(site, rule);
    }
    return plan;
}

/// One query, one key, every element x.
inline Head equal_head(double x, std::ptrdiff_t d) {
    Head head(1, 1, d, 1);
    for (double& e : head.q[0].values) e = x;
    head.k.values = head.q[0].values;
    head.v.values = head.q[0].values;
    return head;
}

/// Frobenius norm of value - truth over that of the truth.
inline double relative_error(MatrixView<const double> value, const CertifiedMatrix& truth) {
    return (frobenius_distance(value, truth) / frobenius_norm(truth)).to_double();
}

}  // namespace faultline::testing
