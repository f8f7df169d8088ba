// SPDX-License-Identifier: Apache-2.0
#include <faultline/attribution/table_text.hpp>

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include <faultline/attribution/finding.hpp>
#include <faultline/attribution/level.hpp>
#include <faultline/attribution/table.hpp>

namespace faultline::attribution {

std::string Pen::operator()(Color color, std::string text) const {
    if (!on_ || color == Color::none || text.empty()) return text;
    const char* code = color == Color::bold   ? "1"
                       : color == Color::dim  ? "2"
                       : color == Color::good ? "32"
                       : color == Color::fair ? "33"
                                              : "31";
    return fmt::format("\x1b[{}m{}\x1b[0m", code, text);
}

std::string percent(double ratio) {
    const double p = 100 * ratio;
    if (p == 0) return "0%";
    const int digits = std::clamp(2 - static_cast<int>(std::floor(std::log10(std::abs(p)))), 0, 6);
    return fmt::format("{:.{}f}%", p, digits);
}

std::string t_text(double t) {
    if (std::isnan(t)) return "-";
    if (std::isinf(t)) return t > 0 ? "+inf" : "-inf";
    return std::abs(t) < 1000 ? signed_text(t, 1) : fmt::format("{:+.1e}", t);
}

std::string cell(std::string_view text, std::size_t width) {
    constexpr std::size_t gap = 2;
    return std::string(std::max(width, text.size() + gap) - text.size(), ' ') + std::string(text);
}

Color color_of(const ErrorMeasure& error, const std::optional<WideReal>& level) {
    if (error.nonfinite > 0) return Color::bad;
    if (!level) return Color::none;
    if (at_level(error, level)) return Color::good;
    if (error.rel_error > WideReal(50.0) * *level) return Color::bad;  // nearly a tenth of the value and more, in bf16
    return error.rel_error > WideReal(4.0) * *level ? Color::fair : Color::none;
}

std::string amount_text(const ErrorMeasure& error) {
    const bool truth_is_zero = error.nonfinite == 0 && std::isinf(error.rel_error.mantissa);
    return truth_is_zero ? error.error_norm.to_string(2) : error_text(error.rel_error);
}

std::string marked(const ErrorMeasure& error, const std::optional<WideReal>& level) {
    return amount_text(error) + (error.nonfinite > 0 ? "!" : at_level(error, level) ? "*" : " ");
}

std::string counterfactual_text(const ErrorMeasure& error) {
    return amount_text(error) + (error.nonfinite > 0 ? "!" : "");
}

void flow(std::string& out, const std::string& label, const std::vector<std::pair<std::string, Color>>& items,
          const Pen& pen) {
    std::string line = label;
    std::size_t width = label.size();
    for (std::size_t i = 0; i < items.size(); ++i) {
        const std::string text = items[i].first + (i + 1 < items.size() ? "," : "");
        if (width + 1 + text.size() > line_width && width > label.size()) {
            out += line + "\n";
            line = std::string(label.size(), ' ');
            width = label.size();
        }
        line += ' ';
        line += pen(items[i].second, text);
        width += 1 + text.size();
    }
    out += line + "\n";
}

std::string sentence(const std::string& text, const Pen& pen) {
    std::string out, line = " ";
    for (std::size_t begin = 0; begin < text.size();) {
        const std::size_t end = std::min(text.find(' ', begin), text.size());
        if (line.size() + 1 + end - begin > line_width) {
            out += pen(Color::bold, line) + "\n";
            line = "     ";
        }
        line += ' ';
        line += text.substr(begin, end - begin);
        begin = end + 1;
    }
    return out + pen(Color::bold, line) + "\n";
}

}  // namespace faultline::attribution

namespace faultline {

std::string error_text(const WideReal& relative) {
    const double r = relative.to_double();
    if (relative.mantissa == 0) return "0%";
    if (std::isfinite(r) && r >= 1e-5 && r < 1000) return attribution::percent(r);
    if (!std::isfinite(relative.mantissa)) return relative.to_string(2);
    return (WideReal(100.0) * relative).to_string(2) + "%";
}

}  // namespace faultline
