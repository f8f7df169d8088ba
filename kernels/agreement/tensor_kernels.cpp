// SPDX-License-Identifier: Apache-2.0
#include <faultline/agreement/tensor_kernels.hpp>

#include <chrono>
#include <cmath>
#include <span>
#include <utility>

#include <faultline/agreement/backward_bound.hpp>
#include <faultline/agreement/differing.hpp>
#include <faultline/base/parallel.hpp>
#include <faultline/format/format.hpp>
#include <faultline/random/random_stream.hpp>
#include <faultline/tensor_kernel/backward.hpp>
#include <faultline/tensor_kernel/forward.hpp>

namespace faultline::agreement {
namespace {

using tensor_kernel::Element;
using tensor_kernel::Unit;
using Kind = TensorCase::Kind;
using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

/// Groups of one shape that own their operands: normal numbers of bf16, queries of twice the size.
struct Groups {
    std::vector<Matrix> values;
    std::vector<HeadGroup> list;

    Groups(std::size_t groups, std::size_t query_heads, std::ptrdiff_t n_q, std::ptrdiff_t n_k, std::ptrdiff_t d,
           bool causal, std::uint64_t seed) {
        const std::size_t each = 2 * query_heads + 2;
        for (std::size_t i = 0; i < groups * each; ++i) {
            const bool of_query = i % each < 2 * query_heads;
            const RandomStream stream(seed, i);
            Matrix& m = values.emplace_back(of_query ? n_q : n_k, d);
            const double size = of_query && i % each % 2 == 0 ? 2 : 1;
            for (std::size_t e = 0; e < m.values.size(); ++e)
                m.values[e] = round(size * stream.normal(e), bf16, Rounding::nearest_even);
        }
        for (std::size_t g = 0; g < groups; ++g) {
            const auto view = [&](std::size_t i) { return std::as_const(values[g * each + i]).view(); };
            HeadGroup& group = list.emplace_back();
            for (std::size_t h = 0; h < query_heads; ++h) {
                group.q.push_back(view(2 * h));
                group.dout.push_back(view(2 * h + 1));
            }
            group.k = view(each - 2);
            group.v = view(each - 1);
            group.scale = 1 / std::sqrt(static_cast<double>(d));
            group.causal = causal;
            group.first_head = static_cast<int>(g * query_heads);
        }
    }
};

template <class Out, class Run>
std::vector<Out> on_cpu(const std::vector<HeadGroup>& groups, int threads, double& seconds, const Run& run) {
    const auto start = Clock::now();
    std::vector<Out> all(groups.size());
    parallel_for(groups.size(), threads, [&](std::size_t g) { all[g] = run(g); });
    seconds += seconds_since(start);
    return all;
}
template <class Run>
auto on_device(double& seconds, const Run& run) {
    const auto start = Clock::now();
    auto all = run();
    seconds += seconds_since(start);
    return all;
}

void compare_forward(const TensorCase& one, const Groups& groups, const RoundingPlan& plan, int threads,
                     Agreement& found) {
    const auto device =
        on_device(found.device_seconds, [&] { return tensor_kernel::attention_forward(groups.list, plan, one.unit); });
    const auto cpu = on_cpu<GroupForward>(groups.list, threads, found.cpu_seconds,
                                          [&](std::size_t g) { return attention_forward(groups.list[g], plan); });
    for (std::size_t g = 0; g < cpu.size(); ++g) {
        found.differing += differing(device[g], cpu[g]);
        for (const HeadForward& head : cpu[g].heads) found.elements += 2 * head.o.values.size() + head.lse.size();
    }
}

void compare_backward(const TensorCase& one, const Groups& groups, const RoundingPlan& plan, int threads,
                      Agreement& found) {
    const auto forward = on_cpu<GroupForward>(groups.list, threads, found.cpu_seconds,
                                              [&](std::size_t g) { return attention_forward(groups.list[g], plan); });
    const auto device =
        on_device(found.device_seconds, [&] { return tensor_kernel::attention_backward(groups.list, forward, plan); });
    const auto count = [&](const Matrix& x) { found.elements += x.values.size(); };
    if (one.kind == Kind::grouped_backward) {
        const auto truth = on_cpu<std::vector<tensor_kernel::Bounded>>(
            groups.list, threads, found.cpu_seconds,
            [&](std::size_t g) { return std::vector{tensor_kernel::Bounded(groups.list[g])}; });
        for (std::size_t g = 0; g < device.size(); ++g) {
            const tensor_kernel::Bounded& t = truth[g].front();
            count(t.dk);
            count(t.dv);
            found.differing += beyond(device[g].dk, t.dk, t.dk_bound) + beyond(device[g].dv, t.dv, t.dv_bound);
        }
    }
    const auto cpu = on_cpu<GroupBackward>(groups.list, threads, found.cpu_seconds, [&](std::size_t g) {
        return attention_backward(groups.list[g], forward[g], plan);
    });
    for (std::size_t g = 0; g < device.size(); ++g) {
        for (std::size_t h = 0; h < cpu[g].dq.size(); ++h) {
            count(cpu[g].dq[h]);
            found.differing += differing(device[g].dq[h], cpu[g].dq[h]);
        }
        if (one.kind == Kind::grouped_backward) continue;
        count(cpu[g].dk);
        count(cpu[g].dv);
        found.differing += differing(device[g].dk, cpu[g].dk) + differing(device[g].dv, cpu[g].dv);
    }
}

}  // namespace

std::vector<TensorCase> tensor_cases(int capability) {
    std::vector<TensorCase> all;
    if (capability != 90) return all;
    const auto add = [&](Kind kind, Element element, Unit unit) {
        const char* const pass = kind == Kind::forward    ? "forward "
                                 : kind == Kind::backward ? "backward "
                                                          : "grouped backward ";
        const char* const type = element == Element::bf16 ? "bf16" : element == Element::fp16 ? "fp16" : "e4m3";
        all.push_back({kind, element, unit, std::string(pass) + type + (unit == Unit::wgmma ? " wgmma" : " mma")});
    };
    for (const Kind kind : {Kind::forward, Kind::backward})
        for (const Unit unit : {Unit::wgmma, Unit::mma})
            for (const Element element : {Element::bf16, Element::fp16}) add(kind, element, unit);
    for (const Kind kind : {Kind::forward, Kind::backward}) add(kind, Element::e4m3, Unit::wgmma);
    add(Kind::grouped_backward, Element::bf16, Unit::wgmma);
    return all;
}

Agreement check_tensor_kernel(const TensorCase& one, int threads, std::uint64_t seed, std::ptrdiff_t queries) {
    Agreement found;
    found.name = one.name;
    const std::size_t query_heads = one.kind == Kind::grouped_backward ? 3 : 1;
    for (const int d : {64, 128}) {
        const RoundingPlan plan = one.kind == Kind::forward ? tensor_kernel::forward_plan(one.element, one.unit, d)
                                                            : tensor_kernel::backward_plan(d, one.element, one.unit);
        const Groups causal(3, query_heads, queries, queries, d, true, seed),
            full(2, query_heads, 200, 333, d, false, seed + 1);
        for (const Groups* groups : {&causal, &full})
            (one.kind == Kind::forward ? compare_forward : compare_backward)(one, *groups, plan, threads, found);
    }
    return found;
}

}  // namespace faultline::agreement
