// SPDX-License-Identifier: Apache-2.0
#include <faultline/format/names.hpp>

#include <array>
#include <utility>

namespace faultline {
namespace {

constexpr std::array<NamedFormat, 11> formats{{
    {"exact", exact, "binary64 container, nothing is rounded"},
    {"binary64", binary64, "IEEE 754-2019"},
    {"fp32", fp32, "IEEE 754-2019 binary32"},
    {"tf32", tf32, "PTX ISA, .tf32"},
    {"bf16", bf16, "PTX ISA, .bf16"},
    {"fp16", fp16, "IEEE 754-2019 binary16"},
    {"e5m2", e5m2, "OCP 8-bit Floating Point Specification 1.0"},
    {"e4m3", e4m3, "OCP 8-bit Floating Point Specification 1.0"},
    {"e3m2", e3m2, "OCP Microscaling Formats 1.0"},
    {"e2m3", e2m3, "OCP Microscaling Formats 1.0"},
    {"e2m1", e2m1, "OCP Microscaling Formats 1.0"},
}};

struct RoundingName {
    Rounding mode;
    std::string_view name;
    std::string_view short_name;
};

constexpr std::array<RoundingName, 7> rounding_names{{
    {Rounding::nearest_even, "nearest_even", "RNE"},
    {Rounding::nearest_away, "nearest_away", "RNA"},
    {Rounding::toward_zero, "toward_zero", "RZ"},
    {Rounding::upward, "upward", "RU"},
    {Rounding::downward, "downward", "RD"},
    {Rounding::to_odd, "to_odd", "RTO"},
    {Rounding::stochastic, "stochastic", "SR"},
}};

constexpr std::string_view saturating_suffix = "-sat";
constexpr std::string_view overflowing_suffix = "-nosat";

}  // namespace

std::span<const NamedFormat> all_formats() { return formats; }

std::string name(Format f) {
    for (const NamedFormat& known : formats) {
        if (f == known.format) return std::string(known.name);
        if (f == with_saturation(known.format, !known.format.saturates)) {
            return std::string(known.name).append(f.saturates ? saturating_suffix : overflowing_suffix);
        }
    }
    std::string text = std::string("p").append(std::to_string(f.precision)) + "[" + std::to_string(f.emin) + "," +
                       std::to_string(f.emax) + "]";
    if (!f.subnormals) text += "-nosub";
    if (!f.infinities) text += "-noinf";
    if (f.nans == NanKind::none) text += "-nonan";
    if (f.nans == NanKind::single_code) text += "-onenan";
    return f.saturates ? text.append(saturating_suffix) : text;
}

std::optional<Format> find_format(std::string_view wanted) {
    for (const NamedFormat& known : formats) {
        if (wanted == known.name) return known.format;
        if (!wanted.starts_with(known.name)) continue;
        const std::string_view suffix = wanted.substr(known.name.size());
        const Format other = with_saturation(known.format, !known.format.saturates);
        if (suffix == (other.saturates ? saturating_suffix : overflowing_suffix) && !is_exact(other) &&
            validate(other).empty()) {
            return other;
        }
    }
    return std::nullopt;
}

std::string_view name(Rounding mode) {
    for (const RoundingName& known : rounding_names) {
        if (known.mode == mode) return known.name;
    }
    return "unknown";
}

std::optional<Rounding> find_rounding(std::string_view wanted) {
    for (const RoundingName& known : rounding_names) {
        if (wanted == known.name || wanted == known.short_name) return known.mode;
    }
    return std::nullopt;
}

std::span<const Rounding> all_roundings() {
    static constexpr std::array<Rounding, 7> modes = {
        Rounding::nearest_even, Rounding::nearest_away, Rounding::toward_zero, Rounding::upward,
        Rounding::downward,     Rounding::to_odd,       Rounding::stochastic};
    return modes;
}

std::string validate(Format f) {
    const auto found = [](std::string_view field, int value, const std::string& expected) {
        return std::string(field) + " is " + std::to_string(value) + ": expected " + expected;
    };
    if (f.precision < 2 || f.precision > 53) {
        return found("precision", f.precision, "2 to 53 significant bits, the hidden bit included");
    }
    if (f.emax > 1023) return found("emax", f.emax, "at most 1023, the top exponent of the binary64 container");
    if (f.emin > f.emax) return found("emin", f.emin, "at most emax, which is " + std::to_string(f.emax));
    if (f.emin < -1022) return found("emin", f.emin, "at least -1022, the smallest normal exponent of binary64");
    if (f.subnormals && f.emin - (f.precision - 1) < -1074) {
        return found("emin", f.emin, "emin - (precision - 1) at least -1074, so that binary64 holds the subnormals");
    }
    if (f.precision == 53 && (f.emin != -1022 || f.emax != 1023)) {
        return "precision is 53: expected the exponent range of binary64, -1022 to 1023, because codes are its own";
    }
    if (f.infinities != (f.nans == NanKind::ieee)) {
        return std::string("infinities is ") + (f.infinities ? "true" : "false") + ": expected " +
               (f.infinities ? "false" : "true") +
               ", because infinities share the reserved all-ones exponent field with nans = ieee and exist with it alone";
    }
    if (f.nans == NanKind::none && !f.saturates) {
        return "saturates is false: expected true, because the format has neither infinity nor NaN to overflow to";
    }
    if (!f.rounds && f.precision != 53) {
        return found("precision", f.precision, "53 where rounds is false, because the container is binary64");
    }
    return {};
}

}  // namespace faultline
