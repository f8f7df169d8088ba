// SPDX-License-Identifier: Apache-2.0
// What a pass leaves to be looked at, and what is switched in it: of either element type.
#include <faultline/gpt_device/pass.hpp>

#include <fmt/format.h>

namespace faultline::gpt {

std::vector<SiteOfPass> Pass::sites() const {
    std::vector<SiteOfPass> all;
    const auto count = static_cast<std::size_t>(config_.batch) * static_cast<std::size_t>(config_.model.context);
    const std::ptrdiff_t c = config_.model.width;
    const auto add = [&](const std::string& name, std::size_t region, std::ptrdiff_t columns, bool is_operand) {
        all.push_back({name, region, columns, is_operand, count * static_cast<std::size_t>(columns)});
    };
    for (std::size_t l = 0; l < memory_.layers.size(); ++l) {
        const LayerRegions& of = memory_.layers[l];
        const auto named = [&](const char* what) { return fmt::format("layer{}.{}", l, what); };
        add(l == 0 ? std::string("embedding") : fmt::format("layer{}.residual stream", l - 1), of.x_in, c, false);
        add(named("norm statistics"), of.statistics1, 2, false);
        add(named("q, k, v"), of.in, static_cast<std::ptrdiff_t>(layout_.in_columns()), true);
        add(named("attention output"), of.o, c, true);
        add(named("residual stream"), of.x_mid, c, false);
        add(named("norm statistics"), of.statistics2, 2, false);
        add(named("ffn activation"), of.a, 4 * c, true);
    }
    add(fmt::format("layer{}.residual stream", memory_.layers.size() - 1), memory_.x_out, c, false);
    add("final norm statistics", memory_.final_statistics, 2, false);
    add("final norm", memory_.final_h, c, true);
    return all;
}

void Pass::switch_qk_norm(int layer, const std::vector<double>& scale) {
    switched_.at(static_cast<std::size_t>(layer)) = scale;
    const std::vector<float> values(scale.begin(), scale.end());
    on_device::upload(at<float>(memory_.scales) + layer * config_.model.heads, values.data(),
                      values.size() * sizeof(float), stream_);
    on_device::wait(stream_);
}

}  // namespace faultline::gpt
