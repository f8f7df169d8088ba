// SPDX-License-Identifier: Apache-2.0
// A double's 53 bits with a 64-bit exponent: what the norm of a gradient of size e^-10^7 is held in.
#pragma once

#include <cstdint>
#include <string>

namespace faultline {

/// mantissa * 2^exponent. Normalised: |mantissa| in [1, 2), or mantissa 0, infinite or NaN with exponent 0. Each
/// operation is correctly rounded to 53 bits (to nearest, ties to even) while exponents stay within 2^62.
struct WideReal {
    double mantissa = 0;
    std::int64_t exponent = 0;

    WideReal() = default;
    /// Exact.
    WideReal(double value) : WideReal(value, 0) {}
    /// value * 2^power, exact.
    WideReal(double value, std::int64_t power);

    /// The nearest double (0 or infinity out of range; a subnormal result is rounded once more).
    [[nodiscard]] double to_double() const;
    /// Scientific notation with `digits` significant decimals, correctly rounded: "1.234e-3012"; "0", "inf", "-inf", "nan".
    [[nodiscard]] std::string to_string(int digits = 4) const;

    WideReal operator-() const;
    friend WideReal operator+(const WideReal& a, const WideReal& b);
    friend WideReal operator-(const WideReal& a, const WideReal& b) { return a + -b; }
    friend WideReal operator*(const WideReal& a, const WideReal& b);
    friend WideReal operator/(const WideReal& a, const WideReal& b);
    /// False with a NaN, as for double.
    friend bool operator<(const WideReal& a, const WideReal& b);
    friend bool operator>(const WideReal& a, const WideReal& b) { return b < a; }
    friend bool operator<=(const WideReal& a, const WideReal& b) { return a < b || a == b; }
    friend bool operator>=(const WideReal& a, const WideReal& b) { return b <= a; }
    friend bool operator==(const WideReal& a, const WideReal& b) {
        return a.mantissa == b.mantissa && a.exponent == b.exponent;
    }
};

[[nodiscard]] WideReal sqrt(const WideReal& a);
[[nodiscard]] WideReal abs(const WideReal& a);

}  // namespace faultline
