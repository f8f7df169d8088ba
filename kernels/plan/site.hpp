// SPDX-License-Identifier: Apache-2.0
// The sites: every named place in the schedule of an attention kernel where a value is rounded. The list is the union of
// the rounding points of the kernels read for it (FlashAttention-1/2/3/4, CUTLASS examples 77 and 88, ThunderKittens,
// llm.c, the code of arXiv 2510.04212, PyTorch's math path); a plan that has no such point gives the site the exact rule.
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <string_view>

namespace faultline {

/// In the order in which the data flows. s = scale q k^T + bias (logit), m row max, l row sum, p = exp(s - m) or
/// exp(s - lse), delta = rowsum(dO o O), ds = p (dp - delta).
enum class Site : unsigned char {
    // inputs
    q_cast,
    k_cast,
    v_cast,
    do_cast,
    scale,
    // forward
    s_accumulate,
    s_cast,
    softcap,
    s_scale,
    row_max,
    exp_argument,
    exp,
    rescale_argument,
    rescale_factor,
    row_sum,
    sink_exp,
    sink_sum,
    p_normalize,
    p_cast,
    p_dropout,
    o_rescale,
    pv_accumulate,
    o_normalize,
    lse,
    partial_o_cast,
    merge,
    o_cast,
    // backward
    lse_scale,
    delta_product,
    delta,
    bwd_s_accumulate,
    bwd_s_cast,
    bwd_softcap,
    bwd_s_scale,
    bwd_exp_argument,
    bwd_exp,
    sink_p,
    bwd_p_cast,
    dp_accumulate,
    dp_cast,
    dp_dropout,
    ds,
    ds_softcap,
    ds_cast,
    ds_scaled,
    dv_accumulate,
    dv_cast,
    dk_accumulate,
    dk_cast,
    dq_accumulate,
    dq_cast,
    dsink,
    kv_group_reduce,
};

inline constexpr std::size_t site_count = static_cast<std::size_t>(Site::kv_group_reduce) + 1;

enum class Pass : unsigned char { input, forward, backward };

/// What the values at a site are, per head: one number, one per row, or a matrix tile.
enum class SiteShape : unsigned char {
    constant,    ///< one number for the whole call
    row,         ///< [query]
    score_tile,  ///< [query tile, key tile]
    query_tile,  ///< [query tile, head_dim]
    key_tile,    ///< [key tile, head_dim]
};

struct SiteInfo {
    Site site;
    std::string_view name;  ///< as written in plans and files
    Pass pass;
    SiteShape shape;
    bool accumulates;              ///< its rule has an accumulation
    std::string_view unit;         ///< of the value: "logit", "1", "value", "gradient", …
    std::string_view description;  ///< the operation whose result is rounded here
};

/// The public table, in schedule order (`faultline sites` prints it).
[[nodiscard]] const std::array<SiteInfo, site_count>& sites();
[[nodiscard]] const SiteInfo& info(Site site);
[[nodiscard]] std::string_view name(Site site);
[[nodiscard]] std::string_view name(Pass pass);
[[nodiscard]] std::string_view name(SiteShape shape);
[[nodiscard]] std::optional<Site> find_site(std::string_view name);

constexpr std::size_t index(Site site) { return static_cast<std::size_t>(site); }

}  // namespace faultline
