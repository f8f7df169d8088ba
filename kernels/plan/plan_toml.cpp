// SPDX-License-Identifier: Apache-2.0
#include <faultline/plan/plan_toml.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include <faultline/base/error.hpp>
#include <faultline/format/names.hpp>
#include <faultline/plan/nearest_name.hpp>
#include <faultline/plan/presets.hpp>
#include <faultline/plan/schedule_fields.hpp>
#include <faultline/plan/tomlplusplus.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline {
namespace {

constexpr std::uintmax_t largest_file = 1 << 20;  // a plan has some 5 KB; what is larger is another kind of file

/// The files being read: the one asked for, its base, that one's base.
using FileChain = std::vector<std::filesystem::path>;
constexpr std::size_t longest_chain = 64;  // of bases of bases: a cycle through links that no path shows ends here

RoundingPlan read_plan(const std::filesystem::path& file, FileChain chain);

std::string joined(std::string_view path, std::string_view key) {
    return path.empty() ? std::string(key) : std::string(path) + "." + std::string(key);
}

std::string_view kind_of(const toml::node& node) {
    switch (node.type()) {
        case toml::node_type::table:
            return "a table";
        case toml::node_type::array:
            return "an array";
        case toml::node_type::string:
            return "a string";
        case toml::node_type::integer:
            return "an integer";
        case toml::node_type::floating_point:
            return "a number with a point";
        case toml::node_type::boolean:
            return "a boolean";
        case toml::node_type::date:
            return "a date";
        case toml::node_type::time:
            return "a time";
        case toml::node_type::date_time:
            return "a date and time";
        case toml::node_type::none:
            break;
    }
    return "nothing";
}

/// Reads one file's nodes; every error names the file, the place and the field.
class Reader {
  public:
    explicit Reader(std::string_view source) : source_(source) {}

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
    void settle_reach(const toml::table& root, RoundingPlan& plan) const;
    /// Where the field stands, or what it is in, where that comes from the base.
    [[nodiscard]] static toml::source_region place_of(const toml::table& root, std::string_view field);
    void read_tiles(const toml::node& node, RoundingPlan& plan) const;
    static void release_tiles(const toml::table& schedule, RoundingPlan& plan);
    [[nodiscard]] RoundingPlan read_root(const toml::table& root, std::span<const RoundingPlan> bases,
                                         const FileChain* files) const;
    [[nodiscard]] RoundingPlan read_base(const toml::node& node, std::span<const RoundingPlan> bases,
                                         const FileChain* files) const;

  private:
    void read_unit(const toml::table& table, std::string_view field, MatrixUnit& unit) const;

