// SPDX-License-Identifier: Apache-2.0
#include <faultline/tensor/safetensors.hpp>

#include "fuzz.hpp"

using namespace faultline;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    const MemoryInput in(fuzz::file_name, std::as_bytes(std::span(data, size)));
    fuzz::accepts([&] {
        const TensorSet set = read_safetensors(in);
        std::size_t total = 0;
        for (const auto& [name, tensor] : set.tensors) {
            fuzz::require(byte_count(tensor.dtype, tensor.shape) == tensor.bytes.size(), "shape and bytes agree");
            fuzz::require(tensor.to_double().size() == static_cast<std::size_t>(tensor.size()),
                          "every element has a value");
            total += tensor.bytes.size();
        }
        fuzz::require(total <= size, "no tensor holds more than the file");
    });
    return 0;
}
