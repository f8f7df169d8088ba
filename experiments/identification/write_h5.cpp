// SPDX-License-Identifier: Apache-2.0
#include <faultline/identification/write_h5.hpp>

#include <algorithm>
#include <set>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <faultline/plan/plan_toml.hpp>

namespace faultline {
namespace {

const std::vector<std::string>& places() {
    static const std::vector<std::string> names{"o", "dq", "dk", "dv", "all", "lse"};
    return names;
}

/// Parallel to places().
std::vector<Match> by_place(const OutputMatches& m) {
    std::vector<Match> all(m.outputs.begin(), m.outputs.end());
    all.push_back(m.all());
    all.push_back(m.lse);
    return all;
}

/// "sites.p_cast.format: bf16 -> fp16; …"
std::string text(const std::vector<Difference>& changes) {
    std::vector<std::string> parts;
    for (const Difference& d : changes) parts.push_back(fmt::format("{}: {} -> {}", d.field, d.from, d.to));
    return fmt::format("{}", fmt::join(parts, "; "));
}

std::string joined(const std::vector<Difference>& changes, std::string Difference::*part) {
    std::vector<std::string> parts;
    for (const Difference& d : changes) parts.push_back(d.*part);
    return fmt::format("{}", fmt::join(parts, "; "));
}

/// Of one place each, apart by " | ".
std::string rules_text(const std::vector<std::vector<Difference>>& rules) {
    std::vector<std::string> parts;
    for (const std::vector<Difference>& changes : rules) parts.push_back(text(changes));
    return fmt::format("{}", fmt::join(parts, " | "));
}

class Writer {
  public:
    Writer(const KernelIdentification& kernel, std::string group, RecordFile& file)
        : k_(kernel), group_(std::move(group)), file_(file) {}

    void write() {
        candidates();
        found();
        changes();
        trials();
        steps();
        sites();
        attributes();
    }

  private:
    template <class T>
    void numbers(const std::string& path, const std::vector<T>& values, const std::vector<Axis>& axes,
                 const char* what) {
        file_.write(path, values, axes, {what, "1"});
    }

    void texts(const std::string& path, const std::vector<std::string>& values, const Axis& axis, const char* what) {
        file_.write_strings(path, values, std::vector<Axis>{axis}, {what});
    }

    Axis axis(const std::string& group, const char* name, const std::vector<std::string>& labels, const char* what) {
        file_.coordinate(group + name, labels, {what});
        return {name, static_cast<std::int64_t>(labels.size())};
    }

    Axis numbered(const std::string& group, const char* name, std::size_t count) {
        std::vector<std::int64_t> index(count);
        for (std::size_t i = 0; i < count; ++i) index[i] = static_cast<std::int64_t>(i);
        file_.coordinate(group + name, index, {"place"});
        return {name, static_cast<std::int64_t>(count)};
    }

    void matches(const std::string& group, const Axis& rows, const std::vector<OutputMatches>& of) {
        const Axis output = axis(group, "output", places(), "o, dq, dk, dv; all of them; rows of the lse");
        std::vector<std::int64_t> equal, near, total;
        for (const OutputMatches& m : of)
            for (const Match& match : by_place(m)) {
                equal.push_back(static_cast<std::int64_t>(match.equal));
                near.push_back(static_cast<std::int64_t>(match.within_one_ulp));
                total.push_back(static_cast<std::int64_t>(match.total));
            }
        const std::vector<Axis> axes{rows, output};
        numbers(group + "equal", equal, axes, "elements that are the kernel's bit for bit");
        numbers(group + "within_one_ulp", near, axes, "elements within one ulp of the kernel's, equal ones included");
        numbers(group + "total", total, axes, "elements compared");
    }

