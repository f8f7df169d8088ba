// SPDX-License-Identifier: Apache-2.0
// What the kernels of gradients.cuh take of a plan, and for which plans and heads they are.
#pragma once

#include <optional>

#include <faultline/emulated/problem.hpp>

namespace faultline::device {

/// What makes the products.
enum class Products : unsigned char {
    sixteen,  ///< the card's unit: fused adds of 16 products
    eight,    ///< the same of 8, the others zeros
    groups,   ///< each thread: Ampere's rule (bf16_groups.hpp)
};
/// A site's rounding to nearest even: emulated::rounded(), what it takes of the format at hand.
struct Cut {
    Format format{};
    bool none = true;  ///< the format is exact, or has every double
    int drop = 0;
};
/// A plan as these kernels read it; kernels/emulated/scores.hpp and backward.hpp have what the fields say.
struct GradientPlan {
    Cut s_accumulate, s_cast, s_scale, argument, exp, dp_accumulate, dp_cast, p_cast, ds, ds_cast, ds_scaled;
    Cut dq, dk, dv;
    double c, natural, log2e, gradient;
    double largest_hidden;  ///< largest_of_hidden_pairs()
    bool scales, to_log2, scaled_before, reference_is_scaled, reference_in_sum, subtracts_first, fused, in_fp32;
    bool by_unit, base_two, delta_in_sum, ds_of_cast_p, scales_ds, scales_cast_ds;
    bool causal, dq_added, dkv_added;
    int n_q, n_k, block_q, block_k;
    Order query_order, key_order;
};
/// The plan and what makes its products, where the kernels are for them: see has_gradients(). `head` as it stands on the device.
struct GradientRequest {
    GradientPlan plan;
    Products products;
};
[[nodiscard]] std::optional<GradientRequest> gradient_request(const emulated::FlatPlan& plan,
                                                              const emulated::HeadProblem& head);

}  // namespace faultline::device
