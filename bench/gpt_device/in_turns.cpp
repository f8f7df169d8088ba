// SPDX-License-Identifier: Apache-2.0
// What monitors and faults cost: trainers of one recipe, all set up at once, a few steps of each in turns on one card, so that its
// clock and what else a machine does is the same for all. By hand:
//
//     in_turns RECIPE ROUNDS STEPS VARIANT…
//
// RECIPE: gpt2 (124M, 32 x 1024), 2x64, 4x256 or 6x384 (docs/results/gpt-device.md). VARIANT: none; each (monitors of every step); all
// (and those of every ten); or faults as --inject has them, joined by +. The same bits each time, no validation, random ids with the
// frequencies of words. For each variant milliseconds of a step, the median over the rounds, what it takes of none's in the same round
// (median, least, most), and what spectra took. As many trainers as fit into the card's memory: eight of GPT-2.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include <faultline/dissociation/fault_hooks.hpp>
#include <faultline/dissociation/fault_report.hpp>
#include <faultline/gpt/fast_attention.hpp>
#include <faultline/gpt_device/device_trainer.hpp>
#include <faultline/random/random_stream.hpp>
#include <faultline/tensor_kernel/backward_kernel.hpp>

namespace {

using namespace faultline;

gpt::TrainConfig recipe(const std::string& name) {
    gpt::TrainConfig c;
    const auto shape = [&](int layers, int width, int heads, int context, int batch) {
        c.model = {
            .layers = layers, .width = width, .heads = heads, .context = context, .vocabulary = 256, .bf16 = true};
        c.batch = batch;
    };
    bool tensor = true;
    if (name == "gpt2") {
        shape(12, 768, 12, 1024, 32);
        c.model.vocabulary = 50304;
        c.model.bias = true;
    } else if (name == "4x256") {
        shape(4, 256, 4, 256, 16);
    } else if (name == "6x384") {
        shape(6, 384, 6, 256, 16);
    } else {
        shape(2, 64, 2, 128, 16);
        tensor = false;
    }
    if (tensor)
        c.model.attention = {
            {-1, {}, std::make_shared<RoundingPlan>(tensor_kernel::backward_plan(c.model.head_dim()))}};
    c.schedule = {.learning_rate = 1e-5, .warmup = 100};  // a fault that lasts is not to end the run
    c.steps = 1 << 30;
    c.validate_every = c.monitor_every = 0;
    return c;
}

gpt::TokenData tokens(int vocabulary) {
    gpt::TokenData data;
    const RandomStream stream(7);
    const double logarithm = std::log(vocabulary);
    for (std::uint64_t i = 0; i < 600000; ++i)
        (i < 550000 ? data.training : data.validation)
            .push_back(std::min(vocabulary - 1, static_cast<int>(std::exp(stream.uniform(i) * logarithm)) - 1));
    return data;
}

struct Variant {
    std::string name;
    std::unique_ptr<FaultHooks> faults;
    std::unique_ptr<FaultReport> report;
    std::unique_ptr<gpt::DeviceTrainer> trainer;
    std::vector<double> ms;
};

std::vector<Fault> faults_of(const std::string& words) {
    std::vector<Fault> all;
    for (std::size_t at = 0; at <= words.size();) {
        const std::size_t end = std::min(words.find('+', at), words.size());
        all.push_back(parse_fault(words.substr(at, end - at)));
        at = end + 1;
    }
    return all;
}

double median(std::vector<double> of) {
    std::sort(of.begin(), of.end());
    return of[of.size() / 2];
}

int run(const std::string& name, int rounds, int steps, const std::vector<std::string>& words) {
    const gpt::TrainConfig plain = recipe(name);
    const gpt::TokenData data = tokens(plain.model.vocabulary);
    const gpt::WindowOrder order(1);
    const RoundingPlan fast = gpt::fast_plan(true);
    std::vector<Variant> variants;
    for (const std::string& word : words) {
        Variant& v = variants.emplace_back();
        v.name = word;
        gpt::TrainConfig config = plain;
        if (word == "all") config.monitor_every = 10;
        const bool monitors = word == "all" || word == "each";
        gpt::Hooks hooks;
        if (!monitors && word != "none") {
            v.faults = std::make_unique<FaultHooks>(faults_of(word), config.model.layers, config.model.heads,
                                                    [&plain, &fast](int layer, int head) {
                                                        const RoundingPlan* plan = plain.model.plan(layer, head);
                                                        return plan != nullptr ? plan : &fast;
                                                    });
            v.report = std::make_unique<FaultReport>(*v.faults);
            hooks.step = v.report.get();
        }
        v.trainer = std::make_unique<gpt::DeviceTrainer>(
            config, data, order, gpt::DeviceOptions{.monitors = monitors, .faults = v.faults.get()}, hooks);
    }
    for (int round = 0; round < rounds; ++round)
        for (std::size_t i = 0; i < variants.size(); ++i) {
            Variant& v = variants[(i + static_cast<std::size_t>(round)) % variants.size()];
            for (int s = 0; s < 2; ++s) (void)v.trainer->step();
            const auto begin = std::chrono::steady_clock::now();
            for (int s = 0; s < steps; ++s) (void)v.trainer->step();
            v.ms.push_back(std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count() /
                           steps);
            if (v.trainer->failure()) std::printf("%s: a value is not finite\n", v.name.c_str());
        }
    const auto none = std::find_if(variants.begin(), variants.end(), [](const Variant& v) { return v.name == "none"; });
    for (const Variant& v : variants) {
        std::printf("%-5s %9.4f ms", name.c_str(), median(v.ms));
        if (none != variants.end()) {
            std::vector<double> shares;
            for (std::size_t r = 0; r < v.ms.size(); ++r) shares.push_back(100 * (v.ms[r] / none->ms[r] - 1));
            std::sort(shares.begin(), shares.end());
            std::printf("  %+5.2f%% (%+5.2f to %+5.2f)", median(shares), shares.front(), shares.back());
        }
        std::printf("  %s", v.name.c_str());
        if (const auto times = v.trainer->spectra_times())
            std::printf("  spectra %.1f ms on %d threads, steps waited %.1f ms", 1e3 * times->seconds, times->threads,
                        1e3 * times->steps_waited);
        std::printf("\n");
    }
    return 0;
}

}  // namespace

int main(int count, char** words) {
    const std::vector<std::string> all(words + 1, words + count);
    if (all.size() < 4) {
        std::fprintf(stderr, "in_turns gpt2|2x64|4x256|6x384 ROUNDS STEPS none|each|all|FAULT…\n");
        return 2;
    }
    try {
        return run(all[0], std::max(1, std::atoi(all[1].c_str())), std::max(1, std::atoi(all[2].c_str())),
                   {all.begin() + 3, all.end()});
    } catch (const std::exception& error) {
        std::fprintf(stderr, "in_turns: %s\n", error.what());
        return 1;
    }
}