    void candidates() {
        const std::string group = group_ + "candidates/";
        const std::vector<std::string> ties = k_.near_ties();
        std::vector<std::string> names;
        std::vector<OutputMatches> of;
        std::vector<std::uint8_t> tie;
        for (const RankedPlan& ranked : k_.ranking) {
            names.push_back(ranked.plan);
            of.push_back(ranked.match);
            tie.push_back(std::find(ties.begin(), ties.end(), ranked.plan) != ties.end() ? 1 : 0);
        }
        const Axis plan = axis(group, "plan", names, "best first");
        matches(group, plan, of);
        numbers(group + "near_tie", tie, {plan}, "1: the outputs do not tell it from the plan found, with its changes");
    }

    void found() {
        const std::string group = group_ + "found/";
        std::vector<std::string> parts{"all"};
        std::vector<OutputMatches> of{k_.match};
        if (!k_.trials.empty()) {
            parts.insert(parts.end(), {"searched", "held_out"});
            of.insert(of.end(), {k_.searched, k_.held_out});
        }
        matches(group, axis(group, "part", parts, "of the kernel's elements"), of);
    }

    void changes() {
        if (k_.changes.empty()) return;
        const std::string group = group_ + "changes/";
        std::vector<std::string> fields, from, to;
        for (const Difference& d : k_.changes) {
            fields.push_back(d.field);
            from.push_back(d.from);
            to.push_back(d.to);
        }
        const Axis field = axis(group, "field", fields, "as in a plan file");
        texts(group + "from", from, field, "in the nearest candidate");
        texts(group + "to", to, field, "in the plan found");
    }

    void trials() {
        if (k_.trials.empty()) return;
        const std::string group = group_ + "trials/";
        std::vector<std::string> field, rule, from, to;
        std::vector<std::int64_t> won, lost, equal;
        std::vector<double> z;
        for (const Trial& t : k_.trials) {
            field.push_back(joined(t.changes, &Difference::field));
            rule.push_back(rule_type(t.changes));
            from.push_back(joined(t.changes, &Difference::from));
            to.push_back(joined(t.changes, &Difference::to));
            won.push_back(static_cast<std::int64_t>(t.flips.won));
            lost.push_back(static_cast<std::int64_t>(t.flips.lost));
            z.push_back(t.flips.z());
            for (const Match& match : by_place(t.match)) equal.push_back(static_cast<std::int64_t>(match.equal));
        }
        const Axis trial = numbered(group, "trial", k_.trials.size());
        const Axis output = axis(group, "output", places(), "o, dq, dk, dv; all of them; rows of the lse");
        texts(group + "field", field, trial, "what was changed in the plan found, as in a plan file");
        texts(group + "rule", rule, trial, "what kind of rule that is");
        texts(group + "from", from, trial, "in the plan found");
        texts(group + "to", to, trial, "in the plan tried");
        numbers(group + "won", won, {trial}, "elements that the plan tried has and the plan found has not");
        numbers(group + "lost", lost, {trial}, "elements that the plan found has and the plan tried has not");
        numbers(group + "z", z, {trial}, "(won - lost) / sqrt(won + lost)");
        numbers(group + "equal", equal, {trial, output}, "elements that are the kernel's bit for bit");
    }

