// SPDX-License-Identifier: Apache-2.0
// Where settings come from: a file, --set, the command line.
#include <algorithm>
#include <cmath>
#include <filesystem>

#include <fmt/format.h>

#include <faultline/base/error.hpp>
#include <faultline/cli/setting.hpp>
#include <faultline/plan/nearest_name.hpp>
#include <faultline/tensor/input.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline::cli {
namespace {

std::string_view kind(const toml::node& node) {
    switch (node.type()) {
        case toml::node_type::string:
            return "a string";
        case toml::node_type::integer:
            return "an integer";
        case toml::node_type::floating_point:
            return "a number";
        case toml::node_type::boolean:
            return "a boolean";
        case toml::node_type::array:
            return "a list";
        case toml::node_type::table:
            return "a table";
        default:
            return "a date or time";
    }
}

std::string value_text(const toml::node& node) {
    if (const auto value = node.value<std::int64_t>(); value && node.is_integer()) return fmt::format(" ({})", *value);
    if (const auto value = node.value<double>(); value && node.is_floating_point())
        return std::isfinite(*value) ? fmt::format(" ({})", *value) : " that is not finite";
    if (const auto value = node.value<std::string>(); value && node.is_string()) return " (" + in_quotes(*value) + ")";
    return "";
}

std::string read_text(const std::string& path) {
    constexpr std::uint64_t largest = 1 << 20;  // a configuration is a page of text
    const FileInput in(path);
    if (in.size() > largest)
        throw RequestError(fmt::format("{}: has {} bytes: expected a configuration file", in.name(), in.size()));
    std::string text(in.size(), '\0');
    in.read(0, std::as_writable_bytes(std::span(text)));
    return text;
}

/// What stands where a value is missing.
void refuse_option(const std::string& where, const std::string& value) {
    if (value.starts_with("--"))
        throw RequestError(
            fmt::format("{}: {}: begins with \"--\" as an option: expected a value (\"./{}\" for a file of that name)",
                        where, in_quotes(value), escaped(value, value.size())));
}

}  // namespace

void Settings::read(const Value& value, const std::string& where) {
    const std::string place = fmt::format("{}.{}", where, escaped(value.key));
    Setting* setting = find(value.key);
    if (setting == nullptr)
        throw RequestError(fmt::format("{}: unknown key: {}", place, expected_one_of(value.key, keys())));
    if (!setting->from_toml(value.node)) {
        if (const toml::array* items = value.node.as_array(); items != nullptr && setting->is_list)
            for (std::size_t i = 0; i < items->size(); ++i) {
                const toml::node& item = *items->get(i);
                if (setting->from_toml(toml::array{item})) continue;
                throw RequestError(fmt::format("{}: item {} is {}{}: expected {}", place, i + 1, kind(item),
                                               value_text(item), setting->expected));
            }
        throw RequestError(fmt::format("{}: is {}{}: expected {}", place, kind(value.node), value_text(value.node),
                                       setting->expected));
    }
    setting->origin = place;
    expect_no_repeats(*setting, place);
}

void Settings::read(const Table& table, const std::string& where) {
    for (const auto& [key, value] : table.of) read(Value{key.str(), value}, where);
}

void Settings::read_config_too(const std::vector<std::string_view>& commands) {
    const Setting* setting = config_too_.empty() ? nullptr : find(config_too_);
    if (setting == nullptr || setting->given.empty()) return;
    const std::string& file = setting->given.back();
    std::error_code none;
    if (!std::filesystem::is_regular_file(file, none)) return;  // the command says what it expected
    std::vector<std::string_view> tables = commands;
    tables.insert(tables.end(), config_too_tables_.begin(), config_too_tables_.end());
    read_file(file, tables, false);
}

void Settings::read_file(const std::string& path, const std::vector<std::string_view>& commands, bool needed) {
    const std::string file = escaped(path, path.size());
    toml::table root;
    try {
        root = toml::parse(read_text(path), path);
    } catch (const toml::parse_error& error) {
        throw RequestError(fmt::format("{}: line {}: {}: expected TOML", file, error.source().begin.line,
                                       escaped(error.description())));
    }
    for (const auto& [name, node] : root) {
        if (std::find(commands.begin(), commands.end(), name.str()) == commands.end()) {
            throw RequestError(fmt::format("{}: line {}: {}: {}", file, node.source().begin.line, in_quotes(name.str()),
                                           expected_one_of(name.str(), commands)));
        }
        if (name.str() != command_) continue;
        if (!node.is_table()) {
            throw RequestError(fmt::format("{}: {}: is {}: expected a table", file, command_, kind(node)));
        }
        read(Table{*node.as_table()}, fmt::format("{}: {}", file, command_));
    }
    if (needed && !root.contains(command_))  // it would be read and change nothing
        throw RequestError(fmt::format("{}: has no table [{}]: expected the settings of this command", file, command_));
}

