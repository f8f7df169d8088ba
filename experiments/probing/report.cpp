// SPDX-License-Identifier: Apache-2.0
#include <faultline/probing/report.hpp>

#include <algorithm>
#include <charconv>
#include <cmath>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include <faultline/record/record_file.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline::probing {
namespace {

using nlohmann::ordered_json;
constexpr std::size_t most_columns = 8;
constexpr int number_width = 10;

std::string number(double x) { return std::isnan(x) ? "-" : fmt::format("{:.4g}", x); }

/// Least, median, largest of the finite values.
std::vector<double> condensed(std::vector<double> values) {
    std::erase_if(values, [](double v) { return std::isnan(v); });
    if (values.empty()) return {NAN, NAN, NAN};
    std::ranges::sort(values);
    return {values.front(), values[values.size() / 2], values.back()};
}

void append(std::string& out, const Block& block) {
    out += fmt::format("\n{}  {}\n", escaped(block.place), block.probe);
    if (!block.note.empty()) out += "  " + block.note + "\n";
    const bool wide = block.columns.size() > most_columns;
    std::size_t name_width = 0;
    for (const Line& line : block.lines) name_width = std::max(name_width, line.name.size() + line.unit.size() + 3);
    std::vector<std::string> columns = block.columns;
    if (wide) columns = {"least", "median", "largest"};
    std::vector<int> widths;
    std::string head;
    for (const std::string& column : columns) {
        widths.push_back(std::max(number_width, static_cast<int>(column.size())));
        head += fmt::format("  {:>{}}", column, widths.back());
    }
    if (wide) head += fmt::format("  of {}", block.columns.size());
    out += fmt::format("  {:{}}{}\n", "", name_width, head);
    for (const Line& line : block.lines) {
        const std::string unit = line.unit.empty() || line.unit == "1" ? "" : fmt::format(" ({})", line.unit);
        out += fmt::format("  {:{}}", line.name + unit, name_width);
        const std::vector<double> values = wide ? condensed(line.values) : line.values;
        for (std::size_t i = 0; i < values.size(); ++i)
            out += fmt::format("  {:>{}}", number(values[i]), i < widths.size() ? widths[i] : number_width);
        out += "\n";
    }
}

ordered_json json_number(double x) {
    if (std::isnan(x)) return nullptr;
    if (std::isinf(x)) return x > 0 ? "inf" : "-inf";
    return x;
}

/// Numbers along the dimensions that count something. Names stay text: runs "01" and "1" are two.
void add_coordinate(RecordFile& file, const std::string& group, const std::string& name,
                    const std::vector<std::string>& labels) {
    constexpr std::string_view counted[] = {"head", "key_head", "layer", "step"};
    std::vector<std::int64_t> numbers;
    for (const std::string& label : labels) {
        std::int64_t number = 0;
        const auto [end, error] = std::from_chars(label.data(), label.data() + label.size(), number);
        if (error == std::errc() && end == label.data() + label.size()) numbers.push_back(number);
    }
    if (numbers.size() == labels.size() && std::ranges::find(counted, name) != std::end(counted))
        file.coordinate(group + name, numbers);
    else
        file.coordinate(group + name, labels);
}

}  // namespace

std::string table(const Report& report) {
    std::vector<std::string> names;
    for (const std::string& input : report.inputs) names.push_back(escaped(input, input.size()));
    std::string out = fmt::format("{}   {}{}\n", fmt::join(names, ", "), report.kind,
                                  report.plan.empty() ? "" : "   plan " + escaped(report.plan));
    for (const Block& block : report.blocks) append(out, block);
    return out;
}

std::string to_json(const Report& report) {
    ordered_json results = ordered_json::array();
    for (const Block& block : report.blocks) {
        ordered_json values = ordered_json::object();
        for (const Line& line : block.lines) {
            ordered_json list = ordered_json::array();
            for (const double x : line.values) list.push_back(json_number(x));
            values[line.name] = {{"unit", line.unit}, {"values", std::move(list)}};
        }
        results.push_back({{"place", block.place},
                           {"probe", block.probe},
                           {"note", block.note},
                           {"columns", block.columns},
                           {"values", std::move(values)}});
    }
    const ordered_json all{{"schema", "faultline.probe/1"},
                           {"kind", report.kind},
                           {"inputs", report.inputs},
                           {"plan", report.plan},
                           {"results", std::move(results)}};
    return all.dump(1, ' ', false, ordered_json::error_handler_t::replace) + "\n";
}

void write_h5(const Report& report, const std::string& path, const Manifest& manifest) {
    RecordFile file = RecordFile::create(path, manifest);
    file.attribute("", "probed", report.kind);
    if (!report.plan.empty()) file.attribute("", "plan", report.plan);
    for (const Block& block : report.blocks) {
        const std::string group = fmt::format("{}/{}/", block.place, block.probe);
        for (const auto& [name, labels] : block.labels) add_coordinate(file, group, name, labels);
        for (const Quantity& quantity : block.quantities)
            file.write(group + quantity.name, quantity.values, quantity.axes, quantity.about);
        if (!block.quantities.empty() && !block.note.empty())
            file.attribute(group.substr(0, group.size() - 1), "note", block.note);
    }
    file.commit();
}

}  // namespace faultline::probing
