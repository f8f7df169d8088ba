// SPDX-License-Identifier: Apache-2.0
#include <faultline/cli/settings.hpp>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>

#include <fmt/format.h>
#include <CLI/CLI.hpp>
#include <faultline/plan/tomlplusplus.hpp>

#include <faultline/base/error.hpp>
#include <faultline/plan/nearest_name.hpp>
#include <faultline/tensor/input.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline::cli {

struct Settings::Setting {
    std::string key, value, help, expected;
    char letter = 0;
    bool is_flag = false, is_choice = false, is_list = false, is_positional = false;
    std::function<bool(const toml::node&)> from_toml;     ///< false: of another type, or out of range
    std::function<bool(const std::string&)> from_text;    ///< the same, one value or items between separators
    char separator = ',';                                 ///< between the items of a list
    std::function<std::optional<std::string>()> to_toml;  ///< nothing where there is no value to write
    std::vector<std::string> given;                       ///< as the command line has it
    std::string origin;
};

namespace {

std::string toml_string(const std::string& text) {
    std::string out = "\"";
    for (const char c : text) {
        if (c == '"' || c == '\\')
            out += '\\', out += c;
        else if (static_cast<unsigned char>(c) < 0x20 || c == 0x7F)
            out += fmt::format("\\u{:04X}", static_cast<unsigned>(c));
        else
            out += c;
    }
    return out + '"';
}

std::string toml_strings(const std::vector<std::string>& items) {
    std::string out = "[";
    for (const std::string& item : items) out += (out.size() > 1 ? ", " : "") + toml_string(item);
    return out + "]";
}

template <class T>
bool parse_number(const std::string& text, T& value) {
    T parsed{};
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), parsed);
    if (text.empty() || error != std::errc{} || end != text.data() + text.size()) return false;
    value = parsed;
    return true;
}

constexpr char unit_separator = '\x1f';  // between items that may hold commas; no shell types it by accident

/// "a,b,c"; false where an item is empty.
bool split_items(const std::string& text, char separator, std::vector<std::string>& items) {
    for (std::size_t begin = 0; begin <= text.size();) {
        const std::size_t end = std::min(text.find(separator, begin), text.size());
        if (end == begin) return false;
        items.push_back(text.substr(begin, end - begin));
        begin = end + 1;
    }
    return true;
}

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
    if (const auto value = node.value<double>(); value && node.is_floating_point()) return fmt::format(" ({})", *value);
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

}  // namespace

Settings::Settings(std::string command) : command_(std::move(command)) {}
Settings::~Settings() = default;
Settings::Settings(Settings&&) noexcept = default;

Settings::Setting& Settings::add(const std::string& key, const std::string& value, const std::string& help,
                                 const std::string& expected) {
    settings_.push_back(std::make_unique<Setting>());
    Setting& setting = *settings_.back();
    setting.key = key;
    setting.value = value;
    setting.help = help;
    setting.expected = expected;
    return setting;
}

void Settings::text(const std::string& key, std::string& target, const std::string& value, const std::string& help) {
    Setting& setting = add(key, value, help, "a string");
    setting.from_text = [&target](const std::string& text) { return target = text, true; };
    setting.from_toml = [&target](const toml::node& node) {
        if (!node.is_string()) return false;
        target = **node.as_string();
        return true;
    };
    setting.to_toml = [&target]() -> std::optional<std::string> {
        if (target.empty()) return std::nullopt;
        return toml_string(target);
    };
}

void Settings::positional(const std::string& key, std::string& target, const std::string& help) {
    text(key, target, "", help);
    settings_.back()->is_positional = true;
}

void Settings::integer(const std::string& key, std::int64_t& target, std::int64_t least, const std::string& value,
                       const std::string& help) {
    Setting& setting = add(key, value, help, fmt::format("an integer of {} or more", least));
    setting.from_text = [&target, least](const std::string& text) {
        return parse_number(text, target) && target >= least;
    };
    setting.from_toml = [&target, least](const toml::node& node) {
        if (!node.is_integer()) return false;
        target = **node.as_integer();
        return target >= least;
    };
    setting.to_toml = [&target] { return fmt::format("{}", target); };
}

