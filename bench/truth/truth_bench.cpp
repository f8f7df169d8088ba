// SPDX-License-Identifier: Apache-2.0
// Truth of one causal head, forward and backward, on one thread, against plain MPFR loops and Arb at 128 bits. The three
// take turns, so that the machine's slow and fast spells fall on all alike; medians over the rounds, and whether all give
// the same doubles. Goal for 256 x 64: at least 50 times MPFR and 15 times Arb.
//   truth_bench [rounds] [sequence length] [head_dim]
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include <benchmark/benchmark.h>

#include <faultline/truth/truth.hpp>

#include "peers.hpp"

namespace {

using namespace faultline;

/// Normal numbers rounded to bf16 (8-bit significand, to nearest even).
std::vector<double> bf16_normal(std::size_t count, double size, std::mt19937_64& random) {
    std::normal_distribution<double> normal(0, size);
    std::vector<double> r(count);
    for (double& x : r) {
        int exponent = 0;
        const double mantissa = std::frexp(normal(random), &exponent);
        x = std::ldexp(std::nearbyint(std::ldexp(mantissa, 8)), exponent - 8);
    }
    return r;
}

template <class Work>
double seconds(const Work& work) {
    const auto start = std::chrono::steady_clock::now();
    work();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double median(std::vector<double> x) {
    std::sort(x.begin(), x.end());
    return x[x.size() / 2];
}

std::size_t differences(const CertifiedMatrix& truth, const std::vector<double>& peer) {
    std::size_t count = 0;
    for (std::size_t at = 0; at < peer.size(); ++at)
        count += truth(static_cast<std::ptrdiff_t>(at) / truth.cols, static_cast<std::ptrdiff_t>(at) % truth.cols) !=
                 peer[at];
    return count;
}

std::size_t differences(const GroupTruth& truth, const bench::PeerResult& peer) {
    return differences(truth.heads[0].o, peer.o) + differences(truth.heads[0].dq, peer.dq) +
           differences(truth.dk, peer.dk) + differences(truth.dv, peer.dv);
}

}  // namespace

int main(int argc, char** argv) {
    const int rounds = argc > 1 ? std::atoi(argv[1]) : 10;
    const std::ptrdiff_t n = argc > 2 ? std::atoi(argv[2]) : 256;
    const std::ptrdiff_t d = argc > 3 ? std::atoi(argv[3]) : 64;
    std::mt19937_64 random(1);
    const auto count = static_cast<std::size_t>(n * d);
    const auto q = bf16_normal(count, 1, random), k = bf16_normal(count, 1, random), v = bf16_normal(count, 1, random),
               dout = bf16_normal(count, 1e-3, random);
    TruthProblem problem;
    problem.q = {MatrixView<const double>(q.data(), n, d)};
    problem.dout = {MatrixView<const double>(dout.data(), n, d)};
    problem.k = MatrixView<const double>(k.data(), n, d);
    problem.v = MatrixView<const double>(v.data(), n, d);
    problem.causal = true;

    GroupTruth truth;
    bench::PeerResult mpfr, arb;
    std::vector<double> t_truth, t_mpfr, t_arb, over_mpfr, over_arb;
    constexpr int truths_per_round = 10;  // a round of truth long enough for the clock, on both sides of the peers
    for (int round = 0; round < rounds; ++round) {
        double own = 0;
        const auto several = [&] {
            for (int r = 0; r < truths_per_round / 2; ++r) {
                truth = attention_truth(problem);
                benchmark::DoNotOptimize(truth.dk.value.data());
            }
        };
        own += seconds(several);
        t_mpfr.push_back(seconds([&] { mpfr = bench::mpfr_attention(problem); }));
        if (bench::have_arb()) t_arb.push_back(seconds([&] { arb = bench::arb_attention(problem); }));
        own += seconds(several);
        t_truth.push_back(own / truths_per_round);
        over_mpfr.push_back(t_mpfr.back() / t_truth.back());
        if (bench::have_arb()) over_arb.push_back(t_arb.back() / t_truth.back());
    }
    std::printf("one causal head %td x %td, forward and backward, one thread, medians of %d interleaved rounds\n", n, d,
                rounds);
    std::printf("  truth                  %9.3f ms  (%zu of %zu elements by interval arithmetic, %zu undecided)\n",
                median(t_truth) * 1e3, truth.slow_elements, truth.elements, truth.undecided_elements);
    std::printf("  MPFR mul+add, %d bits %9.3f ms  %6.1f times  %zu doubles differ\n", bench::peer_bits,
                median(t_mpfr) * 1e3, median(over_mpfr), differences(truth, mpfr));
    if (bench::have_arb())
        std::printf("  Arb, %d bits          %9.3f ms  %6.1f times  %zu doubles differ\n", bench::peer_bits,
                    median(t_arb) * 1e3, median(over_arb), differences(truth, arb));
    else
        std::printf("  Arb: not found when this was built (Debian: libflint-arb-dev)\n");
    return 0;
}
