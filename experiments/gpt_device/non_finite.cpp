// SPDX-License-Identifier: Apache-2.0
// Where the value is that is not finite.
#include <faultline/gpt_device/device_state.hpp>

#include <cmath>
#include <limits>

namespace faultline::gpt {

void DeviceTrainer::State::find_non_finite() {
    failure = NonFinite{next, "loss", 0, 0};
    int found_in = std::numeric_limits<int>::max();  // gradients come after all micro-batches
    for (int round = 0; round < exchange.rounds() && found_in > config.accumulate; ++round) {
        copy_input(next, round);
        plant(round);
        pass->forward_backward(Pass::Watch::nothing);
        for (const SiteOfPass& site : pass->sites())
            if (const std::ptrdiff_t at = pass->first_non_finite(site); at >= 0) {
                failure = NonFinite{next, site.name, at / site.columns, at % site.columns};
                found_in = exchange.micro_batch(round);
                break;
            }
    }
    if (found_in > config.accumulate) find_non_finite_gradient();
    exchange.first_of_ranks(found_in, *failure);
}

void DeviceTrainer::State::find_non_finite_gradient() {
    const std::vector<float> gradient = host(memory.micro_gradient);
    const auto all = layout.all();
    for (auto p = all.rbegin(); p != all.rend(); ++p) {  // in the order of the backward, nearly
        const MatrixView<const float> view = p->of(std::span<const float>(gradient));
        for (std::ptrdiff_t i = 0; i < view.rows; ++i)
            for (std::ptrdiff_t j = 0; j < view.cols; ++j)
                if (!std::isfinite(view(i, j))) {
                    failure = NonFinite{next, "gradient of " + p->name, i, j};
                    return;
                }
    }
}

}  // namespace faultline::gpt
