// SPDX-License-Identifier: Apache-2.0
#include <faultline/tensor/npy.hpp>

#include "fuzz.hpp"

using namespace faultline;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    const MemoryInput in(fuzz::file_name, std::as_bytes(std::span(data, size)));
    for (const char* name : {"q.npy", "q.bf16.npy", "q.e4m3.npy"}) {
        fuzz::accepts([&] {
            const Tensor tensor = read_npy_tensor(in, name);
            fuzz::require(byte_count(tensor.dtype, tensor.shape) == tensor.bytes.size(), "shape and bytes agree");
            fuzz::require(tensor.bytes.size() < size, "no tensor holds more than the file");
            fuzz::require(tensor.to_float().size() == static_cast<std::size_t>(tensor.size()),
                          "every element has a value");
        });
    }
    return 0;
}
