// SPDX-License-Identifier: Apache-2.0
#include <faultline/plan/difference.hpp>

#include <algorithm>
#include <charconv>
#include <type_traits>

#include <faultline/format/names.hpp>
#include <faultline/plan/schedule_fields.hpp>

namespace faultline {
namespace {

std::string text(int value) { return std::to_string(value); }
std::string text(bool value) { return value ? "true" : "false"; }
std::string text(double value) {
    char digits[32];
    return {digits, std::to_chars(digits, digits + sizeof digits, value).ptr};
}
template <class E>
requires requires { enumerators<E>(); }
std::string text(E value) { return std::string(name(value)); }

/// "128x64", "128 queries", "64 keys", or nothing.
std::string tile(const std::optional<int>& queries, const std::optional<int>& keys) {
    if (queries && keys) return text(*queries) + "x" + text(*keys);
    return queries ? text(*queries) + " queries" : keys ? text(*keys) + " keys" : "";
}

/// "64: 128x64, backward 64x128, delta threads 4; 128 causal: …": of each case what it replaces in the schedule.
std::string text(const std::vector<TileCase>& tiles) {
    if (tiles.empty()) return "none";
    std::string out;
    for (const TileCase& t : tiles) {
        std::string changes;
        const auto add = [&](const std::string& label, const std::string& value) {
            if (!value.empty()) changes += (changes.empty() ? "" : ", ") + label + value;
        };
        const auto number = [](const std::optional<int>& value) { return value ? text(*value) : std::string(); };
        add("", tile(t.block_q, t.block_k));
        add("backward ", tile(t.bwd_block_q, t.bwd_block_k));
        add("delta threads ", number(t.delta_threads));
        if (t.exp_poly_every == 0)
            add("", "no polynomial");
        else
            add("polynomial every ", number(t.exp_poly_every));
        add("polynomial count ", number(t.exp_poly_count));
        add("polynomial skip ", number(t.exp_poly_skip));
        if (!out.empty()) out += "; ";
        out += text(t.head_dim) + (t.causal ? (*t.causal ? " causal" : " full") : "") +
               (t.window ? (*t.window ? " window" : " no window") : "") + ": " +
               (changes.empty() ? "as the schedule" : changes);
    }
    return out;
}

void compare(std::vector<Difference>& found, std::string field, const auto& a, const auto& b, auto&& show) {
    if (!(a == b)) found.push_back({std::move(field), show(a), show(b)});
}

}  // namespace

std::vector<Difference> differences(const RoundingPlan& a, const RoundingPlan& b) {
    std::vector<Difference> found;
    for_each_field(a.schedule, [&](std::string_view field, const auto& of_a) {
        for_each_field(b.schedule, [&](std::string_view other, const auto& of_b) {
            if constexpr (std::is_same_v<decltype(of_a), decltype(of_b)>)
                if (field == other)
                    compare(found, "schedule." + std::string(field), of_a, of_b,
                            [](const auto& value) { return text(value); });
        });
    });
    compare(found, "tiles", a.tiles, b.tiles, [](const auto& tiles) { return text(tiles); });
    const auto named = [](const auto& value) { return std::string(name(value)); };
    for (const SiteInfo& site : sites()) {
        const std::string field = "sites." + std::string(site.name);
        compare(found, field + ".format", a[site.site].format, b[site.site].format, named);
        compare(found, field + ".rounding", a[site.site].rounding, b[site.site].rounding, named);
        compare(found, field + ".accumulation", a[site.site].accumulation, b[site.site].accumulation, named);
    }
    return found;
}

RoundingPlan with_fields_of(const RoundingPlan& plan, const RoundingPlan& from, const std::vector<Difference>& fields) {
    const auto named = [&](const std::string& field) {
        return std::any_of(fields.begin(), fields.end(), [&](const Difference& d) { return d.field == field; });
    };
    RoundingPlan changed = plan;
    for_each_field(changed.schedule, [&](std::string_view field, auto& own) {
        if (!named("schedule." + std::string(field))) return;
        for_each_field(from.schedule, [&](std::string_view other, const auto& theirs) {
            if constexpr (std::is_same_v<std::remove_cvref_t<decltype(own)>, std::remove_cvref_t<decltype(theirs)>>)
                if (field == other) own = theirs;
        });
    });
    if (named("tiles")) changed.tiles = from.tiles;
    for (const SiteInfo& site : sites()) {
        const std::string field = "sites." + std::string(site.name);
        Rule rule = changed[site.site];
        if (named(field + ".format")) rule.format = from[site.site].format;
        if (named(field + ".rounding")) rule.rounding = from[site.site].rounding;
        if (named(field + ".accumulation")) rule.accumulation = from[site.site].accumulation;
        changed.set(site.site, rule);
    }
    return changed;
}

}  // namespace faultline
