// SPDX-License-Identifier: Apache-2.0
#include <faultline/cli/setting.hpp>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <limits>
#include <system_error>
#include <type_traits>

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <faultline/base/error.hpp>
#include <faultline/plan/plan_files.hpp>

namespace faultline::cli {
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

std::string toml_number(double x) {
    const std::string text = fmt::format("{}", x);
    return text + (text.find_first_of(".e") == std::string::npos ? ".0" : "");
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
    Setting& setting = add(key, value, help, "a string that is not empty");
    setting.from_text = [&target](const std::string& text) { return target = text, !text.empty(); };
    setting.from_toml = [&target](const toml::node& node) {
        if (!node.is_string()) return false;
        target = **node.as_string();
        return !target.empty();
    };
    setting.texts = [&target] { return std::vector<std::string>{target}; };
    setting.to_toml = [&target]() -> std::optional<std::string> {
        if (target.empty()) return std::nullopt;
        return toml_string(target);
    };
}

void Settings::positional(const std::string& key, std::string& target, const std::string& help, bool needed) {
    text(key, target, "", help);
    settings_.back()->is_positional = true;
    settings_.back()->is_needed = needed;
}

void Settings::positionals(const std::string& key, std::vector<std::string>& target, const std::string& help,
                           bool needed) {
    items(key, target, "", help);
    settings_.back()->is_positional = true;
    settings_.back()->is_needed = needed;
}

void Settings::mark_needed(CLI::App& command) const {
    for (const auto& setting : settings_)
        if (setting->is_needed) command.get_option(setting->key)->required();
}

void Settings::integer(const std::string& key, std::int64_t& target, std::int64_t least, const std::string& value,
                       const std::string& help, std::int64_t most) {
    const bool open = most == std::numeric_limits<std::int64_t>::max();
    Setting& setting = add(key, value, help,
                           open ? fmt::format("an integer of {} or more, below 2^63", least)
                                : fmt::format("an integer from {} to {}", least, most));
    setting.from_text = [&target, least, most](const std::string& text) {
        return parse_number(text, target) && target >= least && target <= most;
    };
    setting.from_toml = [&target, least, most](const toml::node& node) {
        if (!node.is_integer()) return false;
        target = **node.as_integer();
        return target >= least && target <= most;
    };
    setting.to_toml = [&target,
                       least]() -> std::optional<std::string> {  // below the least: a default that the shape has
        return target < least ? std::nullopt : std::optional(fmt::format("{}", target));
    };
}

void Settings::number(const std::string& key, std::optional<double>& target, const std::string& value,
                      const std::string& help) {
    number(key, target, value, help, false);
}

void Settings::positive_number(const std::string& key, std::optional<double>& target, const std::string& value,
                               const std::string& help) {
    number(key, target, value, help, true);
}

void Settings::number(const std::string& key, std::optional<double>& target, const std::string& value,
                      const std::string& help, bool positive) {
    Setting& setting = add(key, value, help, positive ? "a positive number" : "a number");
    const auto fits = [positive](double x) { return std::isfinite(x) && (x > 0 || !positive); };
    setting.from_text = [&target, fits](const std::string& text) {
        double parsed = 0;
        if (!parse_number(text, parsed) || !fits(parsed)) return false;
        target = parsed;
        return true;
    };
    setting.from_toml = [&target, fits](const toml::node& node) {
        if (!node.is_number()) return false;
        target = node.value<double>();
        return target && fits(*target);
    };
    setting.to_toml = [&target]() -> std::optional<std::string> {
        if (!target) return std::nullopt;
        return toml_number(*target);
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

namespace {

/// The first item of a list that is there twice, as it is printed; "" where there is none.
template <class T, class Print>
std::string repeated_item(const std::vector<T>& items, Print print) {
    for (auto item = items.begin(); item != items.end(); ++item)
        if (std::find(items.begin(), item, *item) != item) return print(*item);
    return "";
}

}  // namespace

/// A list of numbers, of the int from 0 up or of the double that are finite.
template <class T>
void Settings::list_of(Setting& setting, std::vector<T>& target, std::string (*print)(T)) {
    const auto fits = [](T item) {
        if constexpr (std::is_integral_v<T>) return item >= 0;
        return std::isfinite(static_cast<double>(item));
    };
    setting.is_list = true;
    setting.from_text = [&target, fits](const std::string& text) {
        std::vector<std::string> items;
        if (!split_items(text, ',', items)) return false;
        target.clear();
        for (const std::string& item : items) {
            T parsed{};
            if (!parse_number(item, parsed) || !fits(parsed)) return false;
            target.push_back(parsed);
        }
        return true;
    };
    setting.from_toml = [&target, fits](const toml::node& node) {
        const toml::array* items = node.as_array();
        if (items == nullptr) return false;
        target.clear();
        for (const toml::node& item : *items) {
            const bool is_one = std::is_integral_v<T> ? item.is_integer() : item.is_number();
            const auto parsed = is_one ? item.value<T>() : std::nullopt;  // none where T does not hold it
            if (!parsed || !fits(*parsed)) return false;
            target.push_back(*parsed);
        }
        return true;
    };
    setting.repeated = [&target, print] { return repeated_item(target, print); };
    setting.to_toml = [&target, print]() -> std::optional<std::string> {
        std::string out = "[";
        for (const T item : target) out += (out.size() > 1 ? ", " : "") + print(item);
        return out + "]";
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
    setting.repeated = [&target] { return repeated_item(target, toml_string); };
    setting.to_toml = [&target]() -> std::optional<std::string> { return toml_strings(target); };
    setting.texts = [&target] { return target; };
}

void Settings::list(const std::string& key, std::vector<int>& target, const std::string& value,
                    const std::string& help) {
    list_of(
        add(key, value, help, "a list of integers from 0 to 2147483647"), target,
        +[](int item) { return fmt::format("{}", item); });
}

void Settings::list(const std::string& key, std::vector<double>& target, const std::string& value,
                    const std::string& help) {
    list_of(add(key, value, help, "a list of numbers"), target, toml_number);
}

void Settings::items(const std::string& key, std::vector<std::string>& target, const std::string& value,
                     const std::string& help) {
    list(key, target, value, help);
    settings_.back()->separator = unit_separator;
}

void Settings::config_too(const std::string& key, std::vector<std::string_view> others) {
    config_too_ = key;
    config_too_tables_ = std::move(others);
}

void Settings::may_repeat(const std::string& key) { find(key)->may_repeat = true; }

void Settings::means_nothing_without(const std::string& key, const std::string& other) { find(key)->needs = other; }

void Settings::holds_options(const std::string& key) { find(key)->holds_options = true; }

void Settings::short_name(const std::string& key, char letter) { find(key)->letter = letter; }

std::string Settings::help_of(const Setting& setting) {
    // A flag is off, and what has no value, or says its default in words, says why.
    if (setting.is_flag || setting.is_positional || setting.help.find("default") != std::string::npos)
        return setting.help;
    std::string value;
    if (setting.texts) {
        for (const std::string& item : setting.texts()) value += (value.empty() ? "" : ", ") + item;
    } else if (const auto toml = setting.to_toml(); toml && *toml != "[]") {
        value = *toml;
        if (value.ends_with(".0")) value.resize(value.size() - 2);
    }
    return value.empty() ? setting.help : fmt::format("{}; default {}", setting.help, value);
}

void Settings::add_to(CLI::App& command) {
    for (const auto& setting : settings_) {
        const std::string help = help_of(*setting);
        std::string names = (setting->is_positional ? "" : "--") + setting->key;
        if (setting->letter != 0) names = fmt::format("-{},{}", setting->letter, names);
        std::vector<std::string>& given = setting->given;
        if (setting->is_flag) {
            if (setting->is_choice) names += fmt::format(",!--no-{}", setting->key);
            command.add_flag(names, given, help);  // each time by itself: --causal --no-causal is no sum
            continue;
        }
        // Every option is kept as text here, so that all values, wherever they come from, are read and refused alike.
        const auto keep = [&given](const CLI::results_t& results) { return given = results, true; };
        CLI::Option* option = command.add_option(names, keep, help);
        option->type_name(setting->is_positional ? "" : setting->value);
        if (setting->is_positional && setting->is_list) option->expected(-1);
        option->multi_option_policy(setting->is_list ? CLI::MultiOptionPolicy::TakeAll
                                                     : CLI::MultiOptionPolicy::TakeLast);
    }
    command
        .add_option(
            "--config", [this](const CLI::results_t& results) { return config_ = results, true; },
            fmt::format("Read settings from the table [{}] of a TOML file", command_))
        ->type_name("FILE.toml")
        ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
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

bool Settings::has(std::string_view key) const {
    return std::any_of(settings_.begin(), settings_.end(), [&](const auto& setting) { return setting->key == key; });
}

std::string Settings::print() const {
    std::string out = fmt::format("[{}]\n", command_);
    for (const auto& setting : settings_)
        if (const auto value = setting->to_toml()) out += fmt::format("{} = {}\n", setting->key, *value);
    return out;
}

std::string Settings::setting_that_names(const std::string& file, std::string_view except) const {
    namespace fs = std::filesystem;
    const auto is_or_holds = [&file](const std::string& name) {
        std::error_code error;
        if (name.empty() || !fs::exists(name, error)) return false;
        if (!fs::is_directory(name, error)) return fs::equivalent(name, file, error);
        for (const fs::directory_entry& entry : fs::directory_iterator(name, error))
            if (std::error_code none; fs::equivalent(entry.path(), file, none)) return true;
        return false;
    };
    for (const std::string& name : config_)
        if (is_or_holds(name)) return "--config";
    for (const auto& setting : settings_) {
        if (!setting->texts || setting->key == except) continue;
        for (const std::string& name : setting->texts()) {
            if (is_or_holds(name)) return where(setting->key);
            if (!name.ends_with(".toml")) continue;  // a plan, which is read with its bases
            for (const fs::path& base : plan_files(name))
                if (is_or_holds(base.string())) return where(setting->key);
        }
    }
    return "";
}

bool Settings::given(std::string_view key) const {
    for (const auto& setting : settings_)
        if (setting->key == key)
            return setting->origin.starts_with("--") || (setting->is_positional && setting->origin == setting->key);
    return false;
}

bool Settings::in_file(std::string_view key) const {
    return !given(key) && std::any_of(settings_.begin(), settings_.end(), [&](const auto& setting) {
        return setting->key == key && !setting->origin.empty();
    });
}

bool Settings::has_value(std::string_view key) const {
    return std::any_of(settings_.begin(), settings_.end(),
                       [&](const auto& setting) { return setting->key == key && setting->to_toml().has_value(); });
}

void Settings::refuse_unread(std::initializer_list<std::string_view> unread, std::string_view without) const {
    for (const std::string_view key : unread)
        if (given(key)) throw RequestError(fmt::format("{}: means nothing {}: expected none", where(key), without));
}

std::string Settings::where(std::string_view key) const {
    for (const auto& setting : settings_)
        if (setting->key == key) return setting->origin.empty() ? "--" + setting->key : setting->origin;
    return std::string(key);
}

}  // namespace faultline::cli
