// SPDX-License-Identifier: Apache-2.0
#include <faultline/attribution/sequences.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <vector>

#include <fmt/format.h>

#include <faultline/attribution/capture.hpp>
#include <faultline/attribution/capture_checks.hpp>
#include <faultline/base/error.hpp>
#include <faultline/tensor/text.hpp>

namespace faultline::detail {
namespace {

using Lengths = std::vector<std::int64_t>;

constexpr std::array<std::string_view, 6> markers{"cu_seqlens", "cu_seqlens_q", "cu_seqlens_k",
                                                  "seqused_q",  "seqused_k",    "block_table"};

bool is_integer(Dtype dtype) {
    using enum Dtype;
    return dtype == i64 || dtype == i32 || dtype == i16 || dtype == i8 || dtype == u8 || dtype == u16 || dtype == u32 ||
           dtype == u64;
}

Lengths integers(const TensorSet& file, const Tensor& tensor, std::size_t rank) {
    if (!is_integer(tensor.dtype) || tensor.shape.size() != rank || tensor.size() == 0)
        refuse(file, tensor.name,
               fmt::format("dtype {}, shape {}: expected integers of rank {}", print_name(tensor.dtype),
                           faultline::shape_text(tensor.shape), rank));
    const std::vector<double> values = tensor.to_double();
    return {values.begin(), values.end()};
}

/// Where row `row` of head `head` of a sequence starts in a tensor, in elements.
struct Rows {
    Lengths first;  ///< per row, of head 0
    std::int64_t head_stride = 0;
    std::int64_t heads = 0, cols = 0;
};

/// [1, heads, rows, cols] of the rows.
Tensor taken(const Tensor& from, const std::string& name, const Rows& rows) {
    Tensor out{name, from.dtype, {1, rows.heads, static_cast<std::int64_t>(rows.first.size()), rows.cols}, {}};
    const std::size_t item = width(from.dtype), bytes = item * static_cast<std::size_t>(rows.cols);
    out.bytes.resize(bytes * static_cast<std::size_t>(rows.heads) * rows.first.size());
    std::byte* to = out.bytes.data();
    for (std::int64_t h = 0; h < rows.heads; ++h)
        for (const std::int64_t first : rows.first) {
            std::memcpy(to, from.bytes.data() + item * static_cast<std::size_t>(first + h * rows.head_stride), bytes);
            to += bytes;
        }
    return out;
}

/// The queries, or the keys, of one layer's sequences.
class Side {
  public:
    enum class Kind { padded, packed, paged };

    Kind kind = Kind::padded;
    Lengths lengths;                   ///< per sequence
    Lengths starts;                    ///< packed: first row
    Lengths table;                     ///< paged: [sequence, entry]
    std::int64_t per_sequence = 0;     ///< paged: entries of a sequence
    std::int64_t pages = 0, page = 0;  ///< paged: how many, and rows of one

    /// The rows of sequence `s` in a tensor of this side. Refuses a tensor of another shape than `like`, which is the side's
    /// own, but for its last dimension (and heads).
    [[nodiscard]] Rows rows(const TensorSet& file, const Tensor& tensor, std::size_t s) const {
        const std::vector<std::int64_t>& shape = tensor.shape;
        const std::size_t rank = kind == Kind::packed ? 3 : 4;
        const bool fits =
            shape.size() == rank && std::none_of(shape.begin(), shape.end(), [](auto n) { return n <= 0; });
        if (!fits)
            refuse(file, tensor.name, fmt::format("shape {}: expected {}", faultline::shape_text(shape), layout()));
        Rows rows;
        rows.cols = shape.back();
        const auto row_at = [&](std::int64_t index, std::int64_t stride) { rows.first.push_back(index * stride); };
        const std::int64_t count = lengths[s];
        if (kind == Kind::packed) {
            rows.heads = shape[1], rows.head_stride = rows.cols;
            expect(file, tensor, shape[0] == starts.back());
            for (std::int64_t i = 0; i < count; ++i) row_at(starts[s] + i, rows.heads * rows.cols);
        } else if (kind == Kind::paged) {
            rows.heads = shape[2], rows.head_stride = rows.cols;
            expect(file, tensor, shape[0] == pages && shape[1] == page);
            for (std::int64_t i = 0; i < count; ++i) {
                const std::int64_t page =
                    table[static_cast<std::size_t>(static_cast<std::int64_t>(s) * per_sequence + i / shape[1])];
                row_at(page * shape[1] + i % shape[1], rows.heads * rows.cols);
            }
        } else {
            rows.heads = shape[1], rows.head_stride = shape[2] * rows.cols;
            expect(file, tensor, shape[0] == static_cast<std::int64_t>(lengths.size()) && shape[2] >= count);
            for (std::int64_t i = 0; i < count; ++i)
                row_at(static_cast<std::int64_t>(s) * shape[1] * shape[2] + i, rows.cols);
        }
        return rows;
    }

