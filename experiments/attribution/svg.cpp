// SPDX-License-Identifier: Apache-2.0
#include <faultline/attribution/svg.hpp>

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include <faultline/tensor/text.hpp>

namespace faultline::attribution {

std::string html(std::string_view text) {
    std::string out;
    for (const char c : escaped(text, text.size())) {
        switch (c) {
            case '&':
                out += "&amp;";
                break;
            case '<':
                out += "&lt;";
                break;
            case '>':
                out += "&gt;";
                break;
            case '"':
                out += "&quot;";
                break;
            default:
                out += c;
        }
    }
    return out;
}

std::string signed_color(double x) {
    if (std::isnan(x)) return "#dddddd";
    const double size = std::min(std::abs(x), 1.0);
    // White to a red or a blue that are told apart without colours too: the red is the lighter of the two.
    const auto mix = [&](double end) { return static_cast<int>(std::lround(255 + (end - 255) * size)); };
    return x >= 0 ? fmt::format("#{:02x}{:02x}{:02x}", mix(202), mix(60), mix(40))
                  : fmt::format("#{:02x}{:02x}{:02x}", mix(25), mix(80), mix(160));
}

std::string drawing(const TileMap& map) {
    const int cell = std::clamp(168 / std::max({map.rows, map.columns, 1}), 3, 24);
    const int width = cell * map.columns, height = cell * map.rows;
    std::string out = fmt::format(
        "<figure><svg role=\"img\" width=\"{}\" height=\"{}\" viewBox=\"0 0 {} {}\">"
        "<rect x=\"0.5\" y=\"0.5\" width=\"{}\" height=\"{}\" fill=\"none\" stroke=\"#999\"/>\n",
        width + 1, height + 1, width + 1, height + 1, width, height);
    for (int i = 0; i < map.rows; ++i)
        for (int j = 0; j < map.columns; ++j) {
            const auto at = static_cast<std::size_t>(i * map.columns + j);
            if (std::isnan(map.value[at])) continue;
            out += fmt::format(
                "<rect x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\" fill=\"{}\"><title>{}</title></rect>\n",
                j * cell + 1, i * cell + 1, cell - 1, cell - 1, signed_color(map.value[at]), html(map.label[at]));
        }
    return out + fmt::format("</svg><figcaption>{}</figcaption></figure>\n", html(map.title));
}

std::string bar(double share) {
    constexpr double unit = 60;  // pixels for a share of 1
    const double length = std::clamp(std::isnan(share) ? 0 : share, -2.0, 2.0) * unit;
    const double zero = share < 0 ? -length : 0;
    return fmt::format(
        "<svg width=\"{:.0f}\" height=\"10\"><rect x=\"{:.1f}\" y=\"1\" width=\"{:.1f}\" "
        "height=\"8\" fill=\"{}\"/></svg>",
        std::max(std::abs(length), 1.0), zero + std::min(length, 0.0), std::max(std::abs(length), 0.5),
        share < 0 ? "#1950a0" : "#ca3c28");
}

std::string strip(const std::vector<double>& values, std::string_view title) {
    constexpr std::size_t cells = 128;
    const std::size_t count = std::min(cells, values.size());
    if (count == 0) return {};
    std::string out = fmt::format(
        "<figure><svg role=\"img\" width=\"{}\" height=\"16\">"
        "<rect x=\"0\" y=\"0\" width=\"{}\" height=\"16\" fill=\"none\" stroke=\"#999\"/>\n",
        3 * count, 3 * count);
    for (std::size_t c = 0; c < count; ++c) {
        const std::size_t begin = c * values.size() / count, end = (c + 1) * values.size() / count;
        double mean = 0;
        for (std::size_t i = begin; i < end; ++i) mean += values[i] / static_cast<double>(end - begin);
        const int level = static_cast<int>(std::lround(255 - 215 * std::clamp(mean, 0.0, 1.0)));
        out += fmt::format("<rect x=\"{}\" y=\"1\" width=\"3\" height=\"14\" fill=\"#{:02x}{:02x}{:02x}\"/>\n", 3 * c,
                           level, level, level);
    }
    return out + fmt::format("</svg><figcaption>{}</figcaption></figure>\n", html(title));
}

std::string legend() {
    std::string out = "<p class=\"legend\">mean / rms of a tile's local error: &minus;1 ";
    for (int i = -4; i <= 4; ++i)
        out += fmt::format(
            "<svg width=\"14\" height=\"12\"><rect width=\"14\" "
            "height=\"12\" fill=\"{}\" stroke=\"#ccc\"/></svg>",
            signed_color(i / 4.0));
    return out + " +1. White: errors of random sign; red: the tile's values are rounded up; blue: down.</p>\n";
}

}  // namespace faultline::attribution
