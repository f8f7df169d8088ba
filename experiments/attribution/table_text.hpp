// SPDX-License-Identifier: Apache-2.0
// Numbers, cells and lines of the table, and their colours. Private to this folder.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <faultline/attribution/attribution.hpp>

namespace faultline::attribution {

inline constexpr std::size_t line_width = 110;  ///< columns

enum class Color { none, bold, dim, good, fair, bad };

/// Pads first and colours then, so that escape sequences do not count as columns.
class Pen {
  public:
    explicit Pen(bool on) : on_(on) {}
    [[nodiscard]] std::string operator()(Color color, std::string text) const;

  private:
    bool on_;
};

/// Three significant digits.
[[nodiscard]] std::string percent(double ratio);
/// t grows with the number of rows: large ones need no decimals.
[[nodiscard]] std::string t_text(double t);
/// Right-aligned in a column of that width, whatever the number at least two blanks from what stands before it.
[[nodiscard]] std::string cell(std::string_view text, std::size_t width);
/// Of an error beside its format's level: good at it, fair above four times it, bad above fifty or where an element is not finite.
[[nodiscard]] Color color_of(const ErrorMeasure& error, const std::optional<WideReal>& level);
/// The relative error, or where the truth is 0 and nothing is infinite its Frobenius norm, without a unit.
[[nodiscard]] std::string amount_text(const ErrorMeasure& error);
/// The error, `*` where it is at the format's level, `!` where elements are not finite.
[[nodiscard]] std::string marked(const ErrorMeasure& error, const std::optional<WideReal>& level);
/// The error of a counterfactual, `!` where elements are not finite.
[[nodiscard]] std::string counterfactual_text(const ErrorMeasure& error);
/// Items after a label, broken into lines.
void flow(std::string& out, const std::string& label, const std::vector<std::pair<std::string, Color>>& items,
          const Pen& pen);
/// A sentence broken at spaces, two columns in, its continuation six.
[[nodiscard]] std::string sentence(const std::string& text, const Pen& pen);

}  // namespace faultline::attribution
