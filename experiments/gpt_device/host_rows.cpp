// SPDX-License-Identifier: Apache-2.0
#include <faultline/gpt_device/host_rows.hpp>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include <cuda_runtime_api.h>

#include <faultline/base/error.hpp>
#include <faultline/gpt_device/cuda_resources.hpp>

namespace faultline::gpt::on_device {
namespace {

/// To nearest even; a NaN stays one.
std::uint16_t bf16_bits(float x) {
    const auto bits = std::bit_cast<std::uint32_t>(x);
    if (std::isnan(x)) return static_cast<std::uint16_t>(bits >> 16 | 0x40U);
    return static_cast<std::uint16_t>((bits + 0x7FFFU + (bits >> 16 & 1U)) >> 16);
}

}  // namespace

template <class E>
std::vector<float> fetch_rows(const E* from, std::size_t rows, std::size_t columns, std::size_t stride, Stream stream) {
    std::vector<E> values(rows * columns);
    download_rows_later(values.data(), from, rows, columns * sizeof(E), stride * sizeof(E), stream);
    wait(stream);
    if constexpr (std::is_same_v<E, Bf16>) {
        std::vector<float> to(values.size());
        std::ranges::transform(values, to.begin(),
                               [](Bf16 x) { return std::bit_cast<float>(static_cast<std::uint32_t>(x.bits) << 16); });
        return to;
    } else {
        return values;
    }
}

template <class E>
void store_rows(const std::vector<float>& from, std::size_t rows, std::size_t columns, E* to, std::size_t stride,
                Stream stream) {
    const auto copy = [&](const void* values) {
        if (cudaMemcpy2DAsync(to, stride * sizeof(E), values, columns * sizeof(E), columns * sizeof(E), rows,
                              cudaMemcpyHostToDevice, stream) != cudaSuccess)
            throw WorkError("device cuda: copying to the device failed");
        wait(stream);
    };
    if constexpr (std::is_same_v<E, Bf16>) {
        std::vector<std::uint16_t> values(from.size());
        std::ranges::transform(from, values.begin(), bf16_bits);
        copy(values.data());
    } else {
        copy(from.data());
    }
}

template std::vector<float> fetch_rows(const float*, std::size_t, std::size_t, std::size_t, Stream);
template std::vector<float> fetch_rows(const Bf16*, std::size_t, std::size_t, std::size_t, Stream);
template void store_rows(const std::vector<float>&, std::size_t, std::size_t, float*, std::size_t, Stream);
template void store_rows(const std::vector<float>&, std::size_t, std::size_t, Bf16*, std::size_t, Stream);

}  // namespace faultline::gpt::on_device
