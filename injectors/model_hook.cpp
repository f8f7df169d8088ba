// SPDX-License-Identifier: Apache-2.0
#include <faultline/injectors/model_hook.hpp>

namespace faultline {

const std::array<ModelSiteInfo, model_site_count>& model_sites() {
    static constexpr std::array<ModelSiteInfo, model_site_count> table{{
        {ModelSite::layer_norm_statistics, "layer_norm_statistics", "mean and reciprocal deviation of a layer norm"},
        {ModelSite::attention_projection, "attention_projection", "the attention's output projection"},
        {ModelSite::ffn_output, "ffn_output", "output of the feed-forward"},
        {ModelSite::residual_add, "residual_add", "the residual stream after an addition"},
        {ModelSite::logits, "logits", "scores of the vocabulary"},
        {ModelSite::ffn_output_gradient, "ffn_output_gradient", "gradient at the feed-forward's output"},
        {ModelSite::ffn_activation_gradient, "ffn_activation_gradient", "gradient at the feed-forward's activation"},
        {ModelSite::optimizer_update, "optimizer_update", "what the optimizer adds to a parameter"},
    }};
    return table;
}

std::string_view name(ModelSite site) { return model_sites()[static_cast<std::size_t>(site)].name; }

std::optional<ModelSite> find_model_site(std::string_view name) {
    for (const ModelSiteInfo& info : model_sites())
        if (info.name == name) return info.site;
    return std::nullopt;
}

}  // namespace faultline
