// SPDX-License-Identifier: Apache-2.0
// faultline selftest: whether the emulated kernel in its device form gives the bits of the CPU's, plan by plan, on a family
// of inputs that reaches every fault, and truth its values and bounds; on the host, or on the card at hand. On a card also what
// the library says of it: copies, the tensor-core kernels, the matrix units' rules, ex2.approx and lg2.approx.
#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstring>
#include <memory>
#include <utility>

#include <fmt/format.h>

#include <faultline/agreement/matrix_rule.hpp>
#include <faultline/agreement/special_functions.hpp>
#include <faultline/agreement/tensor_kernels.hpp>
#include <faultline/attribution/group_run.hpp>
#include <faultline/attribution/layer_plan.hpp>
#include <faultline/base/error.hpp>
#include <faultline/base/parallel.hpp>
#include <faultline/cli/command.hpp>
#include <faultline/cli/listing.hpp>
#include <faultline/cli/terminal.hpp>
#include <faultline/device/device.hpp>
#include <faultline/device/truth.hpp>
#include <faultline/emulated/host.hpp>
#include <faultline/format/format.hpp>
#include <faultline/generation/family.hpp>
#include <faultline/plan/nearest_name.hpp>
#include <faultline/plan/presets.hpp>
#include <faultline/random/random_stream.hpp>
#include <faultline/tensor/text.hpp>
#include <faultline/truth_teams/host.hpp>

namespace faultline::cli {
namespace {

constexpr std::array<std::string_view, 6> all_parts{"plans", "truth", "copies", "kernels", "rules", "functions"};

struct Wanted {
    std::vector<std::string> plans, families, parts;
    std::int64_t queries = 96, head_dim = 64, heads = 2, seed = 1;
};

/// Outputs of one side, and the time that it took.
struct Side {
    std::vector<GroupForward> forward;
    std::vector<GroupBackward> backward;
    double seconds = 0;
};

struct Tally {
    std::uint64_t elements = 0, differing = 0;

    void add(const std::vector<double>& a, const std::vector<double>& b) {
        elements += a.size();
        if (a.size() != b.size()) {
            differing += a.size();
            return;
        }
        for (std::size_t i = 0; i < a.size(); ++i) differing += std::memcmp(&a[i], &b[i], sizeof(double)) != 0 ? 1 : 0;
    }
    /// Value, bound and exponent of each element.
    void add(const CertifiedMatrix& a, const CertifiedMatrix& b) {
        elements += a.size();
        if (a.size() != b.size()) {
            differing += a.size();
            return;
        }
        for (std::size_t i = 0; i < a.size(); ++i)
            differing += a.value[i] == b.value[i] && a.bound[i] == b.bound[i] && a.exponent[i] == b.exponent[i] ? 0 : 1;
    }
    void add(const GroupTruth& a, const GroupTruth& b) {
        for (std::size_t h = 0; h < a.heads.size(); ++h)
            for (const auto member : {&HeadTruth::o, &HeadTruth::dq, &HeadTruth::lse, &HeadTruth::delta})
                add(a.heads[h].*member, b.heads[h].*member);
        add(a.dk, b.dk);
        add(a.dv, b.dv);
    }
    void add(const Side& a, const Side& b) {
        for (std::size_t g = 0; g < a.forward.size(); ++g) {
            for (std::size_t h = 0; h < a.forward[g].heads.size(); ++h) {
                add(a.forward[g].heads[h].o.values, b.forward[g].heads[h].o.values);
                add(a.forward[g].heads[h].lse, b.forward[g].heads[h].lse);
                add(a.backward[g].dq[h].values, b.backward[g].dq[h].values);
            }
            add(a.backward[g].dk.values, b.backward[g].dk.values);
            add(a.backward[g].dv.values, b.backward[g].dv.values);
        }
    }
};

/// What one row of the listing says.
struct Compared {
    Tally tally;
    double cpu_seconds = 0, device_seconds = 0;
};

double seconds_since(std::chrono::steady_clock::time_point start) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

template <class Forward, class Backward>
Side timed(Forward&& forward, Backward&& backward) {
    const auto start = std::chrono::steady_clock::now();
    Side side;
    side.forward = forward();
    side.backward = backward(side.forward);
    side.seconds = seconds_since(start);
    return side;
}

Side on_cpu(const std::vector<HeadGroup>& groups, const RoundingPlan& plan, int threads) {
    return timed(
        [&] {
            std::vector<GroupForward> all(groups.size());
            parallel_for(groups.size(), threads, [&](std::size_t g) { all[g] = attention_forward(groups[g], plan); });
            return all;
        },
        [&](const std::vector<GroupForward>& forward) {
            std::vector<GroupBackward> all(groups.size());
            parallel_for(groups.size(), threads,
                         [&](std::size_t g) { all[g] = attention_backward(groups[g], forward[g], plan); });
            return all;
        });
}
Side in_device_form(const std::string& device, const std::vector<HeadGroup>& groups, const RoundingPlan& plan) {
    if (device == "cuda")
        return timed([&] { return device::attention_forward(groups, plan); },
                     [&](const auto& forward) { return device::attention_backward(groups, forward, plan); });
    emulated::HostBackend backend;
    return timed([&] { return emulated::forward(backend, groups, plan); },
                 [&](const auto& forward) { return emulated::backward(backend, groups, forward, plan); });
}

/// Heads whose operands and results travel to a card in several pieces (Staging): as bf16 in two of 2^19 values, as floats in three,
/// as doubles in five. `exact` has results that are doubles, fp32 inputs travel as floats.
struct LargeHeads {
    static constexpr std::ptrdiff_t n = 4200, d = 128;
    std::vector<Matrix> values;
    std::vector<HeadGroup> groups;

