// SPDX-License-Identifier: Apache-2.0
// faultline selftest: whether the emulated kernel in its device form gives the bits of the CPU's, plan by plan, on a family
// of inputs that reaches every fault, and truth its values and bounds; on the host, or on the card at hand. On a card also what
// the library says of it: copies, the tensor-core kernels, the matrix units' rules, ex2.approx and lg2.approx.
#include <algorithm>
#include <array>
#include <memory>

#include <fmt/format.h>

#include <faultline/agreement/matrix_rule.hpp>
#include <faultline/agreement/special_functions.hpp>
#include <faultline/agreement/tensor_kernels.hpp>
#include <faultline/attribution/group_run.hpp>
#include <faultline/attribution/layer_plan.hpp>
#include <faultline/base/error.hpp>
#include <faultline/cli/command.hpp>
#include <faultline/cli/listing.hpp>
#include <faultline/cli/selftest_sides.hpp>
#include <faultline/cli/terminal.hpp>
#include <faultline/device/device.hpp>
#include <faultline/device/refusals.hpp>
#include <faultline/generation/family.hpp>
#include <faultline/plan/nearest_name.hpp>
#include <faultline/plan/presets.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline::cli {
namespace {

constexpr std::array<std::string_view, 6> all_parts{"plans", "truth", "copies", "kernels", "rules", "functions"};

struct Wanted {
    std::vector<std::string> plans, families, parts;
    std::int64_t queries = 96, head_dim = 64, heads = 2, seed = 1;
};

std::vector<const InputFamily*> chosen_families(const Wanted& wanted, const Settings& settings) {
    std::vector<const InputFamily*> families;
    std::vector<std::string_view> names;
    for (const InputFamily& family : input_families()) {
        names.push_back(family.name);
        if (wanted.families.empty() || std::ranges::count(wanted.families, family.name) > 0)
            families.push_back(&family);
    }
    for (const std::string& name : wanted.families)
        if (std::ranges::count(names, name) == 0)
            throw RequestError(fmt::format("{}: no such family {}: {}", settings.where("families"), in_quotes(name),
                                           expected_one_of(name, names)));
    return families;
}

std::vector<const RoundingPlan*> chosen(const Wanted& wanted, const Settings& settings) {
    std::vector<const RoundingPlan*> plans;
    std::vector<std::string_view> names;
    for (const RoundingPlan& plan : presets()) names.push_back(plan.name);
    for (const RoundingPlan& plan : presets())
        if (wanted.plans.empty() || std::count(wanted.plans.begin(), wanted.plans.end(), plan.name) > 0)
            plans.push_back(&plan);
    for (const std::string& name : wanted.plans)
        if (std::count(names.begin(), names.end(), name) == 0)
            throw RequestError(fmt::format("{}: no such preset {}: {}", settings.where("plans"), in_quotes(name),
                                           expected_one_of(name, names)));
    return plans;
}

/// The parts to compare; the first three of the card alone only there.
std::vector<std::string_view> chosen_parts(const Wanted& wanted, const Settings& settings, bool on_card) {
    const std::size_t here = on_card ? all_parts.size() : 2;
    if (wanted.parts.empty()) {
        // A plan by name is asked about alone.
        const std::size_t count = wanted.plans.empty() ? here : 1;
        return {all_parts.begin(), all_parts.begin() + static_cast<std::ptrdiff_t>(count)};
    }
    std::vector<std::string_view> parts;
    for (const std::string& name : wanted.parts) {
        const auto place = std::ranges::find(all_parts, name);
        if (place == all_parts.end())
            throw RequestError(
                fmt::format("{}: {}: {}", settings.where("parts"), in_quotes(name), expected_one_of(name, all_parts)));
        if (static_cast<std::size_t>(place - all_parts.begin()) >= here)
            throw RequestError(fmt::format("{}: {} is a part of a card's: expected --device cuda with it",
                                           settings.where("parts"), in_quotes(name)));
        parts.push_back(*place);
    }
    const auto asked = [&](std::string_view part) { return std::ranges::find(parts, part) != parts.end(); };
    if (!wanted.plans.empty() && !asked("plans"))
        throw RequestError(
            fmt::format("{}: expected the part plans in {}, too", settings.where("plans"), settings.where("parts")));
    if (!asked("plans") && !asked("truth"))
        settings.refuse_unread({"families", "queries", "heads", "head-dim"}, "without the parts plans and truth");
    return parts;
}

/// A row of the card for which there is nothing to compare with, and why.
agreement::Agreement without(std::string name) {
    agreement::Agreement none;
    none.name = std::move(name);
    return none;
}

/// What the library says of the card beside the emulation, part by part; each row goes to add() as it is found.
template <class Wants, class Add, class Show>
void compare_card(const device::Info& card, const Wants& wants, int threads, std::uint64_t seed, const Show& show,
                  const Add& add) {
    const int capability = 10 * card.major + card.minor;
    const std::string version = fmt::format("{}.{}", card.major, card.minor);
    if (wants("kernels")) {
        const std::vector<agreement::TensorCase> cases = agreement::tensor_cases(capability);
        if (cases.empty()) add(without(fmt::format("tensor kernels (plans are 9.0's, not {}'s)", version)));
        for (const agreement::TensorCase& one : cases) {
            show(one.name);
            add(agreement::check_tensor_kernel(one, threads, seed));
        }
    }
    if (wants("rules")) {
        const std::vector<agreement::NamedInstruction> known = agreement::instructions_with_rules(capability);
        if (known.empty()) add(without(fmt::format("mma, wgmma (no rule of {})", version)));
        if (!known.empty() && capability != 90) add(without(fmt::format("wgmma ({} has none)", version)));
        for (const agreement::NamedInstruction& named : known) {
            show(named.name);
            add(agreement::check_rule(named, seed));
        }
    }
    if (wants("functions")) {
        if (capability > 90) return add(without(fmt::format("ex2, lg2 (no code for {})", version)));
        show("ex2.approx, lg2.approx");
        for (const agreement::Agreement& function : agreement::check_special_functions()) add(function);
    }
}

Status run(const Invocation& call, const Wanted& wanted) {
    const std::string& on = call.common.device;
    const std::vector<std::string_view> parts = chosen_parts(wanted, call.settings, on == "cuda");
    const auto wants = [&](std::string_view part) { return std::ranges::find(parts, part) != parts.end(); };
    const std::vector<const RoundingPlan*> plans = chosen(wanted, call.settings);
    const std::vector<const InputFamily*> families = chosen_families(wanted, call.settings);
    device::Info info;
    if (on == "cuda") {
        info = device::info();
        if (call.talks())
            remark(fmt::format("{}, compute capability {}.{}, {}", info.name, info.major, info.minor,
                               device::memory_text(info.memory)));
    }
    watch_for_interrupts();
    InputShape shape;
    shape.heads = wanted.heads;
    shape.kv_heads = wanted.heads;
    shape.queries = shape.keys = wanted.queries;
    shape.head_dim = wanted.head_dim;
    Listing listing{"selftest",
                    {{"plan", "plan", {}},
                     {"elements", "elements", {}},
                     {"differing", "differing", {}},
                     {"cpu_seconds", "cpu, s", {}},
                     {"device_seconds", fmt::format("{}, s", on), {}}}};
    Tally all;
    const auto add_row = [&](const std::string& name, const Compared& found) {
        all.elements += found.tally.elements;
        all.differing += found.tally.differing;
        const std::vector<std::string> row{
            name, fmt::format("{}", found.tally.elements), fmt::format("{}", found.tally.differing),
            fmt::format("{:.3f}", found.cpu_seconds), fmt::format("{:.3f}", found.device_seconds)};
        for (std::size_t c = 0; c < row.size(); ++c) listing.columns[c].values.push_back(row[c]);
    };
    Progress progress(call.talks());
    for (std::size_t p = 0; wants("plans") && p < plans.size(); ++p) {
        Compared found;
        for (const InputFamily* family : families) {
            if (interrupted()) throw WorkError("interrupted: the plans before were whole, and nothing is written");
            progress.update(p, plans.size(), plans[p]->name);
            const LayerCapture layer = make_inputs(*family, shape, static_cast<std::uint64_t>(wanted.seed));
            const RoundingPlan plan = for_layer(*plans[p], layer);
            const std::vector<attribution::Group> cut =
                attribution::groups_of(layer, {}, static_cast<std::uint64_t>(wanted.seed));
            std::vector<HeadGroup> groups;
            for (const attribution::Group& group : cut) groups.push_back(group.inputs);
            if (!problem_with(plan, layer.extras()).empty()) continue;  // it has no place for a sink or dropout
            if (p == 0 && family == families.front()) (void)in_device_form(on, groups, plan);  // the code is loaded
            const Side reference = on_cpu(groups, plan, static_cast<int>(call.common.threads)),
                       other = in_device_form(on, groups, plan);
            found.tally.add(reference, other);
            found.cpu_seconds += reference.seconds;
            found.device_seconds += other.seconds;
        }
        add_row(plans[p]->name, found);
    }
    if (wants("truth")) {
        progress.update(plans.size(), plans.size(), "truth");
        add_row("truth", compare_truth(on, families, shape, static_cast<std::uint64_t>(wanted.seed)));
    }
    if (wants("copies")) {
        progress.update(plans.size(), plans.size(), "large copies");
        add_row("large copies",
                compare_large(static_cast<int>(call.common.threads), static_cast<std::uint64_t>(wanted.seed)));
    }
    if (on == "cuda")
        compare_card(
            info, wants, static_cast<int>(call.common.threads), static_cast<std::uint64_t>(wanted.seed),
            [&](const std::string& name) {
                if (interrupted()) throw WorkError("interrupted: the rows before were whole, and nothing is written");
                progress.update(plans.size(), plans.size(), name);
            },
            [&](const agreement::Agreement& row) {
                add_row(row.name, {{row.elements, row.differing}, row.cpu_seconds, row.device_seconds});
            });
    progress.clear();
    present(listing, call);
    if (call.talks())
        remark(fmt::format("{} of {} elements of {} differ from {}", all.differing, all.elements,
                           on == "cuda" ? "outputs, truth, products and functions" : "outputs and truth",
                           on == "cuda" ? "what the CPU, the rules and the models have" : "the CPU's"));
    return all.differing == 0 ? Status::done : Status::failed;
}

Run declare(Settings& settings) {
    auto wanted = std::make_shared<Wanted>();
    settings.list("plans", wanted->plans, "NAME[,…]", "Presets to test (default: all)");
    settings.list(
        "parts", wanted->parts, "NAME[,…]",
        "What to compare: plans, truth; on a card also copies (large ones), kernels (of the tensor cores), rules (of "
        "mma and wgmma), functions (ex2.approx, lg2.approx) (default: all; with --plans, plans)");
    settings.list("families", wanted->families, "NAME[,…]",
                  "Inputs to test on (faultline generate --list; default: all)");
    settings.integer("queries", wanted->queries, 8, "N", "Length of the sequence (default 96)", 1 << 16);
    settings.integer("heads", wanted->heads, 1, "N", "Heads of each input (default 2)", 1 << 12);
    settings.integer("head-dim", wanted->head_dim, 8, "N", "Width of a head (default 64)", 1 << 10);
    settings.integer("seed", wanted->seed, 0, "N", "Of the inputs and of stochastic rounding (default 1)");
    return [wanted](const Invocation& call) { return run(call, *wanted); };
}

}  // namespace

Command selftest_command() {
    return {"selftest", "Whether the emulated kernel gives the same bits on a device",
            "  faultline selftest --device cuda", declare};
}

}  // namespace faultline::cli
