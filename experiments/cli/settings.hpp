// SPDX-License-Identifier: Apache-2.0
// The settings of a command: each is declared once, and is then an option of the command line (--key), a key of the
// command's table in a TOML file (--config), and something that --set key=value changes. The command line beats --set,
// --set beats the file. print() gives the whole configuration in force, which read back makes the same run.
#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace CLI {
class App;
}

namespace faultline::cli {

class Settings {
  public:
    /// `command`: the name of the table in a TOML file.
    explicit Settings(std::string command);
    ~Settings();
    Settings(Settings&&) noexcept;

    /// Each binds a key to a variable, which keeps its value where nobody sets it and must outlive the settings. `value`
    /// is what stands for the value in --help, "FILE".
    /// Not empty.
    void text(const std::string& key, std::string& target, const std::string& value, const std::string& help);
    /// From `least` to `most`; a default below `least` stands for "not set" and is not printed.
    void integer(const std::string& key, std::int64_t& target, std::int64_t least, const std::string& value,
                 const std::string& help, std::int64_t most = std::numeric_limits<std::int64_t>::max());
    void number(const std::string& key, std::optional<double>& target, const std::string& value,
                const std::string& help);
    void positive_number(const std::string& key, std::optional<double>& target, const std::string& value,
                         const std::string& help);
    void flag(const std::string& key, bool& target, const std::string& help);
    /// --key and --no-key.
    void choice(const std::string& key, std::optional<bool>& target, const std::string& help);
    /// Names, separated by commas or by giving the option again.
    void list(const std::string& key, std::vector<std::string>& target, const std::string& value,
              const std::string& help);
    void list(const std::string& key, std::vector<int>& target, const std::string& value, const std::string& help);
    void list(const std::string& key, std::vector<double>& target, const std::string& value, const std::string& help);
    /// Texts that may hold commas themselves: one each time the option is given.
    void items(const std::string& key, std::vector<std::string>& target, const std::string& value,
               const std::string& help);
    /// A positional argument. `needed`: --help says so; whether it is there is for the command to ask, since a file may give it.
    void positional(const std::string& key, std::string& target, const std::string& help, bool needed = true);
    /// All positional arguments.
    void positionals(const std::string& key, std::vector<std::string>& target, const std::string& help,
                     bool needed = true);
    /// The same by a one-letter option too: short_name("output", 'o').
    void short_name(const std::string& key, char letter);

    /// Before --help is printed of the command that add_to() was given.
    void mark_needed(CLI::App& command) const;
    /// Declares the options, and --config, --set, --print-config. The help of each ends with what its variable holds then, the
    /// default, unless it has a sentence about it.
    void add_to(CLI::App& command);
    /// Reads file, --set and command line, in this order. `commands`: the tables that a file may have beside this one.
    /// RequestError naming file, key and what was expected.
    void read(const std::vector<std::string_view>& commands);
    [[nodiscard]] bool print_requested() const { return print_config_; }
    /// The configuration in force as TOML: [command] and every key that has a value.
    [[nodiscard]] std::string print() const;
    /// The setting, "--plan", whose value is the name of that very file or of a folder that holds it, whatever either is
    /// called (a link, another path), or of a plan that has it among its bases; "" for none. The key `except` does not count.
    [[nodiscard]] std::string setting_that_names(const std::string& file, std::string_view except) const;
    /// A file's table of settings; `where` begins the place in its refusals ("sweep.toml: train"). For commands whose file
    /// holds more than one set of them; see setting.hpp for the table. RequestError as of read().
    struct Table;
    void read(const Table& table, const std::string& where);
    /// One key of it.
    struct Value;
    void read(const Value& value, const std::string& where);
    /// The values of this key are options of another program, "--account=x"; of any other key such a value is refused, as the
    /// next option in place of a value that was forgotten.
    void holds_options(const std::string& key);
    /// The items of this list may be the same: two faults alike are two faults. Of any other list an item that is there twice
    /// is refused.
    void may_repeat(const std::string& key);
    /// This setting is read where the setting `other` has a value that somebody gave, and refused without it, whatever its own.
    void means_nothing_without(const std::string& key, const std::string& other);
    /// The file that this positional argument names last is read as --config is, where it is one: its table of the command
    /// need not be there, and `others` may be.
    void config_too(const std::string& key, std::vector<std::string_view> others);
    /// Whether the key is one of this command's.
    [[nodiscard]] bool has(std::string_view key) const;
    /// Whether the command line (as an option or by its place) or --set gave the key. What a file gives may be meant for another use of the command.
    [[nodiscard]] bool given(std::string_view key) const;
    /// Whether a file gave the key, and neither the command line nor --set.
    [[nodiscard]] bool in_file(std::string_view key) const;
    /// Whether the key has a value that is printed: given anywhere, or a default that is not empty.
    [[nodiscard]] bool has_value(std::string_view key) const;
    /// RequestError where one of these keys was given so, though `without` ("without --maximize", "with --list") says that
    /// nothing reads it: what is asked for and not done is refused.
    void refuse_unread(std::initializer_list<std::string_view> unread, std::string_view without) const;
    /// Where a key's value came from, to begin an error with: "--plan", "--set plan", "run.toml: attribute.plan".
    [[nodiscard]] std::string where(std::string_view key) const;

  private:
    struct Setting;
    void number(const std::string& key, std::optional<double>& target, const std::string& value,
                const std::string& help, bool positive);
    template <class T>
    static void list_of(Setting& setting, std::vector<T>& target, std::string (*print)(T));
    Setting& add(const std::string& key, const std::string& value, const std::string& help,
                 const std::string& expected);
    static std::string help_of(const Setting& setting);
    Setting* find(std::string_view key);
    [[nodiscard]] std::vector<std::string_view> keys() const;
    void read_file(const std::string& path, const std::vector<std::string_view>& commands, bool needed);
    void read_config_too(const std::vector<std::string_view>& commands);
    void read_assignment(const std::string& assignment);
    static void expect_no_option(const Setting& setting);
    static void expect_one_of_contraries(const Setting& setting);
    static void expect_no_repeats(const Setting& setting, const std::string& where);
    void expect_what_it_needs(const Setting& setting, const std::vector<std::string_view>& assigned) const;

    std::string command_;
    std::vector<std::unique_ptr<Setting>> settings_;
    std::vector<std::string> config_;
    std::string config_too_;
    std::vector<std::string_view> config_too_tables_;
    std::vector<std::string> assignments_;
    bool print_config_ = false;
};

}  // namespace faultline::cli
