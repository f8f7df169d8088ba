// SPDX-License-Identifier: Apache-2.0
// How long truth takes on a card at the size of a large capture, what of it the card does, and whether MPFR agrees.
//   truth_at_scale [--n 4096] [--heads 16] [--kv-heads 16] [--d 128] [--non-causal] [--size 1] [--threads 0] [--repeat 3]
//                  [--verify ELEMENTS] [--verify-groups 1] [--compare-cpu] [--parts]
// bf16 inputs, normal; --size multiplies q and k. --verify: so many elements of each output of the first --verify-groups
// (1) head groups against MPFR with 320 bits (verify_truth; dk and dv take every row that sees a sampled key).
// --compare-cpu: head group 0 against the processor, bit for bit. --parts: seconds of each job on the card.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <typeinfo>
#include <vector>

#include <cuda_runtime.h>

#include <faultline/base/error.hpp>
#include <faultline/base/parallel.hpp>
#include <faultline/device/device.hpp>
#include <faultline/device/truth.hpp>
#include <faultline/device/truth_backend.cuh>
#include <faultline/random/philox.hpp>
#include <faultline/tensor/matrix.hpp>
#include <faultline/truth_teams/driver.hpp>

namespace faultline {
namespace {

using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

struct Request {
    std::ptrdiff_t n = 4096, d = 128;
    std::size_t heads = 16, kv_heads = 16;
    bool causal = true, compare_cpu = false, parts = false;
    double size = 1;
    int threads = 0, repeat = 3;
    std::size_t verify = 0, verify_groups = 1;
};

/// bf16 of normal numbers, by splitmix64 and Box-Muller.
struct Numbers {
    std::uint64_t state;
    double uniform() {
        std::uint64_t z = state += 0x9e3779b97f4a7c15;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
        z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
        return static_cast<double>((z ^ (z >> 31)) >> 11) * 0x1p-53;
    }
    double bf16(double size) {
        const double x = size * std::sqrt(-2 * std::log(1 - uniform())) * std::cos(6.283185307179586 * uniform());
        if (x == 0) return 0;
        int e = 0;
        const double m = std::frexp(x, &e);
        return std::ldexp(std::nearbyint(std::ldexp(m, 8)), e - 8);
    }
    Matrix matrix(std::ptrdiff_t rows, std::ptrdiff_t cols, double size) {
        Matrix m(rows, cols);
        for (double& x : m.values) x = bf16(size);
        return m;
    }
};

struct Group {
    std::vector<Matrix> q, dout;
    Matrix k, v;
    TruthProblem problem;
};

std::vector<Group> groups_of(const Request& request) {
    std::vector<Group> groups(request.kv_heads);
    parallel_for(groups.size(), request.threads, [&](std::size_t g) {
        Group& group = groups[g];
        Numbers numbers{g + 1};
        for (std::size_t h = 0; h < request.heads / request.kv_heads; ++h) {
            group.q.push_back(numbers.matrix(request.n, request.d, request.size));
            group.dout.push_back(numbers.matrix(request.n, request.d, 1e-3));
        }
        group.k = numbers.matrix(request.n, request.d, request.size);
        group.v = numbers.matrix(request.n, request.d, 1);
        for (const Matrix& m : group.q) group.problem.q.push_back(m.view());
        for (const Matrix& m : group.dout) group.problem.dout.push_back(m.view());
        group.problem.k = std::as_const(group.k).view();
        group.problem.v = std::as_const(group.v).view();
        group.problem.causal = request.causal;
    });
    return groups;
}

/// The device's back end with a clock around every job.
class TimedBackend : public device::TruthBackend {
  public:
    using TruthBackend::TruthBackend;
    template <class Job>
    void run(const Job& job, std::ptrdiff_t teams, std::ptrdiff_t doubles) {
        const auto start = synchronised();
        TruthBackend::run(job, teams, doubles);
        (void)synchronised();
        seconds[typeid(Job).name()] += seconds_since(start);
    }
    template <class T>
    T* upload(const T* values, std::size_t n) {
        const auto start = synchronised();
        T* to = TruthBackend::upload(values, n);
        (void)synchronised();
        seconds["upload"] += seconds_since(start);
        return to;
    }
    template <class T>
    void download(const T* from, std::size_t n, T* to) {
        const auto start = synchronised();
        TruthBackend::download(from, n, to);
        seconds["download"] += seconds_since(start);
    }
    std::map<std::string, double> seconds;