    void steps() {
        if (k_.found.empty()) return;
        const std::string group = group_ + "steps/";
        std::vector<std::string> change, rule, left;
        std::vector<std::int64_t> level, won, lost, held_won, held_lost;
        std::vector<std::uint8_t> made;
        for (const FoundChange& f : k_.found) {
            change.push_back(text(f.changes));
            rule.push_back(rule_type(f.changes));
            level.push_back(f.pair ? 2 : 1);
            won.push_back(static_cast<std::int64_t>(f.searched.won));
            lost.push_back(static_cast<std::int64_t>(f.searched.lost));
            held_won.push_back(static_cast<std::int64_t>(f.held_out.won));
            held_lost.push_back(static_cast<std::int64_t>(f.held_out.lost));
            made.push_back(f.carries ? 1 : 0);
            std::vector<std::string> idle;
            for (const IdleChange& i : f.idle) idle.push_back(text(i.changes));
            left.push_back(fmt::format("{}", fmt::join(idle, " | ")));
        }
        const Axis step = numbered(group, "step", k_.found.size());
        texts(group + "change", change, step, "as in a plan file");
        texts(group + "rule", rule, step, "what kind of rule that is");
        numbers(group + "level", level, {step}, "how many changes: 1, or a pair");
        numbers(group + "won", won, {step}, "elements won where it was searched");
        numbers(group + "lost", lost, {step}, "elements lost where it was searched");
        numbers(group + "held_out_won", held_won, {step}, "elements won of those held out");
        numbers(group + "held_out_lost", held_lost, {step}, "elements lost of those held out");
        numbers(group + "made", made, {step}, "1: it carries over and was made");
        texts(group + "left_out", left, step, "changes of the pair it was found as that add nothing");
    }

    void sites() {
        if (k_.sites.empty()) return;
        const std::string group = group_ + "sites/";
        std::vector<std::string> names, others, better;
        std::vector<std::uint8_t> told, silent;
        std::vector<std::int64_t> won, lost, explains;
        for (const SiteEvidence& e : k_.sites) {
            names.emplace_back(name(e.site));
            told.push_back(e.told ? 1 : 0);
            silent.push_back(e.silent() ? 1 : 0);
            won.push_back(static_cast<std::int64_t>(e.exact.won));
            lost.push_back(static_cast<std::int64_t>(e.exact.lost));
            explains.push_back(static_cast<std::int64_t>(e.could_explain));
            others.push_back(rules_text(e.told_from));
            better.push_back(rules_text(e.better));
        }
        const Axis site = axis(group, "site", names, "a place where the plan found rounds");
        numbers(group + "told", told, {site}, "1: the outputs show its rounding");
        numbers(group + "silent", silent, {site}, "1: no rule tried there alone changes what is equal");
        numbers(group + "exact_won", won, {site}, "elements won where it is exact");
        numbers(group + "exact_lost", lost, {site}, "elements lost where it is exact");
        numbers(group + "could_explain", explains, {site}, "most elements won by a change there");
        texts(group + "told_from", others, site, "other rules tried there that lose elements, believably");
        texts(group + "better", better, site, "rules tried there that win elements, believably, and were not made");
    }

    void attributes() {
        const std::string object = group_.substr(0, group_.size() - 1);
        file_.attribute(object, "kernel", k_.kernel);
        file_.attribute(object, "head_dim", static_cast<std::int64_t>(k_.head_dim));
        file_.attribute(object, "causal", std::int64_t{k_.causal ? 1 : 0});
        file_.attribute(object, "layers", std::span<const std::string>(k_.layers));
        file_.attribute(object, "storage", k_.file_storage);
        file_.attribute(object, "nearest", k_.nearest);
        file_.attribute(object, "near", std::int64_t{k_.is_near() ? 1 : 0});
        file_.attribute(object, "found", std::int64_t{k_.is_found() ? 1 : 0});
        file_.attribute(object, "held_out_by", k_.rows_held_out ? "rows" : "heads");
        file_.attribute(object, "plan", k_.plan.name);
        file_.attribute(object, "plan_toml", to_toml(k_.plan));
    }

    const KernelIdentification& k_;
    std::string group_;
    RecordFile& file_;
};

}  // namespace

void write(const Identification& identification, RecordFile& file) {
    file.attribute("", "input", identification.input);
    file.attribute("", "complete", std::int64_t{identification.complete ? 1 : 0});
    std::set<std::string> taken;
    for (const KernelIdentification& kernel : identification.kernels) {
        std::string name = kernel.kernel;
        for (int i = 2; !taken.insert(name).second; ++i) name = fmt::format("{}_{}", kernel.kernel, i);
        Writer(kernel, name + "/", file).write();
    }
}

}  // namespace faultline