void Settings::number(const std::string& key, std::optional<double>& target, const std::string& value,
                      const std::string& help) {
    Setting& setting = add(key, value, help, "a number");
    setting.from_text = [&target](const std::string& text) {
        double parsed = 0;
        if (!parse_number(text, parsed) || !std::isfinite(parsed)) return false;
        target = parsed;
        return true;
    };
    setting.from_toml = [&target](const toml::node& node) {
        if (!node.is_number()) return false;
        target = node.value<double>();
        return target && std::isfinite(*target);
    };
    setting.to_toml = [&target]() -> std::optional<std::string> {
        if (!target) return std::nullopt;
        std::string text = fmt::format("{}", *target);
        if (text.find_first_of(".e") == std::string::npos) text += ".0";
        return text;
    };
}

void Settings::flag(const std::string& key, bool& target, const std::string& help) {
    Setting& setting = add(key, "", help, "true or false");
    setting.is_flag = true;
    setting.from_text = [&target](const std::string& text) {
        return target = text == "true", text == "true" || text == "false";
    };
    setting.from_toml = [&target](const toml::node& node) {
        if (!node.is_boolean()) return false;
        target = **node.as_boolean();
        return true;
    };
    setting.to_toml = [&target] { return std::string(target ? "true" : "false"); };
}

void Settings::choice(const std::string& key, std::optional<bool>& target, const std::string& help) {
    Setting& setting = add(key, "", help, "true or false");
    setting.is_flag = setting.is_choice = true;
    setting.from_text = [&target](const std::string& text) {
        return target = text == "true", text == "true" || text == "false";
    };
    setting.from_toml = [&target](const toml::node& node) {
        if (!node.is_boolean()) return false;
        target = **node.as_boolean();
        return true;
    };
    setting.to_toml = [&target]() -> std::optional<std::string> {
        if (!target) return std::nullopt;
        return *target ? "true" : "false";
    };
}

void Settings::list(const std::string& key, std::vector<std::string>& target, const std::string& value,
                    const std::string& help) {
    Setting& setting = add(key, value, help, "a list of strings");
    setting.is_list = true;
    setting.from_text = [&target, &setting](const std::string& text) {
        return target.clear(), split_items(text, setting.separator, target);
    };
    setting.from_toml = [&target](const toml::node& node) {
        const toml::array* items = node.as_array();
        if (items == nullptr) return false;
        target.clear();
        for (const toml::node& item : *items) {
            if (!item.is_string()) return false;
            target.push_back(**item.as_string());
        }
        return true;
    };
    setting.to_toml = [&target]() -> std::optional<std::string> { return toml_strings(target); };
}

void Settings::list(const std::string& key, std::vector<int>& target, const std::string& value,
                    const std::string& help) {
    Setting& setting = add(key, value, help, "a list of integers of 0 or more");
    setting.is_list = true;
    setting.from_text = [&target](const std::string& text) {
        std::vector<std::string> items;
        if (!split_items(text, ',', items)) return false;
        target.clear();
        for (const std::string& item : items) {
            int parsed = 0;
            if (!parse_number(item, parsed) || parsed < 0) return false;
            target.push_back(parsed);
        }
        return true;
    };
    setting.from_toml = [&target](const toml::node& node) {
        const toml::array* items = node.as_array();
        if (items == nullptr) return false;
        target.clear();
        for (const toml::node& item : *items) {
            const auto parsed = item.is_integer() ? item.value<std::int64_t>() : std::nullopt;
            if (!parsed || *parsed < 0 || *parsed > std::numeric_limits<int>::max()) return false;
            target.push_back(static_cast<int>(*parsed));
        }
        return true;
    };
    setting.to_toml = [&target]() -> std::optional<std::string> {
        std::string out = "[";
        for (const int item : target) out += (out.size() > 1 ? ", " : "") + fmt::format("{}", item);
        return out + "]";
    };
}

void Settings::items(const std::string& key, std::vector<std::string>& target, const std::string& value,
                     const std::string& help) {
    list(key, target, value, help);
    settings_.back()->separator = unit_separator;
}

