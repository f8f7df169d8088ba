// SPDX-License-Identifier: Apache-2.0
#include <faultline/attribution/table.hpp>

#include <algorithm>
#include <cmath>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <faultline/attribution/finding.hpp>
#include <faultline/attribution/level.hpp>
#include <faultline/attribution/table_text.hpp>
#include <faultline/format/names.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline {
namespace {

using attribution::amount_text;
using attribution::by_weight;
using attribution::cell;
using attribution::Color;
using attribution::color_of;
using attribution::counterfactual_text;
using attribution::flow;
using attribution::is_worth_a_block;
using attribution::is_worth_a_line;
using attribution::line_width;
using attribution::marked;
using attribution::modified_text;
using attribution::Pen;
using attribution::percent;
using attribution::sentence;
using attribution::share_text;
using attribution::signed_text;
using attribution::t_text;
using attribution::verdict;

constexpr std::size_t sites_shown = 6;  // without --full

/// The type that an output's level is shown in: the plan's, or of a plan that stores none the first kernel's.
std::optional<Format> level_format(const OutputAttribution& output, const RoundingPlan& plan) {
    const std::optional<Format> format = stored_format(plan, output);
    return format || output.observed.empty() ? format : output.observed.front().format;
}

/// Those types by name, each with its outputs but the lse, which has no mark.
std::vector<std::pair<std::string, std::vector<std::string_view>>> level_formats(const Attribution& a) {
    std::vector<std::pair<std::string, std::vector<std::string_view>>> found;
    for (const LayerAttribution& layer : a.layers)
        for (const OutputAttribution& output : layer.outputs) {
            const std::optional<Format> format = level_format(output, a.plan);
            if (!format || output.lse) continue;
            const std::string its = type_name(*format);
            auto at = std::find_if(found.begin(), found.end(), [&](const auto& f) { return f.first == its; });
            if (at == found.end()) at = found.insert(at, {its, {}});
            if (std::count(at->second.begin(), at->second.end(), name(output)) == 0) at->second.push_back(name(output));
        }
    return found;
}

/// The heading of the column: the type, or "level" where outputs have several; empty where there is none.
std::string level_heading(const Attribution& a) {
    const auto formats = level_formats(a);
    return formats.empty() ? "" : formats.size() == 1 ? formats.front().first : "level";
}

std::string level_legend(const Attribution& a) {
    const auto formats = level_formats(a);
    if (formats.empty()) return "";
    const std::string heading = level_heading(a);
    std::string out;
    if (formats.size() == 1) {
        out = fmt::format(
            "{0:<7}what storing the truth in {0} costs; * marks that level: half of the squared error or more is that\n",
            heading);
    } else {
        std::vector<std::string> parts;
        for (const auto& [format, outputs] : formats)
            parts.push_back(fmt::format("{} in {}", fmt::join(outputs, ", "), format));
        out = fmt::format(
            "{:<7}what storing the truth costs: {}; * marks that\n"
            "       level: half of the squared error or more is that\n",
            heading, fmt::join(parts, ", "));
    }
    const auto other = [&](const OutputAttribution& output) {
        const std::optional<Format> shown = level_format(output, a.plan);
        return !output.lse && std::any_of(output.observed.begin(), output.observed.end(), [&](const ObservedOutput& o) {
            return o.format && (!shown || type_name(*o.format) != type_name(*shown));
        });
    };
    const bool others = std::any_of(a.layers.begin(), a.layers.end(), [&](const LayerAttribution& layer) {
        return std::any_of(layer.outputs.begin(), layer.outputs.end(), other);
    });
    return others ? out + "       (of a kernel's output the level of its own type in the file)\n" : out;
}

std::string head(const Attribution& a, const Pen& pen) {
    std::string out = pen(Color::bold, fmt::format("{}   plan {}", escaped(a.input), a.plan.name)) +
                      (a.complete ? "\n" : "   (interrupted: not all layers)\n");
    for (const Fault& fault : a.faults) out += fmt::format("with the fault {}\n", to_string(fault));
    if (!a.plan.description.empty() && a.plan.description.size() < line_width) out += a.plan.description + "\n";
    const bool some = std::any_of(a.layers.begin(), a.layers.end(), [](const LayerAttribution& layer) {
        return std::ssize(layer.head_indices) < layer.heads;
    });
    out += fmt::format(
        "\nerror  |value - truth| / |truth|, Frobenius over {} heads, or |value| where the truth is 0; truth is\n"
        "       certified, element by element\n",
        some ? "these" : "all");
    out += level_legend(a);
    out +=
        "=plan  elements of the kernel's output that equal the plan's bit for bit, rounded to the type of the file\n"
        "share  of the plan's squared error that repairing this site takes away (repaired: what is left); below 0 it\n"
        "       cancels; near 0 where alone, the error if nothing else rounds, is large: others do the same; the order\n"
        "       is by how far the repair moves the output, whichever way\n"
        "bias   mean / rms of the site's error, t over rows, coherence of the rows' signs (1/sqrt(rows) is none); bias\n"
        "       adds up in training\n"
        "sign   coherence with its sign, from -1 (every row below the truth) to +1 (every row above it)\n";
    return out;
}

/// Which preset was taken, and what to ask for where a kernel is not the plan.
std::string nearer(const Attribution& a, const Pen& pen) {
    std::string out;
    for (const std::string& text : plan_remarks(a.origin, a.plan.name)) out += sentence(text, pen);
    return out.empty() ? out : "\n" + out;
}

/// Where the plan is near the truth of o and every kernel far from it, they were not given these inputs in this way: nothing
/// that follows is said of them.
std::string other_inputs(const LayerAttribution& layer, const Pen& pen) {
    constexpr double far_off = 0.01, times_the_plan = 10;
    for (const OutputAttribution& output : layer.outputs) {
        if (output.lse || output.output != Output::o || output.observed.empty()) continue;
        for (const ObservedOutput& seen : output.observed)
            if (seen.error.nonfinite > 0 || seen.error.rel_error < WideReal(far_off) ||
                seen.error.rel_error < WideReal(times_the_plan) * output.plan.rel_error)
                return "";
        const bool one = output.observed.size() == 1;
        return sentence(
            fmt::format("{} o is {} off the truth of these inputs, and the plan's is not: was {} given another "
                        "mask (causal?), scale or order of q, k, v?",
                        one ? "the kernel's" : "every kernel's", error_text(output.observed.front().error.rel_error),
                        one ? "it" : "each"),
            pen);
    }
    return "";
}

std::string truth_line(const LayerAttribution& layer) {
    if (!layer.verified) return "";
    return fmt::format(
        "  truth: {} elements recomputed in MPFR, {} outside their bound (largest difference {:.2g} of it)\n",
        layer.verified->checked, layer.verified->outside, layer.verified->worst_ratio);
}

/// The gradient of the sinks' logits: a line for the plan and for each kernel, with the head that is worst.
std::string sink_lines(const LayerAttribution& layer) {
    if (!layer.dsink) return "";
    const SinkGradient& dsink = *layer.dsink;
    const bool some = std::ssize(layer.head_indices) < layer.heads;
    std::string out =
        fmt::format("  dsink, the gradient of the sinks' logits, over {} heads:\n", some ? "these" : "all");
    const auto add = [&](const std::string& who, const std::vector<double>& values) {
        const std::size_t worst = dsink.worst(values);
        out += fmt::format("    {:<11} {:>8}   head {}: {:.4g}, truth {}\n", who, error_text(dsink.rel_error(values)),
                           layer.head_indices[worst], values[worst], dsink.truth[worst].to_string(4));
    };
    add("plan", dsink.plan);
    for (const SinkGradient::Observed& seen : dsink.observed) add(escaped(seen.kernel, 11), seen.values);
    return out;
}

std::string layer_head(const LayerAttribution& layer, const Pen& pen) {
    const bool some = std::ssize(layer.head_indices) < layer.heads;
    std::string heads = layer.heads == 1 ? "1 head" : fmt::format("{}{}", layer.heads, some ? "" : " heads");
    if (layer.kv_heads != layer.heads) heads += fmt::format(" on {} of keys", layer.kv_heads);
    if (layer.batch > 1) heads = fmt::format("batch {}, ", layer.batch) + heads;
    if (some)
        heads = fmt::format("head{} {} of {}{}", layer.head_indices.size() == 1 ? "" : "s",
                            fmt::join(layer.head_indices, ", "), heads,
                            layer.kv_heads != layer.heads ? " (those that share keys go together)" : "");
    std::string out =
        fmt::format("\n{}   {}, {} x {}, head_dim {}{}{}\n", pen(Color::bold, escaped(layer.name)), heads, layer.seq_q,
                    layer.seq_k, layer.head_dim, layer.causal ? ", causal" : "", modified_text(layer));
    for (const Realised& fault : layer.faults)
        out += fmt::format("  fault: {:.3g}% of the values' rms ({:.3g}% asked), sign coherence {:.2f}, {} values\n",
                           100 * fault.relative_rms(),
                           fault.rms() > 0 ? 100 * fault.relative_rms() * fault.asked_rms() / fault.rms() : 0.0,
                           fault.sign_coherence(), fault.count);
    const RowStatistics& rows = layer.rows;
    out += fmt::format(
        "  rows: {} saturated (p above 1 - 2^-9), {} with two keys that round to the largest p in bf16,\n"
        "        {} with a repeated maximum in the plan's scores",
        share_text(rows.saturated_fraction), share_text(rows.rounded_to_one_fraction),
        share_text(rows.repeated_max_fraction));
    const bool law = std::any_of(rows.keys.begin(), rows.keys.end(), [](double keys) { return keys > 1; });
    if (!law) return out + "\n" + sink_lines(layer) + truth_line(layer);
    if (!rows.zero_sum.empty() && std::isfinite(rows.zero_sum_rms))
        out += fmt::format("; sum of ds off 0 by {:.2g} of its terms, sign {}", rows.zero_sum_rms,
                           signed_text(rows.zero_sum_coherence, 2));
    else if (!rows.zero_sum.empty())
        out += "; sum of ds undefined: the plan's score gradient is not finite";
    return out + "\n" + sink_lines(layer) + truth_line(layer);
}

/// Outputs whose truth is known too coarsely for the errors beside it, one line each: with a softcap and a sink dQ's bound is
/// absolute (docs/numerics-truth.md, lemma 5), and a cap can make all of dQ smaller than it.
std::string unresolved_lines(const LayerAttribution& layer) {
    std::string out;
    for (const OutputAttribution& output : layer.outputs)
        if (!truth_is_resolved(output))
            out +=
                fmt::format("  {}: its truth is only known to be within {} of {}: the errors above are not resolved\n",
                            name(output), output.truth_bound.to_string(2), output.truth_norm.to_string(2));
    return out;
}

/// Outputs down, plan and kernels across: the error, and how much of the kernel's output the plan reproduces.
std::string errors(const LayerAttribution& layer, const RoundingPlan& plan, const std::string& heading,
                   const Pen& pen) {
    std::vector<std::string> kernels;
    for (const OutputAttribution& output : layer.outputs)
        for (const ObservedOutput& seen : output.observed)
            if (std::find(kernels.begin(), kernels.end(), seen.kernel) == kernels.end()) kernels.push_back(seen.kernel);
    constexpr std::size_t column = 19, first = 34;
    constexpr std::size_t per_line = (line_width - first) / column;
    std::string out;
    for (std::size_t begin = 0; begin == 0 || begin < kernels.size(); begin += per_line) {
        const std::size_t end = std::min(begin + per_line, kernels.size());
        out += fmt::format("  {:<2}{:>11}{:>8}{:>11}", "", begin == 0 ? "|truth|" : "", begin == 0 ? heading : "",
                           begin == 0 ? "plan " : "");
        for (std::size_t k = begin; k < end; ++k) out += fmt::format("{:>11} {:>7}", escaped(kernels[k], 11), "=plan");
        out += "\n";
        for (const OutputAttribution& output : layer.outputs) {
            const bool leads = begin == 0;
            // fp32 is far below what an lse is for: no mark of its level, and a colour where P shows the error.
            using Level = std::optional<WideReal>;
            const Level level = output.lse ? std::nullopt : output.level;
            const auto color = [&](const ErrorMeasure& e, const Level& its) {
                return output.lse && lse_shows(e, output.elements, plan) ? Color::bad : color_of(e, its);
            };
            const std::optional<Format> format = level_format(output, plan);
            const Level shown = output.level || output.observed.empty() ? output.level : output.observed.front().level;
            const bool has_level = leads && format && shown && (heading == "level" || heading == type_name(*format));
            out += fmt::format("  {:<3}", name(output)) + cell(leads ? output.truth_norm.to_string(3) : "", 10) +
                   cell(has_level ? error_text(*shown) : "", 8);
            out += leads ? pen(color(output.plan, level), cell(marked(output.plan, level), 11)) : std::string(11, ' ');
            for (std::size_t k = begin; k < end; ++k) {
                const auto seen = std::find_if(output.observed.begin(), output.observed.end(),
                                               [&](const ObservedOutput& o) { return o.kernel == kernels[k]; });
                if (seen == output.observed.end()) {
                    out += std::string(column, ' ');
                    continue;
                }
                const Level its = output.lse ? std::nullopt : level_of(*seen, output);
                out += pen(color(seen->error, its), cell(marked(seen->error, its), 12));
                out += pen(Color::dim, cell(share_text(seen->bit_equal_to_plan), 7));
            }
            out.resize(out.find_last_not_of(' ') + 1);
            out += "\n";
        }
    }
    return out;
}

/// What a kernel's lse has beyond an error: another unit, numbers in rows without a key.
std::string lse_lines(const LayerAttribution& layer) {
    std::string out;
    for (const OutputAttribution& output : layer.outputs)
        for (const ObservedOutput& seen : output.observed) {
            if (seen.in_log2)
                out += fmt::format("  lse: {}'s is the truth's in log2 units: expected natural ones, to base e\n",
                                   escaped(seen.kernel));
            if (seen.finite_without_key > 0)
                out += fmt::format("  lse: {} rows of {} see no key and have no infinite lse\n",
                                   seen.finite_without_key, escaped(seen.kernel));
        }
    return out;
}

std::string site_line(const LayerAttribution& layer, const OutputAttribution& output, std::size_t s, const Pen& pen) {
    const SiteEffect& e = output.sites[s];
    const TileStatistics& local = layer.local[s];
    const bool silent = e.alone_below_floor;
    std::string line = fmt::format("    {:<17}", name(layer.sites[s]));
    line += pen(std::abs(e.share) > 0.1 ? Color::bold : Color::none, cell(share_text(e.share), 9));
    line += cell(silent ? "-" : counterfactual_text(e.alone), 11) + cell(counterfactual_text(e.repaired), 11);
    line += cell(silent ? "-" : signed_text(e.alone.signed_bias), 8) +
            cell(silent ? "-" : t_text(e.alone.t_statistic), 9) +
            cell(silent || std::isnan(e.alone.row_coherence) ? "-" : fmt::format("{:.2f}", e.alone.row_coherence), 7);
    if (!std::isnan(e.alone.mean_key_share))
        line += cell(silent ? "-" : share_text(e.alone.mean_key_share), 9) +
                cell(silent ? "-" : signed_text(e.alone.mean_key_sign, 2), 7);
    line += cell(fmt::format("{:.1e}", local.total_rms()), 9) + cell(signed_text(local.signed_bias()), 8);
    return line + "\n";
}

std::string sites_of(const LayerAttribution& layer, const OutputAttribution& output, const TableOptions& options,
                     const Pen& pen) {
    if (output.sites.empty()) return "";
    const bool has_key = !std::isnan(output.plan.mean_key_share);
    std::string out = fmt::format("    {:<17}{:>9}{:>11}{:>11}{:>8}{:>9}{:>7}", "site", "share", "alone", "repaired",
                                  "bias", "t", "coher.");
    if (has_key) out += fmt::format("{:>9}{:>7}", "mean key", "sign");
    out = pen(Color::dim, out + fmt::format("{:>9}{:>8}", "local", "bias")) + "\n";
    const std::vector<std::size_t> order = by_weight(layer, output);
    std::size_t shown = 0;
    for (const std::size_t s : order) {
        const bool worth = shown == 0 || (shown < sites_shown && is_worth_a_line(layer, output, s));
        if (!options.full && !worth) break;
        out += site_line(layer, output, s, pen);
        ++shown;
    }
    if (shown < order.size()) {
        double largest = 0;
        const ErrorMeasure* alone = &output.sites[order[shown]].alone;
        for (std::size_t i = shown; i < order.size(); ++i) {
            const ErrorMeasure& its = output.sites[order[i]].alone;
            largest = std::max(largest, std::abs(output.sites[order[i]].share));
            if (alone->rel_error < its.rel_error ||
                (alone->rel_error == its.rel_error && alone->error_norm < its.error_norm))
                alone = &its;
        }
        out += fmt::format("    {} other site{}: share at most {} each, alone at most {}\n", order.size() - shown,
                           order.size() - shown == 1 ? "" : "s", share_text(largest), amount_text(*alone));
    }
    return out;
}

std::string corrections_of(const OutputAttribution& output, const Pen& pen) {
    std::vector<const CorrectedOutput*> kept, changing, useless;
    for (const CorrectedOutput& c : output.corrections) {
        const bool better = c.error.nonfinite == 0 && c.error.rel_error < WideReal(0.95) * output.plan.rel_error;
        (c.changes_function ? changing : better ? kept : useless).push_back(&c);
    }
    const auto less = [](const CorrectedOutput* a, const CorrectedOutput* b) {
        return a->error.rel_error < b->error.rel_error;
    };
    std::string out;
    const auto list = [&](const std::string& label, std::vector<const CorrectedOutput*>& which) {
        if (which.empty()) return;
        std::stable_sort(which.begin(), which.end(), less);
        std::vector<std::pair<std::string, Color>> items;
        for (const CorrectedOutput* c : which)
            items.emplace_back(fmt::format("{} {}{}", c->correction, amount_text(c->error),
                                           c->error.nonfinite > 0         ? "!"
                                           : at_level(c->error, c->level) ? "*"
                                                                          : ""),
                               color_of(c->error, c->level));
        flow(out, label, items, pen);
    };
    list("    repaired by, best first:", kept);
    list("    changing the function:  ", changing);
    list("    not better:             ", useless);
    return out;
}

}  // namespace

std::string table(const Attribution& attribution, const TableOptions& options) {
    const Pen pen(options.color);
    const std::string heading = level_heading(attribution);
    std::string out = head(attribution, pen) + nearer(attribution, pen);
    for (const LayerAttribution& layer : attribution.layers) {
        out += layer_head(layer, pen) + errors(layer, attribution.plan, heading, pen) + lse_lines(layer) +
               unresolved_lines(layer) + other_inputs(layer, pen);
        for (const OutputAttribution& output : layer.outputs) {
            if (!options.full && !is_worth_a_block(output, attribution.plan)) continue;
            out += sentence(verdict(layer, output, attribution.plan), pen);
            out += sites_of(layer, output, options, pen);
            out += corrections_of(output, pen);
        }
    }
    return out;
}

}  // namespace faultline
