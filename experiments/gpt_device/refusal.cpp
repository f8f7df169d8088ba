// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <faultline/gpt_device/device_trainer.hpp>
#include <faultline/gpt_device/monitors.hpp>

namespace faultline::gpt {

std::string refusal(const TrainConfig& config) {
    const ModelConfig& m = config.model;
    const auto has_none = [](const char* what, const char* expected) {
        return fmt::format("device cuda: {}: the device's trainer has none: expected {}", what, expected);
    };
    if (m.sigma_reparam) return has_none("sigma-reparam", "false");
    // Rows are read in octets; a row of the residual stream is in a warp's registers.
    constexpr int octet = 8, widest = 2048, largest_head = 128;
    if (m.width % octet != 0 || m.width > widest)
        return fmt::format("device cuda: width: {}: expected a multiple of {} up to {}", m.width, octet, widest);
    if (m.head_dim() % octet != 0 || m.head_dim() > largest_head)
        return fmt::format("device cuda: heads: {} of width {}: expected heads of a multiple of {} up to {} columns",
                           m.heads, m.width, octet, largest_head);
    if (m.layers > on_device::LayersByHead::most)
        return fmt::format("device cuda: layers: {}: expected up to {}", m.layers, on_device::LayersByHead::most);
    if (m.vocabulary % octet != 0)
        return fmt::format("device cuda: vocab: {}: expected a multiple of {}", m.vocabulary, octet);
    return {};
}

}  // namespace faultline::gpt
