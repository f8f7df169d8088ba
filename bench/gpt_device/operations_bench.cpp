// SPDX-License-Identifier: Apache-2.0
// What a step of GPT-2 124M, 32 x 1024 tokens in bf16, is made of: every product and kernel at its size, on normal numbers (on
// zeros products take 7% less: they need less power, which is what holds the clock down), with how often a step has it.
// `gpt_device_bench [batch]`. What a step that runs is made of says step_profile.cpp.
#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include <cuda_runtime_api.h>

#include <faultline/gpt_device/attention_choice.hpp>
#include <faultline/gpt_device/cuda_resources.hpp>
#include <faultline/gpt_device/memory_plan.hpp>
#include <faultline/gpt_device/products.hpp>
#include <faultline/gpt_device/qk_rows.hpp>
#include <faultline/tensor_kernel/backward_kernel.hpp>

namespace {

using namespace faultline::gpt;
using namespace faultline::gpt::on_device;

constexpr int repeats = 10;

template <class F>
double milliseconds(Stream stream, F&& run) {
    run();
    cudaEvent_t begin = nullptr, end = nullptr;
    (void)cudaEventCreate(&begin);
    (void)cudaEventCreate(&end);
    (void)cudaEventRecord(begin, stream);
    for (int i = 0; i < repeats; ++i) run();
    (void)cudaEventRecord(end, stream);
    wait(stream);
    float ms = 0;
    (void)cudaEventElapsedTime(&ms, begin, end);
    return static_cast<double>(ms) / repeats;
}

double total = 0;

void line(const std::string& name, int times, double ms, double work, const char* unit) {
    total += times * ms;
    std::printf("%-34s %8.3f ms x %3d = %7.3f ms  %7.0f %s\n", name.c_str(), ms, times, ms * times, work / ms, unit);
}

}  // namespace

