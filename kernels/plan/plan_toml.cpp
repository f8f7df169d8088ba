// SPDX-License-Identifier: Apache-2.0
#include <faultline/plan/plan_toml.hpp>

#include <algorithm>
#include <array>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include <faultline/base/error.hpp>
#include <faultline/plan/plan_reader.hpp>
#include <faultline/plan/presets.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline {
namespace {

using plan_file::PlanReader;

constexpr std::uintmax_t largest_file = 1 << 20;  // a plan has some 5 KB; what is larger is another kind of file

/// The files being read: the one asked for, its base, that one's base.
using FileChain = std::vector<std::filesystem::path>;
constexpr std::size_t longest_chain = 64;  // of bases of bases: a cycle through links that no path shows ends here

RoundingPlan read_plan(const std::filesystem::path& file, FileChain chain);

constexpr std::size_t longest_name = 200;  // it stands in tables, file names and attributes

bool is_plain_name(std::string_view name) {
    const auto unfit = [](char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7F || c == '/'; };
    return !name.empty() && name.size() <= longest_name && std::none_of(name.begin(), name.end(), unfit);
}

/// A preset by its name; in a file also another file, by its path from there.
RoundingPlan read_base(const PlanReader& reader, const toml::node& node, std::span<const RoundingPlan> bases,
                       const FileChain* files) {
    std::vector<std::string_view> names;
    for (const RoundingPlan& base : bases) names.push_back(base.name);
    const auto* text = node.as_string();
    if (files == nullptr || text == nullptr || !text->get().ends_with(".toml"))
        return bases[reader.choice(node, "base", names)];
    const std::filesystem::path file = files->back().parent_path() / text->get();
    const std::string shown = in_quotes(text->get());
    std::error_code problem;
    if (!std::filesystem::exists(file, problem))
        reader.fail(node.source(), "base",
                    "no such file " + shown + ": expected a preset or a plan's file, by its path from this one");
    if (files->size() >= longest_chain)
        reader.fail(
            node.source(), "base",
            "is the " + std::to_string(files->size()) + "th file in a row: expected a base that ends in a preset");
    for (const std::filesystem::path& open : *files)
        if (std::filesystem::equivalent(open, file, problem))
            reader.fail(node.source(), "base",
                        shown + " has this plan as its base in turn: expected a base that does not come back to it");
    return read_plan(file, *files);
}

RoundingPlan read_root(const PlanReader& reader, const toml::table& root, std::span<const RoundingPlan> bases,
                       const FileChain* files) {
    constexpr std::array<std::string_view, 7> keys{"name",     "base",  "description", "source",
                                                   "schedule", "tiles", "sites"};
    reader.check_keys(root, "", keys);
    RoundingPlan plan;
    if (const toml::node* node = root.get("base")) {
        plan = read_base(reader, *node, bases, files);
        plan.description.clear();  // they speak of the base alone
        plan.source.clear();
    }
    plan.name = std::filesystem::path(reader.source()).filename().string();
    if (plan.name.ends_with(".toml")) plan.name.resize(plan.name.size() - 5);
    const toml::node* name_node = root.get("name");
    if (name_node != nullptr) reader.read(*name_node, "name", plan.name);
    if (!is_plain_name(plan.name))
        reader.fail(
            name_node != nullptr ? name_node->source() : root.source(), "name",
            "expected 1 to " + std::to_string(longest_name) + " bytes, none of them a slash or a control character");
    if (const toml::node* node = root.get("description")) reader.read(*node, "description", plan.description);
    if (const toml::node* node = root.get("source")) reader.read(*node, "source", plan.source);
    if (const toml::node* node = root.get("schedule")) {
        const toml::table& schedule = reader.table(*node, "schedule", "a table of the schedule's fields");
        reader.read_fields(schedule, "schedule", [&](auto&& visit) { for_each_field(plan.schedule, visit); });
        reader.release_tiles(schedule, plan);
    }
    if (const toml::node* node = root.get("tiles")) reader.read_tiles(*node, plan);
    if (const toml::node* node = root.get("sites")) reader.read_sites(*node, plan);
    if (const auto problem = find_problem(plan))
        reader.fail(reader.place_of(root, problem->field), problem->field, problem->what);
    reader.settle_idle(root, plan);
    return plan;
}

RoundingPlan parsed(std::string_view toml, std::string_view source_name, std::span<const RoundingPlan> bases,
                    const FileChain* files) {
    const PlanReader reader(source_name);
    toml::table root;
    try {
        root = toml::parse(toml);
    } catch (const toml::parse_error& error) {
        reader.fail(error.source(), "", "not TOML: " + escaped(error.description()) + ": expected a plan in TOML 1.0");
    }
    if (files != nullptr && root.empty())
        throw RequestError(escaped(source_name) +
                           ": has no field: expected a plan in TOML, or base = \"exact\" for one that rounds nothing");
    return read_root(reader, root, bases, files);
}

RoundingPlan read_plan(const std::filesystem::path& file, FileChain chain) {
    const std::string shown = escaped(file.string());
    std::error_code problem;
    if (!std::filesystem::is_regular_file(file, problem))
        throw RequestError(shown + ": " +
                           (std::filesystem::exists(file, problem) ? "is not a regular file" : "no such file") +
                           ": expected a plan in TOML");
    if (const std::uintmax_t size = std::filesystem::file_size(file, problem); problem || size > largest_file)
        throw RequestError(shown + ": has more than 1 MiB: expected a plan in TOML");
    std::ifstream in(file, std::ios::binary);
    std::ostringstream text;
    text << in.rdbuf();
    if (!in) throw RequestError(shown + ": cannot be read: expected a plan in TOML");
    chain.push_back(file);
    return parsed(text.str(), file.string(), presets(), &chain);
}

}  // namespace

RoundingPlan parse_plan(std::string_view toml, std::string_view source_name, std::span<const RoundingPlan> bases) {
    return parsed(toml, source_name, bases, nullptr);
}

RoundingPlan parse_plan(std::string_view toml, std::string_view source_name) {
    return parsed(toml, source_name, presets(), nullptr);
}

RoundingPlan read_plan(const std::filesystem::path& file) { return read_plan(file, {}); }

}  // namespace faultline