    std::string source_;
};

void Reader::read(const toml::node& node, std::string_view field, Format& value) const {
    if (const auto* text = node.as_string()) {
        const std::optional<Format> found = find_format(text->get());
        std::vector<std::string_view> names;
        for (const NamedFormat& known : all_formats()) names.push_back(known.name);
        if (!found) fail_choice(*text, field, "format", names);
        value = *found;
        return;
    }
    const toml::table& given = table(node, field, "a format's name or a table with precision, emin, emax");
    Format format{};
    constexpr std::array<std::string_view, 7> keys{"precision",  "emin", "emax",     "subnormals",
                                                   "infinities", "nans", "saturates"};
    constexpr std::array<std::string_view, 3> kinds{"none", "single_code", "ieee"};  // in the order of NanKind
    check_keys(given, field, keys);
    for (const std::string_view needed : {"precision", "emin", "emax"})
        if (!given.contains(needed)) fail(node.source(), joined(field, needed), "is missing: expected an integer");
    read(*given.get("precision"), joined(field, "precision"), format.precision);
    read(*given.get("emin"), joined(field, "emin"), format.emin);
    read(*given.get("emax"), joined(field, "emax"), format.emax);
    if (const auto* n = given.get("subnormals")) read(*n, joined(field, "subnormals"), format.subnormals);
    if (const auto* n = given.get("nans")) format.nans = static_cast<NanKind>(choice(*n, joined(field, "nans"), kinds));
    format.infinities = format.nans == NanKind::ieee;  // as the format must have it, unless the file says otherwise
    format.saturates = format.nans == NanKind::none;
    if (const auto* n = given.get("infinities")) read(*n, joined(field, "infinities"), format.infinities);
    if (const auto* n = given.get("saturates")) read(*n, joined(field, "saturates"), format.saturates);
    if (const std::string problem = validate(format); !problem.empty()) fail(node.source(), field, problem);
    value = format;
}

void Reader::read_unit(const toml::table& given, std::string_view field, MatrixUnit& unit) const {
    constexpr std::array<std::string_view, 7> keys{"terms",          "fraction_bits",       "output", "a_min_exponent",
                                                   "b_min_exponent", "input_fraction_bits", "zero"};
    constexpr std::array<std::string_view, 3> outputs{"f32_rz", "e8m13_rz", "f16_rne"};  // in the order of OutputFormat
    constexpr std::array<std::string_view, 2> zeros{"ignored", "at_minimum"};            // in the order of ZeroOperand
    check_keys(given, field, keys);
    const auto integer = [&](std::string_view key, int& value) {
        if (const auto* n = given.get(key)) read(*n, joined(field, key), value);
    };
    integer("terms", unit.terms);
    integer("fraction_bits", unit.fraction_bits);
    integer("a_min_exponent", unit.a_min_exponent);
    integer("b_min_exponent", unit.b_min_exponent);
    integer("input_fraction_bits", unit.input_fraction_bits);
    if (const auto* n = given.get("output"))
        unit.output = static_cast<OutputFormat>(choice(*n, joined(field, "output"), outputs));
    if (const auto* n = given.get("zero"))
        unit.zero = static_cast<ZeroOperand>(choice(*n, joined(field, "zero"), zeros));
}

void Reader::read(const toml::node& node, std::string_view field, Accumulation& value) const {
    if (const auto* text = node.as_string()) {
        const std::optional<Accumulation> found = find_accumulation(text->get());
        std::vector<std::string_view> names;
        for (const NamedAccumulation& known : accumulations()) names.push_back(known.name);
        if (!found) fail_choice(*text, field, "accumulation", names);
        value = *found;
        return;
    }
    Accumulation accumulation{.kind = Accumulation::Kind::fused};
    read_unit(table(node, field, "an accumulation's name or a table with the numbers of a matrix unit"), field,
              accumulation.unit);
    try {
        validate(accumulation);
    } catch (const RequestError& error) {
        fail(node.source(), field, error.what());
    }
    value = accumulation;
}

void Reader::read_sites(const toml::node& node, RoundingPlan& plan) const {
    std::vector<std::string_view> names;
    for (const SiteInfo& site : sites()) names.push_back(site.name);
    const toml::table& given = table(node, "sites", "a table of sites");
    for (const auto& [key, rule_node] : given) {
        const std::string field = joined("sites", escaped(key.str()));
        const std::optional<Site> site = find_site(key.str());
        if (!site) fail(key.source(), field, "no such site: " + expected_one_of(key.str(), names));
        Rule rule = plan[*site];
        const toml::table& fields = table(rule_node, field, "a table with format, rounding, accumulation");
        read_fields(fields, field, [&](auto&& visit) {
            visit("format", rule.format);
            visit("rounding", rule.rounding);
            visit("accumulation", rule.accumulation);
        });
        if (const toml::node* sum = fields.get("accumulation");
            sum != nullptr && !info(*site).accumulates && rule.accumulation != exact_sum)
            fail(sum->source(), joined(field, "accumulation"),
                 "the site does not sum: expected format and rounding alone");
        plan.set(*site, rule);
    }
}

toml::source_region Reader::place_of(const toml::table& root, std::string_view field) {
    const toml::node* node = &root;
    toml::source_region place = root.source();
    for (std::size_t begin = 0; begin < field.size();) {
        const std::size_t end = std::min(field.find('.', begin), field.size());
        const toml::table* table = node->as_table();
        node = table == nullptr ? nullptr : table->get(field.substr(begin, end - begin));
        if (node == nullptr) break;
        place = node->source();
        begin = end + 1;
    }
    return place;
}

/// A rule that the file itself gives and that no input would bring to bear is a mistake; one of the base that a changed
/// schedule leaves behind goes.
void Reader::settle_reach(const toml::table& root, RoundingPlan& plan) const {
    const toml::table* given = root.get_as<toml::table>("sites");
    for (const SiteInfo& site : sites()) {
        if (plan[site.site].is_exact() || reaches(plan, site.site)) continue;
        if (const toml::node* rule = given == nullptr ? nullptr : given->get(site.name))
            fail(
                rule->source(), joined("sites", site.name),
                "has a rule, and the plan's schedule never reaches it: expected no rule, or a schedule with that step");
        plan.set(site.site, Rule{});
    }
}

/// A size that the file's schedule gives holds for every head: the base's cases leave it alone.
void Reader::release_tiles(const toml::table& schedule, RoundingPlan& plan) {
    for (TileCase& tile : plan.tiles) {
        const auto release = [&](std::string_view field, std::optional<int>& value) {
            if (schedule.contains(field)) value.reset();
        };
        release("block_q", tile.block_q);
        release("block_k", tile.block_k);
        release("bwd_block_q", tile.bwd_block_q);
        release("bwd_block_k", tile.bwd_block_k);
        release("delta_threads", tile.delta_threads);
        release("exp_poly_every", tile.exp_poly_every);
        release("exp_poly_count", tile.exp_poly_count);
        release("exp_poly_skip", tile.exp_poly_skip);
    }
}

void Reader::read_tiles(const toml::node& node, RoundingPlan& plan) const {
    const toml::array* cases = node.as_array();
    if (cases == nullptr) fail_type(node, "tiles", "an array of tables, [[tiles]]");
    plan.tiles.clear();
    for (std::size_t i = 0; i < cases->size(); ++i) {
        const std::string field = "tiles[" + std::to_string(i) + "]";
        const toml::node& entry = *cases->get(i);
        TileCase tile;
        const toml::table& fields = table(entry, field, "a table with head_dim and block sizes");
        read_fields(fields, field, [&](auto&& visit) {
            visit("head_dim", tile.head_dim);
            visit("causal", tile.causal);
            visit("window", tile.window);
            visit("block_q", tile.block_q);
            visit("block_k", tile.block_k);
            visit("bwd_block_q", tile.bwd_block_q);
            visit("bwd_block_k", tile.bwd_block_k);
            visit("delta_threads", tile.delta_threads);
            visit("exp_poly_every", tile.exp_poly_every);
            visit("exp_poly_count", tile.exp_poly_count);
            visit("exp_poly_skip", tile.exp_poly_skip);
        });
        const auto expect = [&](std::string_view key, int value, int least, int most) {
            if (value >= least && value <= most) return;
            const toml::node* at = fields.get(key);
            fail(at != nullptr ? at->source() : entry.source(), joined(field, key),
                 (at != nullptr ? "is " + std::to_string(value) : std::string("is missing")) + ": expected " +
                     std::to_string(least) + " to " + std::to_string(most));
        };
        constexpr int most_head_dim = 1 << 16;  // the largest head size that the case fits
        expect("head_dim", tile.head_dim, 1, most_head_dim);
        expect("block_q", tile.block_q.value_or(0), 0, most_block);
        expect("block_k", tile.block_k.value_or(0), 0, most_block);
        expect("bwd_block_q", tile.bwd_block_q.value_or(0), 0, most_block);
        expect("bwd_block_k", tile.bwd_block_k.value_or(0), 0, most_block);
        expect("exp_poly_every", tile.exp_poly_every.value_or(0), 0, most_block);
        expect("exp_poly_count", tile.exp_poly_count.value_or(0), 0, most_block);
        expect("exp_poly_skip", tile.exp_poly_skip.value_or(0), 0, most_block);
        const int threads = tile.delta_threads.value_or(1);
        if (threads < 1 || threads > most_delta_threads || (threads & (threads - 1)) != 0)
            fail(fields.get("delta_threads")->source(), joined(field, "delta_threads"),
                 "is " + std::to_string(threads) + ": expected a power of two from 1 to " +
                     std::to_string(most_delta_threads));
        for (std::size_t earlier = 0; earlier < plan.tiles.size(); ++earlier) {
            const TileCase& other = plan.tiles[earlier];
            if (other.head_dim < tile.head_dim || (other.causal && other.causal != tile.causal) ||
                (other.window && other.window != tile.window))
                continue;
            fail(entry.source(), joined(field, "head_dim"),
                 "is " + std::to_string(tile.head_dim) + ": expected a head that tiles[" + std::to_string(earlier) +
                     "] does not fit already, since the first case that fits decides");
        }
        plan.tiles.push_back(tile);
    }
}

constexpr std::size_t longest_name = 200;  // it stands in tables, file names and attributes

bool is_plain_name(std::string_view name) {
    const auto unfit = [](char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7F || c == '/'; };
    return !name.empty() && name.size() <= longest_name && std::none_of(name.begin(), name.end(), unfit);
}

/// A preset by its name; in a file also another file, by its path from there.
RoundingPlan Reader::read_base(const toml::node& node, std::span<const RoundingPlan> bases,
                               const FileChain* files) const {
    std::vector<std::string_view> names;
    for (const RoundingPlan& base : bases) names.push_back(base.name);
    const auto* text = node.as_string();
    if (files == nullptr || text == nullptr || !text->get().ends_with(".toml"))
        return bases[choice(node, "base", names)];
    const std::filesystem::path file = files->back().parent_path() / text->get();
    const std::string shown = in_quotes(text->get());
    std::error_code problem;
    if (!std::filesystem::exists(file, problem))
        fail(node.source(), "base",
             "no such file " + shown + ": expected a preset or a plan's file, by its path from this one");
    if (files->size() >= longest_chain)
        fail(node.source(), "base",
             "is the " + std::to_string(files->size()) + "th file in a row: expected a base that ends in a preset");
    for (const std::filesystem::path& open : *files)
        if (std::filesystem::equivalent(open, file, problem))
            fail(node.source(), "base",
                 shown + " has this plan as its base in turn: expected a base that does not come back to it");
    return read_plan(file, *files);
}

RoundingPlan Reader::read_root(const toml::table& root, std::span<const RoundingPlan> bases,
                               const FileChain* files) const {
    constexpr std::array<std::string_view, 7> keys{"name",     "base",  "description", "source",
                                                   "schedule", "tiles", "sites"};
    check_keys(root, "", keys);
    RoundingPlan plan;
    if (const toml::node* node = root.get("base")) {
        plan = read_base(*node, bases, files);
        plan.description.clear();  // they speak of the base alone
        plan.source.clear();
    }
    plan.name = std::filesystem::path(source_).filename().string();
    if (plan.name.ends_with(".toml")) plan.name.resize(plan.name.size() - 5);
    const toml::node* name_node = root.get("name");
    if (name_node != nullptr) read(*name_node, "name", plan.name);
    if (!is_plain_name(plan.name))
        fail(name_node != nullptr ? name_node->source() : root.source(), "name",
             "expected 1 to " + std::to_string(longest_name) + " bytes, none of them a slash or a control character");
    if (const toml::node* node = root.get("description")) read(*node, "description", plan.description);
    if (const toml::node* node = root.get("source")) read(*node, "source", plan.source);
    if (const toml::node* node = root.get("schedule")) {
        const toml::table& schedule = table(*node, "schedule", "a table of the schedule's fields");
        read_fields(schedule, "schedule", [&](auto&& visit) { for_each_field(plan.schedule, visit); });
        release_tiles(schedule, plan);
    }
    if (const toml::node* node = root.get("tiles")) read_tiles(*node, plan);
    if (const toml::node* node = root.get("sites")) read_sites(*node, plan);
    if (const auto problem = find_problem(plan)) fail(place_of(root, problem->field), problem->field, problem->what);
    settle_reach(root, plan);
    return plan;
}

RoundingPlan parsed(std::string_view toml, std::string_view source_name, std::span<const RoundingPlan> bases,
                    const FileChain* files) {
    const Reader reader(source_name);
    toml::table root;
    try {
        root = toml::parse(toml);
    } catch (const toml::parse_error& error) {
        reader.fail(error.source(), "", "not TOML: " + escaped(error.description()) + ": expected a plan in TOML 1.0");
    }
    if (files != nullptr && root.empty())
        throw RequestError(escaped(source_name) +
                           ": has no field: expected a plan in TOML, or base = \"exact\" for one that rounds nothing");
    return reader.read_root(root, bases, files);
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
