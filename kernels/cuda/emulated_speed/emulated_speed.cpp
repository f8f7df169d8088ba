// SPDX-License-Identifier: Apache-2.0
// How long plans take on a card, part by part, and beside the CPU.
//   emulated_speed [--plan fa2[,fa3,…]] [--n 4096] [--heads 16] [--d 128] [--non-causal] [--repeat 3] [--cpu-threads 2]
//                  [--calls 0] [--runs 64]
// Plan by plan, on the same inputs: bf16, normal; a forward and a backward of all heads in one call, the best of --repeat; then one more, the passes
// one after the other, whose every step is waited for, part by part. --cpu-threads: the same on so many threads of the processor, and the elements that
// differ (0: not). --calls: --runs forwards and backwards of one head each, so many threads at once, as commands run
// counterfactuals.
#include <algorithm>
#include <charconv>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <string>
#include <vector>

#include <faultline/base/error.hpp>
#include <faultline/base/parallel.hpp>
#include <faultline/device/device.hpp>
#include <faultline/device/parts.hpp>
#include <faultline/format/format.hpp>
#include <faultline/plan/presets.hpp>
#include <faultline/random/random_stream.hpp>
#include <faultline/tensor/matrix.hpp>

namespace faultline {
namespace {

using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

struct Request {
    std::vector<std::string> plans{"fa2"};
    std::ptrdiff_t n = 4096, d = 128;
    std::size_t heads = 16, runs = 64;
    bool causal = true;
    int repeat = 3, cpu_threads = 2, calls = 0;
};

/// bf16 of normal numbers (Box-Muller), from the bits of a stream.
Matrix normal(std::ptrdiff_t rows, std::ptrdiff_t cols, double size, std::uint64_t seed) {
    Matrix m(rows, cols);
    const RandomStream stream(seed, std::uint64_t{0});
    for (std::size_t i = 0; i < m.values.size(); ++i) {
        const std::uint64_t bits = stream.bits(i);
        const double u = (static_cast<double>(bits >> 32) + 0.5) * 0x1p-32;
        const double angle = static_cast<double>(bits & 0xFFFFFFFFu) * 0x1p-32 * 6.283185307179586;
        m.values[i] = round(size * std::sqrt(-2 * std::log(u)) * std::cos(angle), bf16);
    }
    return m;
}

struct Head {
    Matrix q, k, v, dout;
};

std::vector<Head> drawn_heads(const Request& request) {
    std::vector<Head> heads(request.heads);
    parallel_for(heads.size(), 0, [&](std::size_t h) {
        const std::uint64_t seed = 4 * h;
        heads[h] = {normal(request.n, request.d, 1, seed), normal(request.n, request.d, 1, seed + 1),
                    normal(request.n, request.d, 1, seed + 2), normal(request.n, request.d, 1e-3, seed + 3)};
    });
    return heads;
}

std::size_t differing(const std::vector<double>& a, const std::vector<double>& b) {
    std::size_t count = a.size() == b.size() ? 0 : a.size() + b.size();
    for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i)
        count += std::memcmp(&a[i], &b[i], sizeof(double)) != 0 ? 1 : 0;
    return count;
}

void compare_with_cpu(const Request& request, const std::vector<HeadGroup>& groups, const RoundingPlan& plan,
                      const device::Attention& device, double device_seconds) {
    device::Attention cpu{std::vector<GroupForward>(groups.size()), std::vector<GroupBackward>(groups.size())};
    const auto start = Clock::now();
    parallel_for(groups.size(), request.cpu_threads, [&](std::size_t g) {
        cpu.forward[g] = attention_forward(groups[g], plan);
        cpu.backward[g] = attention_backward(groups[g], cpu.forward[g], plan);
    });
    const double seconds = seconds_since(start);
    std::size_t elements = 0, differ = 0;
    const auto add = [&](const std::vector<double>& a, const std::vector<double>& b) {
        elements += a.size();
        differ += differing(a, b);
    };
    for (std::size_t g = 0; g < groups.size(); ++g) {
        const HeadForward &a = cpu.forward[g].heads[0], &b = device.forward[g].heads[0];
        add(a.o.values, b.o.values);
        add(a.lse, b.lse);
        add(cpu.backward[g].dq[0].values, device.backward[g].dq[0].values);
        add(cpu.backward[g].dk.values, device.backward[g].dk.values);
        add(cpu.backward[g].dv.values, device.backward[g].dv.values);
    }
    std::printf("  cpu, %d threads: %.4f s, %.1f times as long; %zu of %zu elements differ\n", request.cpu_threads,
                seconds, seconds / device_seconds, differ, elements);
}

void print_parts(const std::vector<HeadGroup>& groups, const RoundingPlan& plan) {
    device::Parts parts;
    device::time_parts(&parts);
    const auto start = Clock::now();
    const auto forward = device::attention_forward(groups, plan);
    (void)device::attention_backward(groups, forward, plan);
    double rest = seconds_since(start) - parts.allocating - parts.sending - parts.fetching;
    device::time_parts(nullptr);
    std::printf("  step by step: allocating %.4f, sending %.4f, fetching %.4f", parts.allocating, parts.sending,
                parts.fetching);
    for (const auto& [job, seconds] : parts.computing) {
        std::printf(", %s %.4f", job.c_str(), seconds);
        rest -= seconds;
    }
    std::printf(", the host %.4f s\n", rest);
    for (const auto& [job, heads] : parts.heads_in_registers)
        std::printf("  %s in registers: %zu of %zu heads, the others by teams\n", job.c_str(), heads, groups.size());
    std::printf("  blocks of products that the card's unit had begun and left to the threads: %zu\n",
                parts.blocks_left);
}

void run(const Request& request, const std::vector<Head>& heads, const std::string& name) {
    std::vector<HeadGroup> groups;
    for (const Head& head : heads) {
        HeadGroup group;
        group.q = {head.q.view()};
        group.dout = {head.dout.view()};
        group.k = head.k.view();
        group.v = head.v.view();
        group.scale = 1 / std::sqrt(static_cast<double>(request.d));
        group.causal = request.causal;
        group.first_head = static_cast<int>(groups.size());
        groups.push_back(group);
    }
    const RoundingPlan plan = for_head_dim(faultline::plan(name), static_cast<int>(request.d), request.causal);
    const auto n = static_cast<double>(request.n);
    const double pairs = static_cast<double>(request.heads) * (request.causal ? n * (n + 1) / 2 : n * n);
    const double products = pairs * static_cast<double>(request.d) * 7;  // q k, p v; q k, do v, ds k, ds q, p do
    std::printf("plan %s, %zu heads of %td, d %td%s\n", name.c_str(), request.heads, request.n, request.d,
                request.causal ? ", causal" : "");
    device::Attention outputs;
    double best = HUGE_VAL;
    for (int r = 0; r <= request.repeat; ++r) {  // the first loads the code
        outputs = {};  // freed before the clock starts, as those of the processor are after it has stopped
        const auto start = Clock::now();
        outputs = device::attention(groups, plan);
        const double seconds = seconds_since(start);
        if (r > 0) best = std::min(best, seconds);
    }
    std::printf("  one call: %.4f s, %.3g products/s\n", best, products / best);
    std::fflush(stdout);
    print_parts(groups, plan);
    if (request.cpu_threads > 0) compare_with_cpu(request, groups, plan, outputs, best);
    if (request.calls == 0) return;
    const auto start = Clock::now();
    parallel_for(request.runs, request.calls, [&](std::size_t r) {
        const HeadGroup& group = groups[r % groups.size()];
        const GroupForward forward = device::backend().forward(group, plan, nullptr);
        (void)device::backend().backward(group, forward, plan, nullptr);
    });
    const double seconds = seconds_since(start);
    std::printf("  %zu runs of one head, %d at once: %.4f s, %.3g products/s\n", request.runs, request.calls, seconds,
                products / static_cast<double>(request.heads) * static_cast<double>(request.runs) / seconds);
}

std::vector<std::string> names_of(const std::string& list) {
    std::vector<std::string> names;
    std::istringstream text(list);
    for (std::string one; std::getline(text, one, ',');) names.push_back(one);
    return names;
}

Request parse(int argc, char** argv) {
    Request request;
    const auto next = [&](int& i) {
        if (i + 1 >= argc) throw RequestError(std::string(argv[i]) + ": expected a value");
        return std::string(argv[++i]);
    };
    // `least` to `most`, in digits.
    const auto number = [&](int& i, std::ptrdiff_t least, std::ptrdiff_t most) {
        const std::string option = argv[i], text = next(i);
        std::ptrdiff_t value = 0;
        const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
        if (error != std::errc{} || end != text.data() + text.size() || value < least || value > most)
            throw RequestError(option + ": " + text + ": expected a whole number from " + std::to_string(least) +
                               " to " + std::to_string(most));
        return value;
    };
    constexpr std::ptrdiff_t longest = 1 << 24, most = 1 << 12;
    for (int i = 1; i < argc; ++i) {
        const std::string option = argv[i];
        if (option == "--plan")
            request.plans = names_of(next(i));
        else if (option == "--n")
            request.n = number(i, 1, longest);
        else if (option == "--d")
            request.d = number(i, 1, most);
        else if (option == "--heads")
            request.heads = static_cast<std::size_t>(number(i, 1, most));
        else if (option == "--repeat")
            request.repeat = static_cast<int>(number(i, 1, most));
        else if (option == "--cpu-threads")
            request.cpu_threads = static_cast<int>(number(i, 0, most));
        else if (option == "--calls")
            request.calls = static_cast<int>(number(i, 0, most));
        else if (option == "--runs")
            request.runs = static_cast<std::size_t>(number(i, 1, most));
        else if (option == "--non-causal")
            request.causal = false;
        else
            throw RequestError(option + ": no such option: see the head of emulated_speed.cpp");
    }
    if (request.plans.empty()) throw RequestError("--plan: expected the name of a preset, or several with commas");
    constexpr double elements = 1 << 28;  // of an operand: 2 GiB, and there are some ten
    if (static_cast<double>(request.heads) * static_cast<double>(request.n) * static_cast<double>(request.d) > elements)
        throw RequestError("--heads, --n and --d: expected at most 268435456 as their product");
    return request;
}

}  // namespace
}  // namespace faultline

int main(int argc, char** argv) {
    try {
        const faultline::Request request = faultline::parse(argc, argv);
        for (const std::string& name : request.plans) (void)faultline::plan(name);  // none is there in vain
        std::printf("%s\n", faultline::device::info().name.c_str());
        const std::vector<faultline::Head> heads = faultline::drawn_heads(request);
        for (const std::string& name : request.plans) {
            faultline::run(request, heads, name);
            std::fflush(stdout);
        }
    } catch (const faultline::RequestError& e) {
        std::fprintf(stderr, "emulated_speed: %s\n", e.what());
        return 2;
    } catch (const std::exception& e) {
        std::fprintf(stderr, "emulated_speed: %s\n", e.what());
        return 1;
    }
}
