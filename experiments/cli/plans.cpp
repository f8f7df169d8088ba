// SPDX-License-Identifier: Apache-2.0
// faultline plans: the kernels that are known, one of them as TOML, or what distinguishes two.
#include <memory>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <faultline/base/error.hpp>
#include <faultline/cli/command.hpp>
#include <faultline/cli/listing.hpp>
#include <faultline/cli/terminal.hpp>
#include <faultline/plan/difference.hpp>
#include <faultline/plan/plan_toml.hpp>
#include <faultline/plan/presets.hpp>

namespace faultline::cli {
namespace {

struct PlansSettings {
    std::string name;
    std::vector<std::string> diff;
};

Status list_all(const Invocation& call) {
    Listing listing{"plans", {{"name", "plan", {}}, {"sites", "sites", {}}, {"description", "kernel", {}, true}}};
    std::vector<std::string> sources;
    for (const RoundingPlan& plan : presets()) {
        listing.columns[0].values.push_back(plan.name);
        listing.columns[1].values.push_back(fmt::format("{}", plan.rounding_sites().size()));
        // The source stands below the description in the table, and in a column of its own elsewhere.
        const bool is_text = !call.common.json && call.common.output.empty();
        listing.columns[2].values.push_back(
            is_text && !plan.source.empty() ? fmt::format("{} [{}]", plan.description, plan.source) : plan.description);
        sources.push_back(plan.source);
    }
    if (call.common.json || !call.common.output.empty())
        listing.columns.push_back({"source", "source", std::move(sources), true});
    if (listing.columns.size() == 4) listing.columns[2].wraps = false;
    present(listing, call);
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
    if (call.common.json || !call.common.output.empty())
        present(file, call);
    else
        print(text);
    return Status::done;
}

/// A field with two short values on a line, with long ones below each other.
std::string difference_text(const Listing& listing) {
    constexpr std::size_t width = 110, field_width = 30, value_width = 26;
    std::string out;
    const std::vector<Column>& columns = listing.columns;
    const auto add = [&](const std::string& field, const std::string& from, const std::string& to) {
        if (from.size() <= value_width && to.size() <= width - field_width - value_width - 4) {
            out += fmt::format("{:<{}}  {:<{}}  {}\n", field, field_width, from, value_width, to);
            return;
        }
        out += field + "\n";
        for (const std::size_t c : {std::size_t{1}, std::size_t{2}}) {
            std::string label = "  " + columns[c].heading + ":";
            for (const std::string& line : wrapped(c == 1 ? from : to, width - field_width - 2)) {
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

Status show_difference(const std::vector<std::string>& names, const Invocation& call) {
    if (names.size() != 2) {
        throw RequestError(fmt::format("{}: {} plans: expected two, such as --diff fa2,fa3",
                                       call.settings.where("diff"), names.size()));
    }
    const std::vector<Difference> found = differences(plan(names[0]), plan(names[1]));
    Listing listing{"difference", {{"field", "field", {}}, {"from", names[0], {}}, {"to", names[1], {}, true}}};
    for (const Difference& difference : found) {
        listing.columns[0].values.push_back(difference.field);
        listing.columns[1].values.push_back(difference.from);
        listing.columns[2].values.push_back(difference.to);
    }
    if (found.empty() && !call.common.json && call.common.output.empty())
        print("The plans round alike.\n");
    else if (call.common.json || !call.common.output.empty())
        present(listing, call);
    else
        print(difference_text(listing));
    return Status::done;
}

}  // namespace

Command plans_command() {
    return {"plans", "List the plans, print one as TOML, or compare two",
            "  faultline plans                 the kernels that are known\n"
            "  faultline plans fa3             one as TOML, with the place in its source of every rounding\n"
            "  faultline plans --diff fa2,fa3  the sites and schedule fields that differ",
            [](Settings& settings) -> Run {
                const auto own = std::make_shared<PlansSettings>();
                settings.positional("name", own->name, "A plan's name, or a TOML file", false);
                settings.list("diff", own->diff, "A,B", "Compare two plans, by name or file");
                return [own](const Invocation& call) {
                    if (!own->diff.empty()) {
                        std::vector<std::string> names = own->diff;
                        if (!own->name.empty()) names.push_back(own->name);  // --diff A B
                        return show_difference(names, call);
                    }
                    return own->name.empty() ? list_all(call) : show_one(own->name, call);
                };
            }};
}

}  // namespace faultline::cli
