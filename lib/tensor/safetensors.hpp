// SPDX-License-Identifier: Apache-2.0
// safetensors: u64 little-endian length of the header, the header (JSON), then the tensors' bytes, row-major.
// Format: huggingface/safetensors, README "Format" and safetensors/src/tensor.rs (validate).
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <faultline/tensor/input.hpp>
#include <faultline/tensor/tensor.hpp>

namespace faultline {

/// Where one tensor lies in a safetensors file.
struct SafetensorsEntry {
    std::string name;
    Dtype dtype = Dtype::f64;
    std::vector<std::int64_t> shape;
    std::uint64_t begin = 0;  ///< first byte, from the start of the file
    std::uint64_t end = 0;    ///< one past the last
};

/// What the header says, checked: offsets within the file, in order without overlap or hole and ending where the file
/// does (the format allows no other), shape x dtype equal to each length, no name twice.
struct SafetensorsLayout {
    std::vector<SafetensorsEntry> entries;  ///< in the order of their bytes
    std::map<std::string, std::string, std::less<>> metadata;
};

/// Header only; the tensors' bytes are not read. RequestError, one sentence with file, field and expectation.
[[nodiscard]] SafetensorsLayout read_safetensors_layout(const Input&);
/// One tensor of that layout.
[[nodiscard]] Tensor read_safetensors_tensor(const Input&, const SafetensorsEntry&);

/// Everything. RequestError as above, or when the file is missing, unreadable or not a regular file.
[[nodiscard]] TensorSet read_safetensors(const std::string& path);
[[nodiscard]] TensorSet read_safetensors(const Input&);

/// Writes the set, tensors ordered by name, the data 8-byte aligned. The file appears whole or not at all. RequestError
/// for what the format cannot hold (text that is not UTF-8, a tensor called "__metadata__"), WorkError when the disk
/// refuses.
void write_safetensors(const std::string& path, const TensorSet&);

}  // namespace faultline
