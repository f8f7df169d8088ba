// SPDX-License-Identifier: Apache-2.0
#include <faultline/attribution/report.hpp>

#include <algorithm>
#include <cmath>
#include <numeric>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <faultline/attribution/finding.hpp>
#include <faultline/attribution/level.hpp>
#include <faultline/attribution/svg.hpp>
#include <faultline/attribution/table.hpp>
#include <faultline/base/counted.hpp>
#include <faultline/format/names.hpp>
#include <faultline/plan/plan_toml.hpp>

namespace faultline {
namespace {

using namespace attribution;

constexpr std::size_t sites_listed = 8;  // of an output; the text table has all
constexpr double worth_a_line = 1e-4;    // of the plan\'s squared error
constexpr std::size_t sites_mapped = 4;  // of an output
constexpr int largest_map = 48;          // tiles across; finer grids are averaged over blocks
constexpr std::size_t heads_mapped = 8;  // of a site

constexpr std::string_view style =
    "body{font:15px/1.45 system-ui,sans-serif;color:#1a1a1a;background:#fff;max-width:1100px;margin:24px auto;padding:0 "
    "16px}h1{font-size:22px}h2{font-size:18px;border-bottom:1px solid "
    "#ccc;padding-bottom:4px;margin-top:36px}h3{font-size:15px;margin-bottom:4px}table{border-collapse:collapse;margin:8px "
    "0}th,td{padding:3px 10px;text-align:right;border-bottom:1px solid #e4e4e4;white-space:nowrap}th{color:#555;font-weight:"
    "600}td:first-child,th:first-child{text-align:left}td.l{text-align:left}.good{color:#17692f}.bad{color:#a3210f;font-weight:"
    "600}figure{display:inline-block;margin:6px 14px 6px 0;vertical-align:top}figcaption{font-size:12px;color:#555}pre{font:"
    "12px/1.35 ui-monospace,monospace;background:#f6f6f6;padding:10px;overflow-x:auto}.legend{font-size:12px;color:#555}"
    ".note{color:#555;font-size:13px}@page{size:landscape;margin:12mm}@media "
    "print{body{font-size:11px;max-width:none;margin:0;padding:0}h2,h3{break-after:avoid}table{font-size:9px}figcaption,.legend,.note{font-size:10px}th,td{padding:1px "
    "5px;white-space:normal}pre{font-size:9px;white-space:pre-wrap;overflow-wrap:anywhere}tr,figure{break-inside:avoid}}";

std::string percent(double share) {
    if (!std::isfinite(share)) return "-";
    if (share > 0.999 && share < 1) return "&gt;99.9%";  // must not read as all of it
    if (std::abs(share) < 0.0005) return "0%";
    return std::abs(share) >= 1 ? fmt::format("{:.0f}%", 100 * share) : fmt::format("{:.1f}%", 100 * share);
}
std::string signed_number(double x, int decimals) {
    return std::isfinite(x) ? fmt::format("{:+.{}f}", x, decimals) : "-";
}

std::string error_cell(const ErrorMeasure& e, const std::optional<WideReal>& level) {
    const bool good = at_level(e, level);
    const bool bad = e.nonfinite > 0 || (level && e.rel_error > WideReal(50.0) * *level);
    return fmt::format("<td{}>{}{}</td>",
                       good  ? " class=\"good\""
                       : bad ? " class=\"bad\""
                             : "",
                       error_text(e.rel_error), e.nonfinite > 0 ? fmt::format(" ({} not finite)", e.nonfinite) : "");
}

std::vector<std::string> kernels_of(const LayerAttribution& layer) {
    std::vector<std::string> names;
    for (const OutputAttribution& output : layer.outputs)
        for (const ObservedOutput& seen : output.observed)
            if (std::find(names.begin(), names.end(), seen.kernel) == names.end()) names.push_back(seen.kernel);
    return names;
}

std::string errors_table(const LayerAttribution& layer) {
    const std::vector<std::string> kernels = kernels_of(layer);
    std::string out = "<table><tr><th>output</th><th>|truth|</th><th>storing the truth</th><th>plan</th>";
    for (const std::string& kernel : kernels) out += fmt::format("<th>{}</th><th>= plan</th>", html(kernel));
    out += "</tr>\n";
    for (const OutputAttribution& o : layer.outputs) {
        const std::optional<WideReal> level = o.lse ? std::nullopt : o.level;  // fp32 is far below what an lse is for
        out += fmt::format("<tr><td>{}</td><td>{}</td><td>{}</td>{}", name(o), o.truth_norm.to_string(3),
                           o.level ? error_text(*o.level) : "-", error_cell(o.plan, level));
        for (const std::string& kernel : kernels) {
            const auto seen = std::find_if(o.observed.begin(), o.observed.end(),
                                           [&](const ObservedOutput& s) { return s.kernel == kernel; });
            if (seen == o.observed.end())
                out += "<td>-</td><td>-</td>";
            else
                out += error_cell(seen->error, o.lse ? std::nullopt : level_of(*seen, o)) +
                       fmt::format("<td>{}{}</td>", percent(seen->bit_equal_to_plan),
                                   seen->in_log2 ? " (in log2 units)" : "");
        }
        out += "</tr>\n";
    }
    return out + "</table>\n";
}

/// Sites that do something, what matters most first, in the order of the printed table.
std::vector<std::size_t> by_weight(const LayerAttribution& layer, const OutputAttribution& output) {
    std::vector<std::size_t> order = attribution::by_weight(layer, output);
    std::erase_if(order, [&](std::size_t s) { return !attribution::is_worth_a_line(layer, output, s); });
    return order;
}

std::string sites_table(const LayerAttribution& layer, const OutputAttribution& output) {
    const bool key = !std::isnan(output.plan.mean_key_share);
    std::string out =
        "<table><tr><th>site</th><th></th><th>share</th><th>alone</th><th>repaired</th><th>mean/rms</th><th>t over rows</th>";
    if (key) out += "<th>along mean key</th><th>sign</th>";
    out += "</tr>\n";
    const std::vector<std::size_t> order = by_weight(layer, output);
    for (std::size_t i = 0; i < std::min(order.size(), sites_listed); ++i) {
        const SiteEffect& e = output.sites[order[i]];
        out += fmt::format("<tr><td>{}</td><td class=\"l\">{}</td><td>{}</td>", name(layer.sites[order[i]]),
                           bar(e.share), percent(e.share));
        if (e.alone_below_floor)
            out += fmt::format("<td>-</td><td>{}</td><td>-</td><td>-</td>", error_text(e.repaired.rel_error));
        else
            out += fmt::format("<td>{}</td><td>{}</td><td>{}</td><td>{}</td>", error_text(e.alone.rel_error),
                               error_text(e.repaired.rel_error), signed_number(e.alone.signed_bias, 3),
                               signed_number(e.alone.t_statistic, 1));
        if (key)
            out += fmt::format("<td>{}</td><td>{}</td>", e.alone_below_floor ? "-" : percent(e.alone.mean_key_share),
                               e.alone_below_floor ? "-" : signed_number(e.alone.mean_key_sign, 2));
        out += "</tr>\n";
    }
    return out + "</table>\n";
}

std::string redundant_sites(const OutputAttribution& output) {
    std::string out;
    for (const RedundantSites& set : output.redundant) {
        std::string names;
        for (const Site site : set.sites) names += fmt::format("{}{}", names.empty() ? "" : ", ", name(site));
        out += fmt::format(
            "<p>{} do the same thing: repairing one of them alone changes nothing, repairing all takes {} of the squared "
            "error away and leaves {}.</p>\n",
            names, percent(set.share), error_text(set.repaired.rel_error));
    }
    return out;
}

std::string corrections_table(const OutputAttribution& output) {
    if (output.corrections.empty()) return {};
    std::vector<const CorrectedOutput*> order;
    for (const CorrectedOutput& c : output.corrections) order.push_back(&c);
    std::stable_sort(order.begin(), order.end(), [](const CorrectedOutput* a, const CorrectedOutput* b) {
        return a->error.rel_error < b->error.rel_error;
    });
    std::string out = "<table><tr><th>correction</th><th>error</th><th></th></tr>\n";
    for (const CorrectedOutput* c : order)
        out += fmt::format("<tr><td>{}</td>{}<td class=\"l\">{}</td></tr>\n", html(c->correction),
                           error_cell(c->error, output.level),
                           c->changes_function                          ? "changes the function"
                           : c->error.rel_error < output.plan.rel_error ? ""
                                                                        : "not better");
    return out + "</table>\n";
}

const TileStatistics* local_of(const LayerAttribution& layer, Site site) {
    for (const TileStatistics& t : layer.local)
        if (t.site == site && !t.count.empty()) return &t;
    return nullptr;
}

/// One head's mean/rms, in blocks where there are too many tiles.
TileMap map_of(const TileStatistics& t, int head) {
    TileMap map;
    const int block =
        std::max({1, (t.q_tiles + largest_map - 1) / largest_map, (t.k_tiles + largest_map - 1) / largest_map});
    map.rows = (t.q_tiles + block - 1) / block, map.columns = (t.k_tiles + block - 1) / block;
    for (int i = 0; i < map.rows; ++i)
        for (int j = 0; j < map.columns; ++j) {
            double sum = 0, squares = 0, count = 0, values = 0;
            for (int a = i * block; a < std::min((i + 1) * block, t.q_tiles); ++a)
                for (int b = j * block; b < std::min((j + 1) * block, t.k_tiles); ++b) {
                    const auto at = static_cast<std::size_t>((head * t.q_tiles + a) * t.k_tiles + b);
                    sum += t.signed_mean[at] * t.count[at], squares += t.rms[at] * t.rms[at] * t.count[at];
                    values += t.value_rms[at] * t.value_rms[at] * t.count[at], count += t.count[at];
                }
            const double rms = count > 0 ? std::sqrt(squares / count) : 0;
            map.value.push_back(count == 0 ? std::nan("") : rms == 0 ? 0 : sum / count / rms);
            map.label.push_back(count == 0
                                    ? ""
                                    : fmt::format("query tile {}, key tile {}: mean {:+.2e}, rms {:.2e}, values {:.2e}",
                                                  i * block, j * block, sum / count, rms, std::sqrt(values / count)));
        }
    map.title = fmt::format("{}, head {}", name(t.site), head);
    return map;
}

std::string maps_of(const LayerAttribution& layer, const OutputAttribution& output) {
    std::string out;
    const std::vector<std::size_t> order = by_weight(layer, output);
    for (std::size_t i = 0; i < std::min(order.size(), sites_mapped); ++i) {
        const TileStatistics* t = local_of(layer, layer.sites[order[i]]);
        if (t == nullptr || t->q_tiles * t->k_tiles < 1) continue;
        for (int h = 0; h < std::min<int>(t->heads, heads_mapped); ++h) {
            const TileMap map = map_of(*t, h);
            // A site of a whole key head stands under its first query head.
            if (std::all_of(map.value.begin(), map.value.end(), [](double x) { return std::isnan(x); })) continue;
            out += drawing(map);
        }
    }
    return out.empty() ? out : out + legend();
}

std::string rows_of(const LayerAttribution& layer) {
    const RowStatistics& rows = layer.rows;
    std::string out = fmt::format(
        "<p>{} of the rows are saturated (p above 1 &minus; 2<sup>&minus;9</sup>), {} have two keys that round to the "
        "largest p in bf16, {} a repeated maximum in the plan's scores; the sum of the score gradient is off 0 by {:.2g} of "
        "its terms (rms), with sign {:+.2f}.</p>\n",
        percent(rows.saturated_fraction), percent(rows.rounded_to_one_fraction), percent(rows.repeated_max_fraction),
        rows.zero_sum_rms, rows.zero_sum_coherence);
    if (layer.seq_q == 0) return out;
    const std::size_t heads = rows.p_max.size() / static_cast<std::size_t>(layer.seq_q);
    for (std::size_t h = 0; h < std::min(heads, heads_mapped); ++h) {
        const auto begin = rows.p_max.begin() + static_cast<std::ptrdiff_t>(h) * layer.seq_q;
        out +=
            strip({begin, begin + layer.seq_q}, fmt::format("largest probability over the rows, head {} (dark: 1)", h));
    }
    return out;
}

/// What each planted fault did here.
std::string faults_of(const LayerAttribution& layer) {
    std::string out;
    for (std::size_t f = 0; f < layer.faults.size(); ++f)
        out += fmt::format(
            "<p class=\"bad\">fault at {}: {} of the values' rms, sign coherence {:.2f}, {} values</p>\n",
            f < layer.fault_sites.size() ? name(layer.fault_sites[f]) : "", percent(layer.faults[f].relative_rms()),
            layer.faults[f].sign_coherence(), layer.faults[f].count);
    return out;
}

/// "dq: 0.168% wrong under the plan, bf16 level"; an output that has no more than its storing costs needs no repair.
std::string output_heading(const OutputAttribution& output, const RoundingPlan& plan) {
    std::string out = fmt::format("{}: {} wrong under the plan", name(output), error_text(output.plan.rel_error));
    const std::optional<Format> format = stored_format(plan, output);
    if (format && at_level(output.plan, output.level)) return out + fmt::format(", {} level", name(*format));
    return output.best_correction.empty() ? out : out + ", best repaired by " + html(output.best_correction);
}

/// "; here head 0", where not all heads of the layer were looked at.
std::string heads_looked_at(const LayerAttribution& layer) {
    if (std::ssize(layer.head_indices) == layer.heads) return {};
    return fmt::format("; here head{} {}", layer.head_indices.size() == 1 ? "" : "s",
                       fmt::join(layer.head_indices, ", "));
}

std::string layer_section(const LayerAttribution& layer, const RoundingPlan& plan) {
    std::string out = fmt::format(
        "<h2>{}</h2>\n<p>{}, {}, {} x {}, head size {}, {}{}</p>\n", html(layer.name),
        counted(layer.heads, "query head", "query heads"), counted(layer.kv_heads, "key head", "key heads"),
        counted(layer.seq_q, "query", "queries"), counted(layer.seq_k, "key", "keys"), layer.head_dim,
        (layer.causal ? "causal" : "not causal") + attribution::modified_text(layer), heads_looked_at(layer));
    out += faults_of(layer) + errors_table(layer);
    out += rows_of(layer);
    std::vector<std::string_view> at_level;
    for (const OutputAttribution& output : layer.outputs) {
        if (output.sites.empty()) continue;
        if (!attribution::is_worth_a_block(output, plan)) {
            at_level.push_back(name(output));
            continue;
        }
        out += fmt::format("<h3>{}</h3>\n<p>{}</p>\n", output_heading(output, plan),
                           html(attribution::verdict(layer, output, plan)));
        out += sites_table(layer, output) + redundant_sites(output) + maps_of(layer, output);
        const std::string corrections = corrections_table(output);
        if (!corrections.empty())
            out +=
                fmt::format("<details><summary>corrections of {}</summary>\n{}</details>\n", name(output), corrections);
    }
    if (!at_level.empty())
        out += fmt::format(
            "<p class=\"note\">No block of their own: {} (off by at most twice what storing the truth costs, or an lse that the "
            "backward's P does not show); their sites stand in <i>Everything</i>.</p>\n",
            fmt::join(at_level, ", "));
    return out;
}

/// " with the fault lse:fixed:0.03": a page of a kernel with a fault must not be taken for one of the kernel.
std::string planted(const Attribution& a) {
    std::string out;
    for (const Fault& fault : a.faults) out += (out.empty() ? " with the fault " : " and ") + to_string(fault);
    return out;
}

}  // namespace

std::string html_report(const Attribution& a, const ReportContext& context) {
    const std::string title = context.title.empty()
                                  ? fmt::format("Attribution of {} under {}{}", a.input, a.plan.name, planted(a))
                                  : context.title + planted(a);
    std::string out = fmt::format(
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" "
        "content=\"width=device-width\"><title>{}</title>\n<style>{}</style></head><body>\n<h1>{}</h1>\n",
        html(title), style, html(title));
    out += fmt::format("<p><b>{}</b>: {}<br><span class=\"note\">{}</span></p>\n", html(a.plan.name),
                       html(a.plan.description), html(a.plan.source));
    for (const std::string& remark : plan_remarks(a.origin, a.plan.name))
        out += fmt::format("<p>{}</p>\n", html(remark));
    if (!context.command_line.empty()) out += fmt::format("<pre>{}</pre>\n", html(context.command_line));
    if (!a.complete) out += "<p class=\"bad\">Interrupted: the layers below are whole, others are missing.</p>\n";
    const bool some = std::any_of(a.layers.begin(), a.layers.end(), [](const LayerAttribution& layer) {
        return std::ssize(layer.head_indices) < layer.heads;
    });
    out += fmt::format("<p class=\"note\">Errors are |value &minus; truth| / |truth| over {}; ",
                       some ? "the heads that each layer names" : "all heads");
    out +=
        "truth is certified, element by element. "
        "<b>storing the truth</b>: what rounding it to the type of the plan's output costs, the least that any kernel leaves; "
        "green: no more than that, a kernel's by the type of its own file. <b>= plan</b>: elements of the kernel's output that "
        "equal the plan's bit for bit, rounded to the type of the file. <b>share</b>: the part of the plan's squared "
        "error that making this one rounding exact takes away (negative: it cancels others). <b>alone</b>: the error where "
        "nothing else rounds; <b>repaired</b>: what is left when this one is exact. <b>mean/rms</b> and <b>t</b>: the sign of "
        "the error that the site makes alone; t only where rows are independent, not for dk and dv. <b>along mean key</b>: the part of the square of the site's error "
        "of dq that lies along the mean of the keys; <b>sign</b>: how far the rows agree in its sign, from &minus;1 (every row "
        "below the truth) to +1 (every row above it). Sites stand in the order of how far their repair moves the output, "
        "whichever way, which need not be that of their share. Maps: local error of each tile, queries down, keys across.</p>\n";
    for (const LayerAttribution& layer : a.layers) out += layer_section(layer, a.plan);
    const auto preformatted = [](std::string_view text) {
        std::string lines;
        for (std::size_t begin = 0; begin < text.size();) {
            const std::size_t end = std::min(text.find('\n', begin), text.size());
            lines += html(text.substr(begin, end - begin)) + "\n";
            begin = end + 1;
        }
        return lines;
    };
    out += fmt::format(
        "<h2>Everything</h2>\n<details><summary>every site of every output</summary>\n<pre>{}</pre></details>\n",
        preformatted(table(a, {.full = true})));
    out += fmt::format("<details><summary>the plan</summary>\n<pre>{}</pre></details>\n</body></html>\n",
                       preformatted(to_toml(a.plan)));
    return out;
}

}  // namespace faultline
