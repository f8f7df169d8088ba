// SPDX-License-Identifier: Apache-2.0
// Faults on the device: what kernels read of them, and the kernels that change what stands in memory between two others.
// Private to this folder. Functions launch on the stream; WorkError where a launch fails.
#pragma once

#include <cstddef>
#include <cstdint>

#include <faultline/cpu/head_alteration.hpp>
#include <faultline/gpt_device/kernels.hpp>
#include <faultline/injectors/realised.hpp>

namespace faultline::gpt::on_device {

/// A fault at one head of a layer in a micro-step; of a site of the model at all columns, or at a block of them.
using HeadFault = HeadAlteration;

/// The random streams of a tile, by key, and the amplitude that its rms gives.
struct TileDraw {
    std::uint64_t elements = 0, roundings = 0;
    double amplitude = 0;
};

/// Tiles of a matrix in memory. Row i of head h of sequence b begins at values + b sequence_stride + h head_stride + i
/// row_stride.
template <class T>
struct TileSet {
    T* values = nullptr;
    std::size_t sequence_stride = 0, head_stride = 0, row_stride = 0;
    int sequences = 1, heads = 1, rows = 0, cols = 0;
    int tile = 64;            ///< rows of a tile
    bool by_columns = false;  ///< rows is 1, and `tile` are columns
    int blocks = 1;           ///< model: the columns are this many equal blocks, one for each head
    bool model = false;       ///< tiles are named as ModelInjector's, else as an attention kernel's
    int batch = 0;            ///< model: of the streams
    std::uint64_t name = 0;   ///< model: the tile's name but for its first row and micro-step
    int first_row = 0;        ///< model: of the micro-batch, of row 0 here
    [[nodiscard]] int tiles() const { return ((by_columns ? cols : rows) + tile - 1) / tile; }
};

/// Parts that a tile is changed in, each with a record of its own.
template <class T>
[[nodiscard]] int parts_of(const TileSet<T>& set);

/// What of a fault's law is known before a launch.
struct LawKind {
    bool of_rms = true;  ///< it may ask for the tile's rms
    /// One sign for a head, a size of the value or of the rms, held in bf16 to nearest or stochastically.
    bool simple = false;
    bool stochastic = false;  ///< held stochastically
    bool sampled =
        false;  ///< simple, in an attention kernel's outputs or gradients: recorded of the first sequence alone
};
[[nodiscard]] inline LawKind kind_of(const Alteration& change) {
    using enum Alteration::Size;
    return {change.size == of_rms,
            (change.size == of_rms || change.size == of_value) && change.sign_of == Alteration::Sign::one &&
                change.hold != Alteration::Hold::exact && change.format == bf16,
            change.hold == Alteration::Hold::stochastic};
}

/// Whether the tiles' streams of roundings are named before the launch that changes them: a name is nine steps of Philox one after the
/// other, as long as a block has to work on a tile.
template <class T>
[[nodiscard]] bool has_names(const TileSet<T>& set, LawKind law) {
    return sizeof(T) == 2 && law.simple && !set.model && !set.by_columns && (set.cols == 64 || set.cols == 128);
}
/// keys[layer, head, sequence, tile]: of the streams of roundings of such tiles of every layer. faults: [layer, head].
void name_tiles(const TileSet<Bf16>& set, const HeadFault* faults, int layers, std::uint64_t* keys, Stream stream);

/// Changes every tile. faults: [heads] of the layer; of the model [1 + blocks], the first for all columns. keys: the layer's of
/// name_tiles(), where has_names(). records: [head, sequence, tile, part]. rows: rows of the set, 16 bytes each, of scratch. law: of
/// every one of the faults.
template <class T>
void alter(const TileSet<T>& set, const HeadFault* faults, LawKind law, const std::uint64_t* keys, void* rows,
           Realised* records, Stream stream);

/// A run of records that belong to one layer: per_head of head 0, then of head 1, …; heads 1: all of them under head 0.
struct RecordRange {
    std::size_t first, per_head;
    int layer, heads;
};
/// totals[layer, head] (+)= the sum of the records of its ranges; assigned in micro-step 0, and where scalars is null.
void join_records(const Realised* records, const RecordRange* ranges, int count, int layers, int heads,
                  const StepScalars* scalars, Realised* totals, Stream stream);

/// h = norm(x) from statistics that are there already, as add_and_norm.
template <class E>
void norm_from_statistics(const float* x, const float* statistics, const float* gain, const float* bias, int rows,
                          int width, E* h, Stream stream);

/// weights += update; operands, if not null, get the new weights as bf16; nothing where result->finite is 0.
void apply_update(const float* update, std::size_t count, const StepResult* result, float* weights, Bf16* operands,
                  Stream stream);

/// Faults inside the attention of attention_forward.cu and attention_backward.cu, at most this many in one layer's kernel.
inline constexpr int most_kernel_faults = 4;
enum class KernelSite : int { row_max, row_sum, p_cast, pv_accumulate, bwd_p_cast, dp_accumulate, ds, ds_cast };
struct KernelFaults {
    struct One {
        KernelSite site;
        bool of_rms;
        const HeadFault* heads;  ///< [heads] of the layer
        Realised* records;       ///< [head, sequence, tile]
        TileDraw* draws;         ///< [sequence, head, tile] of scratch, which the backward's kernels share
    };
    static constexpr bool any = true;
    int count = 0;
    One one[most_kernel_faults];  ///< in the order in which the kernel comes by
};

}  // namespace faultline::gpt::on_device
