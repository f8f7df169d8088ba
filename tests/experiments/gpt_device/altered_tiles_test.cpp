// SPDX-License-Identifier: Apache-2.0
// The device's kernel of a fault against apply_fault, on the same values: bit by bit, for every law, size, hold and shape.
#include <gtest/gtest.h>

#ifdef FAULTLINE_HAS_CUDA
#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include <cuda_runtime_api.h>

#include <faultline/gpt_device/cuda_resources.hpp>
#include <faultline/gpt_device/fault_kernels.hpp>
#include <faultline/injectors/apply.hpp>
#include <faultline/random/random_stream.hpp>

#include "../../kernels/tensor_kernel/on_hopper.hpp"

namespace faultline::gpt {
namespace {

using on_device::Bf16;
using on_device::HeadFault;
using on_device::TileSet;

float widened(float x) { return x; }
float widened(Bf16 x) { return detail::bits_as<float>(static_cast<std::uint32_t>(x.bits) << 16); }
void narrow(float x, float& to) { to = x; }
void narrow(float x, Bf16& to) { to.bits = static_cast<std::uint16_t>(detail::bits_as<std::uint32_t>(x) >> 16); }

/// Values of many sizes, with zeros, subnormals and what is not finite among them; numbers of bf16.
std::vector<float> values(std::size_t count) {
    std::vector<float> all(count);
    const RandomStream stream(9);
    for (std::size_t i = 0; i < count; ++i) {
        const double size = i % 37 == 0 ? 1e-39 : i % 11 == 0 ? 1e3 : 1;
        all[i] = static_cast<float>(round(size * stream.normal(i), bf16));
        if (i % 101 == 0) all[i] = 0;
    }
    all[count / 2] = INFINITY;
    return all;
}

/// The set's tiles by the host: apply_fault on each.
template <class T>
std::vector<Realised> by_host(const Fault& fault, FaultPlace place, Format format, const TileSet<T>& set,
                              std::vector<T>& data) {
    std::vector<Realised> records;
    for (int head = 0; head < set.heads; ++head)
        for (int sequence = 0; sequence < set.sequences; ++sequence)
            for (int t = 0; t < set.tiles(); ++t) {
                const int first = t * set.tile;
                // Row quantities are one column, as the CPU's kernels have them, whatever they stand beside here.
                const std::ptrdiff_t rows = std::min(set.tile, (set.by_columns ? set.cols : set.rows) - first);
                const std::ptrdiff_t cols = set.by_columns ? 1 : set.cols;
                const std::size_t row_stride = set.by_columns ? 1 : set.row_stride;
                T* base = data.data() + sequence * set.sequence_stride + head * set.head_stride +
                          (set.by_columns ? static_cast<std::size_t>(first) : first * set.row_stride);
                std::vector<double> wide(static_cast<std::size_t>(rows * cols));
                std::vector<float> narrow_values(wide.size());
                const auto at = [&](std::ptrdiff_t i) -> T& { return base[i / cols * row_stride + i % cols]; };
                for (std::ptrdiff_t i = 0; i < rows * cols; ++i)
                    wide[static_cast<std::size_t>(i)] = narrow_values[static_cast<std::size_t>(i)] = widened(at(i));
                place.head = set.model ? 0 : head;
                place.batch = set.model ? set.batch : sequence;
                place.heads = set.blocks;
                place.tile = set.model ? set.name ^ static_cast<std::uint64_t>(first + set.first_row) << 8
                                       : static_cast<std::uint64_t>(first) << 32;
                Realised found;
                if (set.model || fault.touches_head(head))
                    found = set.model
                                ? apply_fault(fault, place, format, MatrixView<float>(narrow_values.data(), rows, cols))
                                : apply_fault(fault, place, format, MatrixView<double>(wide.data(), rows, cols));
                for (std::ptrdiff_t i = 0; i < rows * cols; ++i)
                    narrow(set.model ? narrow_values[static_cast<std::size_t>(i)]
                                     : static_cast<float>(wide[static_cast<std::size_t>(i)]),
                           at(i));
                records.push_back(found);
            }
    return records;
}

class OnDevice {
  public:
    template <class T>
    std::vector<Realised> alter(const Fault& fault, Format format, TileSet<T> set, std::vector<T>& data, bool sampled) {
        std::vector<HeadFault> table;
        const auto entry = [&](int head, bool touched) {
            FaultPlace place;
            place.step = 5;
            place.layer = 1;
            place.head = head;
            table.push_back({alteration_of(fault, place, format), touched ? 1 : 0, 0});
        };
        if (set.model) {
            entry(0, true);
            for (int h = 0; h < set.blocks; ++h) entry(h, fault.touches_head(h));
            for (std::size_t h = 1; h < table.size(); ++h) table[h].change.head = 0;
        } else {
            for (int h = 0; h < set.heads; ++h) entry(h, fault.touches_head(h));
        }
        const int parts = on_device::parts_of(set);
        const std::size_t tiles = static_cast<std::size_t>(set.heads) * set.sequences * set.tiles();
        const on_device::Memory values(data.size() * sizeof(T), "values"),
            faults(table.size() * sizeof(HeadFault), "faults"),
            rows(24 * static_cast<std::size_t>(set.rows) + 256, "rows"),
            records(tiles * parts * sizeof(Realised), "records"), keys(tiles * sizeof(std::uint64_t), "names");
        on_device::upload(values.data(), data.data(), data.size() * sizeof(T), stream_);
        on_device::upload(faults.data(), table.data(), table.size() * sizeof(HeadFault), stream_);
        set.values = reinterpret_cast<T*>(values.data());
        const auto* of_heads = reinterpret_cast<const HeadFault*>(faults.data());
        auto* names = reinterpret_cast<std::uint64_t*>(keys.data());
        on_device::LawKind law = on_device::kind_of(table.front().change);
        law.sampled = sampled;
        if constexpr (sizeof(T) == sizeof(Bf16))
            if (on_device::has_names(set, law)) on_device::name_tiles(set, of_heads, 1, names, stream_);
        on_device::alter(set, of_heads, law, names, rows.data(), reinterpret_cast<Realised*>(records.data()), stream_);
        on_device::download(data.data(), values.data(), data.size() * sizeof(T), stream_);
        std::vector<Realised> all(tiles * static_cast<std::size_t>(parts)), joined(tiles);
        on_device::download(all.data(), records.data(), all.size() * sizeof(Realised), stream_);
        for (std::size_t i = 0; i < all.size(); ++i) joined[i / static_cast<std::size_t>(parts)].join(all[i]);
        return joined;
    }

