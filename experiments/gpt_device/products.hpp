// SPDX-License-Identifier: Apache-2.0
// Matrix products on the device by cuBLASLt. Matrices are row-major. Sums are fp32 (of fp32 operands in fp32, never TF32).
#pragma once

#include <cstddef>
#include <memory>

#include <faultline/gpt_device/kernels.hpp>

namespace faultline::gpt::on_device {

/// c [m, n] = op(a) [m, k] op(b) [k, n] (+ bias of n elements in every row) (+ c where `add`). a is [m, k] in memory, [k, m]
/// where transposed; b is [k, n], [n, k] where transposed; leading dimensions are the row lengths in memory. `batch` such
/// products, matrix after matrix in each of a, b and c.
struct Product {
    bool transpose_a = false, transpose_b = false;
    int m = 0, n = 0, k = 0;
    bool add = false;
    int batch = 1;
};

class Products {
  public:
    /// workspace: device memory. deterministic: no algorithm that adds up in an order of its own; the library's first choice
    /// is taken, so that the same machine and version give the same bits. Else the fastest of its candidates, timed when a
    /// product of new sizes comes: its result is overwritten, so a first pass must be one whose results nobody uses.
    Products(Stream stream, void* workspace, std::size_t workspace_bytes, bool deterministic);
    ~Products();
    Products(const Products&) = delete;
    Products& operator=(const Products&) = delete;

    /// bias may be null. WorkError where the library has no such product or fails.
    void run(const Product& p, const float* a, const float* b, float* c, const float* bias = nullptr);
    void run(const Product& p, const Bf16* a, const Bf16* b, Bf16* c, const Bf16* bias = nullptr);
    /// A weight's gradient: bf16 operands, fp32 result.
    void run(const Product& p, const Bf16* a, const Bf16* b, float* c);

  private:
    struct State;
    std::unique_ptr<State> state_;
};

}  // namespace faultline::gpt::on_device
