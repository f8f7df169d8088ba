// SPDX-License-Identifier: Apache-2.0
// What of a plan the tensor-core forward compiles in: one kernel for each variant.
#pragma once

#include <faultline/plan/schedule.hpp>

namespace faultline::tensor_kernel {

/// What a number of the streaming state is held in: the fp32 of a register, or rounded to nearest even to something narrower.
enum class StateFormat : unsigned char { fp32, bf16, fp16 };

/// The state that a streaming softmax carries from key tile to key tile, site by site of the plan. Not compiled in: a call
/// says it.
struct StreamingState {
    StateFormat s = StateFormat::fp32;        ///< s_cast: q k^T as stored
    StateFormat row_max = StateFormat::fp32;  ///< after each key tile
    StateFormat row_sum = StateFormat::fp32;  ///< each of the quad's lanes, after each key tile
    StateFormat o_rescale = StateFormat::fp32;
    StateFormat pv_accumulate = StateFormat::fp32;  ///< the output, after each key tile
    StateFormat lse = StateFormat::fp32;            ///< its logarithm, then all of it

    friend constexpr bool operator==(const StreamingState&, const StreamingState&) = default;
};

/// Everything else is as in presets fa3 and fa2: S and P V on the matrix unit with fp32 accumulators, ex2.approx, row sums of unrounded p in
/// quad order, p cast to nearest even, the output rescaled in fp32, divided by the row sum at the end, and cast.
struct ForwardVariant {
    ArgumentForm argument = ArgumentForm::fused;
    bool polynomial = false;  ///< exp2 by special/ex2_polynomial.hpp in columns 0 to 95 of each 128-key tile
    bool stable = false;      ///< Algorithm 1 of arXiv 2510.04212
    RowSumAdds row_sum_adds = RowSumAdds::unrounded;  ///< not two_sums
    bool state = false;  ///< roundings of the streaming state (StreamingState), in key tiles of the call's size
    int max_offset = 0;  ///< Schedule::max_offset; of a fused argument

    friend constexpr bool operator==(const ForwardVariant&, const ForwardVariant&) = default;
};

/// A variant as a type: nvcc 13.0 writes host code that does not compile for a kernel with a class value as its argument.
template <ArgumentForm argument = ArgumentForm::fused, bool polynomial = false, bool stable = false,
          RowSumAdds row_sum_adds = RowSumAdds::unrounded, bool state = false, int max_offset = 0>
struct Compiled {
    static constexpr ForwardVariant value{argument, polynomial, stable, row_sum_adds, state, max_offset};
};

/// That of e4m3, whose p reach 2^8 (preset fa3-fp8).
using UpTo256 = Compiled<ArgumentForm::fused, false, false, RowSumAdds::unrounded, false, 8>;

/// The variant that holds its streaming state as the call says: FlashAttention-2 in PyTorch (preset fa2-unfused) otherwise.
using WithState = Compiled<ArgumentForm::unfused, false, false, RowSumAdds::unrounded, true>;

}  // namespace faultline::tensor_kernel
