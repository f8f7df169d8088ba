// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <span>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <faultline/plan/plan_toml.hpp>
#include <faultline/tensor/text.hpp>
#include <faultline/verdict/report.hpp>

namespace faultline {
namespace {

using nlohmann::ordered_json;

ordered_json number(double x) {
    if (std::isfinite(x)) return x;
    return std::isnan(x) ? "nan" : x > 0 ? "inf" : "-inf";
}

/// A number where a double holds it, else text in scientific notation.
ordered_json number(const WideReal& x) {
    const double value = x.to_double();
    if (std::isfinite(value) && (value != 0 || x.mantissa == 0)) return value;
    return x.to_string(17);
}

const char* key_of(Verdict verdict) {
    switch (verdict) {
        case Verdict::within_rounding:
            return "within_rounding";
        case Verdict::unresolved:
            return "unresolved";
        case Verdict::biased:
            return "biased";
        case Verdict::wrong:
            return "wrong";
    }
    return "";
}

/// `head`: as in Finding. `beside`: "plan" or "kernel", whose value stands beside it.
ordered_json first_json(const verdict::NotFinite& n, int head, const char* beside) {
    ordered_json out{{"head", head}, {"row", n.row}};
    if (n.feature >= 0) out["feature"] = n.feature;
    out["value"] = number(n.value);
    out[beside] = number(n.beside);
    return out;
}

ordered_json finding_json(const Finding& f) {
    ordered_json out{{"verdict", key_of(f.kind)}, {"head", f.head}, {"text", text(f)}};
    if (f.nonfinite) {
        out["test"] = "nonfinite";
        out["elements"] = f.effect;
        out["elements_of_plan"] = f.not_finite_of_plan;
        out["element_rows"] = f.not_finite.rows;
        out["first"] = first_json(f.not_finite, f.head, "plan");
        out["of_plan"] = f.of_plan;
        return out;
    }
    if (f.finite) {
        out["test"] = "finite";
        out["rows"] = f.effect;
        return out;
    }
    out["test"] = verdict::name(f.cell.direction);
    if (f.cell.extent == verdict::Extent::feature) out["feature"] = f.cell.index;
    if (f.cell.extent == verdict::Extent::rows) out["rows"] = {f.cell.index, f.cell.index + f.cell.rows - 1};
    out["t"] = number(f.t);
    out["log10_p"] = number(f.log10_p);
    out["effect"] = number(f.effect);
    out["plan_t"] = number(f.plan_t);
    out["of_plan"] = f.of_plan;
    if (f.worst.row >= 0) {
        out["worst_row"] = f.worst.row;
        if (f.worst.feature >= 0) out["worst_feature"] = f.worst.feature;
        out["worst_row_share"] = number(f.worst.share);
        out["worst_row_truth"] = number(f.worst.truth);
    }
    return out;
}

ordered_json error_json(const ErrorMeasure& e) {
    return {{"rel_error", number(e.rel_error)}, {"signed_bias", number(e.signed_bias)}, {"nonfinite", e.nonfinite}};
}

std::string xml(std::string_view text) {
    std::string out;
    for (const char c : escaped(text, text.size())) {
        if (c == '&')
            out += "&amp;";
        else if (c == '<')
            out += "&lt;";
        else if (c == '>')
            out += "&gt;";
        else if (c == '"')
            out += "&quot;";
        else
            out += c;
    }
    return out;
}

}  // namespace

std::string to_json(const Check& c) {
    ordered_json layers = ordered_json::array();
    for (const LayerCheck& layer : c.layers) {
        ordered_json outputs = ordered_json::object();
        for (const OutputCheck& o : layer.outputs) {
            ordered_json findings = ordered_json::array();
            for (const Finding& f : o.findings) findings.push_back(finding_json(f));
            outputs[std::string(name(o))] = {{"verdict", key_of(o.verdict)},
                                             {"observed", error_json(o.observed)},
                                             {"plan", error_json(o.plan)},
                                             {"expected_rel_error", number(o.expected)},
                                             {"blind", is_blind(o)},
                                             {"size_ratio", number(o.size_ratio)},
                                             {"size_t", number(o.size_t)},
                                             {"size_log10_p", number(o.size_log10_p)},
                                             {"plan_size_ratio", number(o.plan_ratio)},
                                             {"least_size_ratio", number(o.least_ratio)},
                                             {"largest_size_ratio", number(o.largest_ratio)},
                                             {"bit_equal_to_plan", o.bit_equal_to_plan},
                                             {"truth_norm", number(o.truth_norm)},
                                             {"truth_bound", number(o.truth_bound)},
                                             {"truth_resolved", truth_is_resolved(o)},
                                             {"tests", o.tests},
                                             {"undecided", o.undecided},
                                             {"unpredicted", o.unpredicted},
                                             {"nonfinite_runs", o.nonfinite_runs},
                                             {"findings", std::move(findings)}};
            ordered_json& output = outputs[std::string(name(o))];
            if (o.lse) output["in_log2"] = o.in_log2;
            if (o.plan.nonfinite > 0)
                output["plan_first_nonfinite"] = first_json(o.plan_nonfinite, o.plan_nonfinite_head, "kernel");
            if (const std::string plan = plan_text(o); !plan.empty()) output["plan_text"] = plan;
        }
        ordered_json unjudged = ordered_json::array();
        for (const Output output : layer.unjudged) unjudged.push_back(name(output));
        layers.push_back({{"name", layer.name},
                          {"verdict", layer.outputs.empty() ? "not_judged" : key_of(layer.verdict)},
                          {"outputs", std::move(outputs)},
                          {"unjudged", std::move(unjudged)}});
    }
    ordered_json out{{"schema", "faultline.check/1"},
                     {"input", c.input},
                     {"kernel", c.kernel},
                     {"plan", c.plan.name},
                     {"verdict", key_of(c.verdict())},
                     {"all_judged", !c.has_unjudged()},
                     {"complete", c.complete},
                     {"alpha", c.alpha},
                     {"tests", c.tests},
                     {"log10_threshold", number(c.log10_threshold)}};
    out.update(ordered_json::parse(to_json(c.origin)));
    out["layers"] = std::move(layers);
    return out.dump(1, ' ', false, ordered_json::error_handler_t::replace) + "\n";
}

namespace {

/// Test cases, those that failed, those that could not be decided, "errors" in JUnit's words, and those that were not made.
std::string junit_counts(std::span<const LayerCheck> layers) {
    std::size_t tests = 0, failures = 0, errors = 0, skipped = 0;
    for (const LayerCheck& layer : layers) {
        tests += layer.outputs.size() + layer.unjudged.size();
        skipped += layer.unjudged.size();
        for (const OutputCheck& o : layer.outputs) {
            failures += o.verdict == Verdict::biased || o.verdict == Verdict::wrong;
            errors += o.verdict == Verdict::unresolved;
        }
    }
    return fmt::format("tests=\"{}\" failures=\"{}\" errors=\"{}\" skipped=\"{}\"", tests, failures, errors, skipped);
}

std::string junit_case(const OutputCheck& o) {
    std::string note = truth_text(o);
    if (const std::string plan = plan_text(o); !plan.empty()) note += (note.empty() ? "" : "; ") + plan;
    if (o.verdict == Verdict::within_rounding && note.empty()) return "/>\n";
    if (o.verdict == Verdict::within_rounding)
        return fmt::format(">\n      <system-out>{}</system-out>\n    </testcase>\n", xml(note));
    if (o.verdict == Verdict::unresolved)
        return fmt::format(">\n      <error type=\"unresolved\" message=\"{}\"/>\n    </testcase>\n",
                           xml(fmt::format("{}: {}", name(o.verdict), note)));
    std::string out = fmt::format(">\n      <failure type=\"{}\" message=\"{}\">", key_of(o.verdict),
                                  xml(fmt::format("{}: {}", name(o.verdict), text(o.findings.front()))));
    for (const Finding& f : o.findings) out += xml(text(f)) + "\n";
    if (!note.empty()) out += xml(note) + "\n";
    return out + "</failure>\n    </testcase>\n";
}

}  // namespace

std::string to_junit(const Check& c) {
    std::string out =
        fmt::format("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<testsuites name=\"faultline check\" {}>\n",
                    junit_counts(c.layers));
    for (const LayerCheck& layer : c.layers) {
        out += fmt::format("  <testsuite name=\"{}\" {}>\n", xml(layer.name), junit_counts({&layer, 1}));
        const auto begin = [&](std::string_view output) {
            return fmt::format("    <testcase classname=\"{}.{}\" name=\"{} against {}\"", xml(layer.name),
                               xml(c.kernel), output, xml(c.plan.name));
        };
        for (const OutputCheck& o : layer.outputs) out += begin(name(o)) + junit_case(o);
        for (const Output output : layer.unjudged)
            out += begin(name(output)) +
                   fmt::format(">\n      <skipped message=\"{}\"/>\n    </testcase>\n", xml(unjudged_text(layer)));
        out += "  </testsuite>\n";
    }
    return out + "</testsuites>\n";
}

void write(const Check& c, RecordFile& file) {
    file.attribute("", "input", c.input);
    file.attribute("", "kernel", c.kernel);
    file.attribute("", "plan", c.plan.name);
    file.attribute("", "plan_toml", to_toml(c.plan));
    file.attribute("", "verdict", key_of(c.verdict()));
    std::vector<std::string> unjudged;
    for (const LayerCheck& layer : c.layers)
        for (const Output output : layer.unjudged) unjudged.push_back(fmt::format("{}.{}", layer.name, name(output)));
    if (!unjudged.empty()) file.attribute("", "unjudged", std::span<const std::string>(unjudged));
    file.attribute("", "log10_threshold", c.log10_threshold);
    file.attribute("", "complete", std::int64_t{c.complete ? 1 : 0});
    for (const LayerCheck& layer : c.layers)
        for (const OutputCheck& o : layer.outputs) {
            const std::string group = layer.name + "/" + std::string(name(o)) + "/";
            std::vector<std::string> cells;
            for (const verdict::Cell& cell : o.cells)
                cells.push_back(fmt::format("{} {}", verdict::name(cell.direction), cell.where()));
            file.coordinate(group + "cell", cells, {"what is summed, and over what", "1"});
            std::vector<double> t;
            for (const std::vector<double>& head : o.t) t.insert(t.end(), head.begin(), head.end());
            file.write(
                group + "t", t,
                {{"head", static_cast<std::int64_t>(o.t.size())}, {"cell", static_cast<std::int64_t>(cells.size())}},
                {"statistic of the kernel's error against the plan's rounding with random signs", "1"});
        }
}

}  // namespace faultline
