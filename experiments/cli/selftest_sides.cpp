// SPDX-License-Identifier: Apache-2.0
#include <faultline/cli/selftest_sides.hpp>

#include <chrono>
#include <cmath>
#include <cstring>
#include <utility>

#include <faultline/attribution/group_run.hpp>
#include <faultline/base/parallel.hpp>
#include <faultline/device/device.hpp>
#include <faultline/device/truth.hpp>
#include <faultline/emulated/host.hpp>
#include <faultline/format/format.hpp>
#include <faultline/plan/presets.hpp>
#include <faultline/random/random_stream.hpp>
#include <faultline/truth_teams/host.hpp>

namespace faultline::cli {
namespace {

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

}  // namespace

void Tally::add(const std::vector<double>& a, const std::vector<double>& b) {
    elements += a.size();
    if (a.size() != b.size()) {
        differing += a.size();
        return;
    }
    for (std::size_t i = 0; i < a.size(); ++i) differing += std::memcmp(&a[i], &b[i], sizeof(double)) != 0 ? 1 : 0;
}

void Tally::add(const CertifiedMatrix& a, const CertifiedMatrix& b) {
    elements += a.size();
    if (a.size() != b.size()) {
        differing += a.size();
        return;
    }
    for (std::size_t i = 0; i < a.size(); ++i)
        differing += a.value[i] == b.value[i] && a.bound[i] == b.bound[i] && a.exponent[i] == b.exponent[i] ? 0 : 1;
}

void Tally::add(const GroupTruth& a, const GroupTruth& b) {
    for (std::size_t h = 0; h < a.heads.size(); ++h)
        for (const auto member : {&HeadTruth::o, &HeadTruth::dq, &HeadTruth::lse, &HeadTruth::delta})
            add(a.heads[h].*member, b.heads[h].*member);
    add(a.dk, b.dk);
    add(a.dv, b.dv);
}

void Tally::add(const Side& a, const Side& b) {
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

}  // namespace faultline::cli