void Settings::short_name(const std::string& key, char letter) { find(key)->letter = letter; }

void Settings::add_to(CLI::App& command) {
    for (const auto& setting : settings_) {
        std::string names = (setting->is_positional ? "" : "--") + setting->key;
        if (setting->letter != 0) names = fmt::format("-{},{}", setting->letter, names);
        std::vector<std::string>& given = setting->given;
        if (setting->is_flag) {
            if (setting->is_choice) names += fmt::format(",!--no-{}", setting->key);
            command.add_flag_function(
                names, [&given](std::int64_t count) { given = {count > 0 ? "true" : "false"}; }, setting->help);
            continue;
        }
        // Every option is kept as text here, so that all values, wherever they come from, are read and refused alike.
        const auto keep = [&given](const CLI::results_t& results) { return given = results, true; };
        CLI::Option* option = command.add_option(names, keep, setting->help);
        option->type_name(setting->is_positional ? "" : setting->value);
        option->multi_option_policy(setting->is_list ? CLI::MultiOptionPolicy::TakeAll
                                                     : CLI::MultiOptionPolicy::TakeLast);
    }
    command.add_option("--config", config_, fmt::format("Read settings from the table [{}] of a TOML file", command_))
        ->type_name("FILE.toml");
    command
        .add_option(
            "--set", [this](const CLI::results_t& results) { return assignments_ = results, true; },
            "Change one setting: --set threads=2")
        ->type_name("KEY=VALUE")
        ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
    command.add_flag("--print-config", print_config_, "Print the configuration in force as TOML and stop");
}

Settings::Setting* Settings::find(std::string_view key) {
    for (const auto& setting : settings_)
        if (setting->key == key) return setting.get();
    return nullptr;
}

std::vector<std::string_view> Settings::keys() const {
    std::vector<std::string_view> keys;
    for (const auto& setting : settings_) keys.push_back(setting->key);
    return keys;
}

void Settings::read_file(const std::string& path, const std::vector<std::string_view>& commands) {
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
        for (const auto& [key, value] : *node.as_table()) {
            const std::string where = fmt::format("{}: {}.{}", file, command_, escaped(key.str()));
            Setting* setting = find(key.str());
            if (setting == nullptr) {
                throw RequestError(fmt::format("{}: unknown key: {}", where, expected_one_of(key.str(), keys())));
            }
            if (!setting->from_toml(value)) {
                throw RequestError(
                    fmt::format("{}: is {}{}: expected {}", where, kind(value), value_text(value), setting->expected));
            }
            setting->origin = where;
        }
    }
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
        if (parsed.size() == 1 && setting->from_toml(*parsed.get("value"))) return;
    } catch (const toml::parse_error&) {
    }
    if (!setting->from_text(value)) {
        throw RequestError(fmt::format("--set {}: {}: expected {}", key, in_quotes(value), setting->expected));
    }
}

void Settings::read(const std::vector<std::string_view>& commands) {
    if (!config_.empty()) read_file(config_, commands);
    for (const std::string& assignment : assignments_) read_assignment(assignment);
    for (const auto& setting : settings_) {
        if (setting->given.empty()) continue;
        std::string text;
        for (const std::string& item : setting->given)
            text += (&item == &setting->given.front() ? "" : std::string(1, setting->separator)) + item;
        setting->origin = setting->is_positional ? setting->key : "--" + setting->key;
        if (!setting->from_text(text)) {
            throw RequestError(fmt::format("{}: {}: expected {}", setting->origin, in_quotes(text), setting->expected));
        }
    }
}

std::string Settings::print() const {
    std::string out = fmt::format("[{}]\n", command_);
    for (const auto& setting : settings_)
        if (const auto value = setting->to_toml()) out += fmt::format("{} = {}\n", setting->key, *value);
    return out;
}

std::string Settings::where(std::string_view key) const {
    for (const auto& setting : settings_)
        if (setting->key == key) return setting->origin.empty() ? "--" + setting->key : setting->origin;
    return std::string(key);
}

}  // namespace faultline::cli
