// SPDX-License-Identifier: Apache-2.0
// faultline plans: the kernels that are known, one of them as TOML, or what distinguishes two.
#include <algorithm>
#include <memory>

#include <fmt/format.h>

#include <faultline/base/error.hpp>
#include <faultline/cli/command.hpp>
#include <faultline/cli/listing.hpp>
#include <faultline/cli/terminal.hpp>
#include <faultline/plan/difference.hpp>
#include <faultline/plan/effect.hpp>
#include <faultline/plan/plan_toml.hpp>
#include <faultline/plan/presets.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline::cli {
namespace {

struct PlansSettings {
    std::string name;
    std::vector<std::string> diff;
};

Status list_all(const Invocation& call) {
    Listing listing{"plans", {{"name", "plan", {}}, {"sites", "sites", {}}, {"description", "kernel", {}}}};
    Column source{"source", "source", {}};
    for (const RoundingPlan& plan : presets()) {
        listing.columns[0].values.push_back(plan.name);
        listing.columns[1].values.push_back(fmt::format("{}", plan.rounding_sites().size()));
        listing.columns[2].values.push_back(plan.description);
        source.values.push_back(plan.source);
    }
    // The source stands below the description in the table, and in a column of its own elsewhere.
    Listing table = listing;
    Column& kernel = table.columns[2];
    kernel.wraps = true;
    for (std::size_t i = 0; i < kernel.values.size(); ++i)
        if (!source.values[i].empty()) kernel.values[i] += fmt::format(" [{}]", source.values[i]);
    listing.columns.push_back(std::move(source));
    present(listing, call, text_of(table));
    return Status::done;
}

/// The file as it was written, comments included, where it is a preset; else every field spelled out.
std::string plan_text(const std::string& name, const RoundingPlan& chosen) {
    for (const std::string_view preset : preset_names())
        if (preset == name) return std::string(preset_toml(preset));
    return to_toml(chosen);
}

Status show_one(const std::string& name, const Invocation& call) {
    const RoundingPlan chosen = plan(name);
    const std::string text = plan_text(name, chosen);
    Listing file{"plan",
                 {{"name", "plan", {chosen.name}},
                  {"description", "kernel", {chosen.description}},
                  {"source", "source", {chosen.source}},
                  {"toml", "TOML", {text}}}};
    present(file, call, text);
    return Status::done;
}

/// The lines of a value in a column of this width; the cases of a plan's tiles each on their own.
std::vector<std::string> lines_of(const std::string& field, const std::string& value, std::size_t width) {
    if (field != "tiles") return wrapped(value, width);
    std::vector<std::string> lines;
    for (std::size_t begin = 0; begin <= value.size();) {
        const std::size_t end = std::min(value.find("; ", begin), value.size());
        for (const std::string& line : wrapped(value.substr(begin, end - begin), width)) lines.push_back(line);
        begin = end + 2;
    }
    return lines;
}

/// A field with two short values on a line, with long ones below each other.
std::string difference_text(const Listing& listing) {
    constexpr std::size_t width = 110, least_value_width = 19;
    const std::vector<Column>& columns = listing.columns;
    std::size_t field_width = 0, value_width = std::max(least_value_width, columns[1].heading.size());
    for (const std::string& field : columns[0].values) field_width = std::max(field_width, field.size());
    std::string out;
    const auto add = [&](const std::string& field, const std::string& from, const std::string& to) {
        if (from.size() <= value_width && to.size() <= width - field_width - value_width - 4) {
            out += fmt::format("{:<{}}  {:<{}}  {}\n", field, field_width, from, value_width, to);
            return;
        }
        out += field + "\n";
        for (const std::size_t c : {std::size_t{1}, std::size_t{2}}) {
            std::string label = "  " + columns[c].heading + ":";
            for (const std::string& line : lines_of(field, c == 1 ? from : to, width - field_width - 2)) {
                out += fmt::format("{:<{}}  {}\n", label, field_width, line);
                label.clear();
            }
        }
    };
    add(columns[0].heading, columns[1].heading, columns[2].heading);
    for (std::size_t i = 0; i < columns[0].values.size(); ++i)
        add(columns[0].values[i], columns[1].values[i], columns[2].values[i]);
    return out;
}

/// "-" for a field of the schedule that changes nothing in its plan, and for a rule of a site that the plan never comes to.
std::string shown(const RoundingPlan& plan, const std::string& field, const std::string& value) {
    constexpr std::string_view schedule = "schedule.", of_sites = "sites.";
    if (field.starts_with(schedule)) return lacking(plan, field.substr(schedule.size())).empty() ? value : "-";
    if (!field.starts_with(of_sites)) return value;
    const std::string site = field.substr(of_sites.size(), field.find('.', of_sites.size()) - of_sites.size());
    for (const SiteInfo& info : sites())
        if (info.name == site && !reaches(plan, info.site)) return "-";
    return value;
}

/// `name`: the argument that stands alone, which is among the names, or "".
Status show_difference(const std::vector<std::string>& names, const std::string& name, const Invocation& call) {
    if (names.size() != 2) {
        const std::string alone = name.empty() ? "" : fmt::format(", with {} that stands alone", in_quotes(name));
        throw RequestError(fmt::format("{}: {} plan{}{}: expected two, such as --diff fa2,fa3",
                                       call.settings.where("diff"), names.size(), names.size() == 1 ? "" : "s", alone));
    }
    const RoundingPlan from = plan(names[0]), to = plan(names[1]);
    Listing listing{"difference", {{"field", "field", {}}, {"from", names[0], {}}, {"to", names[1], {}, true}}};
    for (const Difference& difference : differences(from, to)) {
        const std::string of_from = shown(from, difference.field, difference.from),
                          of_to = shown(to, difference.field, difference.to);
        if (of_from == of_to) continue;
        listing.columns[0].values.push_back(difference.field);
        listing.columns[1].values.push_back(of_from);
        listing.columns[2].values.push_back(of_to);
    }
    const bool alike = listing.columns[0].values.empty();
    present(listing, call, alike ? "The plans round alike.\n" : difference_text(listing));
    return Status::done;
}

}  // namespace

Command plans_command() {
    return {
        "plans", "List the plans, print one as TOML, or compare two",
        "  faultline plans                 the kernels that are known\n"
        "  faultline plans fa3             one as TOML, with the place in its source of every rounding\n"
        "  faultline plans --diff fa2,fa3  the sites and schedule fields that differ; - where a field or rule changes nothing",
        [](Settings& settings) -> Run {
            const auto own = std::make_shared<PlansSettings>();
            settings.positional("name", own->name, "A plan's name, or a TOML file", false);
            settings.list("diff", own->diff, "A,B", "Compare two plans, by name or file");
            return [own](const Invocation& call) {
                if (!own->diff.empty()) {
                    std::vector<std::string> names = own->diff;
                    if (!own->name.empty()) names.push_back(own->name);  // --diff A B
                    return show_difference(names, own->name, call);
                }
                return own->name.empty() ? list_all(call) : show_one(own->name, call);
            };
        }};
}

}  // namespace faultline::cli
