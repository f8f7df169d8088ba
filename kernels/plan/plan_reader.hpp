// SPDX-License-Identifier: Apache-2.0
// The nodes of a plan's TOML file as values: numbers, names, formats, accumulations, sites, tiles. What a file is based on, and
// where files are, is plan_toml.cpp's.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <faultline/base/error.hpp>
#include <faultline/format/names.hpp>
#include <faultline/plan/nearest_name.hpp>
#include <faultline/plan/plan.hpp>
#include <faultline/plan/schedule_fields.hpp>
#include <faultline/plan/tomlplusplus.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline::plan_file {

/// "sites.p_cast" of "sites" and "p_cast".
[[nodiscard]] std::string joined(std::string_view path, std::string_view key);
/// "an array": what a node is, for a sentence.
[[nodiscard]] std::string_view kind_of(const toml::node& node);

/// Reads one file's nodes; every error is a RequestError that names the file, the place and the field.
class PlanReader {
  public:
    explicit PlanReader(std::string_view source) : source_(source) {}

    [[noreturn]] void fail(const toml::source_region& at, std::string_view field, const std::string& what) const {
        std::string place = escaped(source_);
        if (at.begin) place += ":" + std::to_string(at.begin.line) + ":" + std::to_string(at.begin.column);
        throw RequestError(place + ": " + (field.empty() ? "" : std::string(field) + ": ") + what);
    }
    [[noreturn]] void fail_type(const toml::node& node, std::string_view field, std::string_view expected) const {
        fail(node.source(), field, "is " + std::string(kind_of(node)) + ": expected " + std::string(expected));
    }

    [[noreturn]] void fail_choice(const toml::value<std::string>& text, std::string_view field, std::string_view kind,
                                  std::span<const std::string_view> names) const {
        fail(text.source(), field,
             "no such " + std::string(kind) + " " + in_quotes(text.get()) + ": " + expected_one_of(text.get(), names));
    }

    [[nodiscard]] const toml::table& table(const toml::node& node, std::string_view field,
                                           std::string_view expected) const {
        if (const auto* found = node.as_table()) return *found;
        fail_type(node, field, expected);
    }
    void check_keys(const toml::table& table, std::string_view path, std::span<const std::string_view> allowed) const {
        for (const auto& [key, node] : table)
            if (std::find(allowed.begin(), allowed.end(), key.str()) == allowed.end())
                fail(key.source(), joined(path, escaped(key.str())),
                     "no such field: " + expected_one_of(key.str(), allowed));
    }

    void read(const toml::node& node, std::string_view field, int& value) const {
        const auto* found = node.as_integer();
        if (found == nullptr) fail_type(node, field, "an integer");
        if (found->get() < std::numeric_limits<int>::min() || found->get() > std::numeric_limits<int>::max())
            fail(node.source(), field, "is " + std::to_string(found->get()) + ": expected an integer of 32 bits");
        value = static_cast<int>(found->get());
    }
    void read(const toml::node& node, std::string_view field, double& value) const {
        const std::optional<double> found = node.is_number() ? node.value<double>() : std::nullopt;
        if (!found) fail_type(node, field, "a number");
        if (!std::isfinite(*found)) fail(node.source(), field, "is not finite: expected a finite number");
        value = *found;
    }
    void read(const toml::node& node, std::string_view field, bool& value) const {
        const auto* found = node.as_boolean();
        if (found == nullptr) fail_type(node, field, "true or false");
        value = found->get();
    }
    void read(const toml::node& node, std::string_view field, std::string& value) const {
        const auto* found = node.as_string();
        if (found == nullptr) fail_type(node, field, "a string");
        value = found->get();
    }
    template <class T>
    void read(const toml::node& node, std::string_view field, std::optional<T>& value) const {
        read(node, field, value.emplace());
    }
    template <class E>
    requires requires { enumerators<E>(); }
    void read(const toml::node& node, std::string_view field, E& value) const {
        std::array<std::string_view, enumerators<E>().size()> names;
        for (std::size_t i = 0; i < names.size(); ++i) names[i] = enumerators<E>()[i].name;
        value = enumerators<E>()[choice(node, field, names)].value;
    }
    void read(const toml::node& node, std::string_view field, Rounding& value) const {
        std::vector<std::string_view> names;
        for (const Rounding mode : all_roundings()) names.push_back(name(mode));
        value = all_roundings()[choice(node, field, names)];
    }

    /// The position of the node's text among the names.
    [[nodiscard]] std::size_t choice(const toml::node& node, std::string_view field,
                                     std::span<const std::string_view> names) const {
        const auto* text = node.as_string();
        if (text == nullptr) fail_type(node, field, "a string, one of " + listed(names));
        const auto found = std::find(names.begin(), names.end(), text->get());
        if (found == names.end()) fail_choice(*text, field, "value", names);
        return static_cast<std::size_t>(found - names.begin());
    }
    static std::string listed(std::span<const std::string_view> names) {
        std::string text;
        for (const std::string_view name : names) (text += text.empty() ? "" : ", ") += name;
        return text;
    }

    /// Reads every key of the table with the field's reader; `fields(visit)` calls visit(name, field).
    template <class Fields>
    void read_fields(const toml::table& table, std::string_view path, Fields&& fields) const {
        std::vector<std::string_view> names;
        fields([&](std::string_view field_name, auto&) { names.push_back(field_name); });
        check_keys(table, path, names);
        fields([&](std::string_view field_name, auto& field) {
            if (const toml::node* node = table.get(field_name)) read(*node, joined(path, field_name), field);
        });
    }

    void read(const toml::node& node, std::string_view field, Format& value) const;
    void read(const toml::node& node, std::string_view field, Accumulation& value) const;
    void read_sites(const toml::node& node, RoundingPlan& plan) const;
    void settle_idle(const toml::table& root, RoundingPlan& plan) const;
    /// Where the field stands, or what it is in, where that comes from the base.
    [[nodiscard]] static toml::source_region place_of(const toml::table& root, std::string_view field);
    void read_tiles(const toml::node& node, RoundingPlan& plan) const;
    static void release_tiles(const toml::table& schedule, RoundingPlan& plan);
    [[nodiscard]] const std::string& source() const { return source_; }

  private:
    void refuse_idle_fields(const toml::table& root, const RoundingPlan& plan, const RoundingPlan& settled) const;
    void refuse_idle_cases(const toml::table& root, const RoundingPlan& plan) const;
    void refuse_idle_rules(const toml::table& root, const RoundingPlan& plan, const RoundingPlan& settled) const;
    void read_unit(const toml::table& table, std::string_view field, MatrixUnit& unit) const;

    std::string source_;
};

}  // namespace faultline::plan_file
