// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <faultline/attribution/table.hpp>
#include <faultline/tensor/text.hpp>
#include <faultline/verdict/report.hpp>

namespace faultline {
namespace {

using verdict::Direction;

constexpr std::size_t findings_shown = 5;  // of an output, without --full

std::string p_text(double log10_p) {
    if (std::isinf(log10_p)) return "0";
    const double whole = std::floor(log10_p), digit = std::round(std::pow(10.0, log10_p - whole));
    return digit >= 10 ? fmt::format("1e{:.0f}", whole + 1) : fmt::format("{:.0f}e{:.0f}", digit, whole);
}

std::string share_text(double share) {
    if (share == 1) return "all";
    return share > 0.999 ? ">99.9%" : fmt::format("{:.1f}%", 100 * share);
}

/// Fixed point while that is readable, else three digits.
std::string size_text(double x, int digits) {
    return std::abs(x) < 100 ? fmt::format("{:.{}f}", x, digits) : fmt::format("{:.3g}", x);
}

/// An error beyond this is told by no digits: the output is not resolved by its own size. JSON has the figure.
constexpr double largest_shown = 1e7;  // 1e9%

bool truth_is_zero(const OutputCheck& o) { return o.observed.nonfinite == 0 && o.truth_norm.mantissa == 0; }

/// A relative error in a column of nine: ">1e9%" where it is larger still, "inf" where elements are not finite.
std::string column_text(const WideReal& relative) {
    if (std::isinf(relative.mantissa)) return "inf";
    return relative > WideReal(largest_shown) ? ">1e9%" : error_text(relative);
}

/// The error of a run, relative, or where the truth is 0 its Frobenius norm, without a unit.
std::string column_text(const OutputCheck& o, const ErrorMeasure& error) {
    if (error.nonfinite > 0) return "inf";
    return truth_is_zero(o) ? error.error_norm.to_string(2) : column_text(error.rel_error);
}

/// What the columns are where they are no relative errors, or none that a person can use.
std::string scale_text(const OutputCheck& o) {
    if (truth_is_zero(o))
        return "      its truth is 0, which no error is relative to: error and plan are |value|, and expected is left out\n";
    const auto beyond = [](const WideReal& x) { return x > WideReal(largest_shown) && std::isfinite(x.mantissa); };
    return beyond(o.observed.rel_error) || beyond(o.plan.rel_error) || beyond(o.expected)
               ? "      beyond 1e9% a size says little: the truth is next to nothing beside it (exact figures: --json)\n"
               : "";
}

/// " in row 12, feature 5" of an element, ", 98% of it in row 12" of a size that one row is most of; with what the row is,
/// where its truth is small beside the others'.
std::string worst_text(const Finding& f) {
    constexpr double most = 0.5;
    // Below it errors of the row say little of the output: 2^-8, the rounding of bf16, of the head's rms.
    constexpr double small = 0x1p-8;
    const verdict::Worst& w = f.worst;
    if (w.row < 0) return "";
    std::string out;
    if (w.feature >= 0)
        out = fmt::format(", row {}, feature {}", w.row, w.feature);
    else if (f.cell.direction == Direction::element)
        out = fmt::format(", row {}", w.row);
    else if (f.cell.rows > 1 && w.share > most)
        out = fmt::format(", {} of it in row {}", share_text(w.share), w.row);
    else
        return "";
    if (w.truth == 0) return out + ", whose truth is 0";
    return w.truth < small ? out + fmt::format(", whose truth is {:.1e} of the head's rms", w.truth) : out;
}

/// "row 5, feature 3", of an lse "row 5".
std::string first_text(const verdict::NotFinite& n) {
    return n.feature < 0 ? fmt::format("row {}", n.row) : fmt::format("row {}, feature {}", n.row, n.feature);
}

/// "33 elements in 2 rows are".
std::string count_text(const verdict::NotFinite& n, std::string_view one, std::string_view many) {
    return fmt::format("{} element{} in {} row{} {}", n.elements, n.elements == 1 ? "" : "s", n.rows,
                       n.rows == 1 ? "" : "s", n.elements == 1 ? one : many);
}

/// Where the ratio alone would look like a finding and is none.
std::string spread_text(const OutputCheck& o, double slack, double log10_threshold) {
    if (o.verdict != Verdict::within_rounding || !(o.size_ratio > slack)) return "";
    return fmt::format(
        "      no finding: beyond --slack {:g} it has t {:+.1f} (p {}) in its worst head, and p < {} is asked for; the\n"
        "      plan's own run has {}, runs with random signs from {} to {}\n",
        slack, o.size_t, p_text(o.size_log10_p), p_text(log10_threshold), size_text(o.plan_ratio, 3),
        size_text(o.least_ratio, 3), size_text(o.largest_ratio, 3));
}

/// Under the row of an output: lines of at most 110 columns, those that go on set in further. Nothing for nothing.
std::string in_lines(const std::string& text) {
    constexpr std::size_t most = 110;
    std::string out, line;
    const auto end_line = [&] {
        out += line + "\n";
        line.clear();
    };
    for (std::size_t begin = 0; begin < text.size();) {
        const std::size_t end = std::min(text.find(' ', begin), text.size());
        const std::string word = text.substr(begin, end - begin);
        if (!line.empty() && line.size() + 1 + word.size() > most) end_line();
        line += line.empty() ? std::string(out.empty() ? 6 : 8, ' ') + word : " " + word;
        begin = end + 1;
    }
    if (!line.empty()) end_line();
    return out;
}

}  // namespace

std::string text(const Finding& f) {
    const bool one = f.effect == 1;
    if (f.nonfinite) {
        const verdict::NotFinite& n = f.not_finite;
        std::string out = fmt::format("head {}: {} not finite where the truth is{}; the first, {}, is {}", f.head,
                                      count_text(n, "is", "are"), f.of_plan ? ", as the plan's own run is" : "",
                                      first_text(n), n.value);
        if (f.of_plan) return out;
        out += fmt::format(", {:.3g} in the plan's own run", n.beside);
        return f.not_finite_of_plan == 0 ? out : out + fmt::format(", which has {} of them", f.not_finite_of_plan);
    }
    if (f.finite)
        return fmt::format("head {}: {:.0f} row{} no key and {} no infinite lse", f.head, f.effect,
                           one ? " sees" : "s see", one ? "has" : "have");
    const std::string place = fmt::format("head {}, {}", f.head, f.cell.where());
    std::string what;
    if (std::isinf(f.effect))
        return fmt::format("{}: errors where the plan's rounding makes none{}", place, worst_text(f));
    switch (f.cell.direction) {
        case Direction::shift:
            what = fmt::format("shifted by {}{} of its rounding", f.effect < 0 ? "" : "+", size_text(f.effect, 3));
            break;
        case Direction::growth:
            what = fmt::format("{} zero by {} of its rounding", f.effect > 0 ? "away from" : "towards",
                               size_text(std::abs(f.effect), 3));
            break;
        case Direction::mean_key:
            what =
                fmt::format("{}{} of its rounding along the mean key", f.effect < 0 ? "" : "+", size_text(f.effect, 3));
            break;
        case Direction::size:
            what = fmt::format("{} times as large as its rounding{}", size_text(f.effect, 2), worst_text(f));
            break;
        case Direction::scatter:
            what = fmt::format("features shifted {} times as far as rounding shifts them", size_text(f.effect, 2));
            break;
        case Direction::element:
            what = fmt::format("an element {} times as far off as rounding takes any{}", size_text(f.effect, 2),
                               worst_text(f));
            break;
    }
    return fmt::format("{}: {}, t {}{} (p {}){}", place, what, f.t < 0 ? "" : "+", size_text(f.t, 1), p_text(f.log10_p),
                       f.of_plan ? ", as the plan's own run is" : "");
}

std::string plan_text(const OutputCheck& o) {
    std::string runs;
    if (o.nonfinite_runs > 0)
        runs =
            fmt::format("{} of {} runs with random signs have elements that are not finite", o.nonfinite_runs, o.runs);
    if (o.unpredicted == 0) return runs;  // what the kernel has of it, the findings say
    const verdict::NotFinite& n = o.plan_nonfinite;
    std::string out = fmt::format("{} elements of the plan's own run are not finite; the first, head {}, {}, is {}, ",
                                  o.plan.nonfinite, o.plan_nonfinite_head, first_text(n), n.value);
    out += fmt::format("{:.3g} in the kernel", n.beside);
    out += fmt::format(
        ": the plan does not say how large an error may be in {} that the kernel has finite, which {} not judged",
        o.unpredicted, o.unpredicted == 1 ? "is" : "are");
    return runs.empty() ? out : out + "; " + runs;
}

std::string truth_text(const OutputCheck& o) {
    const bool resolved = truth_is_resolved(o);
    if (resolved && o.undecided == 0) return "";
    std::string out = fmt::format("its truth is only known to be within {} of {}", o.truth_bound.to_string(2),
                                  o.truth_norm.to_string(2));
    if (!resolved) out += ": the errors are not resolved";
    if (o.undecided > 0)
        out += fmt::format("{} {} of {} tests may fail or not", resolved ? ":" : ", and", o.undecided, o.tests);
    return out;
}

std::string unjudged_text(const LayerCheck& layer) {
    std::vector<std::string_view> names;
    for (const Output output : layer.unjudged) names.push_back(name(output));
    return fmt::format("{} not judged: there is no {}.do, the gradient at the output", fmt::join(names, ", "),
                       escaped(layer.name));
}

std::string table(const Check& c, bool full) {
    std::string out =
        fmt::format("{}   kernel {}   plan {}\n", escaped(c.input, c.input.size()), escaped(c.kernel), c.plan.name);
    for (const std::string& remark : plan_remarks(c.origin, c.plan.name)) out += remark + "\n";
    out +=
        fmt::format("verdict: {}{}   ({} tests, each at p < {}: {:.2g} for all together)\n", name(c.verdict()),
                    c.has_unjudged() ? ", of what could be judged" : "", c.tests, p_text(c.log10_threshold), c.alpha);
    for (const LayerCheck& layer : c.layers) {
        out +=
            fmt::format("\n{}: {}\n", escaped(layer.name), layer.outputs.empty() ? "not judged" : name(layer.verdict));
        if (!layer.unjudged.empty()) out += fmt::format("  {}\n", unjudged_text(layer));
        if (layer.outputs.empty()) continue;
        out += "          error      plan   expected   ratio   =plan   verdict\n";
        for (const OutputCheck& o : layer.outputs) {
            out += fmt::format("  {:<4}{:>9} {:>9}  {:>9}  {:>6}  {:>6}   {}\n", name(o), column_text(o, o.observed),
                               column_text(o, o.plan), truth_is_zero(o) ? "-" : column_text(o.expected),
                               size_text(o.size_ratio, 3), share_text(o.bit_equal_to_plan), name(o.verdict));
            if (o.in_log2 && o.verdict != Verdict::within_rounding)
                out += "      it is the truth's in log2 units: expected natural ones, the logarithm to base e\n";
            for (const std::string& line : {truth_text(o), plan_text(o)}) out += in_lines(line);
            if (is_blind(o))
                out += fmt::format(
                    "      of little weight: with random signs its roundings make an error of {}, where the plan's make\n"
                    "      {}, so that only a fault larger still is found, and an output of zeros would not be\n",
                    column_text(o.expected), column_text(o.plan.rel_error));
            out += scale_text(o);
            out += spread_text(o, c.slack, c.log10_threshold);
            const std::size_t shown = full ? o.findings.size() : std::min(o.findings.size(), findings_shown);
            for (std::size_t i = 0; i < shown; ++i) out += in_lines(text(o.findings[i]));
            if (shown < o.findings.size())
                out += fmt::format("      and {} more (--full)\n", o.findings.size() - shown);
        }
    }
    out +=
        "\nerror, plan: |value - truth| / |truth| of the kernel and of the plan's own run; expected: of the plan with its\n"
        "roundings given random signs, the median run; ratio: size of the kernel's error to that, row by row, of\n"
        "what is finite; =plan: equal elements, nearly all where the kernel rounds as the plan does: a rounding more of\n"
        "the same size is within its rounding, and identify looks for it\n";
    return out;
}

}  // namespace faultline