  private:
    on_device::OwnedStream stream_;
};

template <class T>
void compare(const std::string& word, const TileSet<T>& set, std::size_t count, Format format, long long& elements,
             bool sampled = false) {
    SCOPED_TRACE(word);
    const Fault fault = parse_fault(word);
    FaultPlace place;
    place.step = 5;
    place.layer = 1;
    const std::vector<float> start = values(count);
    std::vector<T> host(count), device(count);
    for (std::size_t i = 0; i < count; ++i) narrow(start[i], host[i]);
    device = host;
    const std::vector<Realised> wanted = by_host(fault, place, format, set, host);
    OnDevice card;
    const std::vector<Realised> found = card.alter(fault, format, set, device, sampled);
    long long differ = 0, changed = 0;
    for (std::size_t i = 0; i < count; ++i) {
        differ += std::memcmp(&host[i], &device[i], sizeof(T)) != 0;
        changed += widened(host[i]) != start[i];
    }
    elements += static_cast<long long>(count);
    EXPECT_EQ(differ, 0);
    EXPECT_GT(changed, 0);
    ASSERT_EQ(found.size(), wanted.size());
    for (std::size_t i = 0; i < wanted.size(); ++i) {
        if (sampled && i / static_cast<std::size_t>(set.tiles()) % static_cast<std::size_t>(set.sequences) != 0)
            continue;
        EXPECT_EQ(found[i].count, wanted[i].count);
        // Sums of the same numbers in another order: n 2^-53 of their magnitudes' sum.
        const double order = 0x1p-53 * wanted[i].count * 2;
        EXPECT_NEAR(found[i].sum, wanted[i].sum, order * wanted[i].sum_abs);
        EXPECT_NEAR(found[i].sum_squared, wanted[i].sum_squared, order * wanted[i].sum_squared);
        EXPECT_NEAR(found[i].asked_squared, wanted[i].asked_squared, order * wanted[i].asked_squared);
        EXPECT_NEAR(found[i].value_squared, wanted[i].value_squared, order * wanted[i].value_squared);
    }
}

TEST(AlteredTiles, AreTheHostsBitForBit) {
    NEEDS_HOPPER();
    std::vector<std::string> words;
    for (const char* law : {"fixed", "per_head", "per_column", "random", "random_step", "flip@2", "operand"})
        for (const char* size : {"2%", "-0.5ulp:format=bf16", "0.03:shape=value"})
            words.push_back(std::string(law) + ":" + size);
    words.emplace_back("multiplicative:0.1");
    words.emplace_back("multiplicative:-3ulp:format=bf16");
    long long elements = 0;
    for (const char* hold : {"stochastic", "nearest", "exact"})
        for (const std::string& word : words) {
            const std::string kernel = "o_cast:" + word + ":hold=" + hold,
                              model = "ffn_output:" + word + ":hold=" + hold;
            const bool held = std::string(hold) != "exact";
            // Heads in [tokens, 3 width], whole sequences and blocks of 64; row quantities; 72 columns, 75 rows.
            TileSet<float> heads;
            heads.sequences = 2;
            heads.heads = 3;
            heads.rows = 75;
            heads.cols = 72;
            heads.head_stride = 72;
            heads.row_stride = 3 * 72;
            heads.sequence_stride = 75 * 3 * 72;
            compare<float>(kernel, heads, 2 * 75 * 3 * 72, fp32, elements);
            compare<float>(kernel + ":heads=1", heads, 2 * 75 * 3 * 72, fp32, elements);
            TileSet<float> rows;
            rows.sequences = 2;
            rows.heads = 3;
            rows.rows = 1;
            rows.cols = 100;
            rows.by_columns = true;
            rows.head_stride = 100;
            rows.sequence_stride = 300;
            compare<float>(kernel, rows, 600, fp32, elements);
            // Of the model: blocks of columns; one tile in many parts; a column.
            TileSet<float> tokens;
            tokens.model = true;
            tokens.rows = 500;
            tokens.cols = 72;
            tokens.row_stride = 72;
            tokens.tile = 200;
            tokens.blocks = 3;
            tokens.name = 77;
            tokens.first_row = 400;
            compare<float>(model, tokens, 500 * 72, exact, elements);
            compare<float>(model + ":heads=1,2", tokens, 500 * 72, exact, elements);
            TileSet<float> large = tokens;
            large.rows = 1100;
            large.tile = 900;
            EXPECT_GT(on_device::parts_of(large), 1);
            compare<float>(model, large, 1100 * 72, exact, elements);
            TileSet<float> column = tokens;
            column.cols = column.blocks = 1;
            column.batch = 1;
            compare<float>(model, column, 500 * 72, exact, elements);
            if (!held) continue;
            TileSet<Bf16> low;
            low.sequences = heads.sequences;
            low.heads = heads.heads;
            low.rows = low.tile = heads.rows;
            low.cols = heads.cols;
            low.head_stride = heads.head_stride;
            low.row_stride = heads.row_stride;
            low.sequence_stride = heads.sequence_stride;
            compare<Bf16>(kernel, low, 2 * 75 * 3 * 72, bf16, elements);
            // Head sizes of the tensor cores' kernels, in query tiles, the last of them short, and whole.
            for (const int cols : {64, 128}) {
                low.cols = cols;
                low.tile = cols == 64 ? 64 : low.rows;
                low.head_stride = static_cast<std::size_t>(cols);
                low.row_stride = 3 * low.head_stride;
                low.sequence_stride = static_cast<std::size_t>(low.rows) * low.row_stride;
                compare<Bf16>(kernel, low, 2 * low.sequence_stride, bf16, elements);
                compare<Bf16>(kernel + ":heads=1", low, 2 * low.sequence_stride, bf16, elements);
                // Tiles of more rows than a block has, and one that it has behind them.
                TileSet<Bf16> long_tiles = low;
                long_tiles.rows = 250;
                long_tiles.tile = 150;
                long_tiles.sequence_stride = static_cast<std::size_t>(long_tiles.rows) * low.row_stride;
                compare<Bf16>(kernel, long_tiles, 2 * long_tiles.sequence_stride, bf16, elements);
                if (!word.starts_with("fixed") && !word.starts_with("multiplicative")) continue;
                // Of eight blocks, where an odd number of rows is left in the last; of more than a cluster; at odd addresses.
                for (const int rows_of_tile : {1003, 1030}) {
                    long_tiles.heads = 1;
                    long_tiles.rows = long_tiles.tile = rows_of_tile;
                    long_tiles.sequence_stride = static_cast<std::size_t>(rows_of_tile) * low.row_stride;
                    compare<Bf16>(kernel, long_tiles, 2 * long_tiles.sequence_stride, bf16, elements);
                }
                TileSet<Bf16> odd = low;
                ++odd.row_stride;
                odd.sequence_stride = static_cast<std::size_t>(odd.rows) * odd.row_stride;
                compare<Bf16>(kernel, odd, 2 * odd.sequence_stride, bf16, elements);
            }
        }
    std::printf("%lld elements\n", elements);
}

/// More tiles than a card works on at once, of one block and of eight. Of 0.3% of the rms many elements have about the size, so that
/// sums cancel.
TEST(AlteredTiles, MoreThanTheCardHasAtOnceAreTheHosts) {
    NEEDS_HOPPER();
    long long elements = 0;
    for (const bool sampled : {false, true})
        for (const bool large : {false, true})
            for (const char* word : {"o_cast:fixed:0.3%", "o_cast:fixed:-0.3%:heads=1,2", "o_cast:multiplicative:0.1",
                                     "o_cast:fixed:0.3%:hold=nearest"}) {
                if (large && std::string(word).find("0.3%") == std::string::npos) continue;
                TileSet<Bf16> set;
                set.sequences = large ? 25 : 130;
                set.heads = 3;
                set.rows = large ? 900 : 19;
                set.tile = large ? 900 : 8;
                set.cols = 64;
                set.head_stride = 64;
                set.row_stride = 3 * 64;
                set.sequence_stride = static_cast<std::size_t>(set.rows) * set.row_stride;
                compare<Bf16>(word, set, static_cast<std::size_t>(set.sequences) * set.sequence_stride, bf16, elements,
                              sampled);
            }
    std::printf("%lld elements\n", elements);
}

}  // namespace
}  // namespace faultline::gpt
#endif
