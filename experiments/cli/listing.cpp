// SPDX-License-Identifier: Apache-2.0
#include <faultline/cli/listing.hpp>

#include <algorithm>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <faultline/cli/terminal.hpp>
#include <faultline/record/record_file.hpp>

namespace faultline::cli {

std::vector<std::string> wrapped(const std::string& text, std::size_t width) {
    std::vector<std::string> lines;
    std::string rest = text;
    while (rest.size() > width) {
        const std::size_t space = rest.rfind(' ', width), mark = rest.find_last_of("/,;", width - 1);
        std::size_t end = width;
        if (space != std::string::npos && space != 0)
            end = space;
        else if (mark != std::string::npos)
            end = mark + 1;
        lines.push_back(rest.substr(0, end));
        rest = rest.substr(rest[end] == ' ' ? end + 1 : end);
    }
    lines.push_back(rest);
    return lines;
}

std::string text_of(const Listing& listing, std::size_t width) {
    std::vector<std::size_t> widths;
    std::size_t used = 0;
    for (const Column& column : listing.columns) {
        std::size_t widest = column.heading.size();
        for (const std::string& value : column.values) widest = std::max(widest, value.size());
        widths.push_back(column.wraps ? width - used : widest);
        used += widest + 2;
    }
    std::string out;
    const auto add_line = [&](const std::vector<std::string>& cells) {
        std::string line;
        for (std::size_t c = 0; c < cells.size(); ++c)
            line += fmt::format("{:<{}}  ", cells[c], c + 1 < cells.size() ? widths[c] : 0);
        line.erase(line.find_last_not_of(' ') + 1);
        out += line + "\n";
    };
    std::vector<std::string> heading;
    for (const Column& column : listing.columns) heading.push_back(column.heading);
    add_line(heading);
    const std::size_t rows = listing.columns.front().values.size();
    for (std::size_t row = 0; row < rows; ++row) {
        std::vector<std::string> cells;
        std::vector<std::string> more;
        for (std::size_t c = 0; c < listing.columns.size(); ++c) {
            const Column& column = listing.columns[c];
            cells.push_back(column.values[row]);
            if (!column.wraps) continue;
            more = wrapped(column.values[row], widths[c]);
            cells.back() = more.front();
            more.erase(more.begin());
        }
        add_line(cells);
        for (const std::string& line : more) {
            std::vector<std::string> continuation(listing.columns.size());
            continuation.back() = line;
            add_line(continuation);
        }
    }
    return out;
}

namespace {

std::string json_of(const Listing& listing) {
    nlohmann::ordered_json items = nlohmann::ordered_json::array();
    for (std::size_t row = 0; row < listing.columns.front().values.size(); ++row) {
        nlohmann::ordered_json item;
        for (const Column& column : listing.columns) item[column.key] = column.values[row];
        items.push_back(std::move(item));
    }
    const nlohmann::ordered_json object{{"schema", fmt::format("faultline.{}/1", listing.kind)},
                                        {listing.kind, std::move(items)}};
    return object.dump(1) + "\n";
}

void write_file(const Listing& listing, const Invocation& call) {
    RecordFile file = RecordFile::create(call.common.output, call.manifest(listing.kind));
    const std::string axis = listing.columns.front().key;
    file.coordinate(axis, listing.columns.front().values, {listing.columns.front().heading, "1"});
    for (std::size_t c = 1; c < listing.columns.size(); ++c) {
        const Column& column = listing.columns[c];
        const std::vector<Axis> axes{{axis, static_cast<std::int64_t>(column.values.size())}};
        file.write_strings(column.key, column.values, axes, {column.heading, "1"});
    }
    file.commit();
}

}  // namespace

void present(const Listing& listing, const Invocation& call) { present(listing, call, text_of(listing)); }

void present(const Listing& listing, const Invocation& call, const std::string& text) {
    if (!call.common.output.empty()) write_file(listing, call);
    print(call.common.json ? json_of(listing) : text);
}

}  // namespace faultline::cli