    LargeHeads(const Format& format, std::uint64_t seed) {
        constexpr int heads = 2, operands = 4;
        for (int i = 0; i < heads * operands; ++i) {
            const RandomStream stream(seed, static_cast<std::uint64_t>(i));
            Matrix& m = values.emplace_back(n, d);
            for (std::size_t e = 0; e < m.values.size(); ++e) m.values[e] = round(stream.normal(e), format);
        }
        for (int h = 0; h < heads; ++h) {
            const auto view = [&](int i) {
                return std::as_const(values[static_cast<std::size_t>(h * operands + i)]).view();
            };
            HeadGroup& group = groups.emplace_back();
            group.q = {view(0)};
            group.dout = {view(1)};
            group.k = view(2);
            group.v = view(3);
            group.scale = 1 / std::sqrt(static_cast<double>(d));
            group.first_head = h;
        }
    }
};

/// On a card alone: elsewhere nothing is copied. Passes one by one, and in one call.
Compared compare_large(int threads, std::uint64_t seed) {
    Compared found;
    const auto add = [&](const char* name, const Format& format) {
        const LargeHeads heads(format, seed);
        const RoundingPlan settled = for_head_dim(plan(name), LargeHeads::d, true);
        const Side reference = on_cpu(heads.groups, settled, threads);
        const Side other = in_device_form("cuda", heads.groups, settled);
        const auto start = std::chrono::steady_clock::now();
        device::Attention both = device::attention(heads.groups, settled);
        found.device_seconds += other.seconds + seconds_since(start);
        found.cpu_seconds += reference.seconds;
        found.tally.add(reference, other);
        found.tally.add(reference, {std::move(both.forward), std::move(both.backward), 0});
    };
    add("fa2", bf16);
    add("exact", fp32);
    return found;
}

/// The fast path alone: what it leaves undecided is the processor's on every device.
constexpr TruthOptions fast{.correctly_rounded = false};

GroupTruth truth_in_device_form(const std::string& device, const TruthProblem& problem) {
    if (device == "cuda") return device::attention_truth(problem, fast);
    const auto by_teams = [](const TruthProblem& given, bool first_key_is_sink, GroupTruth& truth,
                             detail::FastReport& report) {
        truth_teams::HostBackend backend;
        truth_teams::fast_values(backend, given, first_key_is_sink, truth, report);
    };
    return detail::attention_truth_by(by_teams, problem, fast);
}

Compared compare_truth(const std::string& device, const std::vector<const InputFamily*>& families,
                       const InputShape& shape, std::uint64_t seed) {
    Compared found;
    for (const InputFamily* family : families) {
        const LayerCapture layer = make_inputs(*family, shape, seed);  // which the groups look into
        for (const attribution::Group& group : attribution::groups_of(layer, {}, seed)) {
            const auto start = std::chrono::steady_clock::now();
            const GroupTruth cpu = attention_truth(group.problem, fast);
            found.cpu_seconds += seconds_since(start);
            const auto again = std::chrono::steady_clock::now();
            const GroupTruth other = truth_in_device_form(device, group.problem);
            found.device_seconds += seconds_since(again);
            found.tally.add(cpu, other);
        }
    }
    return found;
}

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
            remark(fmt::format("{}, compute capability {}.{}, {:.0f} GiB", info.name, info.major, info.minor,
                               static_cast<double>(info.memory) * 0x1p-30));
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
