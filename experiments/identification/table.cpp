// SPDX-License-Identifier: Apache-2.0
#include <faultline/identification/table.hpp>

#include <algorithm>
#include <cmath>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <faultline/tensor/text.hpp>

namespace faultline {
namespace {

constexpr std::size_t plans_shown = 4;    // without `full`
constexpr std::size_t changes_shown = 5;  // of those that would make some of the rest equal
constexpr std::size_t line_width = 110;
constexpr std::size_t most_digits = 12;  // a double holds no more of a percentage

std::string row(const std::string& plan, const OutputMatches& m) {
    constexpr std::size_t column = 24;
    // A name with a type for each output stands on a line of its own.
    std::string line =
        plan.size() < column ? fmt::format("  {:<{}}", plan, column) : fmt::format("  {}\n  {:{}}", plan, "", column);
    line += fmt::format("{:>10}", share_percent(m.all()));
    for (const Output output : all_outputs)
        line += fmt::format("{:>10}", m[output].total == 0 ? "-" : share_percent(m[output]));
    if (m.lse.total > 0) line += fmt::format("{:>10}", share_percent(m.lse));
    Match all = m.all();
    const Match near{all.within_one_ulp, all.within_one_ulp, all.total};
    return line + fmt::format("{:>16}\n", share_percent(near));
}

std::string heading(bool lse) {
    std::string line = fmt::format("  {:<24}{:>10}", "equal elements", "all");
    for (const Output output : all_outputs) line += fmt::format("{:>10}", name(output));
    if (lse) line += fmt::format("{:>10}", "lse");
    return line + fmt::format("{:>16}\n", "within 1 ulp");
}

std::string change_text(const std::vector<Difference>& changes) {
    const Difference& first = changes.front();
    const std::string rest = changes.size() == 1 ? "" : fmt::format(" and {} more", changes.size() - 1);
    return fmt::format("{}: {} -> {}{}", first.field, first.from, first.to, rest);
}

/// Text after a label, broken at blanks and commas, its further lines below its beginning: changes of two rules may differ in
/// the last word alone.
std::string wrapped(const std::string& label, const std::string& text) {
    std::string out, line = label;
    for (std::size_t begin = 0; begin < text.size();) {
        const std::size_t end = std::min(text.find_first_of(" ,", begin), text.size() - 1) + 1;
        if (line.size() + end - begin > line_width + 1 && line.size() > label.size()) {
            out += line.substr(0, line.find_last_not_of(' ') + 1) + "\n";
            line = std::string(label.size(), ' ');
        }
        line += text.substr(begin, end - begin);
        begin = end;
    }
    return out + line + "\n";
}

/// Plans that the outputs do not tell from the first: as many elements of every output.
std::vector<std::string> equals_of(const KernelIdentification& k) {
    std::vector<std::string> equals;
    for (const RankedPlan& plan : k.ranking)
        if (plan.match == k.ranking.front().match) equals.push_back(plan.plan);
    return equals;
}

/// Outputs by name: "o, dq".
std::string output_names(const std::vector<Output>& outputs) {
    std::vector<std::string_view> names;
    for (const Output output : outputs) names.push_back(name(output));
    return fmt::format("{}", fmt::join(names, ", "));
}

/// What the kernel is, in the heading: a plan that others tie with is not the answer by itself, and one that has no more of an
/// output than chance is not the kernel.
std::string answer(const KernelIdentification& k) {
    if (!k.is_near()) return "no preset is this kernel";
    const std::vector<Output> unlike = k.unlike();
    if (!unlike.empty())
        return fmt::format("no preset is this kernel: {} is nearest, but has not its {}", k.nearest,
                           output_names(unlike));
    const std::string changed =
        k.changes.empty() ? "" : fmt::format(" with {} change{}", k.changes.size(), k.changes.size() == 1 ? "" : "s");
    if (!k.is_found())
        return fmt::format("no plan found is this kernel; the nearest, {}{}, has {}{}", k.nearest, changed,
                           share_percent(k.match.all()), lacking_text(k, ", and "));
    const std::size_t others = k.near_ties().size();
    std::string text = k.nearest;
    if (others > 0) text += fmt::format(" or {} other{}", others, others == 1 ? "" : "s");
    if (!k.changes.empty()) text += k.is_far() ? changed : ", changed";
    if (others > 0) text += ", not told apart";
    return k.is_far() ? fmt::format("no plan found has all of its elements; the nearest, {} of them: {}",
                                    share_percent(k.match.all()), text)
                      : text;
}

/// Names after a heading, broken into lines.
std::string name_list(const std::string& title, const std::vector<std::string>& names) {
    if (names.empty()) return {};
    std::string out, line = "  " + title;
    for (std::size_t i = 0; i < names.size(); ++i) {
        const std::string item = names[i] + (i + 1 < names.size() ? "," : "");
        if (line.size() + 1 + item.size() > line_width) {
            out += line + "\n";
            line = "   ";
        }
        line += " " + item;
    }
    return out + line + "\n";
}

std::string ranking_text(const KernelIdentification& k, bool full) {
    std::string out = heading(!k.ranking.empty() && k.ranking.front().match.lse.total > 0);
    const std::size_t shown = full ? k.ranking.size() : std::min(plans_shown, k.ranking.size());
    for (std::size_t i = 0; i < shown; ++i) out += row(k.ranking[i].plan, k.ranking[i].match);
    const std::vector<std::string> equals = equals_of(k);
    if (equals.size() > 1) out += name_list("not told apart by these outputs:", equals);
    const std::vector<std::string> ties = k.ranked_ties();
    if (k.is_near() && ties.size() + 1 > equals.size())
        out += name_list(fmt::format("within {:g}% of {}, which the order of sums that no plan models may decide:",
                                     100 * unmodelled_share, k.ranking.front().plan),
                         ties);
    if (!k.is_near())
        out +=
            fmt::format("  of unrelated numbers some are equal by chance; a plan of this kernel has {:.0f}% and more\n",
                        100 * more_than_chance);
    for (const Output output : k.is_near() ? k.unlike() : std::vector<Output>{})
        out +=
            fmt::format("  of {} no more than chance ({}): faultline attribute says how far off it is, and its gain\n",
                        name(output), share_percent(k.match[output]));
    return out;
}

/// "heads held out": of what the search saw, or did not.
std::string part_name(const KernelIdentification& k, const char* part) {
    return fmt::format("{} {}", k.rows_held_out ? "rows" : "heads", part);
}

/// What a change did where it was found, and where it was not.
std::string flips_text(const KernelIdentification& k, const FoundChange& f) {
    return fmt::format("{} won, {} lost on the {}; {} won, {} lost on those held out", f.searched.won, f.searched.lost,
                       part_name(k, "searched"), f.held_out.won, f.held_out.lost);
}

/// Changes that were not made. Several that win and lose as many are different ways to say one thing, and one line.
std::string refused_text(const KernelIdentification& k) {
    struct Refused {
        const FoundChange* first;
        std::vector<std::string> changes;
    };
    std::vector<Refused> all;
    for (const FoundChange& f : k.found) {
        if (f.carries) continue;
        const auto at = std::find_if(all.begin(), all.end(), [&](const Refused& r) {
            return r.first->searched == f.searched && r.first->held_out == f.held_out && r.first->spoils == f.spoils &&
                   r.first->idle.empty() == f.idle.empty();
        });
        std::vector<std::string>& changes = at == all.end() ? all.emplace_back(Refused{&f, {}}).changes : at->changes;
        std::string text = change_text(f.changes);
        if (std::find(changes.begin(), changes.end(), text) == changes.end()) changes.push_back(std::move(text));
    }
    std::string out;
    for (const Refused& r : all) {
        const std::string change = r.changes.size() > 1 ? "each of these does" : "it does";
        out += wrapped(
            r.first->spoils ? fmt::format("  not made, as {} not leave {} whole: ", change, name(*r.first->spoils))
            : r.first->idle.empty() ? fmt::format("  not made, as {} not carry over: ", change)
                                    : "  not made, as neither of the two needs the other, nor is believed by itself: ",
            fmt::format("{} ({})", fmt::join(r.changes, "; "), flips_text(k, *r.first)));
    }
    return out;
}

/// The other half of a pair that was left out.
std::string idle_text(const KernelIdentification& k, const FoundChange& f) {
    std::string out;
    for (const IdleChange& idle : f.idle)
        out += wrapped("      found with, and left out: ",
                       fmt::format("{} (adds {} won, {} lost on the {}; {} won, {} lost on those held out)",
                                   change_text(idle.changes), idle.searched.won, idle.searched.lost,
                                   part_name(k, "searched"), idle.held_out.won, idle.held_out.lost));
    return out;
}

std::string found_text(const KernelIdentification& k) {
    if (k.changes.empty())
        return fmt::format(
                   "  {}: none of {} changes tried gains more than the {:g}% that is not modelled, or makes all equal{}\n",
                   k.nearest, k.trials.size(), 100 * unmodelled_share,
                   refused_text(k).empty() ? "" : ", and carries over") +
               refused_text(k);
    std::string out = fmt::format(
        "  {} is {} with {} change{}{}:\n", k.plan.name, k.nearest, k.changes.size(), k.changes.size() == 1 ? "" : "s",
        k.is_found() && !k.is_far() ? "" : ", which are the nearest found and need not be the kernel's");
    for (const Difference& change : k.changes)
        out += fmt::format("    {}: {} -> {}\n", change.field, change.from, change.to);
    for (const FoundChange& f : k.found)
        if (f.carries)
            out += wrapped(f.held_out.none() ? "    made, though those held out are equal with and without it: "
                                             : "    carries over: ",
                           fmt::format("{} ({})", change_text(f.changes), flips_text(k, f))) +
                   idle_text(k, f);
    out += row(k.plan.name, k.match) + row("  " + part_name(k, "searched"), k.searched) +
           row("  " + part_name(k, "held out"), k.held_out);
    out += name_list("with the same changes not told apart:", k.near_ties());
    return out + refused_text(k);
}

/// "lse (bf16, fp16)": a site with rules tried there, each in a word: a format, a rounding; an accumulation has no short name.
std::string with_rules(const SiteEvidence& e, const std::vector<std::vector<Difference>>& tried) {
    std::vector<std::string> rules;
    for (const std::vector<Difference>& changes : tried) {
        const bool exact = std::any_of(changes.begin(), changes.end(), [](const Difference& d) {
            return d.field.ends_with(".format") && d.to == "exact";
        });
        std::string rule = exact ? "exact" : changes.front().to;
        if (!exact && changes.size() == 2) rule += " " + changes.back().to;  // a format and its rounding
        if (!exact && changes.front().field.ends_with(".accumulation")) rule = "another accumulation";
        if (std::find(rules.begin(), rules.end(), rule) == rules.end()) rules.push_back(std::move(rule));
    }
    return fmt::format("{} ({})", name(e.site), fmt::join(rules, ", "));
}

/// What could explain the elements that still differ, and what the outputs say nothing of.
std::string rest_text(const KernelIdentification& k, bool full) {
    std::vector<const Trial*> helping;
    std::vector<std::string> silent, told, others, better;
    for (const Trial& trial : k.trials)
        if (trial.flips.won > 0) helping.push_back(&trial);
    std::stable_sort(helping.begin(), helping.end(),
                     [](const Trial* a, const Trial* b) { return a->flips.won > b->flips.won; });
    if (!full && helping.size() > changes_shown) helping.resize(changes_shown);
    std::string out =
        fmt::format("  {} of {} elements differ{}\n", k.match.all().differing(), k.match.all().total,
                    helping.empty() ? "" : "; changes that make some of them equal, and how many they lose:");
    for (const Trial* trial : helping) {
        out += wrapped(fmt::format("    {:>7} won {:>8} lost  ", trial->flips.won, trial->flips.lost),
                       change_text(trial->changes));
    }
    for (const SiteEvidence& e : k.sites) {
        if (e.told)
            told.emplace_back(name(e.site));
        else if (e.silent())
            silent.emplace_back(name(e.site));
        else if (e.better.empty())
            others.push_back(with_rules(e, e.told_from));
        if (!e.better.empty()) better.push_back(with_rules(e, e.better));
    }
    if (!k.is_found()) out += "  of the sites of this plan, which is not the kernel, the outputs of the kernel say:\n";
    out += name_list("sites whose rounding the outputs show:", told);
    out += name_list("sites that might be exact, with the rules that they exclude:", others);
    out += name_list("sites with a rule that has more of the elements, none believed by itself:", better);
    return out + name_list("sites of which they say nothing, by any rule tried there alone:", silent);
}

}  // namespace

std::string share_percent(const Match& match) {
    if (match.differing() == 0) return "100%";
    const double missing = 100.0 * static_cast<double>(match.differing()) / static_cast<double>(match.total);
    std::size_t digits = 2;
    while (digits < most_digits && missing < 0.5 * std::pow(10.0, -static_cast<double>(digits))) ++digits;
    return fmt::format("{:.{}f}%", 100.0 - missing, digits);
}

std::string lacking_text(const KernelIdentification& k, std::string_view before) {
    const std::vector<Output> lacking = k.lacking();
    if (lacking.empty()) return "";
    const Output worst = *std::min_element(lacking.begin(), lacking.end(),
                                           [&](Output a, Output b) { return k.match[a].share() < k.match[b].share(); });
    return fmt::format("{}{} of {}", before, share_percent(k.match[worst]), name(worst));
}

namespace {

/// Where an answer is near to being none, or is none: the bound.
std::string bound_text(const KernelIdentification& k) {
    constexpr double near = 0.1;
    if (!k.is_near()) return "";
    if (!k.is_found())
        return fmt::format(
            "  a plan is called the kernel from {:.0f}% of all elements, {:.0f}% of dq and {:.0f}% of any other output on\n",
            100 * found_share, 100 * found_share_of(Output::dq), 100 * found_share_of(Output::o));
    const std::optional<Output> output = k.nearest_to_bound();
    if (!output || k.match[*output].share() >= found_share_of(*output) + near) return "";
    // 90% leaves less than 10% beyond it: there only what is as far from all as from the bound.
    if (1 - k.match[*output].share() < k.match[*output].share() - found_share_of(*output)) return "";
    return fmt::format("  {} of {} is near the bound: with less than {:.0f}% it would not be called the kernel\n",
                       share_percent(k.match[*output]), name(*output), 100 * found_share_of(*output));
}

}  // namespace

std::string table(const Identification& identification, bool full) {
    std::string out;
    for (const std::string& remark : left_out_remarks(identification.left_out)) out += wrapped("", remark);
    for (const KernelIdentification& k : identification.kernels) {
        if (!out.empty()) out += "\n";
        out +=
            fmt::format("{}: {} (head size {}, {}, {})\n", escaped(k.kernel), answer(k), k.head_dim,
                        k.causal ? "causal" : "no causal mask", escaped(fmt::format("{}", fmt::join(k.layers, ", "))));
        if (!suffix(k.storage).empty())
            out += wrapped("  ", fmt::format("{}: presets are compared so, where their names end in {}", k.file_storage,
                                             suffix(k.storage)));
        for (const std::string& sentence : k.not_compared) out += wrapped("  ", sentence);
        for (const std::string& sentence : k.not_finite) out += wrapped("  ", sentence);
        if (!k.inputs.empty()) out += wrapped("  ", k.inputs);
        out += ranking_text(k, full);
        if (!k.trials.empty()) {
            out += found_text(k);
            out += rest_text(k, full);
        }
        out += bound_text(k);
    }
    return out;
}

}  // namespace faultline
