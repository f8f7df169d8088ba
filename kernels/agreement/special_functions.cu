// SPDX-License-Identifier: Apache-2.0
#include <faultline/agreement/special_functions.hpp>

#include <algorithm>
#include <chrono>
#include <iterator>

#include <faultline/agreement/card_memory.cuh>
#include <faultline/agreement/function_probe.cuh>
#include <faultline/base/cuda_device.cuh>

namespace faultline::agreement {
namespace {

constexpr std::uint32_t chunk = 1u << 22, on_host = 1u << 12;  // floats

template <class F>
Agreement check_function() {
    Agreement found;
    found.name = F::name;
    const auto start = std::chrono::steady_clock::now();
    const Cleared<std::uint32_t> card(chunk);
    const Cleared<FunctionTally> on_card(1);
    std::vector<std::uint32_t> bits(on_host);
    for (std::uint64_t base = 0; base < std::uint64_t{1} << 32; base += chunk) {
        compare_function<F><<<chunk / 256, 256>>>(static_cast<std::uint32_t>(base), card.data(), on_card.data());
        check_cuda(cudaGetLastError(), "starting the kernel");
        check_cuda(cudaMemcpy(bits.data(), card.data(), on_host * sizeof bits[0], cudaMemcpyDeviceToHost),
                   "reading results");
        const auto host = std::chrono::steady_clock::now();
        for (std::uint32_t i = 0; i < on_host; ++i) {
            const float x = detail::bits_as<float>(static_cast<std::uint32_t>(base) + i);
            found.differing += bits_of(F::model(x)) != bits[i] ? 1 : 0;
        }
        found.cpu_seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - host).count();
    }
    FunctionTally tally{};
    on_card.fetch(&tally);
    for (const unsigned long long count : tally.mismatches) found.differing += count;
    found.elements = std::uint64_t{1} << 32;
    found.device_seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() - found.cpu_seconds;
    return found;
}

}  // namespace

std::vector<Agreement> check_special_functions() {
    expect_cuda_device();
    return {check_function<Ex2Ftz>(), check_function<Ex2>(), check_function<Exp2f>(),   check_function<ExpfFast>(),
            check_function<Lg2Ftz>(), check_function<Lg2>(), check_function<LogfFast>()};
}

}  // namespace faultline::agreement
