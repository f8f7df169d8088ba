// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <charconv>

#include <faultline/format/names.hpp>
#include <faultline/plan/effect.hpp>
#include <faultline/plan/plan_toml.hpp>
#include <faultline/plan/schedule_fields.hpp>

namespace faultline {
namespace {

/// A TOML basic string: quotes, backslashes and control characters escaped.
std::string text(std::string_view value) {
    std::string out = "\"";
    for (const char c : value) {
        const auto code = static_cast<unsigned char>(c);
        if (c == '"' || c == '\\') {
            (out += '\\') += c;
        } else if (code < 0x20 || code == 0x7F) {
            constexpr std::string_view digits = "0123456789ABCDEF";
            ((out += "\\u00") += digits[code >> 4]) += digits[code & 15];
        } else {
            out += c;
        }
    }
    return out += '"';
}

std::string text(int value) { return std::to_string(value); }
std::string text(bool value) { return value ? "true" : "false"; }

/// The shortest decimal that reads back as the same double.
std::string text(double value) {
    std::array<char, 32> digits;
    const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), value).ptr;
    std::string out(digits.data(), end);
    return out.find_first_of(".e") == std::string::npos ? out + ".0" : out;
}

template <class E>
requires requires { enumerators<E>(); }
std::string text(E value) { return text(name(value)); }

std::string text(const Format& f) {
    if (const std::string known = name(f); find_format(known) == f) return text(known);
    constexpr std::array<std::string_view, 3> nans{"none", "single_code", "ieee"};
    return "{ precision = " + text(f.precision) + ", emin = " + text(f.emin) + ", emax = " + text(f.emax) +
           ", subnormals = " + text(f.subnormals) + ", infinities = " + text(f.infinities) +
           ", nans = " + text(nans[static_cast<std::size_t>(f.nans)]) + ", saturates = " + text(f.saturates) + " }";
}

std::string text(const Accumulation& accumulation) {
    if (const std::string known = name(accumulation); find_accumulation(known) == accumulation) return text(known);
    constexpr std::array<std::string_view, 3> outputs{"f32_rz", "e8m13_rz", "f16_rne"};
    constexpr std::array<std::string_view, 2> zeros{"ignored", "at_minimum"};
    const MatrixUnit& u = accumulation.unit;
    return "{ terms = " + text(u.terms) + ", fraction_bits = " + text(u.fraction_bits) +
           ", output = " + text(outputs[static_cast<std::size_t>(u.output)]) +
           ", a_min_exponent = " + text(u.a_min_exponent) + ", b_min_exponent = " + text(u.b_min_exponent) +
           ", input_fraction_bits = " + text(u.input_fraction_bits) +
           ", zero = " + text(zeros[static_cast<std::size_t>(u.zero)]) + " }";
}

template <class T>
void line(std::string& out, std::string_view key, const T& value) {
    ((out += key) += " = ") += text(value) + "\n";
}

}  // namespace

std::string to_toml(const RoundingPlan& given) {
    const RoundingPlan plan = without_idle(given);
    std::string out;
    line(out, "name", std::string_view(plan.name));
    if (!plan.description.empty()) line(out, "description", std::string_view(plan.description));
    if (!plan.source.empty()) line(out, "source", std::string_view(plan.source));
    out += "\n[schedule]\n";
    for_each_field(plan.schedule, [&](std::string_view field, const auto& value) {
        if (lacking(plan, field).empty()) line(out, field, value);
    });
    for (const TileCase& tile : plan.tiles) {
        out += "\n[[tiles]]\n";
        const auto optional = [&](std::string_view key, const auto& value) {
            if (value) line(out, key, *value);
        };
        line(out, "head_dim", tile.head_dim);
        optional("causal", tile.causal);
        optional("window", tile.window);
        optional("block_q", tile.block_q);
        optional("block_k", tile.block_k);
        optional("bwd_block_q", tile.bwd_block_q);
        optional("bwd_block_k", tile.bwd_block_k);
        optional("delta_threads", tile.delta_threads);
        optional("exp_poly_every", tile.exp_poly_every);
        optional("exp_poly_count", tile.exp_poly_count);
        optional("exp_poly_skip", tile.exp_poly_skip);
    }
    for (const SiteInfo& site : sites()) {
        const Rule& rule = plan[site.site];
        if (rule == Rule{}) continue;
        ((out += "\n[sites.") += site.name) += "]\n";
        line(out, "format", rule.format);
        line(out, "rounding", name(rule.rounding));
        if (site.accumulates) line(out, "accumulation", rule.accumulation);
    }
    return out;
}

}  // namespace faultline