  private:
    static Clock::time_point synchronised() {
        check_cuda(cudaStreamSynchronize(stream()), "running the kernel");
        return Clock::now();
    }
};

void print_parts(const Group& group) {
    for (int round = 0; round < 2; ++round) {  // the first also loads the code
        const auto begin = Clock::now();
        const detail::FastInputs inputs(group.problem);
        const double host = seconds_since(begin);
        GroupTruth truth = detail::shaped_truth(group.problem, false);
        const double shaped = seconds_since(begin) - host;
        detail::FastReport report;
        const truth_teams::TruthNeed need(group.problem, device::threads_per_team);
        constexpr std::size_t teams = 2048;
        TimedBackend backend(need.all(teams), teams * need.team());
        truth_teams::Driver<TimedBackend>(backend, inputs).run(false, truth, report);
        if (round == 0) continue;
        std::printf("  one head group, %.4f s in all, FastInputs on the host %.4f s, space for results %.4f s\n",
                    seconds_since(begin), host, shaped);
        for (const auto& [name, seconds] : backend.seconds) std::printf("    %9.5f s  %s\n", seconds, name.c_str());
    }
}

std::size_t differing(const CertifiedMatrix& a, const CertifiedMatrix& b) {
    std::size_t count = 0;
    for (std::size_t e = 0; e < a.size(); ++e)
        count += a.value[e] == b.value[e] && a.bound[e] == b.bound[e] && a.exponent[e] == b.exponent[e] ? 0 : 1;
    return count;
}

void compare_with_the_processor(const Group& group, const GroupTruth& truth) {
    const auto start = Clock::now();
    const GroupTruth cpu = attention_truth(group.problem, {.correctly_rounded = false});
    const double seconds = seconds_since(start);
    std::size_t count = differing(cpu.dk, truth.dk) + differing(cpu.dv, truth.dv);
    for (std::size_t h = 0; h < cpu.heads.size(); ++h)
        count += differing(cpu.heads[h].o, truth.heads[h].o) + differing(cpu.heads[h].dq, truth.heads[h].dq) +
                 differing(cpu.heads[h].lse, truth.heads[h].lse) + differing(cpu.heads[h].delta, truth.heads[h].delta);
    std::printf(
        "  processor, one thread, head group 0: %.2f s; %zu of %zu elements differ in value, bound or exponent\n",
        seconds, count, cpu.elements);
}

/// Upper bound of |bound| / |value| over all elements that are not 0, and how many are 0 with a bound.
void print_bounds(const std::vector<GroupTruth>& truths) {
    double worst = 0;
    std::size_t open = 0;
    const auto look = [&](const CertifiedMatrix& m) {
        for (std::size_t e = 0; e < m.size(); ++e) {
            if (m.value[e] == 0)
                open += m.bound[e] != 0 ? 1 : 0;
            else if (std::isfinite(m.value[e]))
                worst = std::max(worst, m.bound[e] / std::fabs(m.value[e]));
        }
    };
    for (const GroupTruth& t : truths) {
        for (const HeadTruth& h : t.heads)
            for (const CertifiedMatrix* m : {&h.o, &h.dq, &h.lse, &h.delta}) look(*m);
        look(t.dk);
        look(t.dv);
    }
    std::printf("  largest bound / |value|: %.3g = 2^%.2f; zeros with a bound: %zu\n", worst, std::log2(worst), open);
}

void run(const Request& request) {
    const device::Info info = device::info();
    const std::vector<Group> groups = groups_of(request);
    const double pairs = static_cast<double>(request.heads) *
                         (request.causal ? 0.5 * static_cast<double>(request.n) * static_cast<double>(request.n + 1)
                                         : static_cast<double>(request.n) * static_cast<double>(request.n));
    int units = 0, clock_khz = 0, device = 0;
    check_cuda(cudaGetDevice(&device), "choosing a device");
    check_cuda(cudaDeviceGetAttribute(&units, cudaDevAttrMultiProcessorCount, device), "asking the device");
    check_cuda(cudaDeviceGetAttribute(&clock_khz, cudaDevAttrClockRate, device), "asking the device");
    // Lemma 1's sums take 4 operations in binary64 for each product of qk and dp, 5 for each of o, dq, dk, dv; compute
    // capability 8.0 and 9.0 do 32 and 64 in a unit and clock, one fma counted as one.
    const double operations = pairs * static_cast<double>(request.d) * (2 * 4 + 4 * 5);
    const double peak = units * (info.major >= 9 ? 64.0 : 32.0) * clock_khz * 1e3;
    std::printf("%s: n %td, %zu heads, %zu kv heads, d %td, %s, size %g; room %.1f GiB\n", info.name.c_str(), request.n,
                request.heads, request.kv_heads, request.d, request.causal ? "causal" : "not causal", request.size,
                static_cast<double>(device::room()) * 0x1p-30);
    std::vector<GroupTruth> truths(groups.size());
    double best = HUGE_VAL;
    for (int r = 0; r < request.repeat; ++r) {
        for (GroupTruth& t : truths) t = {};
        const auto start = Clock::now();
        parallel_for(groups.size(), request.threads, [&](std::size_t g) {
            truths[g] = device::attention_truth(groups[g].problem, {.correctly_rounded = false});
        });
        const double seconds = seconds_since(start);
        best = std::min(best, seconds);
        std::printf("  %.3f s", seconds);
    }
    std::printf("\n");
    std::size_t elements = 0, slow = 0, undecided = 0;
    for (const GroupTruth& t : truths) {
        elements += t.elements;
        slow += t.slow_elements;
        undecided += t.undecided_elements;
    }
    std::printf("  best %.3f s; the sums alone at the card's peak in binary64 (%.1f T/s): %.4f s, %.1f%% of it\n", best,
                peak * 1e-12, operations / peak, 100 * operations / peak / best);
    std::printf("  %zu elements, %zu by interval arithmetic, %zu whose 53-bit rounding the bound leaves open\n",
                elements, slow, undecided);
    print_bounds(truths);
    if (request.parts) print_parts(groups.front());
    if (request.compare_cpu) compare_with_the_processor(groups.front(), truths.front());
    std::fflush(stdout);
    if (request.verify > 0) {
        const auto start = Clock::now();
        std::vector<TruthVerification> found(std::min(groups.size(), request.verify_groups));
        for (std::size_t g = 0; g < found.size(); ++g)
            found[g] = verify_truth(groups[g].problem, truths[g], request.verify, 11 + g, 320, {}, request.threads);
        std::size_t checked = 0, outside = 0;
        double worst = 0;
        for (const TruthVerification& f : found) {
            checked += f.checked;
            outside += f.outside;
            worst = std::max(worst, f.worst_ratio);
        }
        std::printf(
            "  MPFR, 320 bits: %zu elements recomputed, %zu outside, largest difference / bound %.4f (%.1f s)\n",
            checked, outside, worst, seconds_since(start));
    }
}

}  // namespace
}  // namespace faultline

