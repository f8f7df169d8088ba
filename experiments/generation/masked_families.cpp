// SPDX-License-Identifier: Apache-2.0
// The families with a mask, a softcap, sinks or dropout.
#include <limits>

#include <faultline/generation/maker.hpp>

namespace faultline::generation {
namespace {

/// Masks are [batch, 1, queries, keys], or with a head each where `per_head`.
template <class F>
void mask(Maker& m, bool per_head, F&& bias) {
    const InputShape& s = m.shape;
    HeadArray a{s.batch, per_head ? s.heads : 1, s.queries, s.keys, {}, Dtype::f32};
    for (std::ptrdiff_t h = 0; h < a.batch * a.heads; ++h)
        for (std::ptrdiff_t i = 0; i < a.rows; ++i)
            for (std::ptrdiff_t j = 0; j < a.cols; ++j) a.values.push_back(bias(h, i, j));
    m.layer.bias = std::move(a);
}
constexpr double hidden = -std::numeric_limits<double>::infinity();

/// Keys that no row sees hold the largest value there is, with random signs.
template <class F>
void poison(Maker& m, F&& is_hidden) {
    for (HeadArray* a : {&m.layer.k, &m.layer.v})
        for (std::ptrdiff_t h = 0; h < a->batch * a->heads; ++h)
            for (std::ptrdiff_t j = 0; j < a->rows; ++j)
                for (std::ptrdiff_t c = 0; c < a->cols; ++c)
                    if (is_hidden(h / a->heads, j))
                        a->values[static_cast<std::size_t>((h * a->rows + j) * a->cols + c)] =
                            m.sign(for_mask, h, j, c) * generation::largest_value;
}

/// The last key that a row sees where queries and keys are aligned at their ends, as a causal mask aligns them.
std::ptrdiff_t diagonal(const Maker& m, std::ptrdiff_t i) {
    return std::clamp<std::ptrdiff_t>(i + m.shape.keys - m.shape.queries, 0, m.shape.keys - 1);
}

}  // namespace

void padding(Maker& m, bool left) {
    const std::ptrdiff_t n = m.shape.keys;
    const auto is_hidden = [&](std::ptrdiff_t b, std::ptrdiff_t j) {
        return left ? j < n / 3 * (b + 1) / m.shape.batch : j >= n - n / 3;
    };
    mask(m, false, [&](auto b, auto, auto j) { return is_hidden(b, j) ? hidden : 0.0; });
    poison(m, is_hidden);
}

void random_mask(Maker& m) {
    mask(m, true, [&](auto h, auto i, auto j) {
        return j == diagonal(m, i) || m.uniform(for_mask, h, i, j) < 0.5 ? 0.0 : hidden;
    });
}

void window(Maker& m) {
    const std::ptrdiff_t width = std::max<std::ptrdiff_t>(1, m.shape.keys / 8);
    mask(m, false,
         [&](auto, auto i, auto j) { return j <= diagonal(m, i) && j > diagonal(m, i) - width ? 0.0 : hidden; });
}

void alibi(Maker& m) {
    mask(m, true, [&](auto h, auto i, auto j) {
        const double slope = std::exp2(-1 - static_cast<double>(h % m.shape.heads * 8 / m.shape.heads));
        return j <= diagonal(m, i) ? slope * static_cast<double>(j - diagonal(m, i)) : hidden;
    });
}

void softcap(Maker& m) {
    m.layer.softcap = 30;
    m.fill(m.layer.k, [&](auto h, auto j, auto c) { return m.sign(for_codes, h, j, c); });
    m.fill(m.layer.q, [&](auto h, auto i, auto c) {
        const double power = m.power_near(1 / m.root()) * std::exp2(static_cast<double>(i % 11));  // logits 1 … 1024
        return power * m.sign(for_codes, m.key_head(h), m.chosen(for_choice, h, i), c);
    });
}

void sink_logit(Maker& m) {
    for (std::ptrdiff_t h = 0; h < m.shape.heads; ++h) m.layer.sink.push_back(static_cast<double>(4 * (h % 4)));
}

void dropout(Maker& m) {
    m.layer.keep = 0.9;
    const InputShape& s = m.shape;
    HeadArray kept{s.batch, s.heads, s.queries, s.keys, {}, Dtype::boolean};
    for (std::ptrdiff_t h = 0; h < kept.batch * kept.heads; ++h)
        for (std::ptrdiff_t i = 0; i < kept.rows; ++i)
            for (std::ptrdiff_t j = 0; j < kept.cols; ++j)
                kept.values.push_back(m.uniform(for_mask, h, i, j) < m.layer.keep ? 1 : 0);
    m.layer.dropout = std::move(kept);
}

}  // namespace faultline::generation
