// SPDX-License-Identifier: Apache-2.0
#include <faultline/bisection/target.hpp>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <limits>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <faultline/base/error.hpp>
#include <faultline/plan/nearest_name.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline {
namespace {

constexpr std::array<std::string_view, 11> metric_names{
    "rel_error",      "error_norm",     "signed_bias",   "t_statistic", "gain",         "row_coherence",
    "head_coherence", "mean_key_share", "mean_key_sign", "nonfinite",   "plan_distance"};
constexpr std::array<std::string_view, 4> output_names{"o", "dq", "dk", "dv"};

std::string_view trimmed(std::string_view text) {
    constexpr std::string_view blank = " \t";
    const std::size_t first = text.find_first_not_of(blank);
    if (first == std::string_view::npos) return {};
    return text.substr(first, text.find_last_not_of(blank) - first + 1);
}

/// Of what the grammar's form does not answer; `wrong` says itself what is expected.
[[noreturn]] void refuse_meaning(std::string_view text, const std::string& wrong) {
    throw RequestError(fmt::format("{}: {}", in_quotes(text), wrong));
}

[[noreturn]] void refuse(std::string_view text, const std::string& wrong) {
    throw RequestError(fmt::format(
        "{}: {}: expected LAYER.OUTPUT.MEASURE < NUMBER (or <=, >, >=; abs(…) around the measure; 1% for 0.01), as in "
        "'layer1.dq.rel_error < 1e-2'",
        in_quotes(text), wrong));
}

/// "1e-2", "1%", "3e-4000": an x87 long double has the range that a wide real is asked for.
WideReal number(std::string_view text, std::string_view whole) {
    std::string digits(trimmed(text));
    const bool percent = digits.ends_with('%');
    if (percent) digits.pop_back();
    char* end = nullptr;
    const long double x = std::strtold(digits.c_str(), &end);
    if (digits.empty() || end != digits.c_str() + digits.size() || !std::isfinite(x))
        refuse(whole, fmt::format("{} is no number", in_quotes(trimmed(text))));
    int exponent = 0;
    const long double mantissa = std::frexp(percent ? x / 100 : x, &exponent);
    return {static_cast<double>(mantissa), exponent};
}

/// Splits off the last component of a dotted name.
std::string_view last_component(std::string_view& rest) {
    const std::size_t dot = rest.rfind('.');
    const std::string_view last = dot == std::string_view::npos ? rest : rest.substr(dot + 1);
    rest = dot == std::string_view::npos ? std::string_view{} : rest.substr(0, dot);
    return last;
}

template <std::size_t N>
std::size_t position(std::string_view word, const std::array<std::string_view, N>& known, const char* what,
                     std::string_view whole) {
    for (std::size_t i = 0; i < N; ++i)
        if (known[i] == word) return i;
    throw RequestError(
        fmt::format("{}: {} is no {}: {}", in_quotes(whole), in_quotes(word), what, expected_one_of(word, known)));
}

std::string layer_named(std::string_view given, const std::vector<std::string>& layers, std::string_view whole) {
    if (given.empty()) {
        if (layers.size() == 1) return layers.front();
        constexpr std::size_t shown = 8;
        std::string names;
        for (std::size_t l = 0; l < std::min(shown, layers.size()); ++l)
            names += (l == 0 ? "" : ", ") + in_quotes(layers[l]);
        refuse(whole, fmt::format("no layer is named and the capture has {}: {}{}", layers.size(), names,
                                  layers.size() > shown ? ", ..." : ""));
    }
    const std::vector<std::string_view> known(layers.begin(), layers.end());
    for (const std::string& layer : layers)
        if (layer == given) return layer;
    throw RequestError(fmt::format("{}: layer {} is not in the capture: {}", in_quotes(whole), in_quotes(given),
                                   expected_one_of(given, known)));
}

bool may_be_negative(Metric metric) {
    return metric == Metric::signed_bias || metric == Metric::t_statistic || metric == Metric::gain ||
           metric == Metric::mean_key_sign;
}

/// The largest size that a measure has: a cosine, a coherence or a share is at most 1 by Cauchy and Schwarz.
std::optional<double> largest(Metric metric) {
    const bool is_part = metric == Metric::signed_bias || metric == Metric::row_coherence ||
                         metric == Metric::head_coherence || metric == Metric::mean_key_share ||
                         metric == Metric::mean_key_sign;
    return is_part ? std::optional(1.0) : std::nullopt;
}

/// RequestError where the target asks for values that its measure never has.
void expect_in_range(const Target& target, std::string_view metric) {
    using R = Target::Relation;
    const bool below = target.relation == R::less || target.relation == R::less_equal;
    if (!below && target.relation != R::greater && target.relation != R::greater_equal) return;
    const bool strict = target.relation == R::less || target.relation == R::greater;
    const bool has_sign = may_be_negative(target.metric) && !target.absolute;  // sizes and shares have none
    const std::optional<double> most = largest(target.metric);
    if (has_sign && !most) return;
    const std::string measure = target.absolute ? fmt::format("abs({})", metric) : std::string(metric);
    if (below) {
        const double least = has_sign ? -*most : 0;
        if (strict ? target.bound > WideReal(least) : target.bound >= WideReal(least)) return;
        refuse_meaning(target.text, fmt::format("{} is never below {:g}: expected a number {}", measure, least,
                                                strict ? "above it" : fmt::format("from {:g} on", least)));
    }
    if (!most || (strict ? target.bound < WideReal(*most) : target.bound <= WideReal(*most))) return;
    refuse_meaning(target.text, fmt::format("{} is never above {:g}: expected a number {}", measure, *most,
                                            strict ? "below it" : fmt::format("up to {:g}", *most)));
}

double log2_of(const WideReal& x) { return std::log2(x.mantissa) + static_cast<double>(x.exponent); }

}  // namespace