  private:
    [[nodiscard]] std::string layout() const {
        if (kind == Kind::packed) return fmt::format("[{}, heads, head_dim], packed sequences", starts.back());
        if (kind == Kind::paged) return fmt::format("[{}, {}, heads, head_dim], pages of the cache", pages, page);
        return fmt::format("[{}, heads, seq, head_dim]", lengths.size());
    }
    void expect(const TensorSet& file, const Tensor& tensor, bool fits) const {
        if (!fits)
            refuse(file, tensor.name,
                   fmt::format("shape {}: does not hold the sequences that the lengths give: expected {}",
                               faultline::shape_text(tensor.shape), layout()));
    }
};

Side packed(const TensorSet& file, const Tensor& tensor) {
    Side side;
    side.kind = Side::Kind::packed;
    side.starts = integers(file, tensor, 1);
    bool rises = side.starts.front() == 0 && side.starts.size() > 1;
    for (std::size_t s = 1; s < side.starts.size(); ++s) {
        side.lengths.push_back(side.starts[s] - side.starts[s - 1]);
        rises = rises && side.lengths.back() >= 0;
    }
    if (!rises)
        refuse(file, tensor.name,
               "is no list of ends of sequences: expected integers from 0 that do not fall, as many as "
               "sequences and one more");
    return side;
}

/// Padded: the whole sequences, or as many rows as `used` says.
Side padded(const TensorSet& file, const Tensor& tensor, const Tensor* used) {
    Side side;
    if (tensor.shape.size() != 4)
        refuse(file, tensor.name,
               fmt::format("shape {}: expected [batch, heads, seq, head_dim] beside a list of lengths",
                           faultline::shape_text(tensor.shape)));
    side.lengths.assign(static_cast<std::size_t>(tensor.shape[0]), tensor.shape[2]);
    if (used == nullptr) return side;
    const std::int64_t most = tensor.shape[2];
    const std::size_t batch = side.lengths.size();
    side.lengths = integers(file, *used, 1);
    if (side.lengths.size() != batch ||
        std::any_of(side.lengths.begin(), side.lengths.end(), [&](std::int64_t n) { return n < 0 || n > most; }))
        refuse(file, used->name,
               fmt::format("expected {} lengths of 0 to {}, as {} has room", batch, most, in_quotes(tensor.name)));
    return side;
}

Side paged(const TensorSet& file, const Tensor& cache, const Tensor& table, const Tensor* used) {
    if (used == nullptr)
        refuse(file, table.name, "stands without LAYER.seqused_k: expected the number of keys of each sequence");
    Side side;
    side.kind = Side::Kind::paged;
    side.lengths = integers(file, *used, 1);
    side.table = integers(file, table, 2);
    side.per_sequence = table.shape[1];
    if (cache.shape.size() != 4)
        refuse(
            file, cache.name,
            fmt::format("shape {}: expected [pages, page size, heads, head_dim]", faultline::shape_text(cache.shape)));
    const std::int64_t pages = cache.shape[0], page = cache.shape[1];
    side.pages = pages, side.page = page;
    if (table.shape[0] != static_cast<std::int64_t>(side.lengths.size()))
        refuse(file, table.name,
               fmt::format("shape {}: expected a row for each of the {} sequences", faultline::shape_text(table.shape),
                           side.lengths.size()));
    for (std::size_t s = 0; s < side.lengths.size(); ++s) {
        if (side.lengths[s] < 0 || side.lengths[s] > side.per_sequence * page)
            refuse(file, used->name,
                   fmt::format("sequence {} has {} keys: expected 0 to {}, which its pages hold", s, side.lengths[s],
                               side.per_sequence * page));
        for (std::int64_t e = 0; e * page < side.lengths[s]; ++e) {
            const std::int64_t entry =
                side.table[s * static_cast<std::size_t>(side.per_sequence) + static_cast<std::size_t>(e)];
            if (entry < 0 || entry >= pages)
                refuse(file, table.name,
                       fmt::format("page {} of sequence {} is {}: expected 0 to {}", e, s, entry, pages - 1));
        }
    }
    return side;
}

/// One layer's way from a batch to sequences.
class Splitter {
  public:
    Splitter(const TensorSet& file, std::string layer) : file_(file), layer_(std::move(layer)) {
        const Tensor* both = find("cu_seqlens");
        const Tensor* cu_q = find("cu_seqlens_q") != nullptr ? find("cu_seqlens_q") : both;
        const Tensor* cu_k = find("cu_seqlens_k") != nullptr ? find("cu_seqlens_k") : both;
        // What would be ignored, is refused: two lists of one side's lengths may say different things.
        const auto expect_alone = [&](const char* one, const char* other) {
            if (find(one) != nullptr && find(other) != nullptr)
                refuse(file_, layer_ + "." + one,
                       fmt::format("stands beside {}: expected one of them", in_quotes(layer_ + "." + other)));
        };
        for (const char* list : {"cu_seqlens", "cu_seqlens_q"}) expect_alone("seqused_q", list);
        for (const char* list : {"cu_seqlens", "cu_seqlens_k"})
            if (find("block_table") == nullptr) expect_alone("seqused_k", list);
        expect_alone("cu_seqlens_q", "cu_seqlens");
        expect_alone("cu_seqlens_k", "cu_seqlens");
        expect_alone("cu_seqlens_k", "block_table");
        expect_alone("cu_seqlens", "block_table");
        // One side's boundaries say that the batch is packed: without the other's, rows of rank 3 cannot be cut.
        const auto expect_cut = [&](const char* input, const char* list, const char* other) {
            if (required(input).shape.size() == 3)
                throw RequestError(fmt::format(
                    "{}: tensor {} is missing: expected it beside {}, since {} is packed, [total, heads, head_dim]",
                    file_.source, in_quotes(layer_ + "." + list), in_quotes(layer_ + "." + other),
                    in_quotes(layer_ + "." + input)));
        };
        if (cu_q != nullptr && cu_k == nullptr && find("block_table") == nullptr)
            expect_cut("k", "cu_seqlens_k", "cu_seqlens_q");
        if (cu_k != nullptr && cu_q == nullptr) expect_cut("q", "cu_seqlens_q", "cu_seqlens_k");
        queries_ = cu_q != nullptr ? packed(file_, *cu_q) : padded(file_, required("q"), find("seqused_q"));
        if (const Tensor* table = find("block_table"))
            keys_ = paged(file_, required("k"), *table, find("seqused_k"));
        else
            keys_ = cu_k != nullptr ? packed(file_, *cu_k) : padded(file_, required("k"), find("seqused_k"));
        if (queries_.lengths.size() != keys_.lengths.size())
            refuse(file_, layer_ + ".k",
                   fmt::format("has {} sequences and {} has {}: expected as many", keys_.lengths.size(),
                               in_quotes(layer_ + ".q"), queries_.lengths.size()));
    }

