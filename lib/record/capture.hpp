// SPDX-License-Identifier: Apache-2.0
// Tensors from any file that we read, and HDF5 captures of our own: datasets named as the tensors, bf16 as uint16 with
// encoding = "bfloat16", fp8 as uint8 likewise, metadata as text attributes of the root.
#pragma once

#include <string>

#include <faultline/record/manifest.hpp>
#include <faultline/tensor/tensor.hpp>

namespace faultline {

/// By what the path is: a folder of .npy files; else by extension (.safetensors, .npy, .h5, .hdf5); else by the first
/// bytes. RequestError, one sentence with file, field and expectation.
[[nodiscard]] TensorSet read_tensors(const std::string& path);

/// Every numeric dataset under its path in the file ("layer0.q"). A file without `kind`, as h5py makes it, will do; one
/// of another kind is refused. RequestError.
[[nodiscard]] TensorSet read_hdf5_capture(const std::string& path);

/// The set as an HDF5 capture; manifest.kind is set to "capture". The file appears whole or not at all. Dimensions of a
/// 4-D tensor are batch, head, seq, head_dim, of a 3-D one batch, head, seq, and carry their length where two tensors
/// differ (seq_512). RequestError for a name that HDF5 cannot hold, WorkError when the disk refuses.
void write_hdf5_capture(const std::string& path, const TensorSet& set, Manifest manifest);

}  // namespace faultline
