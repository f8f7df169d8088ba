// SPDX-License-Identifier: Apache-2.0
#include <faultline/record/deflate.hpp>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <stdexcept>

#include <zlib.h>

#include <faultline/base/parallel.hpp>

namespace faultline::h5 {
namespace {

constexpr std::int64_t largest_chunk = 256 << 10;  // bytes
constexpr std::size_t sample_bytes = 64 << 10;
// Of the size. Float noise shrinks to 0.86 (its exponents) at the full price and is left alone; bf16 activations shrink to
// 0.72, statistics to a few hundredths (bench/record).
constexpr double worth = 0.75;

/// The elements of one chunk, those beyond the array's edge zero (readers never see them).
void gather(std::span<const std::byte> bytes, std::span<const std::int64_t> shape, std::span<const std::int64_t> chunk,
            std::span<const hsize_t> origin, std::size_t element_width, std::vector<std::byte>& out) {
    const std::size_t rank = shape.size();
    std::fill(out.begin(), out.end(), std::byte{0});
    const auto row = static_cast<std::size_t>(
        std::min(chunk[rank - 1], shape[rank - 1] - static_cast<std::int64_t>(origin[rank - 1])));
    std::vector<std::int64_t> index(rank, 0);
    for (std::size_t to = 0; to < out.size(); to += static_cast<std::size_t>(chunk[rank - 1]) * element_width) {
        std::int64_t from = 0;
        bool inside = true;
        for (std::size_t d = 0; d < rank; ++d) {
            const std::int64_t at = static_cast<std::int64_t>(origin[d]) + index[d];
            inside = inside && at < shape[d];
            from = from * shape[d] + at;
        }
        if (inside)
            std::memcpy(out.data() + to, bytes.data() + static_cast<std::size_t>(from) * element_width,
                        row * element_width);
        for (std::size_t d = rank - 1; d-- > 0;) {
            if (++index[d] < chunk[d]) break;
            index[d] = 0;
        }
    }
}

template <std::size_t Width>
void shuffle_fixed(const std::byte* in, std::size_t count, std::byte* out) {
    for (std::size_t b = 0; b < Width; ++b) {
        for (std::size_t i = 0; i < count; ++i) out[b * count + i] = in[i * Width + b];
    }
}

}  // namespace

std::vector<std::int64_t> chunk_shape(std::span<const std::int64_t> shape, std::size_t element_width) {
    std::vector<std::int64_t> chunk;
    for (const std::int64_t extent : shape) chunk.push_back(std::max<std::int64_t>(extent, 1));
    for (std::size_t d = 0; d < chunk.size(); ++d) {
        const std::int64_t rest = std::accumulate(chunk.begin() + static_cast<std::ptrdiff_t>(d) + 1, chunk.end(),
                                                  static_cast<std::int64_t>(element_width), std::multiplies<>());
        if (chunk[d] * rest <= largest_chunk) break;
        // Equal parts rather than full ones and a remnant: a chunk at the edge is stored whole.
        const std::int64_t most = std::max<std::int64_t>(largest_chunk / rest, 1);
        const std::int64_t parts = (chunk[d] + most - 1) / most;
        chunk[d] = (chunk[d] + parts - 1) / parts;
    }
    return chunk;
}

void shuffle(std::span<const std::byte> in, std::size_t element_width, std::span<std::byte> out) {
    const std::size_t count = in.size() / element_width;
    switch (element_width) {
        case 1:
            std::memcpy(out.data(), in.data(), in.size());
            break;
        case 2:
            shuffle_fixed<2>(in.data(), count, out.data());
            break;
        case 4:
            shuffle_fixed<4>(in.data(), count, out.data());
            break;
        case 8:
            shuffle_fixed<8>(in.data(), count, out.data());
            break;
        default:
            throw std::invalid_argument("elements have 1, 2, 4 or 8 bytes");
    }
}

std::vector<std::byte> deflate(std::span<const std::byte> in, int level) {
    uLongf size = compressBound(static_cast<uLong>(in.size()));
    std::vector<std::byte> out(size);
    // Cannot fail but for memory or a wrong level: the bound leaves room.
    if (compress2(reinterpret_cast<Bytef*>(out.data()), &size, reinterpret_cast<const Bytef*>(in.data()),
                  static_cast<uLong>(in.size()), level) != Z_OK) {
        throw std::bad_alloc();
    }
    out.resize(size);
    return out;
}

bool worth_deflating(std::span<const std::byte> bytes, std::size_t element_width) {
    const std::size_t size = std::min(bytes.size(), sample_bytes) / element_width * element_width;
    const std::size_t middle = (bytes.size() - size) / 2 / element_width * element_width;
    std::vector<std::byte> shuffled(size);
    std::size_t deflated = 0;
    for (const std::size_t from : {std::size_t{0}, middle}) {
        shuffle(bytes.subspan(from, size), element_width, shuffled);
        deflated += deflate(shuffled, 1).size();
    }
    return static_cast<double>(deflated) <= worth * 2.0 * static_cast<double>(size);
}

void write_deflated(hid_t dataset, std::span<const std::byte> bytes, std::span<const std::int64_t> shape,
                    std::span<const std::int64_t> chunk, std::size_t element_width, int level, int threads,
                    const std::string& file_name, const std::string& what) {
    const std::size_t rank = shape.size();
    std::vector<std::size_t> grid(rank);
    for (std::size_t d = 0; d < rank; ++d) grid[d] = static_cast<std::size_t>((shape[d] + chunk[d] - 1) / chunk[d]);
    const std::size_t count = std::accumulate(grid.begin(), grid.end(), std::size_t{1}, std::multiplies<>());
    const auto chunk_bytes = static_cast<std::size_t>(
        std::accumulate(chunk.begin(), chunk.end(), static_cast<std::int64_t>(element_width), std::multiplies<>()));
    const auto origin_of = [&](std::size_t i) {
        std::vector<hsize_t> origin(rank);
        for (std::size_t d = rank; d-- > 0; i /= grid[d])
            origin[d] = static_cast<hsize_t>(i % grid[d]) * static_cast<hsize_t>(chunk[d]);
        return origin;
    };

    const int workers = threads > 0 ? threads : hardware_threads();
    // A few chunks each at a time: bounds the memory and keeps the threads busy between two rounds of writing.
    const std::size_t batch = static_cast<std::size_t>(workers) * 8;
    std::vector<std::vector<std::byte>> done(std::min(batch, count));
    for (std::size_t first = 0; first < count; first += batch) {
        const std::size_t now = std::min(batch, count - first);
        parallel_for(now, workers, [&](std::size_t i) {
            std::vector<std::byte> plain(chunk_bytes), shuffled(chunk_bytes);
            gather(bytes, shape, chunk, origin_of(first + i), element_width, plain);
            shuffle(plain, element_width, shuffled);
            done[i] = deflate(shuffled, level);
        });
        for (std::size_t i = 0; i < now; ++i) {
            const std::vector<hsize_t> origin = origin_of(first + i);
            if (H5Dwrite_chunk(dataset, H5P_DEFAULT, 0, origin.data(), done[i].size(), done[i].data()) < 0) {
                fail_write(file_name, what);
            }
        }
    }
}

}  // namespace faultline::h5
