// SPDX-License-Identifier: Apache-2.0
// Shuffle + deflate in worker threads. HDF5's own filters run inside H5Dwrite, one chunk after another, at 50 to 90 MB/s
// at level 4; here the chunks are made by zlib in parallel and handed over finished (H5Dwrite_chunk), and any HDF5
// reader undoes them with its built-in filters.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <faultline/record/h5.hpp>

namespace faultline::h5 {

/// Chunk for an array of that shape: the leading dimension (the append axis) is cut first, then the next, until a chunk
/// has at most 256 KiB: large enough for deflate, small enough to share among threads and to read one tile row.
[[nodiscard]] std::vector<std::int64_t> chunk_shape(std::span<const std::int64_t> shape, std::size_t element_width);
/// Byte b of every element together, b = 0, 1, …: HDF5's shuffle filter. Sizes equal, a multiple of element_width.
void shuffle(std::span<const std::byte> in, std::size_t element_width, std::span<std::byte> out);
/// zlib stream of the bytes, as HDF5's deflate filter stores it.
[[nodiscard]] std::vector<std::byte> deflate(std::span<const std::byte> in, int level);
/// Would shuffle + deflate make them smaller by a quarter at least? Judged on two samples of 64 KiB, so it costs little
/// and depends on the data alone.
[[nodiscard]] bool worth_deflating(std::span<const std::byte> bytes, std::size_t element_width);
/// Writes a chunked dataset created with shuffle and deflate. `shape` and `chunk` are the dataset's.
void write_deflated(hid_t dataset, std::span<const std::byte> bytes, std::span<const std::int64_t> shape,
                    std::span<const std::int64_t> chunk, std::size_t element_width, int level, int threads,
                    const std::string& file_name, const std::string& what);

}  // namespace faultline::h5
