// SPDX-License-Identifier: Apache-2.0
#include <faultline/plan/site.hpp>

namespace faultline {
namespace {

using enum Pass;
using enum SiteShape;

constexpr std::array<SiteInfo, site_count> table{{
    {Site::q_cast, "q_cast", input, query_tile, false, "query", "q as the matrix unit receives it"},
    {Site::k_cast, "k_cast", input, key_tile, false, "key", "k as the matrix unit receives it"},
    {Site::v_cast, "v_cast", input, key_tile, false, "value", "v as the matrix unit receives it"},
    {Site::do_cast, "do_cast", input, query_tile, false, "gradient", "dO as the matrix unit receives it"},
    {Site::scale, "scale", input, constant, false, "1",
     "the constant 1/sqrt(head_dim), times log2(e) where exp2 is used"},
    {Site::s_accumulate, "s_accumulate", forward, score_tile, true, "raw logit", "q k^T"},
    {Site::s_cast, "s_cast", forward, score_tile, false, "raw logit", "q k^T as stored"},
    {Site::softcap, "softcap", forward, score_tile, false, "1",
     "tanh(scale q k^T / c), the score under a softcap over the cap"},
    {Site::s_scale, "s_scale", forward, score_tile, false, "logit",
     "scale q k^T + bias, where scores are scaled before the maximum"},
    {Site::row_max, "row_max", forward, row, false, "logit", "the running row maximum that is subtracted"},
    {Site::exp_argument, "exp_argument", forward, score_tile, false, "logit",
     "scale (s - m), in log2 units where exp2 is used"},
    {Site::exp, "exp", forward, score_tile, false, "1", "p = exp of its argument"},
    {Site::rescale_argument, "rescale_argument", forward, row, false, "logit",
     "scale (m_old - m_new), in log2 units where exp2 is used: subtracted, then scaled, in most kernels"},
    {Site::rescale_factor, "rescale_factor", forward, row, false, "1",
     "exp(m_old - m_new), which rescales row sum and output"},
    {Site::row_sum, "row_sum", forward, row, true, "1", "the running sum of p"},
    {Site::sink_exp, "sink_exp", forward, row, false, "1", "exp(sink - m), the sink's term of the row sum"},
    {Site::sink_sum, "sink_sum", forward, row, false, "1", "the row sum and the sink's term"},
    {Site::p_normalize, "p_normalize", forward, score_tile, false, "1",
     "p / row sum, where p is normalised before P V"},
    {Site::p_cast, "p_cast", forward, score_tile, false, "1", "p as the matrix unit receives it in P V"},
    {Site::p_dropout, "p_dropout", forward, score_tile, false, "1",
     "the cast p over the kept share, where dropout scales p and not the output"},
    {Site::o_rescale, "o_rescale", forward, query_tile, false, "value",
     "the output accumulator times the rescale factor"},
    {Site::pv_accumulate, "pv_accumulate", forward, query_tile, true, "value", "P V, added to the output accumulator"},
    {Site::o_normalize, "o_normalize", forward, query_tile, false, "value", "the output accumulator over the row sum"},
    {Site::lse, "lse", forward, row, false, "logit", "log-sum-exp of the row, or of one split of its keys, as stored"},
    {Site::partial_o_cast, "partial_o_cast", forward, query_tile, false, "value",
     "the output of one split of the keys, as stored until the splits are merged"},
    {Site::merge, "merge", forward, query_tile, false, "value",
     "the splits' outputs, weighted by exp(lse_i - lse) and summed"},
    {Site::o_cast, "o_cast", forward, query_tile, false, "value", "o as stored"},
    {Site::lse_scale, "lse_scale", backward, row, false, "logit",
     "log-sum-exp in the unit in which the backward subtracts it: log2, or over the scale"},
    {Site::delta_product, "delta_product", backward, query_tile, false, "gradient x value",
     "dO o O, where it is a tensor of its own"},
    {Site::delta, "delta", backward, row, true, "gradient x value", "rowsum(dO o O), or rowsum(P o dP)"},
    {Site::bwd_s_accumulate, "bwd_s_accumulate", backward, score_tile, true, "raw logit", "q k^T recomputed"},
    {Site::bwd_s_cast, "bwd_s_cast", backward, score_tile, false, "raw logit", "q k^T recomputed, as stored"},
    {Site::bwd_softcap, "bwd_softcap", backward, score_tile, false, "1", "tanh(scale q k^T / c) recomputed"},
    {Site::bwd_s_scale, "bwd_s_scale", backward, score_tile, false, "logit", "scale q k^T + bias recomputed"},
    {Site::bwd_exp_argument, "bwd_exp_argument", backward, score_tile, false, "logit",
     "s - lse, in log2 units where exp2 is used"},
    {Site::bwd_exp, "bwd_exp", backward, score_tile, false, "1", "p = exp(s - lse)"},
    {Site::sink_p, "sink_p", backward, row, false, "1", "exp(sink - lse), the sink's probability"},
    {Site::bwd_p_cast, "bwd_p_cast", backward, score_tile, false, "1", "p as the matrix unit receives it in P^T dO"},
    {Site::dp_accumulate, "dp_accumulate", backward, score_tile, true, "gradient x value", "dO V^T"},
    {Site::dp_cast, "dp_cast", backward, score_tile, false, "gradient x value", "dO V^T as stored"},
    {Site::dp_dropout, "dp_dropout", backward, score_tile, false, "gradient x value",
     "dO V^T over the kept share, where dropout scales p and not the output"},
    {Site::ds, "ds", backward, score_tile, false, "gradient", "p (dp - delta), working precision"},
    {Site::ds_softcap, "ds_softcap", backward, score_tile, false, "gradient",
     "the gradient of the capped score times 1 - tanh^2"},
    {Site::ds_cast, "ds_cast", backward, score_tile, false, "gradient",
     "the score gradient as the matrix unit receives it"},
    {Site::ds_scaled, "ds_scaled", backward, score_tile, false, "gradient",
     "the cast score gradient times scale, where that is a tensor of its own"},
    {Site::dv_accumulate, "dv_accumulate", backward, key_tile, true, "gradient", "P^T dO"},
    {Site::dv_cast, "dv_cast", backward, key_tile, false, "gradient", "dv as stored"},
    {Site::dk_accumulate, "dk_accumulate", backward, key_tile, true, "gradient", "ds^T q"},
    {Site::dk_cast, "dk_cast", backward, key_tile, false, "gradient", "dk, scaled, as stored"},
    {Site::dq_accumulate, "dq_accumulate", backward, query_tile, true, "gradient", "ds k, within and across key tiles"},
    {Site::dq_cast, "dq_cast", backward, query_tile, false, "gradient", "dq, scaled, as stored"},
    {Site::dsink, "dsink", backward, constant, true, "gradient", "-sum_i p_sink delta, of one query head"},
    {Site::kv_group_reduce, "kv_group_reduce", backward, key_tile, false, "gradient",
     "dk and dv summed over the query heads of a group"},
}};

constexpr bool in_order() {
    for (std::size_t i = 0; i < site_count; ++i)
        if (index(table[i].site) != i) return false;
    return true;
}
static_assert(in_order(), "the table lists the sites in the order of the enumeration");

}  // namespace

const std::array<SiteInfo, site_count>& sites() { return table; }
const SiteInfo& info(Site site) { return table[index(site)]; }
std::string_view name(Site site) { return info(site).name; }

std::string_view name(Pass pass) {
    switch (pass) {
        case input:
            return "input";
        case forward:
            return "forward";
        case backward:
            return "backward";
    }
    return "?";
}

std::string_view name(SiteShape shape) {
    switch (shape) {
        case constant:
            return "constant";
        case row:
            return "[query]";
        case score_tile:
            return "[query tile, key tile]";
        case query_tile:
            return "[query tile, head_dim]";
        case key_tile:
            return "[key tile, head_dim]";
    }
    return "?";
}

std::optional<Site> find_site(std::string_view wanted) {
    for (const SiteInfo& s : table)
        if (s.name == wanted) return s.site;
    return std::nullopt;
}

}  // namespace faultline
