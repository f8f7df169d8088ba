// SPDX-License-Identifier: Apache-2.0
#include <faultline/corrections/correction.hpp>

#include <algorithm>
#include <charconv>
#include <cmath>

#include <faultline/base/error.hpp>
#include <faultline/plan/nearest_name.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline {
namespace {

/// Reads one correction's text; every error names it.
class Parser {
  public:
    explicit Parser(std::string_view text) : text_(text) {}

    [[nodiscard]] Correction run() const {
        Correction correction{std::string(text_), {}};
        for (const std::string_view part : split(text_, '+')) correction.steps.push_back(step(part));
        for (std::size_t b = 1; b < correction.steps.size(); ++b)
            for (std::size_t a = 0; a < b; ++a) exclude(*correction.steps[a].info, *correction.steps[b].info);
        return correction;
    }

  private:
    [[noreturn]] void fail(const std::string& what) const {
        throw RequestError("correction " + in_quotes(text_) + ": " + what);
    }

    /// The parts between separators, empty ones included. "1e+3" and "1e-3" are one part: a plus after a digit and an e
    /// belongs to the number.
    static std::vector<std::string_view> split(std::string_view text, char separator) {
        std::vector<std::string_view> parts;
        std::size_t begin = 0;
        for (std::size_t i = 0; i <= text.size(); ++i) {
            if (i < text.size() && (text[i] != separator || belongs_to_number(text, i))) continue;
            parts.push_back(text.substr(begin, i - begin));
            begin = i + 1;
        }
        return parts;
    }
    static bool belongs_to_number(std::string_view text, std::size_t i) {
        const auto digit = [&](std::size_t at) { return text[at] >= '0' && text[at] <= '9'; };
        return i >= 2 && i + 1 < text.size() && text[i] == '+' && text[i - 1] == 'e' && digit(i - 2) && digit(i + 1);
    }

    [[nodiscard]] CorrectionStep step(std::string_view part) const {
        const std::size_t colon = part.find(':');
        const std::string_view wanted = part.substr(0, colon);
        const auto all = corrections();
        const auto found =
            std::find_if(all.begin(), all.end(), [&](const CorrectionInfo& c) { return c.name == wanted; });
        if (found == all.end()) {
            std::vector<std::string_view> names;
            for (const CorrectionInfo& c : all) names.push_back(c.name);
            fail((wanted.empty() ? std::string("a name is missing: ") : "no such name as " + in_quotes(wanted) + ": ") +
                 expected_one_of(wanted, names) + "; `faultline corrections` says what each does");
        }
        CorrectionStep step{&*found, {}};
        for (const Parameter& parameter : found->parameters) step.arguments.numbers.push_back(parameter.standard);
        if (colon != std::string_view::npos) read_arguments(step, split(part.substr(colon + 1), ','));
        if (found->arguments == Arguments::sites && step.arguments.sites.empty())
            fail(std::string(wanted) + " needs the sites at which it acts: expected e.g. " + std::string(wanted) +
                 ":ds_cast");
        return step;
    }

    void read_arguments(CorrectionStep& step, const std::vector<std::string_view>& given) const {
        const std::string name(step.info->name);
        switch (step.info->arguments) {
            case Arguments::none:
                fail(name + " takes no argument: expected \"" + name + "\" alone");
            case Arguments::numbers:
                return read_numbers(step, given);
            case Arguments::sites:
                for (const std::string_view site : given) step.arguments.sites.push_back(read_site(name, site));
                return;
            case Arguments::layers:
                for (const std::string_view layer : given) {
                    if (layer.empty())
                        fail(name + ": a layer's name is missing: expected e.g. " + name + ":layer1,layer3");
                    step.arguments.layers.emplace_back(layer);
                }
                return;
        }
    }

    [[nodiscard]] Site read_site(const std::string& correction, std::string_view text) const {
        if (const auto site = find_site(text)) return *site;
        std::vector<std::string_view> names;
        for (const SiteInfo& site : sites()) names.push_back(site.name);
        fail(correction + ": no such site as " + in_quotes(text) + ": " + expected_one_of(text, names));
    }

    void read_numbers(CorrectionStep& step, const std::vector<std::string_view>& given) const {
        const std::vector<Parameter>& parameters = step.info->parameters;
        const std::string name(step.info->name);
        if (given.size() > parameters.size())
            fail(name + " has " + std::to_string(given.size()) + " arguments: expected at most " +
                 std::to_string(parameters.size()));
        for (std::size_t i = 0; i < given.size(); ++i) {
            const Parameter& parameter = parameters[i];
            double& value = step.arguments.numbers[i];
            const auto [end, problem] = std::from_chars(given[i].data(), given[i].data() + given[i].size(), value);
            const bool whole = problem == std::errc{} && end == given[i].data() + given[i].size();
            if (!whole || !std::isfinite(value) || !(value > parameter.minimum))
                fail(name + ": " + std::string(parameter.name) + " is " + in_quotes(given[i]) + ": expected " +
                     std::string(parameter.expected));
        }
    }