std::string_view name(Metric metric) { return metric_names[static_cast<std::size_t>(metric)]; }

bool Target::met(const WideReal& value) const {
    switch (relation) {
        case Relation::less:
            return value < bound;
        case Relation::less_equal:
            return value <= bound;
        case Relation::greater:
            return value > bound;
        case Relation::greater_equal:
            return value >= bound;
        case Relation::near_plan:
            return std::isfinite(bound.mantissa) && abs(value - bound) <= WideReal(tolerance) * abs(bound);
    }
    return false;
}

double Target::distance(const WideReal& value) const {
    const double infinite = std::numeric_limits<double>::infinity();
    if (std::isnan(value.mantissa)) return infinite;
    if (relation == Relation::near_plan) {
        if (met(value)) return 0;
        const WideReal zero(0.0);
        if (value > zero && bound > zero) return std::abs(log2_of(value) - log2_of(bound));
        return abs(value - bound).to_double();
    }
    const double sign = relation == Relation::greater || relation == Relation::greater_equal ? -1 : 1;
    const WideReal zero(0.0);
    if (value > zero && bound > zero && std::isfinite(value.mantissa)) return sign * (log2_of(value) - log2_of(bound));
    return sign * (value - bound).to_double();
}

Target parse_target(std::string_view text, const std::vector<std::string>& layers, std::optional<double> tolerance) {
    Target target;
    target.text = std::string(trimmed(text));
    const std::size_t at = text.find_first_of("<>=");
    std::string_view measure = trimmed(text.substr(0, at));
    if (measure.empty()) refuse(text, "there is no measure");
    if (at == std::string_view::npos) {
        if (!tolerance) refuse(text, "there is no < or >");
        target.relation = Target::Relation::near_plan;
        target.tolerance = *tolerance;
    } else {
        const bool with_equal = at + 1 < text.size() && text[at + 1] == '=';
        if (text[at] == '=') refuse(text, "\"=\" is no relation");
        target.relation = text[at] == '<' ? (with_equal ? Target::Relation::less_equal : Target::Relation::less)
                                          : (with_equal ? Target::Relation::greater_equal : Target::Relation::greater);
        target.bound = number(text.substr(at + (with_equal ? 2 : 1)), text);
    }
    if (measure.starts_with("abs(") && measure.ends_with(')')) {
        target.absolute = true;
        measure = trimmed(measure.substr(4, measure.size() - 5));
    } else if (measure.starts_with("abs(")) {
        refuse(text, "the \")\" of abs( is missing");
    } else if (measure.ends_with(')')) {
        refuse(text, "\")\" has no abs( before it");
    }
    std::string_view rest = measure;
    const std::string_view metric = last_component(rest);
    if (rest.empty()) refuse(text, "there is no output before the measure");
    target.metric = static_cast<Metric>(position(metric, metric_names, "measure", text));
    target.output = static_cast<Output>(position(last_component(rest), output_names, "output", text));
    expect_in_range(target, metric);
    const bool rows_are_keys = target.output == Output::dk || target.output == Output::dv;
    if (rows_are_keys && (target.metric == Metric::t_statistic || target.metric == Metric::row_coherence))
        refuse_meaning(text,
                       fmt::format("{} is defined for o and dq alone, since the rows of dk and dv are keys and each "
                                   "query's error enters all of them: expected o or dq before it",
                                   metric));
    if (target.output != Output::dq &&
        (target.metric == Metric::mean_key_share || target.metric == Metric::mean_key_sign))
        refuse_meaning(text,
                       fmt::format("{} is defined for dq alone, a sum of keys, since no other output lies along the "
                                   "mean key: expected dq before it",
                                   metric));
    target.layer = layer_named(rest, layers, text);
    return target;
}

