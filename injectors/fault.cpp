// SPDX-License-Identifier: Apache-2.0
#include <faultline/injectors/fault.hpp>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <limits>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <faultline/base/error.hpp>
#include <faultline/format/names.hpp>
#include <faultline/plan/nearest_name.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline {
namespace {

constexpr std::array<LawInfo, 8> law_table{{
    {Law::fixed, "fixed", "the same sign everywhere and always"},
    {Law::per_head, "per_head", "a sign for each head, always the same; neighbours in a pair have opposite ones"},
    {Law::per_column, "per_column", "a sign for each column, always the same"},
    {Law::random, "random", "a sign for each element and step"},
    {Law::random_step, "random_step", "a sign for each head and step, common to its elements"},
    {Law::flip, "flip", "the same sign everywhere, reversed every K steps (flip@K)"},
    {Law::operand, "operand", "the sign of the value: away from zero; with a negative magnitude toward it"},
    {Law::multiplicative, "multiplicative", "the value times one plus the magnitude"},
}};

constexpr std::array<std::pair<Hold, std::string_view>, 3> holds{
    {{Hold::stochastic, "stochastic"}, {Hold::nearest, "nearest"}, {Hold::exact, "exact"}}};

std::vector<std::string_view> split(std::string_view text, char separator) {
    std::vector<std::string_view> parts;
    for (std::size_t begin = 0; begin <= text.size();) {
        const std::size_t end = std::min(text.find(separator, begin), text.size());
        parts.push_back(text.substr(begin, end - begin));
        begin = end + 1;
    }
    return parts;
}

template <class T>
std::optional<T> number(std::string_view text) {
    if (text.starts_with('+')) text.remove_prefix(1);
    T value{};
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (text.empty() || error != std::errc{} || end != text.data() + text.size()) return std::nullopt;
    return value;
}

/// Reads one word, its whole text at hand for messages.
class Parser {
  public:
    explicit Parser(std::string_view text) : text_(text) {}

    Fault parse() {
        const std::vector<std::string_view> parts = split(text_, ':');
        if (parts.size() < 3) fail("expected SITE:LAW:MAGNITUDE, e.g. delta:multiplicative:0.1");
        site(parts[0]);
        law(parts[1]);
        magnitude(parts[2]);
        std::vector<std::string_view> given;
        for (std::size_t i = 3; i < parts.size(); ++i) {
            const std::string_view key = parts[i].substr(0, parts[i].find('='));
            option(parts[i]);
            if (std::find(given.begin(), given.end(), key) != given.end())
                fail(fmt::format("{}: is there twice: expected it once", key));
            given.push_back(key);
        }
        if (fault_.from >= fault_.until) fail("from must be less than until");
        expect_columns();
        return fault_;
    }

  private:
    [[noreturn]] void fail(const std::string& what) const {
        throw RequestError(fmt::format("fault {}: {}", in_quotes(text_), what));
    }

    /// What would choose columns or heads where there are none to choose.
    void expect_columns() const {
        const ModelSite* model = std::get_if<ModelSite>(&fault_.site);
        if (fault_.column >= 0 && model == nullptr)
            fail(fmt::format(
                "column={}: {} is in the attention kernel, whose tiles are not the model's columns: expected "
                "heads=N, or a site of the model",
                fault_.column, site_name(fault_)));
        if (fault_.heads.empty() || model == nullptr) return;
        if (*model == ModelSite::layer_norm_statistics)
            fail(
                "heads: layer_norm_statistics has a mean and a deviation of each token: expected column=0 or 1, or none");
        if (fault_.column >= 0)
            fail(fmt::format("heads: is beside column={}, which is one head's: expected one of them", fault_.column));
    }

    void site(std::string_view name) {
        if (const auto found = find_site(name)) {
            fault_.site = *found;
            if (*found == Site::scale) fail("\"scale\" is a constant of the call: expected a site of a tile or row");
        } else if (const auto model = find_model_site(name)) {
            fault_.site = *model;
        } else {
            std::vector<std::string_view> known;
            for (const SiteInfo& s : sites()) known.push_back(s.name);
            for (const ModelSiteInfo& s : model_sites()) known.push_back(s.name);
            fail(fmt::format("site {}: {}", in_quotes(name), expected_one_of(name, known)));
        }
    }

    void law(std::string_view name) {
        const std::size_t at = name.find('@');
        const auto found = find_law(name.substr(0, at));
        if (!found) {
            std::vector<std::string_view> known;
            for (const LawInfo& l : law_table) known.push_back(l.name);
            fail(fmt::format("law {}: {}", in_quotes(name), expected_one_of(name, known)));
        }
        fault_.law = *found;
        if (*found == Law::flip) {
            const auto period = at == std::string_view::npos ? std::nullopt : number<int>(name.substr(at + 1));
            if (!period || *period < 1) fail("law flip: expected flip@K, K steps between reversals, 1 or more");
            fault_.period = *period;
        } else if (at != std::string_view::npos) {
            fail(fmt::format("law {}: only flip has a period", in_quotes(name)));
        }
    }

