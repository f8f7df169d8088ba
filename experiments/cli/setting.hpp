// SPDX-License-Identifier: Apache-2.0
// One setting: how it is read from text and from TOML. For the sources of Settings.
#pragma once

#include <faultline/cli/settings.hpp>
#include <faultline/plan/tomlplusplus.hpp>

namespace faultline::cli {

struct Settings::Setting {
    std::string key, value, help, expected;
    char letter = 0;
    bool is_flag = false, is_choice = false, is_list = false, is_positional = false, is_needed = false;
    bool may_repeat = false;                              ///< a list whose items may be the same
    std::string needs;                                    ///< the setting without which this one means nothing
    std::function<std::string()> repeated;                ///< of a list: the first item that is there twice; else ""
    bool holds_options = false;                           ///< of another program: they begin with "--"
    std::function<bool(const toml::node&)> from_toml;     ///< false: of another type, or out of range
    std::function<bool(const std::string&)> from_text;    ///< the same, one value or items between separators
    char separator = ',';                                 ///< between the items of a list
    std::function<std::optional<std::string>()> to_toml;  ///< nothing where there is no value to write
    std::function<std::vector<std::string>()> texts;      ///< what may be a file's name
    std::vector<std::string> given;                       ///< as the command line has it
    std::string origin;
};

struct Settings::Table {
    const toml::table& of;
};
struct Settings::Value {
    std::string_view key;
    const toml::node& node;
};

}  // namespace faultline::cli