namespace {

/// Whether some number that the measure may be meets all of these targets, which are about one measure. What meets them is made
/// of intervals that end at the bounds, of either sign where an absolute value is asked for, or at an end of what the measure
/// may be: so one of these does, or a number between two of them or beyond them all. A count meets them at a whole number that
/// is next to one of them.
bool can_be_met(const std::vector<const Target*>& targets) {
    const Metric metric = targets.front()->metric;
    const std::optional<double> most = largest(metric);
    std::vector<WideReal> ends{WideReal(0.0)};
    if (most) ends.insert(ends.end(), {WideReal(*most), WideReal(-*most)});
    for (const Target* target : targets)
        for (const WideReal& end : {target->bound, -target->bound}) ends.push_back(end);
    std::sort(ends.begin(), ends.end());
    const WideReal two(2.0), one(1.0);
    std::vector<WideReal> tried{ends.front() * two - one, ends.back() * two + one};
    for (std::size_t i = 0; i < ends.size(); ++i) {
        tried.push_back(ends[i]);
        if (i > 0) tried.push_back((ends[i - 1] + ends[i]) / two);
    }
    if (metric == Metric::nonfinite) {
        constexpr double whole_from = 4503599627370496.0;  // 2^52: every double from there on is a whole number
        for (const WideReal& end : ends) {
            const double x = end.to_double();
            for (const double step : {-1.0, 0.0, 1.0, 2.0})
                if (std::abs(x) < whole_from) tried.emplace_back(std::floor(x) + step);
        }
        std::erase_if(tried, [](const WideReal& x) { return x.to_double() != std::floor(x.to_double()); });
    }
    return std::any_of(tried.begin(), tried.end(), [&](const WideReal& value) {
        if (value < WideReal(0.0) && !may_be_negative(metric)) return false;
        if (most && abs(value) > WideReal(*most)) return false;
        return std::all_of(targets.begin(), targets.end(),
                           [&](const Target* t) { return t->met(t->absolute ? abs(value) : value); });
    });
}

/// Whether an output with elements that are not finite may meet it: there sizes of the error are infinite, and all else but the
/// count is NaN (value_of).
bool may_hold_where_not_finite(const Target& target) {
    const bool is_size = target.metric == Metric::rel_error || target.metric == Metric::error_norm ||
                         target.metric == Metric::plan_distance;
    return target.metric == Metric::nonfinite || target.relation == Target::Relation::near_plan ||
           (is_size && target.met(WideReal(std::numeric_limits<double>::infinity())));
}

}  // namespace

void expect_compatible(const std::vector<Target>& targets) {
    const auto is_above = [](const Target& t) {
        return t.relation == Target::Relation::greater || t.relation == Target::Relation::greater_equal;
    };
    const auto refuse_together = [](const Target& first, const std::vector<const Target*>& others) {
        std::vector<std::string> named;
        for (const Target* other : others) named.push_back(in_quotes(other->text));
        throw RequestError(fmt::format("{}: cannot be met together with {}: expected targets that one value meets",
                                       in_quotes(first.text), fmt::join(named, " and ")));
    };
    for (const Target& first : targets) {
        std::vector<const Target*> alike;  // about the same measure, with a bound that is known
        for (const Target& other : targets) {
            if (other.relation == Target::Relation::near_plan || first.layer != other.layer ||
                first.output != other.output || first.metric != other.metric)
                continue;
            alike.push_back(&other);
        }
        if (alike.empty() || can_be_met(alike)) continue;
        for (const Target* one : alike)  // two that do not go together say it best
            for (const Target* other : alike)
                if (is_above(*one) >= is_above(*other) && !can_be_met({one, other})) refuse_together(*one, {other});
        refuse_together(*alike.front(), {alike.begin() + 1, alike.end()});
    }
    for (const Target& some : targets) {
        const bool wants_some = some.metric == Metric::nonfinite && some.relation != Target::Relation::near_plan &&
                                !some.met(WideReal(0.0));
        for (const Target& other : targets)
            if (wants_some && some.layer == other.layer && some.output == other.output &&
                !may_hold_where_not_finite(other))
                refuse_together(some, {&other});
    }
}

WideReal value_of(const Target& target, const ErrorMeasure& m, double plan_distance) {
    const auto value = [&]() -> WideReal {
        // ErrorMeasure leaves elements that are not finite out; a target is about the whole output.
        const bool of_all = target.metric == Metric::rel_error || target.metric == Metric::nonfinite ||
                            target.metric == Metric::plan_distance;
        if (m.nonfinite > 0 && !of_all)
            return {target.metric == Metric::error_norm ? std::numeric_limits<double>::infinity()
                                                        : std::numeric_limits<double>::quiet_NaN()};
        switch (target.metric) {
            case Metric::rel_error:
                return m.rel_error;
            case Metric::error_norm:
                return m.error_norm;
            case Metric::signed_bias:
                return {m.signed_bias};
            case Metric::t_statistic:
                return {m.t_statistic};
            case Metric::gain:
                return {m.gain};
            case Metric::row_coherence:
                return {m.row_coherence};
            case Metric::head_coherence:
                return {m.head_coherence};
            case Metric::mean_key_share:
                return {m.mean_key_share};
            case Metric::mean_key_sign:
                return {m.mean_key_sign};
            case Metric::nonfinite:
                return {static_cast<double>(m.nonfinite)};
            case Metric::plan_distance:
                return {plan_distance};
        }
        return {};
    }();
    return target.absolute ? abs(value) : value;
}

}  // namespace faultline