    void magnitude(std::string_view word) {
        double factor = 1;
        std::string_view digits = word;
        if (digits.ends_with("ulps")) digits.remove_suffix(1);
        if (digits.ends_with("ulp")) {
            digits.remove_suffix(3);
            fault_.unit = Fault::Unit::ulps;
        } else if (digits.ends_with('%')) {
            digits.remove_suffix(1);
            factor = 0.01;
        }
        const auto value = number<double>(digits);
        if (!value || !std::isfinite(*value))
            fail(
                fmt::format("magnitude {}: expected a number relative to the tile's rms (0.1 or 10%) or of ulps (2ulp)",
                            in_quotes(word)));
        // Divided, not multiplied by a rounded 0.01: 10% is the double 0.1.
        fault_.magnitude = factor == 1 ? *value : *value / 100;
        if (fault_.magnitude != 0 && std::abs(fault_.magnitude) < std::numeric_limits<float>::min())
            fail(fmt::format("magnitude {}: changes nothing: expected 0, or 1.2e-38 or more, the least that fp32 has",
                             in_quotes(word)));
    }

    std::vector<int> indices(std::string_view key, std::string_view list) const {
        std::vector<int> found;
        for (const std::string_view item : split(list, ',')) {
            const auto value = number<int>(item);
            if (!value || *value < 0) fail(fmt::format("{}={}: expected integers of 0 or more", key, list));
            if (std::find(found.begin(), found.end(), *value) != found.end())
                fail(fmt::format("{}={}: {} is there twice: expected it once", key, list, *value));
            found.push_back(*value);
        }
        return found;
    }

    std::int64_t count(std::string_view key, std::string_view value) const {
        const auto found = number<std::int64_t>(value);
        if (!found || *found < 0) fail(fmt::format("{}={}: expected an integer of 0 or more", key, value));
        return *found;
    }

    void option(std::string_view word) {
        const std::size_t equals = word.find('=');
        const std::string_view key = word.substr(0, equals);
        const std::string_view value = equals == std::string_view::npos ? "" : word.substr(equals + 1);
        constexpr std::array<std::string_view, 10> keys{"shape", "layers", "heads", "column", "from",
                                                        "until", "seed",   "hold",  "format", "record"};
        if (key == "shape") {
            if (value != "value" && value != "constant")
                fail(fmt::format("shape={}: expected constant or value", value));
            fault_.by_value = value == "value";
        } else if (key == "layers") {
            fault_.layers = indices(key, value);
        } else if (key == "heads") {
            fault_.heads = indices(key, value);
        } else if (key == "column") {
            constexpr int most = std::numeric_limits<int>::max();
            if (count(key, value) > most) fail(fmt::format("column={}: expected 0 to {}", value, most));
            fault_.column = static_cast<int>(count(key, value));
        } else if (key == "from") {
            fault_.from = count(key, value);
        } else if (key == "until") {
            fault_.until = count(key, value);
        } else if (key == "seed") {
            fault_.seed = static_cast<std::uint64_t>(count(key, value));
        } else if (key == "hold") {
            const auto found =
                std::find_if(holds.begin(), holds.end(), [&](const auto& h) { return h.second == value; });
            if (found == holds.end()) fail(fmt::format("hold={}: expected stochastic, nearest or exact", value));
            fault_.hold = found->first;
        } else if (key == "record") {
            if (value != "all" && value != "sample") fail(fmt::format("record={}: expected all or sample", value));
            fault_.sampled = value == "sample";
        } else if (key == "format") {
            fault_.format = find_format(value);
            if (!fault_.format) {
                std::vector<std::string_view> known;
                for (const NamedFormat& f : all_formats()) known.push_back(f.name);
                fail(fmt::format("format={}: {}", value, expected_one_of(value, known)));
            }
        } else {
            fail(fmt::format("{}: {}", in_quotes(word), expected_one_of(key, keys)));
        }
    }

    std::string_view text_;
    Fault fault_;
};

}  // namespace

std::span<const LawInfo> laws() { return law_table; }
std::string_view name(Law law) { return law_table[static_cast<std::size_t>(law)].name; }
std::optional<Law> find_law(std::string_view wanted) {
    std::string underscored(wanted);
    std::replace(underscored.begin(), underscored.end(), '-', '_');
    for (const LawInfo& l : law_table)
        if (l.name == underscored) return l.law;
    return std::nullopt;
}

bool Fault::active(std::int64_t step, int layer) const {
    return step >= from && step < until &&
           (layers.empty() || std::find(layers.begin(), layers.end(), layer) != layers.end());
}

bool Fault::touches_head(int head) const {
    return heads.empty() || std::find(heads.begin(), heads.end(), head) != heads.end();
}

Fault parse_fault(std::string_view text) { return Parser(text).parse(); }

std::string_view site_name(const Fault& fault) {
    return std::visit([](auto site) { return name(site); }, fault.site);
}

std::string to_string(const Fault& fault) {
    std::string out = fmt::format("{}:{}", site_name(fault), name(fault.law));
    if (fault.law == Law::flip) out += fmt::format("@{}", fault.period);
    out += fmt::format(":{}{}", fault.magnitude, fault.unit == Fault::Unit::ulps ? "ulp" : "");
    if (fault.by_value) out += ":shape=value";
    if (!fault.layers.empty()) out += fmt::format(":layers={}", fmt::join(fault.layers, ","));
    if (!fault.heads.empty()) out += fmt::format(":heads={}", fmt::join(fault.heads, ","));
    if (fault.column >= 0) out += fmt::format(":column={}", fault.column);
    if (fault.from != Fault{}.from) out += fmt::format(":from={}", fault.from);
    if (fault.until != Fault{}.until) out += fmt::format(":until={}", fault.until);
    if (fault.seed != 0) out += fmt::format(":seed={}", fault.seed);
    if (fault.hold != Fault{}.hold) out += fmt::format(":hold={}", holds[static_cast<std::size_t>(fault.hold)].second);
    if (fault.format) out += fmt::format(":format={}", name(*fault.format));
    if (fault.sampled) out += ":record=sample";
    return out;
}

}  // namespace faultline
