// SPDX-License-Identifier: Apache-2.0
// Several small runs on one card: steps a second in all, of P processes with R runs each as threads. By hand:
//
//     several_runs PROCESSES RUNS LAYERS WIDTH HEADS CONTEXT BATCH fast|tensor SECONDS
//
// bf16, monitors off, the same bits each time, random ids of 256. All runs begin together when each is set up; what is counted is the
// steps that were done in SECONDS, from half a second on. Under NVIDIA's multi-process service where that is started.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <thread>
#include <vector>

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <faultline/gpt_device/device_trainer.hpp>
#include <faultline/random/random_stream.hpp>
#include <faultline/tensor_kernel/backward_kernel.hpp>

namespace {

using namespace faultline;
using Clock = std::chrono::steady_clock;

constexpr int most_runs = 64;
/// Of all processes.
struct Shared {
    std::atomic<int> ready, failed;
    std::atomic<std::int64_t> steps[most_runs];
    double rates[most_runs];
};

struct Request {
    int processes, runs, layers, width, heads, context, batch;
    bool tensor;
    double seconds;
};

gpt::TrainConfig config_of(const Request& r, int run) {
    gpt::TrainConfig c;
    c.model = {
        .layers = r.layers, .width = r.width, .heads = r.heads, .context = r.context, .vocabulary = 256, .bf16 = true};
    if (r.tensor)
        c.model.attention = {
            {-1, {}, std::make_shared<RoundingPlan>(tensor_kernel::backward_plan(c.model.head_dim()))}};
    c.batch = r.batch;
    c.steps = 1 << 30;
    c.schedule = {.learning_rate = 1e-3, .warmup = 100};
    c.monitor_every = c.validate_every = 0;
    c.seed = static_cast<std::uint64_t>(run);
    return c;
}

void train(const Request& r, int run, Shared& shared) {
    gpt::TokenData data;
    const RandomStream stream(7, run);
    for (std::uint64_t i = 0; i < 200000; ++i)
        (i < 180000 ? data.training : data.validation).push_back(static_cast<std::int32_t>(stream.bits(i) % 256));
    const gpt::WindowOrder order(static_cast<std::uint64_t>(run));
    gpt::DeviceTrainer trainer(config_of(r, run), data, order, {.monitors = false});
    for (int i = 0; i < 50; ++i) (void)trainer.step();
    ++shared.ready;
    while (shared.ready < r.processes * r.runs && shared.failed == 0)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    const auto all = Clock::now();
    const auto passed = [](Clock::time_point from) {
        return std::chrono::duration<double>(Clock::now() - from).count();
    };
    while (passed(all) < 0.5) (void)trainer.step();
    const auto begin = Clock::now();
    std::int64_t steps = 0;
    for (; passed(begin) < r.seconds; ++steps) (void)trainer.step();
    shared.rates[run] = static_cast<double>(steps) / passed(begin);
    // The others count until they are through, beside as many runs as there were.
    --shared.ready;
    while (shared.ready > 0 && shared.failed == 0) (void)trainer.step();
}

int process(const Request& r, int number, Shared& shared) {
    std::vector<std::thread> threads;
    for (int i = 0; i < r.runs; ++i)
        threads.emplace_back([&, i] {
            try {
                train(r, number * r.runs + i, shared);
            } catch (const std::exception& error) {
                std::fprintf(stderr, "several_runs: %s\n", error.what());
                ++shared.failed;
            }
        });
    for (std::thread& thread : threads) thread.join();
    return shared.failed > 0 ? 1 : 0;
}

}  // namespace

int main(int count, char** words) {
    if (count != 10) {
        std::fprintf(stderr, "several_runs PROCESSES RUNS LAYERS WIDTH HEADS CONTEXT BATCH fast|tensor SECONDS\n");
        return 2;
    }
    const auto number = [&](int at) { return std::atoi(words[at]); };
    const Request r{number(1),          number(2), number(3), number(4),
                    number(5),          number(6), number(7), std::strcmp(words[8], "tensor") == 0,
                    std::atof(words[9])};
    if (r.processes < 1 || r.runs < 1 || r.processes * r.runs > most_runs) {
        std::fprintf(stderr, "several_runs: expected 1 to %d runs in all\n", most_runs);
        return 2;
    }
    auto* const shared =
        static_cast<Shared*>(mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
    if (shared == MAP_FAILED) return 1;
    std::vector<pid_t> children;
    for (int p = 0; p < r.processes; ++p) {
        const pid_t child = fork();
        if (child == 0) _exit(process(r, p, *shared));
        children.push_back(child);
    }
    int failed = 0;
    for (const pid_t child : children) {
        int status = 0;
        if (child < 0 || waitpid(child, &status, 0) < 0 || status != 0) ++failed;
    }
    if (failed > 0) return 1;
    double sum = 0;
    std::printf("%d x %d runs of %d x %d:", r.processes, r.runs, r.layers, r.width);
    for (int i = 0; i < r.processes * r.runs; ++i) {
        std::printf(" %.0f", shared->rates[i]);
        sum += shared->rates[i];
    }
    std::printf(", %.0f steps/s in all\n", sum);
    return 0;
}
