// SPDX-License-Identifier: Apache-2.0
// Puts the models of lib/special to a real card: for each function, all 2^32 floats through the card and through the
// model, compiled for the device and for the host, compared bit for bit. Beside the model stand rivals that differ in
// one respect (functions.cuh): that those fail shows that the inputs can tell.
//
//   ninja -C build/cuda special_probe && build/cuda/kernels/cuda/special_probe/special_probe [FOLDER]
// With FOLDER, the differences card - model of each function's worst binade, if it has any, are written there as
// FUNCTION.BASE.i8: 2^23 signed bytes, clipped to +-127, for the floats whose bits are BASE + i.
// Exit status: 0 all agree, 1 a model disagrees with the card somewhere, or there is no card, a CUDA error, a FOLDER that is
// not writable, which a sentence on standard error says.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include <cuda_runtime.h>

#include <faultline/agreement/function_probe.cuh>

namespace faultline::agreement {
namespace {

constexpr std::uint64_t all_floats = std::uint64_t{1} << 32;
constexpr std::uint32_t binade = 1u << 23;  // floats of one sign and exponent
constexpr std::uint32_t chunk = 1u << 26;   // floats held at a time, 256 MiB

void check(cudaError_t status, const char* what) {
    if (status == cudaSuccess) return;
    std::fprintf(stderr, "special_probe: %s: %s\n", what, cudaGetErrorString(status));
    std::exit(1);
}

template <class F>
__global__ void evaluate(const std::uint32_t* x, std::uint32_t n, std::uint32_t* card) {
    const std::uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) card[i] = bits_of(F::card(detail::bits_as<float>(x[i])));
}

/// How many of the floats base + i differ from the model as the host's compiler made it.
template <class F>
std::uint64_t host_mismatches(std::uint32_t base, const std::vector<std::uint32_t>& card) {
    const std::size_t threads = std::max(1u, std::thread::hardware_concurrency());
    std::atomic<std::uint64_t> total{0};
    std::vector<std::thread> pool;
    for (std::size_t t = 0; t < threads; ++t) {
        pool.emplace_back([&, t] {
            const std::size_t begin = card.size() * t / threads, end = card.size() * (t + 1) / threads;
            std::uint64_t count = 0;
            for (std::size_t i = begin; i < end; ++i)
                count += bits_of(F::model(detail::bits_as<float>(base + static_cast<std::uint32_t>(i)))) != card[i];
            total += count;
        });
    }
    for (std::thread& thread : pool) thread.join();
    return total;
}

template <class F>
void print_binade(int b, const FunctionTally& tally) {
    const std::uint32_t x[2] = {tally.first[b], tally.last[b]};
    std::uint32_t *d = nullptr, card[2] = {};
    check(cudaMalloc(&d, 4 * sizeof *d), "memory for two examples");
    check(cudaMemcpy(d, x, sizeof x, cudaMemcpyHostToDevice), "copying examples");
    evaluate<F><<<1, 2>>>(d, 2, d + 2);
    check(cudaMemcpy(card, d + 2, sizeof card, cudaMemcpyDeviceToHost), "running examples");
    check(cudaFree(d), "freeing examples");
    std::printf("  %c exponent %4d: %8llu", b >= 256 ? '-' : '+', (b & 255) - 127, tally.mismatches[b]);
    for (int k = 0; k < 2; ++k)
        std::printf("   x %08x card %08x model %08x", x[k], card[k], bits_of(F::model(detail::bits_as<float>(x[k]))));
    std::printf("\n");
}

/// Writes the differences of binade b; card and bytes are device memory of one binade at least.
template <class F>
void dump(const std::string& folder, int b, std::uint32_t* card, FunctionTally* tally) {
    const std::uint32_t base = static_cast<std::uint32_t>(b) << 23;
    compare_function<F><<<binade / 256, 256>>>(base, card, tally);
    std::vector<std::uint32_t> bits(binade);
    check(cudaMemcpy(bits.data(), card, binade * sizeof bits[0], cudaMemcpyDeviceToHost), "copying a binade");
    std::vector<signed char> difference(binade);
    for (std::uint32_t i = 0; i < binade; ++i) {
        const std::uint32_t model = bits_of(F::model(detail::bits_as<float>(base + i)));
        difference[i] = static_cast<signed char>(distance(bits[i], model, 127));
    }
    char name[64];
    std::snprintf(name, sizeof name, "/%s.%08x.i8", F::name, base);
    std::FILE* file = std::fopen((folder + name).c_str(), "wb");
    const bool written = file && std::fwrite(difference.data(), 1, binade, file) == binade;
    if (!file || std::fclose(file) != 0 || !written) {
        std::fprintf(stderr, "special_probe: %s%s: cannot be written\n", folder.c_str(), name);
        std::exit(1);
    }
}

/// Number of floats on which card and model differ, on device or host.
template <class F>
std::uint64_t probe(std::uint32_t* card, FunctionTally* device_tally, const std::string& folder) {
    FunctionTally tally{};
    std::fill(std::begin(tally.first), std::end(tally.first), 0xFFFFFFFFu);
    check(cudaMemcpy(device_tally, &tally, sizeof tally, cudaMemcpyHostToDevice), "clearing the tally");
    std::vector<std::uint32_t> bits(chunk);
    std::uint64_t on_host = 0;
    for (std::uint64_t base = 0; base < all_floats; base += chunk) {
        compare_function<F><<<chunk / 256, 256>>>(static_cast<std::uint32_t>(base), card, device_tally);
        check(cudaGetLastError(), F::name);
        check(cudaMemcpy(bits.data(), card, chunk * sizeof bits[0], cudaMemcpyDeviceToHost), F::name);
        on_host += host_mismatches<F>(static_cast<std::uint32_t>(base), bits);
    }
    check(cudaMemcpy(&tally, device_tally, sizeof tally, cudaMemcpyDeviceToHost), "copying the tally");

    std::uint64_t on_device = 0;
    for (const unsigned long long count : tally.mismatches) on_device += count;
    std::printf("\n%-20s of 2^32 floats differ: model on the device %llu, model on the host %llu\n", F::name,
                static_cast<unsigned long long>(on_device), static_cast<unsigned long long>(on_host));
    for (int r = 0; r < F::rivals; ++r)
        std::printf("  rival, %-32s %12llu\n", F::rival_names[r], tally.rival_mismatches[r]);
    if (on_device != 0) {
        std::printf("  card - model:");
        for (int k = 0; k < histogram_size; ++k) std::printf(" [%+d] %llu", k - 4, tally.histogram[k]);
        std::printf("\n");
        for (int b = 0; b < binades; ++b)
            if (tally.mismatches[b] != 0) print_binade<F>(b, tally);
        const auto most = std::max_element(std::begin(tally.mismatches), std::end(tally.mismatches));
        if (!folder.empty()) dump<F>(folder, static_cast<int>(most - std::begin(tally.mismatches)), card, device_tally);
    }
    return on_device + on_host;
}

int run(const std::string& folder) {
    cudaDeviceProp properties{};
    check(cudaGetDeviceProperties(&properties, 0), "no device");
    std::printf("%s, compute capability %d.%d\n", properties.name, properties.major, properties.minor);
    std::uint32_t* card = nullptr;
    FunctionTally* tally = nullptr;
    check(cudaMalloc(&card, chunk * sizeof *card), "memory for results");
    check(cudaMalloc(&tally, sizeof *tally), "memory for the tally");
    std::uint64_t differ = 0;
    differ += probe<Ex2Ftz>(card, tally, folder);
    differ += probe<Lg2Ftz>(card, tally, folder);
    differ += probe<Ex2>(card, tally, folder);
    differ += probe<Exp2f>(card, tally, folder);
    differ += probe<ExpfFast>(card, tally, folder);
    differ += probe<Lg2>(card, tally, folder);
    differ += probe<LogfFast>(card, tally, folder);
    std::printf("\n%s\n", differ == 0 ? "all equal" : "not equal everywhere");
    return differ == 0 ? 0 : 1;
}

}  // namespace
}  // namespace faultline::agreement

int main(int argc, char** argv) { return faultline::agreement::run(argc > 1 ? argv[1] : ""); }
