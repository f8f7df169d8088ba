// SPDX-License-Identifier: Apache-2.0
#include <faultline/plan/plan_reader.hpp>

namespace faultline::plan_file {

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

void PlanReader::read(const toml::node& node, std::string_view field, Format& value) const {
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

void PlanReader::read_unit(const toml::table& given, std::string_view field, MatrixUnit& unit) const {
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

void PlanReader::read(const toml::node& node, std::string_view field, Accumulation& value) const {
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

void PlanReader::read_sites(const toml::node& node, RoundingPlan& plan) const {
    std::vector<std::string_view> names;
    for (const SiteInfo& site : sites()) names.push_back(site.name);
    const toml::table& given = table(node, "sites", "a table of sites");
    for (const auto& [key, rule_node] : given) {
        const std::string field = joined("sites", escaped(key.str()));
        const std::optional<Site> site = find_site(key.str());
        if (!site) fail(key.source(), field, "no such site: " + expected_one_of(key.str(), names));
        Rule rule = plan[*site];
        const toml::table& fields = table(rule_node, field, "a table with format, rounding, accumulation");
        if (fields.empty())
            fail(rule_node.source(), field, "is empty: expected format, rounding or accumulation, or no entry");
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

toml::source_region PlanReader::place_of(const toml::table& root, std::string_view field) {
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

/// A size that the file's schedule gives holds for every head: the base's cases leave it alone.
void PlanReader::release_tiles(const toml::table& schedule, RoundingPlan& plan) {
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

void PlanReader::read_tiles(const toml::node& node, RoundingPlan& plan) const {
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

}  // namespace faultline::plan_file
