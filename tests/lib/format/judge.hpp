// SPDX-License-Identifier: Apache-2.0
// The judge of every rounding: MPFR finds the two neighbours of x in the format, exact comparison with their midpoint
// chooses. What a format is stands here a second time, as literals from the standards, so that a wrong field or a wrong
// max_finite in lib/format is a failure and not a shared belief.
#pragma once

#include <faultline/format/names.hpp>

#include <gtest/gtest.h>
#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

namespace faultline::testing {

struct Case {
    std::string name;
    Format format;
    int precision;    ///< significant bits
    int emin;         ///< smallest normal exponent
    double max;       ///< largest finite number, from the standard
    double min;       ///< smallest positive number, from the standard
    int bits;         ///< width of a code
    double infinite;  ///< what overflow and infinity become: infinity, max or NaN
    double nan;       ///< what NaN becomes

    friend void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }
};

/// The named formats but exact and binary64, both overflow policies of the fp8 formats, and formats built by hand: with
/// other splits of the bits, without subnormals, saturating.
const std::vector<Case>& cases();

/// A subset by width: those with at most 16 bits, for exhaustive sweeps.
std::vector<Case> narrow_cases();

/// x among the numbers of the format, found by MPFR once for all modes. Keeps a reference to the case.
class Judgement {
  public:
    Judgement(double x, const Case& c);

    /// x rounded into the format. The rule for random_bits is that of round() in format.hpp.
    [[nodiscard]] double rounded(Rounding mode, std::uint64_t random_bits) const;

  private:
    [[nodiscard]] bool goes_away(Rounding mode, std::uint64_t random_bits) const;

    double x_;
    const Case& case_;
    double below_ = 0, above_ = 0;  ///< the neighbours of |x|, the upper end of the format left open
    int against_middle_ = 0;        ///< sign of |x| minus their midpoint
    bool odd_ = false;              ///< whether the lower one has an odd significand
};

/// x rounded by MPFR's own means alone (mpfr_set_emin, mpfr_set_emax, mpfr_subnormalize): only IEEE formats that do not
/// saturate, only the four modes MPFR has for it. Judges the judge.
double judged_by_mpfr_alone(double x, const Case& c, Rounding mode);

/// The case's name as GoogleTest takes it: letters, digits and underscores.
std::string label(const ::testing::TestParamInfo<Case>& info);

/// Whether a and b are the same number, zeros with their signs, or both NaN.
bool same(double a, double b);

}  // namespace faultline::testing