    void exclude(const CorrectionInfo& a, const CorrectionInfo& b) const {
        if (a.name == b.name)
            fail(std::string(a.name) + " stands there twice: expected it once, with all its arguments");
        if (a.topic == b.topic)
            fail(std::string(a.name) + " and " + std::string(b.name) + " both decide on " + std::string(a.topic) +
                 ": expected one of them");
    }

    std::string_view text_;
};

[[noreturn]] void refuse(const Correction& correction, const RoundingPlan& plan, const std::string& why) {
    throw RequestError("correction " + in_quotes(correction.name) + ": plan " + in_quotes(plan.name) +
                       " cannot take it: " + why);
}

void require_applicable(const Correction& correction, const CorrectionStep& step, const RoundingPlan& plan) {
    if (const std::string problem = step.info->problem ? step.info->problem(plan) : ""; !problem.empty())
        refuse(correction, plan, problem);
    for (const Site site : step.arguments.sites) {
        if (!is_exact(plan[site].format)) continue;
        std::string rounding;
        for (const SiteInfo& s : sites())
            if (!is_exact(plan[s.site].format)) (rounding += rounding.empty() ? "" : ", ") += s.name;
        refuse(correction, plan,
               "it does not round at " + std::string(name(site)) + ": expected " +
                   (rounding.empty() ? "a plan that rounds" : "one of " + rounding));
    }
}

}  // namespace

bool Correction::changes_function() const {
    return std::any_of(steps.begin(), steps.end(),
                       [](const CorrectionStep& step) { return step.info->changes_function; });
}

std::vector<std::string> Correction::layers() const {
    std::vector<std::string> found;
    for (const CorrectionStep& step : steps)
        for (const std::string& layer : step.arguments.layers)
            if (std::find(found.begin(), found.end(), layer) == found.end()) found.push_back(layer);
    return found;
}

Correction parse_correction(std::string_view text) { return Parser(text).run(); }

RoundingPlan apply(const Correction& correction, const RoundingPlan& plan, std::string_view layer) {
    RoundingPlan corrected = plan;
    for (const CorrectionStep& step : correction.steps) {
        const std::vector<std::string>& layers = step.arguments.layers;
        if (!layers.empty() && std::find(layers.begin(), layers.end(), layer) == layers.end()) continue;
        require_applicable(correction, step, plan);
        step.info->change(corrected, step.arguments);
    }
    corrected.name = plan.name + "+" + correction.name;
    if (const std::string problem = problem_with(corrected); !problem.empty()) refuse(correction, plan, problem);
    return corrected;
}

bool changes_plan(const Correction& correction, const RoundingPlan& plan) {
    if (correction.changes_function()) return true;
    std::vector<std::string> layers = correction.layers();
    layers.emplace_back();  // a layer that no argument names
    return std::any_of(layers.begin(), layers.end(),
                       [&](const std::string& layer) { return !apply(correction, plan, layer).same_numerics(plan); });
}

std::vector<Correction> standard_corrections(const RoundingPlan& plan) {
    std::vector<std::string> wanted;
    for (const CorrectionInfo& info : corrections()) {
        if (info.changes_function) continue;
        if (info.arguments != Arguments::sites) {
            wanted.emplace_back(info.name);
            continue;
        }
        for (const std::string_view site : {"ds_cast", "o_cast"})
            wanted.push_back(std::string(info.name) + ":" + std::string(site));
    }
    // The zero-sum law is broken by delta (through the cast of O) and by the cast of ds: each pair repairs both.
    for (const std::string_view pair :
         {"o_fp32_delta+zero_sum_uniform", "o_fp32_delta+zero_sum_weighted", "delta_p_dp+zero_sum_weighted"})
        wanted.emplace_back(pair);
    std::vector<Correction> found;
    for (const std::string& text : wanted) {
        const Correction correction = parse_correction(text);
        try {
            if (changes_plan(correction, plan)) found.push_back(correction);
        } catch (const RequestError&) {
            continue;  // not for this plan
        }
    }
    return found;
}

void transform_inputs(const Correction& correction, Matrix& q, Matrix& k, const Format& q_format,
                      const Format& k_format) {
    if (!correction.changes_function()) return;
    for (const auto& [rows, format] : {std::pair{&q, q_format}, std::pair{&k, k_format}}) {
        for (std::ptrdiff_t i = 0; i < rows->rows; ++i) {
            double sum = 0;
            for (std::ptrdiff_t j = 0; j < rows->cols; ++j) sum += (*rows)(i, j) * (*rows)(i, j);
            if (sum == 0) continue;
            const double rms = std::sqrt(sum / static_cast<double>(rows->cols));
            for (std::ptrdiff_t j = 0; j < rows->cols; ++j) (*rows)(i, j) = round((*rows)(i, j) / rms, format);
        }
    }
}

}  // namespace faultline