    void split(TensorSet& out) const {
        for (std::size_t s = 0; s < queries_.lengths.size(); ++s) {
            if (queries_.lengths[s] == 0) continue;  // no row: nothing is computed
            if (keys_.lengths[s] == 0)
                refuse(file_, layer_ + ".k",
                       fmt::format("sequence {} has {} queries and no key: expected a key, or no query", s,
                                   queries_.lengths[s]));
            const std::string prefix = layer_ + ".", name = fmt::format("{}[{}]", layer_, s);
            for (auto at = file_.tensors.lower_bound(prefix);
                 at != file_.tensors.end() && at->first.starts_with(prefix); ++at)
                one(at->second, at->first.substr(prefix.size()), name, s, out);
        }
    }

  private:
    [[nodiscard]] const Tensor* find(const char* what) const { return file_.find(layer_ + "." + what); }
    [[nodiscard]] const Tensor& required(const char* what) const { return file_.at(layer_ + "." + what); }

    void one(const Tensor& tensor, const std::string& rest, const std::string& name, std::size_t s,
             TensorSet& out) const {
        if (std::find(markers.begin(), markers.end(), rest) != markers.end()) return;
        if (rest.ends_with(".dsink")) return;  // of all sequences together, and each is judged by itself
        const std::string suffix = rest.substr(rest.rfind('.') == std::string::npos ? 0 : rest.rfind('.') + 1);
        const std::string full = name + "." + rest;
        const auto is = [&](std::initializer_list<std::string_view> names) {
            return std::find(names.begin(), names.end(), suffix) != names.end();
        };
        if (is({"q", "do", "o", "dq"})) {
            out.add(taken(tensor, full, queries_.rows(file_, tensor, s)));
        } else if (is({"k", "v", "dk", "dv"})) {
            out.add(taken(tensor, full, keys_.rows(file_, tensor, s)));
        } else if (suffix == "lse") {
            out.add(lse(tensor, full, s));
        } else if (is({"mask", "dropout"})) {
            out.add(matrix(tensor, full, s));
        } else {  // of the whole layer: sink, softcap, keep
            Tensor copy = tensor;
            copy.name = full;
            out.add(std::move(copy));
        }
    }