int main(int argc, char** argv) {
    faultline::Request request;
    try {
        for (int a = 1; a < argc; ++a) {
            const std::string name = argv[a];
            const auto value = [&] {
                if (a + 1 == argc) throw faultline::RequestError(name + ": expected a value");
                char* end = nullptr;
                const double number = std::strtod(argv[++a], &end);
                if (end == argv[a] || *end != 0 || !(number >= 0) || number > 1e6)
                    throw faultline::RequestError(name + ": expected a number from 0 to 1000000");
                return number;
            };
            if (name == "--n")
                request.n = static_cast<std::ptrdiff_t>(value());
            else if (name == "--d")
                request.d = static_cast<std::ptrdiff_t>(value());
            else if (name == "--heads")
                request.heads = static_cast<std::size_t>(value());
            else if (name == "--kv-heads")
                request.kv_heads = static_cast<std::size_t>(value());
            else if (name == "--non-causal")
                request.causal = false;
            else if (name == "--size")
                request.size = value();
            else if (name == "--threads")
                request.threads = static_cast<int>(value());
            else if (name == "--repeat")
                request.repeat = static_cast<int>(value());
            else if (name == "--verify")
                request.verify = static_cast<std::size_t>(value());
            else if (name == "--verify-groups")
                request.verify_groups = static_cast<std::size_t>(value());
            else if (name == "--compare-cpu")
                request.compare_cpu = true;
            else if (name == "--parts")
                request.parts = true;
            else
                throw faultline::RequestError(name + ": expected an option of the comment in truth_at_scale.cu");
        }
        if (request.n < 1 || request.d < 1 || request.heads < 1 || request.repeat < 1)
            throw faultline::RequestError("--n, --d, --heads and --repeat: expected 1 or more");
        if (request.kv_heads == 0 || request.heads % request.kv_heads != 0)
            throw faultline::RequestError("--kv-heads: expected a divisor of --heads");
        faultline::run(request);
    } catch (const faultline::RequestError& error) {
        std::fprintf(stderr, "truth_at_scale: %s\n", error.what());
        return 2;
    } catch (const std::exception& error) {
        std::fprintf(stderr, "truth_at_scale: %s\n", error.what());
        return 1;
    }
    return 0;
}
