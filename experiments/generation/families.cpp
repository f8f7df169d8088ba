// SPDX-License-Identifier: Apache-2.0
// The families. A code is a vector of signs: the scaled product of a code with itself is sqrt(head_dim), with another one
// some +-3 at most, so that a query that is a multiple of one key's code has that key for its maximum, by a margin that the
// multiple sets.
#include <algorithm>
#include <array>
#include <cmath>

#include <fmt/format.h>

#include <faultline/base/error.hpp>
#include <faultline/generation/maker.hpp>

namespace faultline {
namespace {

using namespace generation;

constexpr std::array<InputFamily, 23> families{{
    {"benign", "normal deviates of q, k, v and dO", "nothing: what random tests try, for comparison"},
    {"saturated", "one key a row, drawn among the visible ones, has all the weight: gap of some 30 in the logit",
     "gradients that are cancellation alone: delta from a rounded o, p off 1"},
    {"repeated-max",
     "four groups of equal keys, so that a row's maximum repeats up to n/4 times, over a tail of e^-10; "
     "values of one sign",
     "p of equal keys cast alike in many rows (repeated maxima: arXiv 2510.04212, section 3.3): a bias of dv"},
    {"near-repeated",
     "the same with maxima that differ by some 2^-10 in the logit: different scores, p rounds to 1 alike",
     "rules that look for equal scores; p that rounds alike over a row sum that does not: a bias of o"},
    {"two-level",
     "one key at the maximum and all others at one p, swept from 1 - 2^-12 to e^-8 over the rows; values 1",
     "p cast in the numerator and not in the row sum: o is not 1"},
    {"deep-negative",
     "every sixteenth row has all its scores deeply negative: around -226 to -452 by the head size, with a deviation of that over sqrt(2 d) (keys near 2u, those queries -mu)",
     "padding scored 0 against lse; a bias along u (rank one)"},
    {"large-key-mean", "keys u (8 to 14): a mean ten times the spread",
     "a broken zero-sum law leaks the mean key into dq"},
    {"coherent-values", "values of one sign a feature, within a factor of two, and dO of one sign",
     "delta from a rounded o, with its sign kept"},
    {"power-sweep", "one saturated key a row, the largest logit swept by powers of two from 2^5 to 2^19 and beyond",
     "exp2 of a fused argument: p_max - 1 grows with every power"},
    {"ring", "eight runs of keys whose values have turns of sign, so that o is small beside the parts' o",
     "partial outputs in a low format, merged by lse"},
    {"sink", "the first key draws nearly all weight of every row and has the smallest value there is",
     "row sums and lse carried by a term that adds nothing to o"},
    {"cancelling-gradient", "values whose products with dO are equal for all keys but a few: dp - delta is 0 or tiny",
     "delta's rounding as the whole of dq"},
    {"padding", "the last third of the keys masked by -inf, with +-448 in them", "masked keys that are read", true},
    {"left-padding", "the first keys masked, more of them from batch to batch and up to a third, with +-448 in them",
     "tiles that hold no visible key, the first maximum", true},
    {"random-mask", "half of the keys masked at random", "row maxima and sums over few keys, rows that differ", true},
    {"window", "a causal window of an eighth of the keys", "tiles that are masked in part on both sides", true},
    {"alibi", "causal, with a bias of slope (j - i), slopes 2^-1 to 2^-8 over the heads",
     "bias added in a low format, a maximum that runs with the row", true},
    // Behind the others: a family's numbers are drawn by its place in this list.
    {"key-mean-sweep",
     "the mean of half of the columns doubles from key head to key head, 2^-2 to 2^8 over eleven; in the other half the "
     "spread stays 1",
     "how a broken zero-sum law grows with the mean key, and what a projection takes off"},
    {"softcap", "one key a row has a logit that is swept by powers of two through a softcap of 30 and far beyond",
     "tanh in a low precision, slopes 1 - tanh^2 that vanish, a chain factor at the wrong score", false, true},
    {"sink-logit", "a sink of logit 0, 4, 8 or 12 from head to head beside normal deviates",
     "a denominator without the sink, a score gradient that is projected although it does not sum to zero", false,
     true},
    {"dropout", "a tenth of p is dropped, of normal deviates", "1/keep in the wrong place: o, dp, or delta", false,
     true},
    {"varlen", "four sequences of n, n/2 + 1, 9 and 5n/8 keys, packed one behind the other, normal deviates",
     "tiles that run over the end of a sequence, cu_seqlens read as lengths", false, true, true},
    {"paged",
     "the same keys in pages of 16 of a cache in which all that no sequence uses is NaN, one to sixteen queries",
     "slots behind a sequence's last key that are read: NaN, or p = 0 times NaN", false, true, true},
}};

void benign(Maker& m) {
    m.fill(m.layer.q, [&](auto h, auto i, auto c) { return m.normal(for_q, h, i, c); });
    m.fill(m.layer.k, [&](auto h, auto i, auto c) { return m.normal(for_k, h, i, c); });
    m.fill(m.layer.v, [&](auto h, auto i, auto c) { return m.normal(for_v, h, i, c); });
    m.fill(m.layer.dout, [&](auto h, auto i, auto c) { return m.normal(for_do, h, i, c); });
}

void saturated(Maker& m) {
    const double size = m.power_near(64 / m.root());  // logit 64 of the chosen key
    m.fill(m.layer.k, [&](auto h, auto j, auto c) { return m.sign(for_codes, h, j, c); });
    m.fill(m.layer.q, [&](auto h, auto i, auto c) {
        const auto kv = m.key_head(h);
        return size * m.sign(for_codes, kv, m.chosen(for_choice, h, i), c);
    });
}

constexpr std::ptrdiff_t groups = 4;

/// Keys in four groups; `spread`: the first coordinate of a group's keys differs.
void repeated(Maker& m, bool spread) {
    const double size = m.power_near(16 / m.root());  // logit 16 of a group's keys, the others' within some 4 of 0
    m.fill(m.layer.k, [&](auto h, auto j, auto c) {
        if (spread && c == 0) return m.quarter(for_k, h, j, 0);
        return m.sign(for_codes, h, j % groups, c);
    });
    m.fill(m.layer.q, [&](auto h, auto i, auto c) {
        if (spread && c == 0) return generation::smallest_value;  // times a quarter and the scale: 2^-11 for 64 columns
        return size * m.sign(for_codes, m.key_head(h), i % groups, c);
    });
    m.fill(m.layer.v,
           [&](auto h, auto j, auto c) { return m.sign(for_direction, h, 0, c) * m.quarter(for_v, h, j, c); });
}

void two_level(Maker& m) {
    // k_0 = e_0, no other key has a first coordinate and q has nothing else: the gap is q_0 / sqrt(d).
    m.fill(m.layer.k, [&](auto h, auto j, auto c) {
        if (j == 0) return c == 0 ? 1.0 : 0.0;
        return c == 0 ? 0.0 : m.normal(for_k, h, j, c);
    });
    m.fill(m.layer.q, [&](auto h, auto i, auto c) {
        if (c != 0) return 0.0;
        const double exponent = -6 + 12 * m.uniform(for_q, h, i, 0);
        return std::exp2(std::floor(exponent)) * m.quarter(for_choice, h, i, 0);
    });
    m.fill(m.layer.v, [](auto, auto, auto) { return 1.0; });
}

void deep_negative(Maker& m) {
    const double multiple = m.power_near(320 / (2 * m.root()));
    const auto u = [&](auto h, auto c) { return m.sign(for_direction, h, 0, c); };
    m.fill(m.layer.k, [&](auto h, auto j, auto c) {
        const double random = std::floor(5 * m.uniform(for_k, h, j, c)) - 2;  // -2 … 2
        return 2 * u(h, c) + random;
    });
    m.fill(m.layer.q, [&](auto h, auto i, auto c) {
        if (i % 16 == 15) return -multiple * u(m.key_head(h), c);
        return 0.25 * m.normal(for_q, h, i, c);
    });
}

void large_key_mean(Maker& m) {
    m.fill(m.layer.k,
           [&](auto h, auto j, auto c) { return 8 * m.sign(for_direction, h, 0, c) * m.quarter(for_k, h, j, c); });
    m.fill(m.layer.q, [&](auto h, auto i, auto c) { return 0.25 * m.normal(for_q, h, i, c); });
}

/// A mean and a spread in one column would grow together: the grid has three significant bits.
void key_mean_sweep(Maker& m) {
    constexpr std::ptrdiff_t steps = 11;
    m.fill(m.layer.k, [&](auto h, auto j, auto c) {
        if (c >= m.shape.head_dim / 2) return m.normal(for_k, h, j, c);
        return std::exp2(static_cast<double>(h % m.shape.kv_heads % steps - 2)) * m.sign(for_direction, h, 0, c);
    });
    m.fill(m.layer.q, [&](auto h, auto i, auto c) { return 0.25 * m.normal(for_q, h, i, c); });
}

void coherent_values(Maker& m) {
    m.fill(m.layer.v,
           [&](auto h, auto j, auto c) { return m.sign(for_direction, h, 0, c) * m.quarter(for_v, h, j, c); });
    m.fill(m.layer.dout, [&](auto h, auto i, auto c) {
        return 0.5 * m.sign(for_direction, m.key_head(h), 0, c) * m.quarter(for_do, h, i, c);
    });
}

void power_sweep(Maker& m) {
    m.fill(m.layer.k, [&](auto h, auto j, auto c) { return 256 * m.sign(for_codes, h, j, c); });
    m.fill(m.layer.q, [&](auto h, auto i, auto c) {
        const double power = std::exp2(static_cast<double>(i % 15 - 6));  // 2^-6 … 2^8
        // Quarters, since the product of a power of two and the scale is exact: fused or not, the exponent would be 0.
        return power * m.quarter(for_q, h, i, c) * m.sign(for_codes, m.key_head(h), m.chosen(for_choice, h, i), c);
    });
}

void ring(Maker& m) {
    const std::ptrdiff_t part = (m.shape.keys + 7) / 8;
    m.fill(m.layer.v, [&](auto h, auto j, auto c) {
        return (j / part % 2 == 0 ? 1 : -1) * m.sign(for_direction, h, 0, c) * m.quarter(for_v, h, j, c);
    });
    m.fill(m.layer.q, [&](auto h, auto i, auto c) { return 0.25 * m.normal(for_q, h, i, c); });
}

void sink(Maker& m) {
    const double size = m.power_near(std::sqrt(24 / m.root()));  // logit 12 to 48 of the first key
    m.fill(m.layer.k, [&](auto h, auto j, auto c) {
        return j == 0 ? size * m.sign(for_direction, h, 0, c) : 0.5 * m.normal(for_k, h, j, c);
    });
    m.fill(m.layer.q, [&](auto h, auto i, auto c) {
        return size * m.sign(for_direction, m.key_head(h), 0, c) * m.quarter(for_q, h, i, c);
    });
    for (std::ptrdiff_t h = 0; h < m.layer.v.batch * m.layer.v.heads; ++h)
        for (std::ptrdiff_t c = 0; c < m.layer.v.cols; ++c)
            m.layer.v.values[static_cast<std::size_t>(h * m.layer.v.rows * m.layer.v.cols + c)] =
                generation::smallest_value;
}

void cancelling_gradient(Maker& m) {
    // dO is +-1/2; a value is the same multiset of quarters with dO's signs in another order, so that dO V^T is one number
    // for all keys, but for every eighth, which is a quarter off in one coordinate.
    m.fill(m.layer.dout, [&](auto h, auto, auto c) { return 0.5 * m.sign(for_direction, m.key_head(h), 0, c); });
    m.fill(m.layer.v, [&](auto h, auto j, auto c) {
        const double size = 1 + 0.25 * static_cast<double>((c + j) % 4);
        const bool whole = c < m.shape.head_dim / 4 * 4;
        const double off = j % 8 == 7 && c == j % 4 ? (size < 1.75 ? 0.25 : -0.25) : 0;
        return m.sign(for_direction, h, 0, c) * ((whole ? size : 1) + off);
    });
}

void check(const InputFamily& family, const InputShape& s) {
    const auto wrong = [&](const std::string& what) {
        throw RequestError(fmt::format("family {}: {}", family.name, what));
    };
    for (const auto& [name, value] : {std::pair<const char*, std::ptrdiff_t>{"batch", s.batch},
                                      {"heads", s.heads},
                                      {"kv_heads", s.kv_heads},
                                      {"queries", s.queries},
                                      {"head_dim", s.head_dim}})
        if (value < 1) wrong(fmt::format("{} is {}: expected 1 or more", name, value));
    if (s.keys < least_keys) wrong(fmt::format("keys is {}: expected {} or more", s.keys, least_keys));
    if (s.heads % s.kv_heads != 0)
        wrong(fmt::format("{} query heads and {} key heads: expected a whole number of query heads for each key head",
                          s.heads, s.kv_heads));
    if (s.causal && !family.masked && s.keys < s.queries)
        wrong(fmt::format(
            "{} queries and {} keys under a causal mask: expected as many keys at least, or --no-causal, so "
            "that every row sees one",
            s.queries, s.keys));
    const double elements = static_cast<double>(s.batch) * static_cast<double>(s.heads) *
                            static_cast<double>(std::max(s.queries, s.keys)) * static_cast<double>(s.head_dim);
    if (elements > 0x1p31 || s.queries >= 1 << 28 || s.keys >= 1 << 28 || s.head_dim >= 1 << 20)
        wrong("the tensors have more than 2^31 elements: expected a smaller shape");
}

}  // namespace

std::span<const InputFamily> input_families() { return families; }

const InputFamily* find_family(std::string_view name) {
    for (const InputFamily& family : families)
        if (family.name == name) return &family;
    return nullptr;
}

std::vector<LayerCapture> make_layers(const InputFamily& family, const InputShape& shape, std::uint64_t seed) {
    if (!family.sequences) return {make_inputs(family, shape, seed)};
    check(family, shape);
    const bool decodes = family.name == "paged";
    const std::ptrdiff_t n = shape.keys;
    std::vector<LayerCapture> layers;
    for (const std::ptrdiff_t length :
         {n, n / 2 + 1, std::min<std::ptrdiff_t>(n, 9), std::max<std::ptrdiff_t>(8, n * 5 / 8)}) {
        const auto s = static_cast<std::ptrdiff_t>(layers.size());
        InputShape own = shape;
        own.batch = 1;
        own.keys = std::max<std::ptrdiff_t>(8, length);
        own.queries = decodes ? std::min(own.keys, std::ptrdiff_t{1} << s) : own.keys;
        layers.push_back(make_inputs(family, own, RandomStream(seed, 29).child(static_cast<std::uint64_t>(s)).key));
        layers.back().name = fmt::format("{}[{}]", family.name, s);
    }
    return layers;
}

LayerCapture make_inputs(const InputFamily& family, const InputShape& shape, std::uint64_t seed) {
    check(family, shape);
    const InputFamily* listed = find_family(family.name);
    Maker m(*listed, shape, seed);
    benign(m);  // what a family leaves alone
    const std::string_view name = family.name;
    if (name == "saturated") saturated(m);
    if (name == "repeated-max") repeated(m, false);
    if (name == "near-repeated") repeated(m, true);
    if (name == "two-level") two_level(m);
    if (name == "deep-negative") deep_negative(m);
    if (name == "large-key-mean") large_key_mean(m);
    if (name == "key-mean-sweep") key_mean_sweep(m);
    if (name == "coherent-values") coherent_values(m);
    if (name == "power-sweep") power_sweep(m);
    if (name == "ring") ring(m);
    if (name == "sink") sink(m);
    if (name == "cancelling-gradient") cancelling_gradient(m);
    if (name == "padding") padding(m, false);
    if (name == "left-padding") padding(m, true);
    if (name == "random-mask") random_mask(m);
    if (name == "window") window(m);
    if (name == "alibi") alibi(m);
    if (name == "softcap") softcap(m);
    if (name == "sink-logit") sink_logit(m);
    if (name == "dropout") dropout(m);
    return std::move(m.layer);
}

}  // namespace faultline
