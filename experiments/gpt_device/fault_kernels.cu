// SPDX-License-Identifier: Apache-2.0
#include <faultline/gpt_device/altered_casts.cuh>
#include <faultline/gpt_device/altered_in_memory.cuh>
#include <faultline/gpt_device/cast_rows.cuh>

#include <algorithm>

namespace faultline::gpt::on_device {
namespace {

constexpr int threads = altering_threads;

/// Squares and count of a row, for tiles that several blocks change.
struct RowSquares {
    double squares, count;
};
__device__ void add(RowSquares& to, const RowSquares& next) {
    to.squares += next.squares;
    to.count += next.count;
}

/// A tile of a set, as a block sees it; of_blocks: its columns are blocks, which a fault may leave out.
template <class T, bool of_blocks>
struct Tile {
    T* base;
    std::size_t row_stride;
    int rows, cols, blocks;
    const HeadFault* faults;

    __device__ Tile(const TileSet<T>& set, const HeadFault* table, int head, int sequence, int index) {
        const bool by_columns = set.by_columns;
        const int row0 = by_columns ? 0 : index * set.tile, col0 = by_columns ? index * set.tile : 0;
        rows = by_columns ? 1 : min(set.tile, set.rows - row0);
        cols = by_columns ? min(set.tile, set.cols - col0) : set.cols;
        row_stride = set.row_stride;
        blocks = set.blocks;
        base = set.values + sequence * set.sequence_stride + head * set.head_stride + row0 * row_stride + col0;
        faults = table + (set.model ? 0 : head);
    }
    /// Columns times blocks (heads) are far from 2^32.
    [[nodiscard]] __device__ unsigned block_of(int j) const {
        return static_cast<unsigned>(j) * static_cast<unsigned>(blocks) / static_cast<unsigned>(cols);
    }
    [[nodiscard]] __device__ float value(int i, int j) const {
        if constexpr (of_blocks)
            if (!faults[1 + block_of(j)].touched) return NAN;
        return value_of(base[i * row_stride + j]);
    }
};

/// Where the tile's random numbers come from.
template <class T>
__device__ Alteration placed(const TileSet<T>& set, const HeadFault& fault, int sequence, int index,
                             std::uint64_t& tile) {
    Alteration a = fault.change;
    const auto first = static_cast<std::uint64_t>(index) * static_cast<std::uint64_t>(set.tile);
    if (set.model) {
        a.batch = set.batch;
        tile = set.name ^ ((first + static_cast<std::uint64_t>(set.first_row)) << 8) ^
               static_cast<std::uint64_t>(fault.micro_step) << 48;
    } else {
        a.batch += sequence;
        tile = first << 32;
    }
    return a;
}

template <class T, bool of_blocks>
__global__ void __launch_bounds__(threads, 3)
    alter_tiles(TileSet<T> set, const HeadFault* faults, const double* amplitudes, const RowSquares* rows, int parts,
                bool of_rms, Realised* records) {
    __shared__ BlockSums sums;
    __shared__ Uninitialised<TileDraw> shared_draw;
    __shared__ Uninitialised<Alteration> shared_change;
    TileDraw& draw = shared_draw.value();
    Alteration& a = shared_change.value();
    const int index = blockIdx.x, part = blockIdx.y, head = blockIdx.z % set.heads, sequence = blockIdx.z / set.heads;
    const int tiles = gridDim.x;
    Realised* to =
        records + ((static_cast<std::size_t>(head) * set.sequences + sequence) * tiles + index) * parts + part;
    const Tile<T, of_blocks> tile(set, faults, head, sequence, index);
    if (!tile.faults->touched) return keep_record({}, sums, to);
    {
        std::uint64_t name = 0;
        const Alteration mine = placed(set, *tile.faults, sequence, index, name);
        on_device::draw(mine, name, draw);
        if (threadIdx.x == 0) {
            a = mine;
            draw.amplitude = amplitudes != nullptr ? amplitudes[index] : 0.0;
        }
    }
    __syncthreads();
    const auto value = [&](int i, int j) { return tile.value(i, j); };
    if (amplitudes == nullptr && of_rms && a.size == Alteration::Size::of_rms) {
        double amplitude = 0;
        if (rows != nullptr) {  // a half warp's first thread stands for one of the 16 lanes of rows
            RowSquares lane{};
            if (threadIdx.x % 16 == 0)
                for (int i = threadIdx.x / 16; i < tile.rows; i += 16) add(lane, rows[index * set.tile + i]);
            amplitude = joined_amplitude(a, lane.squares, lane.count, sums);
        } else {
            amplitude = block_amplitude(a, tile.rows, tile.cols, value, sums);
        }
        if (threadIdx.x == 0) draw.amplitude = amplitude;
        __syncthreads();
    }
    const auto store = [&](int i, int j, double held) {
        T* at = tile.base + i * tile.row_stride + j;
        store1(at, static_cast<float>(held));
        return set.model ? static_cast<double>(value_of(*at)) : held;
    };
    // Of a block of columns its own sign in place of a's: a.sign squared is 1.
    const auto sign = [&](int j) {
        if constexpr (of_blocks)
            return a.sign * tile.faults[1 + tile.block_of(j)].change.sign;
        else
            return 1.0;
    };
    const Realised mine =
        change_in_memory(a, draw, tile.rows, tile.cols, set.by_columns, part * (threads / 16) + threadIdx.x / 16,
                         parts * (threads / 16), value, store, sign);
    keep_record(mine, sums, to);
}

/// A thread names a tile's roundings.
__global__ void __launch_bounds__(threads)
    name_streams(TileSet<Bf16> set, const HeadFault* faults, int tiles, int all, std::uint64_t* keys) {
    const int at = blockIdx.x * threads + threadIdx.x;
    if (at >= all) return;
    const int index = at % tiles, sequence = at / tiles % set.sequences;
    const HeadFault& fault = faults[at / tiles / set.sequences];
    if (!fault.touched || fault.change.hold != Alteration::Hold::stochastic) return;
    std::uint64_t name = 0;
    const Alteration mine = placed(set, fault, sequence, index, name);
    keys[at] = tile_key(mine, fault_stream::roundings, name);
}

/// Tiles of an attention kernel's outputs or gradients in bf16, whose rows have `cols` columns, under simple laws, where
/// cast_rows.cuh has them not: of any number of rows, at any address.
template <int cols>
__global__ void __launch_bounds__(threads, 3) alter_casts(TileSet<Bf16> set, const HeadFault* faults,
                                                          const std::uint64_t* keys, bool sampled, Realised* records) {
    __shared__ BlockSums sums;
    __shared__ Uninitialised<TileDraw> shared_draw;
    const int index = blockIdx.x, head = blockIdx.z % set.heads, sequence = blockIdx.z / set.heads;
    const std::size_t slot = (static_cast<std::size_t>(head) * set.sequences + sequence) * gridDim.x + index;
    Realised* to = records + slot;
    const Tile<Bf16, false> tile(set, faults, head, sequence, index);
    const bool recorded = !sampled || sequence == 0;
    if (!tile.faults->touched) {
        if (recorded) keep_record({}, sums, to);
        return;
    }
    const Alteration& a = tile.faults->change;
    TileDraw& draw = shared_draw.value();
    if (threadIdx.x == 0) draw.roundings = a.hold == Alteration::Hold::stochastic ? keys[slot] : 0;
    if (a.size == Alteration::Size::of_rms) {
        const double amplitude = amplitude_of_casts<cols>(a, tile.base, tile.row_stride, tile.rows, sums);
        if (threadIdx.x == 0) draw.amplitude = amplitude;
    }
    __syncthreads();
    if (recorded)
        keep_record(change_casts<cols, true>(a, draw, tile.base, tile.row_stride, tile.rows), sums, to);
    else
        (void)change_casts<cols, false>(a, draw, tile.base, tile.row_stride, tile.rows);
}

/// The kernel of cast_rows.cuh for a law.
template <int cols, bool clustered, RecordedRows recorded>
auto rows_under(LawKind law) {
    return law.of_rms ? (law.stochastic ? alter_cast_rows<cols, clustered, recorded, false, true>
                                        : alter_cast_rows<cols, clustered, recorded, false, false>)
                      : (law.stochastic ? alter_cast_rows<cols, clustered, recorded, true, true>
                                        : alter_cast_rows<cols, clustered, recorded, true, false>);
}

/// Launches alter_cast_rows; false where it has not such tiles.
template <int cols>
bool alter_in_registers(const TileSet<Bf16>& set, const HeadFault* faults, LawKind law, const std::uint64_t* keys,
                        Realised* records, Stream stream) {
    using Rows = CastRows<cols>;
    const int parts = (std::min(set.tile, set.rows) + Rows::rows - 1) / Rows::rows;
    // Four elements at once.
    const bool aligned = reinterpret_cast<std::uintptr_t>(set.values) % (4 * sizeof(Bf16)) == 0 &&
                         (set.sequence_stride | set.head_stride | set.row_stride) % 4 == 0;
    if (parts > Rows::most_parts || !aligned) return false;
    constexpr RecordedRows all = RecordedRows::all, first = RecordedRows::first_sequence;
    const auto run = parts > 1
                         ? (law.sampled ? rows_under<cols, true, first>(law) : rows_under<cols, true, all>(law))
                         : (law.sampled ? rows_under<cols, false, first>(law) : rows_under<cols, false, all>(law));
    cudaLaunchAttribute cluster{};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = static_cast<unsigned>(parts);
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(set.tiles() * parts, set.heads, set.sequences);
    config.blockDim = Rows::threads;
    config.stream = stream;
    config.attrs = &cluster;
    config.numAttrs = parts > 1 ? 1 : 0;
    (void)cudaLaunchKernelEx(&config, run, set, faults, keys, parts, records);  // check_launch says what went wrong
    return true;
}

/// Of row quantities, whose tiles are some 64 or 128 numbers: a half warp has a tile, its lanes the columns as block_amplitude's and
/// change_in_memory's threads have them.
template <class T>
__global__ void __launch_bounds__(threads)
    alter_columns(TileSet<T> set, const HeadFault* faults, int tiles, int all, bool of_rms, Realised* records) {
    const int lane = threadIdx.x % 16, which = blockIdx.x * (threads / 16) + threadIdx.x / 16;
    const bool inside = which < all;  // whole warps go on together
    const int at = inside ? which : 0, index = at % tiles, sequence = at / tiles % set.sequences,
              head = at / tiles / set.sequences;
    const Tile<T, false> tile(set, faults, head, sequence, index);
    const bool touched = inside && tile.faults->touched;
    std::uint64_t name = 0;
    const Alteration a = placed(set, *tile.faults, sequence, index, name);
    TileDraw draw;
    if (touched && lane == 0 && a.sign_of == Alteration::Sign::of_element)
        draw.elements = tile_key(a, fault_stream::element_signs, name);
    if (touched && lane == 1 && a.hold == Alteration::Hold::stochastic)
        draw.roundings = tile_key(a, fault_stream::roundings, name);
    draw.elements = __shfl_sync(0xffffffffu, draw.elements, 0, 16);
    draw.roundings = __shfl_sync(0xffffffffu, draw.roundings, 1, 16);
    const auto value = [&](int i, int j) { return tile.value(i, j); };
    if (of_rms) {
        double squares = 0, count = 0;
        if (touched)
            for (int j = lane; j < tile.cols; j += 16)
                if (const double v = value(0, j); is_finite(v)) {
                    squares += v * v;
                    count += 1;
                }
        squares = joined16(squares);
        count = joined16(count);
        draw.amplitude = count == 0 ? 0.0 : a.magnitude * ::sqrt(squares / count);
    }
    Realised mine{};
    if (touched)
        mine = change_in_memory(
            a, draw, 1, tile.cols, true, 0, 1, value,
            [&](int, int j, double held) {
                store1(tile.base + j, static_cast<float>(held));
                return held;
            },
            [](int) { return 1.0; });
    const double of[7] = {joined16(mine.count),        joined16(mine.sum),       joined16(mine.sum_squared),
                          joined16(mine.sum_abs),      joined16(mine.asked_sum), joined16(mine.asked_squared),
                          joined16(mine.value_squared)};
    if (inside && lane == 0) records[at] = {of[0], of[1], of[2], of[3], of[4], of[5], of[6]};
}

template <class T>
__global__ void __launch_bounds__(threads) square_rows(TileSet<T> set, const HeadFault* faults, RowSquares* to) {
    const int row = blockIdx.x * (threads / 16) + threadIdx.x / 16;
    const bool inside = row < set.rows;
    const Tile<T, true> tile(set, faults, 0, 0, inside ? row / set.tile : 0);
    double squares = 0, count = 0;
    if (inside)
        for (int j = threadIdx.x % 16; j < tile.cols; j += 16)
            if (const double v = tile.value(row % set.tile, j); is_finite(v)) {
                squares += v * v;
                count += 1;
            }
    squares = joined16(squares);
    count = joined16(count);
    if (inside && threadIdx.x % 16 == 0) to[row] = {squares, count};
}

/// A half warp has a tile: lane l the rows l, l + 16, ….
__global__ void __launch_bounds__(32)
    join_squares(const RowSquares* rows, int count, int tile, const HeadFault* faults, double* amplitudes) {
    const int first = blockIdx.x * tile, last = min(first + tile, count);
    RowSquares sum{};
    if (threadIdx.x < 16) {
#pragma unroll 8
        for (int i = first + threadIdx.x; i < last; i += 16) add(sum, rows[i]);
    }
    const double squares = joined16(sum.squares), counted = joined16(sum.count);
    if (threadIdx.x == 0)
        amplitudes[blockIdx.x] = counted == 0 ? 0.0 : faults->change.magnitude * ::sqrt(squares / counted);
}

__global__ void __launch_bounds__(threads) join_ranges(const Realised* records, const RecordRange* ranges, int count,
                                                       int heads, const StepScalars* scalars, Realised* totals) {
    __shared__ BlockSums sums;
    const int layer = blockIdx.x / heads, head = blockIdx.x % heads;
    Realised mine{};
    for (int r = 0; r < count; ++r) {
        const RecordRange range = ranges[r];
        if (range.layer != layer || head >= range.heads) continue;
        const Realised* from = records + range.first + head * range.per_head;
        for (std::size_t i = threadIdx.x; i < range.per_head; i += threads) tensor_kernel::add_sums(mine, from[i]);
    }
    Realised* to = totals + blockIdx.x;
    const bool goes_on = scalars != nullptr && scalars->micro_step > 0;
    Realised sum = goes_on && threadIdx.x == 0 ? *to : Realised{};
    keep_record(mine, sums, to);
    // Whole micro-step to whole micro-step, as ranks add theirs.
    if (!goes_on || threadIdx.x != 0) return;
    tensor_kernel::add_sums(sum, *to);
    *to = sum;
}

template <class E>
__global__ void __launch_bounds__(256) norm_octets(const float* x, const float2* statistics, const float* gain,
                                                   const float* bias, std::size_t octets, int width, E* h) {
    const std::size_t o = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (o >= octets) return;
    const std::size_t at = 8 * o;
    const auto column = static_cast<int>(at % width);
    const float2 s = statistics[at / width];
    Octet v = load8(x + at);
    const Octet g = load8(gain + column);
#pragma unroll
    for (int i = 0; i < 8; ++i) v.x[i] = ((v.x[i] - s.x) * s.y) * g.x[i];
    if (bias != nullptr) {
        const Octet b = load8(bias + column);
#pragma unroll
        for (int i = 0; i < 8; ++i) v.x[i] += b.x[i];
    }
    store8(h + at, v);
}

__global__ void __launch_bounds__(256)
    apply_octets(const float* update, std::size_t octets, const StepResult* result, float* weights, Bf16* operands) {
    const std::size_t o = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (o >= octets || !result->finite) return;
    Octet w = load8(weights + 8 * o);
    const Octet u = load8(update + 8 * o);
#pragma unroll
    for (int i = 0; i < 8; ++i) w.x[i] += u.x[i];
    store8(weights + 8 * o, w);
    if (operands != nullptr) store8(operands + 8 * o, w);
}

unsigned blocks_of(std::size_t octets) { return static_cast<unsigned>((octets + 255) / 256); }

}  // namespace

template <class T>
int parts_of(const TileSet<T>& set) {
    // One block for a tile where that is little work, or where tiles fill the card; else a few blocks for a multiprocessor.
    constexpr long long little = 4096, enough = 264, wanted = 1056, per_part = 2048;
    const long long tiles = static_cast<long long>(set.tiles()) * set.sequences * set.heads;
    const long long elements = static_cast<long long>(std::min(set.tile, set.rows)) * set.cols;
    if (!set.model || tiles >= enough || elements <= little) return 1;
    return static_cast<int>(std::min((wanted + tiles - 1) / tiles, (elements + per_part - 1) / per_part));
}

void name_tiles(const TileSet<Bf16>& set, const HeadFault* faults, int layers, std::uint64_t* keys, Stream stream) {
    TileSet<Bf16> all_layers = set;
    all_layers.heads *= layers;
    const int all = set.tiles() * set.sequences * all_layers.heads;
    name_streams<<<(all + threads - 1) / threads, threads, 0, stream>>>(all_layers, faults, set.tiles(), all, keys);
    check_launch("naming the tiles of a fault");
}

template <class T>
void alter(const TileSet<T>& set, const HeadFault* faults, LawKind law, const std::uint64_t* keys, void* rows,
           Realised* records, Stream stream) {
    const bool of_rms = law.of_rms;
    if constexpr (std::is_same_v<T, Bf16>)
        if (has_names(set, law)) {
            const bool launched = set.cols == 64 ? alter_in_registers<64>(set, faults, law, keys, records, stream)
                                                 : alter_in_registers<128>(set, faults, law, keys, records, stream);
            if (!launched) {
                const dim3 grid(set.tiles(), 1, set.sequences * set.heads);
                const auto run = set.cols == 64 ? alter_casts<64> : alter_casts<128>;
                run<<<grid, threads, 0, stream>>>(set, faults, keys, law.sampled, records);
            }
            return check_launch("a fault");
        }
    if (set.by_columns && !set.model) {
        const int all = set.tiles() * set.sequences * set.heads;
        alter_columns<<<(all + threads / 16 - 1) / (threads / 16), threads, 0, stream>>>(set, faults, set.tiles(), all,
                                                                                         of_rms, records);
        return check_launch("a fault");
    }
    const int parts = parts_of(set);
    double* amplitudes = nullptr;
    RowSquares* squares = nullptr;
    if (parts > 1 && of_rms) {
        squares = static_cast<RowSquares*>(rows);
        square_rows<<<(set.rows + threads / 16 - 1) / (threads / 16), threads, 0, stream>>>(set, faults, squares);
        constexpr int few = 256;  // rows that each block of a tile adds up for itself
        if (std::min(set.tile, set.rows) > few) {
            amplitudes = reinterpret_cast<double*>(squares + set.rows);
            join_squares<<<set.tiles(), 32, 0, stream>>>(squares, set.rows, set.tile, faults, amplitudes);
        }
    }
    const dim3 grid(set.tiles(), parts, set.sequences * set.heads);
    if (set.blocks > 1)
        alter_tiles<T, true><<<grid, threads, 0, stream>>>(set, faults, amplitudes, squares, parts, of_rms, records);
    else
        alter_tiles<T, false><<<grid, threads, 0, stream>>>(set, faults, amplitudes, squares, parts, of_rms, records);
    check_launch("a fault");
}

void join_records(const Realised* records, const RecordRange* ranges, int count, int layers, int heads,
                  const StepScalars* scalars, Realised* totals, Stream stream) {
    join_ranges<<<layers * heads, threads, 0, stream>>>(records, ranges, count, heads, scalars, totals);
    check_launch("records of faults");
}

template <class E>
void norm_from_statistics(const float* x, const float* statistics, const float* gain, const float* bias, int rows,
                          int width, E* h, Stream stream) {
    const std::size_t octets = static_cast<std::size_t>(rows) * width / 8;
    norm_octets<<<blocks_of(octets), 256, 0, stream>>>(x, reinterpret_cast<const float2*>(statistics), gain, bias,
                                                       octets, width, h);
    check_launch("norm_from_statistics");
}

void apply_update(const float* update, std::size_t count, const StepResult* result, float* weights, Bf16* operands,
                  Stream stream) {
    apply_octets<<<blocks_of(count / 8), 256, 0, stream>>>(update, count / 8, result, weights, operands);
    check_launch("apply_update");
}

#define FAULTLINE_FOR(T)                                                                                               \
    template int parts_of(const TileSet<T>&);                                                                          \
    template void alter(const TileSet<T>&, const HeadFault*, LawKind, const std::uint64_t*, void*, Realised*, Stream); \
    template void norm_from_statistics(const float*, const float*, const float*, const float*, int, int, T*, Stream);
FAULTLINE_FOR(float)
FAULTLINE_FOR(Bf16)
#undef FAULTLINE_FOR

}  // namespace faultline::gpt::on_device