int main(int count, char** words) try {
    TrainConfig c;
    c.model = {
        .layers = 12, .width = 768, .heads = 12, .context = 1024, .vocabulary = 50304, .bias = true, .attention = {}};
    c.batch = count > 1 ? std::atoi(words[1]) : 32;
    c.model.attention = {
        {-1, {}, std::make_shared<faultline::RoundingPlan>(faultline::tensor_kernel::backward_plan(64))}};
    const Device device;
    const OwnedStream stream;
    const int T = c.batch * c.model.context, C = c.model.width, V = c.model.vocabulary,
              H = static_cast<int>(head_tokens(c));
    std::printf("%s, %d tokens\n", device.name().c_str(), T);
    const auto size = [](int a, int b) { return static_cast<std::size_t>(a) * static_cast<std::size_t>(b); };
    const Memory x(size(T, 4 * C) * 4, "x"), y(size(T, 4 * C) * 4, "y"),
        z(std::max(size(T, 4 * C), size(H, V)) * 4, "z"), w(size(V, C) * 8, "w"), g(size(V, C) * 8, "g"),
        workspace(std::size_t{64} << 20, "workspace");
    std::vector<std::uint16_t> normal(std::size_t{1} << 20);
    std::minstd_rand random(1);
    for (std::uint16_t& to : normal)
        to = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(std::normal_distribution<float>()(random)) >> 16);
    const auto fill = [&](const Memory& m, std::size_t bytes) {
        for (std::size_t at = 0; at < bytes; at += normal.size() * 2)
            upload(m.data() + at, normal.data(), std::min(normal.size() * 2, bytes - at), stream);
    };
    fill(x, size(T, 4 * C) * 4);
    fill(y, size(T, 4 * C) * 4);
    fill(z, std::max(size(T, 4 * C), size(H, V)) * 4);
    fill(w, size(V, C) * 8);
    fill(g, size(V, C) * 8);
    const auto bf = [](const Memory& m) { return reinterpret_cast<Bf16*>(m.data()); };
    const auto fl = [](const Memory& m) { return reinterpret_cast<float*>(m.data()); };

    for (const bool deterministic : {true, false}) {
        Products products(stream, workspace.data(), std::size_t{64} << 20, deterministic);
        std::printf("products, %s\n", deterministic ? "the library's first choice" : "the fastest of eight");
        total = 0;
        const auto one = [&](const char* name, int times, const Product& p, int kind) {
            const double ms = milliseconds(stream, [&] {
                if (kind == 0) products.run(p, bf(x), bf(w), bf(z));
                if (kind == 1) products.run(p, bf(x), bf(w), bf(z), bf(w));
                if (kind == 2) products.run(p, bf(x), bf(y), fl(g));
            });
            line(name, times, ms, 2.0 * p.m * p.n * p.k * 1e-9, "TFLOP/s");
        };
        for (const auto& [name, in, out] :
             {std::tuple{"q, k, v", C, 3 * C}, {"o", C, C}, {"fc", C, 4 * C}, {"proj", 4 * C, C}}) {
            const std::string n(name);
            one((n + " without bias").c_str(), 0, {.m = T, .n = out, .k = in}, 0);
            one(n.c_str(), 12, {.m = T, .n = out, .k = in}, 1);
            one((n + " dW").c_str(), 12, {.transpose_a = true, .m = in, .n = out, .k = T}, 2);
            one((n + " dx").c_str(), 12, {.transpose_b = true, .m = T, .n = in, .k = out}, 0);
        }
        one("logits", T / H, {.transpose_b = true, .m = H, .n = V, .k = C}, 0);
        one("head dW", T / H, {.transpose_a = true, .m = V, .n = C, .k = H, .add = true}, 2);
        one("head dx", T / H, {.m = H, .n = C, .k = V}, 0);
        std::printf("sum %.2f ms\n", total);
    }

    total = 0;
    const AttentionOnDevice attention(c, false);
    const Memory scratch(attention.scratch_bytes(), "scratch"), lse(size(T, 12) * 4, "lse");
    const double flops = 4.0 * c.batch * 12 * 1024 * 1024 * 64 / 2 * 1e-9;
    const auto wide = static_cast<std::size_t>(3 * C);
    const AttentionOnDevice::Inputs qkv{bf(x), bf(x) + C, bf(x) + 2 * C, wide, wide};
    const HeadParts nothing, watched{fl(g), nullptr, reinterpret_cast<double*>(g.data() + (1 << 22)), nullptr};
    for (const auto& [name, times, seen] :
         {std::tuple{"attention", 12, &nothing}, {"with its largest scores", 0, &watched}})
        line(
            name, times,
            milliseconds(stream, [&] { attention.forward(0, qkv, {}, bf(y), fl(lse), *seen, nullptr, false, stream); }),
            flops, "TFLOP/s");
    line(
        "entropies and saturation", 0,
        milliseconds(
            stream,
            [&] { attention.look_at_rows(qkv, {}, fl(lse), reinterpret_cast<double*>(g.data() + (1 << 24)), stream); }),
        flops / 2, "TFLOP/s");
    line("rms of q and k", 0,
         milliseconds(stream,
                      [&] {
                          qk_rows<Bf16>({bf(x), bf(x) + C, wide}, attention.shape(), 0, {}, nullptr, nullptr, 0,
                                        reinterpret_cast<double*>(g.data()), stream);
                      }),
         static_cast<double>(T) * C * 4e-6, "GB/s");
    for (const bool deterministic : {false, true})
        line(deterministic ? "attention backward, in order" : "attention backward", deterministic ? 0 : 12,
             milliseconds(stream,
                          [&] {
                              attention.backward(0, qkv, {}, bf(y), fl(lse), bf(w), bf(z), scratch.data(),
                                                 deterministic, nothing, nullptr, false, stream);
                          }),
             2.5 * flops, "TFLOP/s");
    line("with its zero sums", 0,
         milliseconds(stream,
                      [&] {
                          attention.backward(0, qkv, {}, bf(y), fl(lse), bf(w), bf(z), scratch.data(), false, watched,
                                             nullptr, false, stream);
                      }),
         2.5 * flops, "TFLOP/s");
    const double mb = static_cast<double>(T) * C * 1e-6;
    line("add and norm", 25,
         milliseconds(
             stream, [&] { add_and_norm(fl(x), bf(y), fl(x), fl(lse), fl(w), fl(w), 1e-5F, {}, T, C, bf(z), stream); }),
         mb * (4 + 2 + 4 + 2), "GB/s");
    line("norm backward", 25,
         milliseconds(stream,
                      [&] {
                          (void)norm_backward(bf(x), fl(y), fl(lse), fl(w), true, false, T, C, fl(z), bf(g),
                                              fl(scratch), stream);
                      }),
         mb * (2 + 4 + 4 + 4 + 2), "GB/s");
    line("gelu", 12, milliseconds(stream, [&] { gelu(bf(x), size(T, 4 * C), bf(y), stream); }), mb * 16, "GB/s");
    line("gelu backward", 12,
         milliseconds(stream, [&] { (void)gelu_backward(bf(x), T, 4 * C, bf(y), fl(scratch), stream); }), mb * 24,
         "GB/s");
    line("sum of rows, width x 3", 12,
         milliseconds(stream, [&] { (void)sum_rows(bf(x), T, 3 * C, fl(scratch), stream); }), mb * 6, "GB/s");
    const float* parts = fl(scratch);
    const int wide_norm = norm_columns(C, true);
    const Partials sums[] = {
        {parts, norm_parts(C), wide_norm, 2 * C, fl(w)}, {parts, norm_parts(C), wide_norm, C, fl(w)},
        {parts, norm_parts(C), wide_norm, 2 * C, fl(w)}, {parts, norm_parts(C), wide_norm, C, fl(w)},
        {parts, sum_slabs, 4 * C, 4 * C, fl(w)},         {parts, sum_slabs, 3 * C, 3 * C, fl(w)}};
    line("partial sums of a layer", 12, milliseconds(stream, [&] { add_partials(sums, 6, stream); }),
         C * 4e-6 * (6 * norm_parts(C) + 7 * sum_slabs), "GB/s");
    clear(lse.data(), size(T, 12) * 4, stream);  // ids and losses
    line("cross entropy", T / H,
         milliseconds(stream,
                      [&] {
                          cross_entropy(bf(z), reinterpret_cast<int*>(lse.data()), H, V, 1e-5F, 0,
                                        reinterpret_cast<double*>(w.data()), stream);
                      }),
         static_cast<double>(H) * V * 4e-6, "GB/s");
    const std::size_t parameters = 124475904;
    const Memory state(parameters * 18, "state"), kinds(parameters / 8, "kinds"), more(1 << 20, "scalars");
    clear(state.data(), parameters * 18, stream);
    clear(kinds.data(), parameters / 8, stream);
    clear(more.data(), 1 << 20, stream);
    auto* at = fl(state);
    auto* result = reinterpret_cast<StepResult*>(more.data());
    const auto* scalars = reinterpret_cast<StepScalars*>(more.data() + 4096);
    line("norm of the gradient", 1,
         milliseconds(stream,
                      [&] {
                          finish_gradient(at, reinterpret_cast<std::uint8_t*>(kinds.data()), true, parameters,
                                          reinterpret_cast<double*>(more.data() + 8192), scalars,
                                          reinterpret_cast<double*>(more.data() + 16384), result, stream);
                      }),
         static_cast<double>(parameters) * 4e-6, "GB/s");
    line("adamw", 1,
         milliseconds(stream,
                      [&] {
                          adamw(at, reinterpret_cast<std::uint8_t*>(kinds.data()), true, parameters,
                                {0.9F, 0.95F, 1e-8F, 0}, scalars, result, at + parameters, at + 2 * parameters,
                                at + 3 * parameters, reinterpret_cast<Bf16*>(at + 4 * parameters), nullptr, stream);
                      }),
         static_cast<double>(parameters) * 30e-6, "GB/s");
    std::printf("sum %.2f ms\n", total);
    return 0;
} catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