    /// [1, heads, rows] of [heads, total], or of [batch, heads, seq].
    [[nodiscard]] Tensor lse(const Tensor& tensor, const std::string& name, std::size_t s) const {
        Rows rows;
        rows.cols = 1;
        const std::vector<std::int64_t>& shape = tensor.shape;
        const bool is_packed = queries_.kind == Side::Kind::packed;
        const std::int64_t seq = shape.empty() ? 0 : shape.back();
        const bool fits = is_packed
                              ? shape.size() == 2 && seq == queries_.starts.back()
                              : shape.size() == 3 && shape[0] == static_cast<std::int64_t>(queries_.lengths.size()) &&
                                    seq >= queries_.lengths[s];
        if (!fits)
            refuse(file_, tensor.name,
                   fmt::format("shape {}: expected {}", faultline::shape_text(shape),
                               is_packed ? "[heads, total]" : "[batch, heads, seq]"));
        rows.heads = is_packed ? shape[0] : shape[1];
        rows.head_stride = seq;
        const std::int64_t first = is_packed ? queries_.starts[s] : static_cast<std::int64_t>(s) * rows.heads * seq;
        for (std::int64_t i = 0; i < queries_.lengths[s]; ++i) rows.first.push_back(first + i);
        return taken(tensor, name, rows);
    }

    /// [1, heads or 1, queries, keys] of a padded batch's mask.
    [[nodiscard]] Tensor matrix(const Tensor& tensor, const std::string& name, std::size_t s) const {
        const std::vector<std::int64_t>& shape = tensor.shape;
        const auto batch = static_cast<std::int64_t>(queries_.lengths.size());
        const bool is_padded = queries_.kind == Side::Kind::padded && keys_.kind == Side::Kind::padded;
        if (!is_padded || shape.size() != 4 || (shape[0] != 1 && shape[0] != batch) || shape[2] < queries_.lengths[s] ||
            shape[3] < keys_.lengths[s])
            refuse(file_, tensor.name,
                   fmt::format("shape {}: expected {}", faultline::shape_text(shape),
                               is_padded ? "[batch, heads, queries, keys]" : "none beside packed or paged sequences"));
        Rows rows;
        rows.heads = shape[1], rows.cols = keys_.lengths[s], rows.head_stride = shape[2] * shape[3];
        const std::int64_t first = shape[0] == 1 ? 0 : static_cast<std::int64_t>(s) * shape[1] * shape[2] * shape[3];
        for (std::int64_t i = 0; i < queries_.lengths[s]; ++i) rows.first.push_back(first + i * shape[3]);
        return taken(tensor, name, rows);
    }

    const TensorSet& file_;
    std::string layer_;
    Side queries_, keys_;
};

}  // namespace

std::string_view batch_of_sequence(std::string_view layer) {
    const std::size_t open = layer.rfind('[');
    return open == std::string_view::npos || !layer.ends_with(']') ? layer : layer.substr(0, open);
}

std::optional<TensorSet> sequences_apart(const TensorSet& file) {
    std::vector<std::string> ragged;
    for (const auto& [name, tensor] : file.tensors) {
        const std::size_t dot = name.rfind('.');
        if (dot == std::string::npos || dot == 0) continue;
        const std::string_view suffix = std::string_view(name).substr(dot + 1);
        if (std::find(markers.begin(), markers.end(), suffix) == markers.end()) continue;
        std::string layer = name.substr(0, dot);
        if (std::find(ragged.begin(), ragged.end(), layer) == ragged.end()) ragged.push_back(std::move(layer));
    }
    if (ragged.empty()) return std::nullopt;
    TensorSet out{file.source, {}, file.metadata};
    for (const auto& [name, tensor] : file.tensors) {
        const bool apart = std::any_of(ragged.begin(), ragged.end(), [&full = name](const std::string& layer) {
            return full.starts_with(layer + ".");
        });
        if (!apart) out.add(tensor);
    }
    for (const std::string& layer : ragged) Splitter(file, layer).split(out);
    return out;
}

}  // namespace faultline::detail
