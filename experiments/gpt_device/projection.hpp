// SPDX-License-Identifier: Apache-2.0
// Updates of W_Q and W_K projected off the weights' leading singular directions, on the device: block power iteration with
// Rayleigh-Ritz in binary64, as probes/leading.hpp does it, started from the directions of the step before. Private to this folder.
#pragma once

#include <cstddef>
#include <vector>

#include <faultline/gpt/parameters.hpp>
#include <faultline/gpt/planted_projection.hpp>
#include <faultline/gpt_device/kernels.hpp>

namespace faultline::gpt::on_device {

/// Where W_Q and W_K stand in the flat weights and updates: both [width, width] in rows of `stride`, W_K behind W_Q.
struct QkMatrices {
    std::ptrdiff_t first = 0, layer_step = 0, stride = 0;
    int layers = 0, width = 0;
};

/// Whether the kernel has it: k of 1 to 4, and the blocks of a matrix fit into a multiprocessor's shared memory.
[[nodiscard]] bool has_projection(const Projection& wanted, int width);

/// Device memory of a run's projection, 256-byte aligned parts of one region.
struct ProjectionMemory {
    ProjectionMemory(const Projection& wanted, int layers, int width);
    std::size_t blocks, partials, energies;  ///< offsets
    std::size_t block_bytes, energy_bytes;   ///< of all matrices; blocks as PlantedProjection has them
    std::size_t bytes = 0;
};

/// Follows the directions of every weight and takes the part off its update, where the step is finite. One launch.
void project(const Projection& wanted, const QkMatrices& where, const float* weights, float* update,
             const StepResult* result, char* memory, Stream stream);

}  // namespace faultline::gpt::on_device
