// SPDX-License-Identifier: Apache-2.0
// A projection that the device makes by itself: its memory, its directions in a checkpoint, what it removed.
#include <faultline/gpt_device/device_state.hpp>

#include <cstring>

#include <fmt/format.h>

#include <faultline/base/error.hpp>

namespace faultline::gpt {

std::optional<on_device::ProjectionMemory> DeviceTrainer::State::memory_of_projection() const {
    if (projecting == nullptr) return std::nullopt;
    const Projection wanted = projecting->projection();
    if (!on_device::has_projection(wanted, config.model.width))
        throw RequestError(
            fmt::format("device cuda: project: k {} at width {}: expected k of 1 to 4, and a width that "
                        "a multiprocessor's memory holds",
                        wanted.k, config.model.width));
    return on_device::ProjectionMemory(wanted, config.model.layers, config.model.width);
}

void DeviceTrainer::State::take_directions() {
    if (!projected) return;
    const std::vector<double> blocks = projecting->blocks(config.model.width);
    on_device::upload(projection_part(projected->blocks), blocks.data(), projected->block_bytes, stream);
    on_device::wait(stream);
}

void DeviceTrainer::State::leave_directions() const {
    if (!projected) return;
    std::vector<double> blocks(projected->block_bytes / sizeof(double));
    on_device::download(blocks.data(), projection_part(projected->blocks), projected->block_bytes, stream);
    projecting->keep_blocks(blocks, config.model.width);
}

void DeviceTrainer::State::project() {
    on_device::project(
        projecting->projection(),
        {layout.layer(0).w_in, layer_step(), layout.in_columns(), config.model.layers, config.model.width},
        pass->at<float>(memory.weights), pass->at<float>(memory.proposed),
        pass->at<on_device::StepResult>(memory.result), projection_part(0), stream);
}

void DeviceTrainer::State::fetch_energies() {
    on_device::download_later(removed.data(), projection_part(projected->energies), projected->energy_bytes, stream);
}

void DeviceTrainer::State::report_energies() const {
    std::vector<RemovedEnergy> energies(projected->energy_bytes / sizeof(RemovedEnergy));
    std::memcpy(energies.data(), removed.data(), projected->energy_bytes);
    projecting->projected(energies);
}

}  // namespace faultline::gpt
