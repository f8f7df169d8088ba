// SPDX-License-Identifier: Apache-2.0
// The tiles that a fault sees of what stands in memory, named and cut as the CPU's kernels and hooks name and cut them. `values`
// may be null where the shape alone is asked for. Private to this folder.
#pragma once

#include <algorithm>

#include <faultline/gpt/fast_attention.hpp>
#include <faultline/gpt/training.hpp>
#include <faultline/gpt_device/fault_kernels.hpp>
#include <faultline/injectors/fault.hpp>
#include <faultline/injectors/model_injector.hpp>

namespace faultline::gpt {

/// All heads of a layer at lse, delta, o_cast, dq_cast, dk_cast or dv_cast (DeviceFaults::at says how they stand). plan: of the
/// tensor cores' kernel; null: the fast one.
template <class T>
[[nodiscard]] on_device::TileSet<T> attention_set(const TrainConfig& config, const RoundingPlan* plan, Site site,
                                                  T* values, bool by_head) {
    constexpr int tile_rows = static_cast<int>(fast_block);
    const ModelConfig& m = config.model;
    const auto tile_of = [&](int block) { return block > 0 ? block : m.context; };
    const auto length = static_cast<std::size_t>(m.context), d = static_cast<std::size_t>(m.head_dim()),
               width = static_cast<std::size_t>(m.width);
    on_device::TileSet<T> set;
    set.sequences = config.batch;
    set.heads = m.heads;
    set.tile = tile_rows;
    if (site == Site::lse || site == Site::delta) {  // a column of row quantities is as good as a row
        set.values = values;
        set.head_stride = length;
        set.sequence_stride = length * static_cast<std::size_t>(m.heads);
        if (by_head) {
            set.head_stride = length * static_cast<std::size_t>(config.batch);
            set.sequence_stride = length;
        }
        set.rows = 1;
        set.cols = m.context;
        set.by_columns = true;
        if (plan != nullptr) set.tile = tile_of(plan->schedule.block_q);
        return set;
    }
    const std::size_t parts = site == Site::o_cast ? 1 : 3;
    const std::size_t part = site == Site::dk_cast ? 1 : site == Site::dv_cast ? 2 : 0;
    set.values = values == nullptr ? nullptr : values + part * width;
    set.row_stride = parts * width;
    set.sequence_stride = length * set.row_stride;
    set.head_stride = d;
    set.rows = m.context;
    set.cols = m.head_dim();
    if (part > 0) set.tile = m.context;
    if (plan != nullptr)  // the emulated kernel shows gradients whole
        set.tile = site == Site::o_cast ? tile_of(plan->schedule.block_q) : m.context;
    return set;
}

/// use(set, column) for the matrices that a fault at a site of the model sees of rows x cols, the tokens [first_row, first_row +
/// rows) of a micro-batch: the whole, or columns of it.
template <class T, class F>
void for_model_sets(const TrainConfig& config, const Fault& fault, int layer, int part, T* values, int first_row,
                    int rows, int cols, F&& use) {
    const ModelSite site = std::get<ModelSite>(fault.site);
    const int heads = config.model.heads;
    on_device::TileSet<T> set;
    set.model = true;
    set.values = values;
    set.row_stride = static_cast<std::size_t>(cols);
    set.rows = rows;
    set.cols = cols;
    set.first_row = first_row;
    set.tile = std::max(1, chunk_tokens / config.model.context) * config.model.context;
    ModelAt where;
    where.layer = layer;
    where.part = part;
    set.name = model_tile(where);
    const bool by_column = site == ModelSite::layer_norm_statistics;
    if (!by_column && fault.column < 0) {
        set.blocks = heads > 0 && cols % heads == 0 ? heads : 1;
        return use(set, 0);
    }
    for (int j = 0; j < cols; ++j) {
        if (fault.column >= 0 && j != fault.column) continue;
        on_device::TileSet<T> column = set;
        column.values = values == nullptr ? nullptr : values + j;
        column.cols = 1;
        column.batch = j;
        use(column, j);
    }
}

/// A parameter in the flat update, or the column of it that the fault is of.
[[nodiscard]] inline on_device::TileSet<float> update_set(const TrainConfig& config, const Fault& fault,
                                                          const Parameter& parameter, float* update) {
    ModelAt where;
    where.name = parameter.name;
    on_device::TileSet<float> set;
    set.model = true;
    set.values = update == nullptr ? nullptr : update + parameter.offset;
    set.row_stride = static_cast<std::size_t>(parameter.stride);
    set.rows = static_cast<int>(parameter.rows);
    set.cols = static_cast<int>(parameter.cols);
    set.tile = set.rows;
    set.name = model_tile(where);
    const int heads = config.model.heads;
    set.blocks = heads > 0 && set.cols % heads == 0 ? heads : 1;
    if (fault.column < 0) return set;
    if (update != nullptr) set.values += fault.column;
    set.cols = set.blocks = 1;
    set.batch = fault.column;
    return set;
}

}  // namespace faultline::gpt
