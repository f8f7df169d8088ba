// SPDX-License-Identifier: Apache-2.0
// numpy's .npy files, versions 1.0 to 3.0 (NEP 1, numpy.lib.format), alone or as a folder that makes a capture.
//
// numpy has no bfloat16 and no fp8; ml_dtypes saves them as raw bytes. The rule for reading them:
//   descr 'bfloat16', or 2 raw bytes ('<V2', '|V2': what ml_dtypes writes)      bfloat16
//   descr 'float8_e5m2', or 'f1' (what ml_dtypes writes)                        float8_e5m2
//   descr 'float8_e4m3fn'                                                       float8_e4m3fn
//   NAME.bf16.npy with 2 raw bytes or uint16                                    bfloat16
//   NAME.e5m2.npy, NAME.e4m3.npy with 1 raw byte ('V1') or uint8                that fp8 format
// One raw byte without such a suffix is refused: ml_dtypes writes it for several formats. The suffix is no part of the
// tensor's name. Big-endian files are swapped, Fortran-ordered ones transposed, objects (pickles) refused.
#pragma once

#include <string>

#include <faultline/tensor/input.hpp>
#include <faultline/tensor/tensor.hpp>

namespace faultline {

/// A file `layer0.q.npy` as a set of one tensor, "layer0.q". RequestError, one sentence with file, field, expectation.
[[nodiscard]] TensorSet read_npy(const std::string& path);
/// Every `*.npy` of the folder (not of folders in it), each a tensor named as its file. RequestError also when there is
/// none. Other files are left alone.
[[nodiscard]] TensorSet read_npy_folder(const std::string& path);
/// One tensor from bytes; `file_name` gives name and suffix.
[[nodiscard]] Tensor read_npy_tensor(const Input&, const std::string& file_name);

/// Writes version 1.0, little-endian, C order; bf16 as '<V2' (as uint16 where the name ends in .bf16.npy). fp8 must be
/// named NAME.e4m3.npy or NAME.e5m2.npy and is written as uint8, so that every numpy loads it. RequestError when the
/// name does not fit the dtype; WorkError when the disk refuses, and then no file is left.
void write_npy(const std::string& path, const Tensor&);

}  // namespace faultline
