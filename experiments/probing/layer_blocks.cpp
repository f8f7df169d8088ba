// SPDX-License-Identifier: Apache-2.0
// What the laws, their invariances and the signs of errors say of a layer.
#include <numeric>

#include <fmt/format.h>

#include <faultline/base/error.hpp>
#include <faultline/probes/plan_conservation.hpp>
#include <faultline/probing/layer_probes.hpp>

namespace faultline::probing {
namespace {

/// A NaN stays.
double rms(std::span<const double> x) {
    double largest = 0, squares = 0;
    for (const double v : x) largest = std::max(largest, std::abs(v));
    if (largest == 0 || !std::isfinite(largest)) largest = 1;
    for (const double v : x) squares += v / largest * (v / largest);
    return x.empty() ? NAN : largest * std::sqrt(squares / static_cast<double>(x.size()));
}
double mean(std::span<const double> x) {
    return x.empty() ? NAN : std::accumulate(x.begin(), x.end(), 0.0) / static_cast<double>(x.size());
}

}  // namespace

void LayerProbes::conservation_block(Report& report) {
    Block out = block("conservation",
                      "over rows: r = sum of ds (0), p (1), delta = dO.O against exact and against the "
                      "source's own P.dP; r over sum of |ds| in rows that see two keys or more; sequences joined");
    for (Source& s : sources_) {
        const std::string& n = s.name;
        out.lines.push_back(line(n + ": sum of p - 1, rms", "1", [&](std::size_t h) {
            std::vector<double> away;  // of rows that see a key, or a sink: the others' p is 0 by right
            for (std::size_t i = 0; i < rows_; ++i)
                if (saturation_[h * rows_ + i].keys > 0 || !layer_.sink.empty()) away.push_back(s.p_sum.head(h)[i] - 1);
            return rms(away);
        }));
        if (!backward_) continue;
        out.lines.push_back(line(n + ": r over sum of |ds|, rms", "1", [&](std::size_t h) {
            std::vector<double> relative, keys;
            for (std::size_t i = 0; i < rows_; ++i) {
                relative.push_back(relative_row_sum(s.gradient_sum.head(h)[i], s.gradient_abs.head(h)[i]));
                keys.push_back(saturation_[h * rows_ + i].keys);
            }
            return relative_row_sum_rms(relative, keys);
        }));
        out.lines.push_back(line(n + ": running sum of r, at the end", "nat/logit",
                                 [&](std::size_t h) { return running_sum(s.gradient_sum.head(h)).back(); }));
        out.lines.push_back(
            line(n + ": delta - exact, mean", "nat/logit", [&](std::size_t h) { return mean(s.delta_error.head(h)); }));
        out.lines.push_back(
            line(n + ": delta - exact, rms", "nat/logit", [&](std::size_t h) { return rms(s.delta_error.head(h)); }));
        out.lines.push_back(
            line(n + ": delta - P.dP, rms", "nat/logit", [&](std::size_t h) { return rms(s.delta_gap.head(h)); }));
    }
    label(out, true);
    const auto put = [&](const char* name, const char* about, const char* unit, RowArray Source::*member) {
        out.quantities.push_back(
            {name, {about, unit}, row_axes(true), of_sources([&](Source & s) -> auto& { return (s.*member).values; })});
    };
    put("p_sum", "sum of p over the keys of the row, NaN where the source has no log-sum-exp", "1", &Source::p_sum);
    if (backward_) {
        put("gradient_sum", "sum of the score gradient over the keys of the row", "nat/logit", &Source::gradient_sum);
        put("gradient_abs", "sum of its magnitudes", "nat/logit", &Source::gradient_abs);
        put("delta_error", "delta minus that of exact arithmetic", "nat/logit", &Source::delta_error);
        put("delta_gap", "delta minus the source's own sum of P dP", "nat/logit", &Source::delta_gap);
        std::vector<double> running;
        for (Source& s : sources_)
            for (std::size_t h = 0; h < heads_.size(); ++h)
                for (const double sum : running_sum(s.delta_error.head(h))) running.push_back(sum);
        out.quantities.push_back({"delta_error_running",
                                  {"delta_error added up over rows and sequences", "nat/logit"},
                                  row_axes(true),
                                  running});
    }
    report.blocks.push_back(std::move(out));
}

void LayerProbes::invariance_block(Report& report) {
    constexpr double shift = 16;
    Block out{place_,
              "invariance",
              fmt::format(
                  "plan {}: changes of the outputs, Frobenius, where exact arithmetic has none; largest over sequences",
                  options_.plan.name),
              {},
              {},
              {},
              {}};
    std::vector<Invariance> all;
    std::vector<std::string> keys;
    std::vector<Invariance> by_group(groups_.size());
    parallel_for(groups_.size(), options_.threads, [&](std::size_t n) {
        expect_going_on(options_);
        by_group[n] = plan_invariance(groups_[n].inputs, plan_, shift, *options_.backend);
    });
    for (std::size_t n = 0; n < groups_.size(); ++n) {
        const attribution::Group& group = groups_[n];
        const Invariance& found = by_group[n];
        const std::string name = fmt::format("key head {}", group.kv_head);
        const auto at = static_cast<std::size_t>(std::ranges::find(out.columns, name) - out.columns.begin());
        if (at == out.columns.size()) {
            out.columns.push_back(name);
            keys.push_back(std::to_string(group.kv_head));
            all.push_back(found);
            continue;
        }
        const auto larger = [](double& kept, double other) {
            if (!(std::abs(other) <= std::abs(kept))) kept = other;
        };
        for (double Invariance::*m : {&Invariance::shift_o, &Invariance::shift_dq, &Invariance::permutation_o,
                                      &Invariance::permutation_dq, &Invariance::ones_largest, &Invariance::ones_mean})
            larger(all[at].*m, found.*m);
    }
    out.labels.emplace_back("key_head", keys);
    const auto put = [&](const char* name, const std::string& title, double Invariance::*member) {
        Line line{title, "1", {}};
        for (const Invariance& i : all) line.values.push_back(i.*member);
        out.quantities.push_back(
            {name, {title, "1"}, {{"key_head", static_cast<std::int64_t>(all.size())}}, line.values});
        out.lines.push_back(std::move(line));
    };
    put("shift_o", fmt::format("o, {} added to every score", shift), &Invariance::shift_o);
    put("permutation_o", "o, keys reversed", &Invariance::permutation_o);
    if (backward_) {
        put("shift_dq", fmt::format("dq, {} added to every score", shift), &Invariance::shift_dq);
        put("permutation_dq", "dq, keys reversed", &Invariance::permutation_dq);
    }
    put("ones_largest", "V = 1: largest |o - 1|", &Invariance::ones_largest);
    put("ones_mean", "V = 1: mean of o - 1", &Invariance::ones_mean);
    report.blocks.push_back(std::move(out));
}

void LayerProbes::add_coherence(Block& out, const std::string& name, const std::vector<Coherence>& by_head) {
    const auto put = [&](const char* what, const char* unit, auto&& get) {
        Line line{name + ": " + what, unit, {}};
        for (const Coherence& c : by_head) line.values.push_back(get(c));
        out.lines.push_back(std::move(line));
    };
    put("mean sign", "1", [](const Coherence& c) { return c.mean_sign; });
    put("sum over sum of magnitudes", "1", [](const Coherence& c) { return c.sum_coherence; });
    put("p of it", "1", [](const Coherence& c) { return c.sum_p; });
    put("signs' correlation with the next", "1", [](const Coherence& c) { return c.sign_lag1; });
    if (std::ranges::any_of(by_head, [](const Coherence& c) { return c.nonfinite > 0; }))
        put("left out, not finite", "1", [](const Coherence& c) { return static_cast<double>(c.nonfinite); });
}

void LayerProbes::put_coherence(Block& out, const std::vector<Axis>& axes, const std::vector<Coherence>& all,
                                const std::string& unit) {
    const auto put = [&](const char* name, const char* about, auto&& get, const std::string& its_unit = "1") {
        std::vector<double> values;
        for (const Coherence& c : all) values.push_back(static_cast<double>(get(c)));
        out.quantities.push_back({name, {about, its_unit}, axes, values});
    };
    put("mean_sign", "mean sign; its magnitude is the sign coherence", [](const Coherence& c) { return c.mean_sign; });
    put("sum_coherence", "sum over sum of magnitudes", [](const Coherence& c) { return c.sum_coherence; });
    put(
        "rms", "deviation: rms", [](const Coherence& c) { return c.rms; }, unit);
    put("count", "finite elements", [](const Coherence& c) { return c.count; });
    put("nonfinite", "elements left out: not finite", [](const Coherence& c) { return c.nonfinite; });
    put("sign_lag1", "correlation of the signs of neighbours; above 0 the chances are too small",
        [](const Coherence& c) { return c.sign_lag1; });
    put("sign_p", "two-sided chance under random signs, exact binomial", [](const Coherence& c) { return c.sign_p; });
    put("sum_p", "two-sided chance of the sum under random signs: counted up to 16 elements, normal beyond",
        [](const Coherence& c) { return c.sum_p; });
}

void LayerProbes::coherence_blocks(Report& report) {
    Block out = block("coherence", "of the error of delta over rows, sequences joined; p: two-sided, signs at random");
    const std::size_t window = options_.window > 0 ? static_cast<std::size_t>(options_.window) : rows_;
    if (window > rows_)
        throw RequestError(
            fmt::format("--window: {}: expected at most {}, the rows of a head of {}", window, rows_, layer_.name));
    std::vector<Coherence> windows;
    for (Source& s : sources_) {
        std::vector<Coherence> whole;
        for (std::size_t h = 0; h < heads_.size(); ++h) {
            whole.push_back(coherence(s.delta_error.head(h)));
            for (const Coherence& c : windowed_coherence(s.delta_error.head(h), window, window)) windows.push_back(c);
        }
        if (&s != &sources_.front()) add_coherence(out, s.name, whole);
    }
    label(out, true);
    put_coherence(out, axes({{"window", static_cast<std::int64_t>(rows_ / window)}}, true), windows, "nat/logit");
    report.blocks.push_back(std::move(out));
    if (site_errors_.empty()) return;

    Block sites = block(
        "site-coherence",
        fmt::format(
            "plan {}: of a site's local error, tile means over tiles and sequences; the {} most significant of the sites "
            "with {} tiles and more",
            options_.plan.name, shown_sites, least_tiles));
    std::vector<std::string> names;
    std::vector<Coherence> all;
    std::vector<std::pair<double, Block>> ranked;
    for (const auto& [site, errors] : site_errors_) {
        std::vector<Coherence> by_head;
        double least = 1;
        std::size_t most_tiles = 0;
        for (const std::vector<double>& tiles : errors) {
            by_head.push_back(coherence(tiles));
            least = std::min(least, by_head.back().sum_p);  // a NaN is not less
            most_tiles = std::max(most_tiles, by_head.back().count);
        }
        names.emplace_back(name(site));
        all.insert(all.end(), by_head.begin(), by_head.end());
        if (most_tiles < least_tiles) continue;
        Block part;
        add_coherence(part, std::string(name(site)), by_head);
        ranked.emplace_back(least, std::move(part));
    }
    std::ranges::stable_sort(ranked, {}, &std::pair<double, Block>::first);
    for (std::size_t i = 0; i < std::min(shown_sites, ranked.size()); ++i)
        sites.lines.insert(sites.lines.end(), ranked[i].second.lines.begin(), ranked[i].second.lines.end());
    label(sites, false);
    sites.labels.emplace_back("site", names);
    put_coherence(
        sites, {{"site", static_cast<std::int64_t>(names.size())}, {"head", static_cast<std::int64_t>(heads_.size())}},
        all, "unit of the site");
    report.blocks.push_back(std::move(sites));
}

}  // namespace faultline::probing
