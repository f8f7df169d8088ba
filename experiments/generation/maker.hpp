// SPDX-License-Identifier: Apache-2.0
// One layer of inputs in the making, with the random numbers that the families draw, and the families that are in files of
// their own. A number depends on the family, the seed, the tensor and the element's place alone.
#pragma once

#include <algorithm>
#include <cmath>

#include <faultline/generation/family.hpp>
#include <faultline/random/random_stream.hpp>

namespace faultline::generation {

/// One layer in the making.
struct Maker {
    LayerCapture layer;
    InputShape shape;
    RandomStream stream;

    Maker(const InputFamily& family, const InputShape& the_shape, std::uint64_t seed)
        : shape(the_shape), stream(seed, static_cast<std::uint64_t>(&family - input_families().data())) {
        const InputShape& s = shape;
        layer.name = std::string(family.name);
        layer.causal = s.causal && !family.masked;
        layer.q = array(s.heads, s.queries), layer.dout = array(s.heads, s.queries);
        layer.k = array(s.kv_heads, s.keys), layer.v = array(s.kv_heads, s.keys);
    }

    [[nodiscard]] HeadArray array(std::ptrdiff_t heads, std::ptrdiff_t rows) const {
        return {shape.batch,
                heads,
                rows,
                shape.head_dim,
                std::vector<double>(static_cast<std::size_t>(shape.batch * heads * rows * shape.head_dim)),
                Dtype::bf16};
    }

    /// a(head of all batches, row, column) <- f; heads of k and v are numbered like those.
    template <class F>
    static void fill(HeadArray& a, F&& f) {
        std::size_t at = 0;
        for (std::ptrdiff_t h = 0; h < a.batch * a.heads; ++h)
            for (std::ptrdiff_t i = 0; i < a.rows; ++i)
                for (std::ptrdiff_t c = 0; c < a.cols; ++c) a.values[at++] = on_grid(f(h, i, c));
    }
    /// The key head of a query head.
    [[nodiscard]] std::ptrdiff_t key_head(std::ptrdiff_t head) const {
        const std::ptrdiff_t b = head / shape.heads, h = head % shape.heads;
        return b * shape.kv_heads + h / (shape.heads / shape.kv_heads);
    }

    [[nodiscard]] double uniform(std::uint64_t tensor, std::ptrdiff_t h, std::ptrdiff_t i, std::ptrdiff_t c) const {
        return stream.child(tensor).uniform(place(h, i, c));
    }
    [[nodiscard]] double normal(std::uint64_t tensor, std::ptrdiff_t h, std::ptrdiff_t i, std::ptrdiff_t c) const {
        return stream.child(tensor).normal(place(h, i, c));
    }
    [[nodiscard]] double sign(std::uint64_t tensor, std::ptrdiff_t h, std::ptrdiff_t i, std::ptrdiff_t c) const {
        return uniform(tensor, h, i, c) < 0.5 ? -1 : 1;
    }
    /// 1, 1.25, 1.5 or 1.75
    [[nodiscard]] double quarter(std::uint64_t tensor, std::ptrdiff_t h, std::ptrdiff_t i, std::ptrdiff_t c) const {
        return 1 + 0.25 * std::floor(4 * uniform(tensor, h, i, c));
    }
    static std::uint64_t place(std::ptrdiff_t h, std::ptrdiff_t i, std::ptrdiff_t c) {
        return (static_cast<std::uint64_t>(h) << 48) | (static_cast<std::uint64_t>(i) << 20) |
               static_cast<std::uint64_t>(c);
    }

    [[nodiscard]] std::ptrdiff_t visible(std::ptrdiff_t query) const {
        return layer.causal ? std::min(shape.keys, query + 1 + shape.keys - shape.queries) : shape.keys;
    }
    /// A key that the row sees.
    [[nodiscard]] std::ptrdiff_t chosen(std::uint64_t tensor, std::ptrdiff_t h, std::ptrdiff_t i) const {
        const std::ptrdiff_t n = visible(i);
        return std::min(n - 1, static_cast<std::ptrdiff_t>(uniform(tensor, h, i, 0) * static_cast<double>(n)));
    }
    [[nodiscard]] double root() const { return std::sqrt(static_cast<double>(shape.head_dim)); }
    /// The power of two nearest to x.
    static double power_near(double x) { return std::exp2(std::round(std::log2(x))); }
};

enum Stream : std::uint64_t { for_q, for_k, for_v, for_do, for_codes, for_choice, for_direction, for_mask };

// Masks and what a layer has beyond scores, made after benign(): masked_families.cpp.
void padding(Maker& m, bool left);
void random_mask(Maker& m);
void window(Maker& m);
void alibi(Maker& m);
void softcap(Maker& m);
void sink_logit(Maker& m);
void dropout(Maker& m);

}  // namespace faultline::generation
