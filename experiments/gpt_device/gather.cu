// SPDX-License-Identifier: Apache-2.0
#include <faultline/gpt_device/elements.cuh>
#include <faultline/gpt_device/gather_kernels.hpp>

namespace faultline::gpt::on_device {
namespace {

__global__ void take_set_words(std::uint32_t* words, int count, int but) {
    for (int i = static_cast<int>(threadIdx.x); i < count; i += static_cast<int>(blockDim.x))
        while (i != but && atomicExch_system(words + i, 0U) != 1U) continue;
    __threadfence_system();
}

}  // namespace

void take_words(std::uint32_t* words, int count, int but, Stream stream) {
    take_set_words<<<1, 32, 0, stream>>>(words, count, but);
    check_launch("take_words");
}

}  // namespace faultline::gpt::on_device