void Settings::read_assignment(const std::string& assignment) {
    const std::size_t equals = assignment.find('=');
    if (equals == std::string::npos || equals == 0) {
        throw RequestError(fmt::format("--set: {}: expected KEY=VALUE", in_quotes(assignment)));
    }
    const std::string key = assignment.substr(0, equals), value = assignment.substr(equals + 1);
    Setting* setting = find(key);
    if (setting == nullptr) {
        throw RequestError(fmt::format("--set: {}: unknown key: {}", in_quotes(key), expected_one_of(key, keys())));
    }
    setting->origin = "--set " + key;
    // As TOML, so that what a file says can be said here; else as the command line would have it: plan=fa2.
    try {
        const toml::table parsed = toml::parse("value = " + value);
        if (parsed.size() == 1) {
            const toml::node& node = *parsed.get("value");
            if (setting->from_toml(node)) return expect_no_repeats(*setting, setting->origin);
            // One string for a list: correction="none".
            if (setting->is_list && node.is_string() && setting->from_text(**node.as_string()))
                return expect_no_repeats(*setting, setting->origin);
        }
    } catch (const toml::parse_error&) {
    }
    if (!setting->from_text(value)) {
        throw RequestError(fmt::format("--set {}: {}: expected {}", key, in_quotes(value), setting->expected));
    }
    expect_no_repeats(*setting, setting->origin);
}

/// Of a value that is given again the last counts, so that one can be put behind what a script gives. A flag and its contrary
/// are two options, whose order says nothing.
void Settings::expect_one_of_contraries(const Setting& setting) {
    if (!setting.is_choice) return;
    for (const std::string& value : setting.given)
        if (value != setting.given.front())
            throw RequestError(fmt::format("--{0} and --no-{0}: are both given: expected one of them", setting.key));
}

/// `where`: of the value.
void Settings::expect_no_repeats(const Setting& setting, const std::string& where) {
    if (!setting.repeated || setting.may_repeat) return;
    if (const std::string item = setting.repeated(); !item.empty())
        throw RequestError(fmt::format("{}: {}: is there twice: expected it once", where, item));
}

/// Said before a value is found out of range that nothing would read. `assigned`: the keys that --set gives.
void Settings::expect_what_it_needs(const Setting& setting, const std::vector<std::string_view>& assigned) const {
    if (setting.needs.empty()) return;
    if (std::find(assigned.begin(), assigned.end(), setting.needs) != assigned.end()) return;
    for (const auto& other : settings_)
        if (other->key == setting.needs && other->given.empty() && other->origin.empty())
            throw RequestError(fmt::format("{}{}: means nothing without --{}: expected none",
                                           setting.given.empty() ? "--set " : "--", setting.key, setting.needs));
}

/// A forgotten value takes the next option: --report --quiet would write a file of that name.
void Settings::expect_no_option(const Setting& setting) {
    if (setting.is_flag || setting.is_positional || setting.holds_options) return;
    for (const std::string& item : setting.given) refuse_option("--" + setting.key, item);
}

void Settings::read(const std::vector<std::string_view>& commands) {
    for (const std::string& file : config_) refuse_option("--config", file);
    if (config_.size() > 1)
        throw RequestError(fmt::format("--config: is given {} times: expected one file (--set changes single settings)",
                                       config_.size()));
    if (!config_.empty() && config_.front().empty())
        throw RequestError("--config: \"\": expected the name of a TOML file");
    read_config_too(commands);
    if (!config_.empty()) read_file(config_.front(), commands, true);
    std::vector<std::string_view> assigned;
    for (const std::string& assignment : assignments_)
        assigned.push_back(std::string_view(assignment).substr(0, assignment.find('=')));
    for (const std::string_view key : assigned)
        if (const Setting* setting = find(key)) expect_what_it_needs(*setting, assigned);
    for (const std::string& assignment : assignments_) read_assignment(assignment);
    for (const auto& setting : settings_) {
        if (setting->given.empty()) continue;
        expect_no_option(*setting);
        expect_one_of_contraries(*setting);
        expect_what_it_needs(*setting, assigned);
        std::string text;
        for (const std::string& item : setting->given)
            text += (&item == &setting->given.front() ? "" : std::string(1, setting->separator)) + item;
        if (setting->is_flag) text = setting->given.back();
        setting->origin = setting->is_positional ? setting->key : "--" + setting->key;
        if (!setting->from_text(text)) {
            // Of texts that are given one at a time none is a list.
            const bool one_at_a_time = setting->is_list && setting->separator != ',';
            throw RequestError(
                fmt::format("{}: {}: expected {}", setting->origin, in_quotes(text),
                            one_at_a_time ? fmt::format("{}, not empty", setting->value) : setting->expected));
        }
        expect_no_repeats(*setting, setting->origin);
    }
}

}  // namespace faultline::cli
