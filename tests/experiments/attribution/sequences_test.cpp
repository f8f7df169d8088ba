// SPDX-License-Identifier: Apache-2.0
// Packed, padded and paged batches are the sequences that they hold: with everything that no sequence uses poisoned by NaN,
// the layers are those of the sequences written one by one, and so is every output of every plan, bit for bit.
#include <cmath>
#include <functional>
#include <limits>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <faultline/attribution/capture.hpp>
#include <faultline/attribution/group_run.hpp>
#include <faultline/base/error.hpp>
#include <faultline/plan/presets.hpp>
#include <faultline/random/random_stream.hpp>

namespace faultline {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr std::int64_t heads = 4, kv_heads = 2, size = 8;
constexpr float poison = std::numeric_limits<float>::quiet_NaN();

struct Batch {
    std::vector<std::int64_t> queries, keys;
};
const Batch lengths{{5, 12, 1, 70}, {9, 12, 33, 70}};

/// Element (head, row, column) of a tensor of sequence s.
float element(const std::string& tensor, std::size_t s, std::int64_t h, std::int64_t i, std::int64_t c) {
    const auto place = static_cast<std::uint64_t>(((static_cast<std::int64_t>(s) * 8 + h) * 128 + i) * 16 + c);
    return static_cast<float>(std::round(64 * RandomStream(static_cast<std::uint64_t>(tensor[0])).normal(place)) / 64);
}

bool is_query(const std::string& tensor) { return tensor == "q" || tensor == "do" || tensor == "flash.o"; }
const std::vector<std::string> tensors{"q", "k", "v", "do", "flash.o"};

std::int64_t heads_of(const std::string& tensor) { return is_query(tensor) ? heads : kv_heads; }
const std::vector<std::int64_t>& rows_of(const std::string& tensor) {
    return is_query(tensor) ? lengths.queries : lengths.keys;
}
std::int64_t sum(const std::vector<std::int64_t>& n) {
    std::int64_t total = 0;
    for (const std::int64_t x : n) total += x;
    return total;
}

void add(TensorSet& set, const std::string& name, std::vector<std::int64_t> shape, const std::vector<float>& values) {
    set.add(make_tensor<float>("l." + name, std::move(shape), values));
}
void add_integers(TensorSet& set, const std::string& name, std::vector<std::int64_t> shape,
                  std::vector<std::int32_t> values) {
    set.add(make_tensor<std::int32_t>("l." + name, std::move(shape), values));
}
std::vector<std::int32_t> ends(const std::vector<std::int64_t>& n) {
    std::vector<std::int32_t> all{0};
    for (const std::int64_t x : n) all.push_back(all.back() + static_cast<std::int32_t>(x));
    return all;
}

void add_packed(TensorSet& set, const std::string& tensor) {
    std::vector<float> values;
    for (std::size_t s = 0; s < 4; ++s)
        for (std::int64_t i = 0; i < rows_of(tensor)[s]; ++i)
            for (std::int64_t h = 0; h < heads_of(tensor); ++h)
                for (std::int64_t c = 0; c < size; ++c) values.push_back(element(tensor, s, h, i, c));
    add(set, tensor, {sum(rows_of(tensor)), heads_of(tensor), size}, values);
}

void add_padded(TensorSet& set, const std::string& tensor) {
    std::vector<float> values;
    for (std::size_t s = 0; s < 4; ++s)
        for (std::int64_t h = 0; h < heads_of(tensor); ++h)
            for (std::int64_t i = 0; i < 72; ++i)
                for (std::int64_t c = 0; c < size; ++c)
                    values.push_back(i < rows_of(tensor)[s] ? element(tensor, s, h, i, c) : poison);
    add(set, tensor, {4, heads_of(tensor), 72, size}, values);
}

/// Pages of 16 keys, handed out from the last to the first; pages that nobody has and the tails of the others are poison.
void add_paged(TensorSet& set, const std::string& tensor, std::vector<std::int32_t>& table) {
    constexpr std::int64_t page = 16, pages = 20, of_sequence = 5;
    std::vector<float> values(static_cast<std::size_t>(pages * page * kv_heads * size), poison);
    table.assign(static_cast<std::size_t>(4 * of_sequence), -1);
    std::int64_t next = pages - 1;
    for (std::size_t s = 0; s < 4; ++s)
        for (std::int64_t first = 0; first < lengths.keys[s]; first += page) {
            table[s * of_sequence + static_cast<std::size_t>(first / page)] = static_cast<std::int32_t>(next);
            for (std::int64_t i = first; i < std::min(first + page, lengths.keys[s]); ++i)
                for (std::int64_t h = 0; h < kv_heads; ++h)
                    for (std::int64_t c = 0; c < size; ++c)
                        values[static_cast<std::size_t>(((next * page + i % page) * kv_heads + h) * size + c)] =
                            element(tensor, s, h, i, c);
            next -= 2;
        }
    add(set, tensor, {pages, page, kv_heads, size}, values);
}

/// The sequences one by one, as a batch of one each.
TensorSet one_by_one() {
    TensorSet set;
    for (std::size_t s = 0; s < 4; ++s)
        for (const std::string& tensor : tensors) {
            std::vector<float> values;
            for (std::int64_t h = 0; h < heads_of(tensor); ++h)
                for (std::int64_t i = 0; i < rows_of(tensor)[s]; ++i)
                    for (std::int64_t c = 0; c < size; ++c) values.push_back(element(tensor, s, h, i, c));
            set.add(make_tensor<float>("l[" + std::to_string(s) + "]." + tensor,
                                       {1, heads_of(tensor), rows_of(tensor)[s], size}, values));
        }
    return set;
}

TensorSet packed() {
    TensorSet set;
    for (const std::string& tensor : tensors) add_packed(set, tensor);
    add_integers(set, "cu_seqlens_q", {5}, ends(lengths.queries));
    add_integers(set, "cu_seqlens_k", {5}, ends(lengths.keys));
    return set;
}

TensorSet padded() {
    TensorSet set;
    for (const std::string& tensor : tensors) add_padded(set, tensor);
    add_integers(set, "seqused_q", {4}, {lengths.queries.begin(), lengths.queries.end()});
    add_integers(set, "seqused_k", {4}, {lengths.keys.begin(), lengths.keys.end()});
    return set;
}

TensorSet paged() {
    TensorSet set;
    for (const char* tensor : {"q", "do", "flash.o"}) add_packed(set, tensor);
    std::vector<std::int32_t> table;
    for (const char* tensor : {"k", "v"}) add_paged(set, tensor, table);
    add_integers(set, "cu_seqlens_q", {5}, ends(lengths.queries));
    add_integers(set, "seqused_k", {4}, {lengths.keys.begin(), lengths.keys.end()});
    add_integers(set, "block_table", {4, 5}, table);
    return set;
}

TEST(Sequences, ArePoisonedNowhere) {
    const Capture expected = capture_of(one_by_one());
    for (const auto& make : {&packed, &padded, &paged}) {
        const Capture capture = capture_of(make());
        ASSERT_EQ(capture.layers.size(), 4u);
        EXPECT_TRUE(capture.unused.empty());
        for (std::size_t s = 0; s < 4; ++s) {
            const LayerCapture &a = capture.layers[s], &b = expected.layers[s];
            EXPECT_EQ(a.name, b.name);
            EXPECT_EQ(a.q.values, b.q.values);
            EXPECT_EQ(a.k.values, b.k.values);
            EXPECT_EQ(a.v.values, b.v.values);
            EXPECT_EQ(a.dout.values, b.dout.values);
            EXPECT_EQ(a.observed.at(0)[Output::o]->values, b.observed.at(0)[Output::o]->values);
            for (const char* name : {"fa2", "fa3", "standard-bf16"}) {
                const RoundingPlan settled = for_head_dim(plan(name), size, a.causal);
                const auto groups = attribution::groups_of(a, {}, 0), others = attribution::groups_of(b, {}, 0);
                for (std::size_t g = 0; g < groups.size(); ++g) {
                    const auto ours = attribution::run_plan(groups[g], settled),
                               theirs = attribution::run_plan(others[g], settled);
                    for (const Output output : all_outputs)
                        for (std::size_t m = 0; m < ours[output].size(); ++m) {
                            EXPECT_EQ(ours[output][m], theirs[output][m]) << name;
                            for (const double x : ours[output][m].values) ASSERT_TRUE(std::isfinite(x));
                        }
                }
            }
        }
    }
}

TEST(Sequences, AreChosenByTheirLayersNameOrTheirOwn) {
    const auto names = [](const std::vector<std::string>& wanted) {
        CaptureOptions options;
        options.layers = wanted;
        std::vector<std::string> found;
        for (const LayerCapture& layer : capture_of(packed(), options).layers) found.push_back(layer.name);
        return found;
    };
    EXPECT_THAT(names({}), ElementsAre("l[0]", "l[1]", "l[2]", "l[3]"));
    EXPECT_THAT(names({"l"}), ElementsAre("l[0]", "l[1]", "l[2]", "l[3]"));
    EXPECT_THAT(names({"l[2]"}), ElementsAre("l[2]"));
    EXPECT_THROW((void)names({"l[4]"}), RequestError);
}

// A sequence without queries is none; the sink is every sequence's.
TEST(Sequences, WithoutRowsAreLeftOut) {
    TensorSet set = packed();
    set.tensors.erase("l.cu_seqlens_q");
    add_integers(set, "cu_seqlens_q", {5}, {0, 0, 17, 18, 88});
    set.add(make_tensor<float>("l.sink", {4}, std::vector<float>{1, 2, 3, 4}));
    CaptureOptions options;
    options.causal = false;
    const Capture capture = capture_of(set, options);
    ASSERT_EQ(capture.layers.size(), 3u);
    EXPECT_EQ(capture.layers[0].name, "l[1]");
    EXPECT_EQ(capture.layers[0].q.rows, 17);
    EXPECT_EQ(capture.layers[2].sink, (std::vector<double>{1, 2, 3, 4}));
}

TEST(Sequences, DescaleIsOfTheHeadOrOfTheSequenceAndHead) {
    const std::vector<float> by_sequence{1, 2, 4, 8, 0.5, 0.25, 16, 3}, by_head{5, 7};
    TensorSet of_sequences = packed(), of_heads = packed(), cache = paged();
    add(of_sequences, "k_descale", {4, kv_heads}, by_sequence);
    add(of_heads, "k_descale", {kv_heads}, by_head);
    add(cache, "k_descale", {kv_heads}, by_head);
    for (const TensorSet* set : {&of_sequences, &of_heads, &cache}) {
        const Capture capture = capture_of(*set);
        ASSERT_EQ(capture.layers.size(), 4u);
        for (std::size_t s = 0; s < 4; ++s)
            for (std::int64_t h = 0; h < kv_heads; ++h) {
                const auto at = static_cast<std::size_t>(h);
                const float factor = set == &of_sequences ? by_sequence[s * kv_heads + at] : by_head[at];
                const auto k = capture.layers[s].k(0, h);
                ASSERT_EQ(k.rows, lengths.keys[s]);
                for (std::int64_t i = 0; i < k.rows; ++i)
                    for (std::int64_t c = 0; c < size; ++c)
                        ASSERT_EQ(k(i, c), static_cast<double>(element("k", s, h, i, c) * factor)) << s << " " << h;
            }
    }
}

TEST(Sequences, WhatDoesNotFitIsNamed) {
    const auto refused = [](TensorSet set, const char* name, std::vector<std::int64_t> shape,
                            std::vector<std::int32_t> values, const char* what) {
        set.tensors.erase(std::string("l.") + name);
        if (!values.empty()) add_integers(set, name, std::move(shape), std::move(values));
        try {
            (void)capture_of(set);
            ADD_FAILURE() << "expected: " << what;
        } catch (const RequestError& error) {
            EXPECT_THAT(error.what(), HasSubstr(what));
        }
    };
    refused(packed(), "cu_seqlens_q", {5}, {0, 5, 17, 18, 87},
            "\"l.do\": shape [88, 4, 8]: does not hold the sequences");
    refused(packed(), "cu_seqlens_q", {5}, {0, 5, 4, 18, 88}, "integers from 0 that do not fall");
    refused(packed(), "cu_seqlens_k", {4}, {0, 9, 21, 124}, "has 3 sequences");
    refused(packed(), "cu_seqlens_k", {5}, {0, 0, 21, 54, 124}, "sequence 0 has 5 queries and no key");
    refused(padded(), "seqused_k", {4}, {9, 12, 73, 70}, "expected 4 lengths of 0 to 72");
    refused(paged(), "seqused_k", {4}, {9, 12, 33, 81}, "sequence 3 has 81 keys: expected 0 to 80");
    refused(paged(), "seqused_k", {4}, {9, 17, 33, 70}, "page 1 of sequence 1 is -1: expected 0 to 19");
    refused(paged(), "seqused_k", {}, {}, "stands without LAYER.seqused_k");
    refused(paged(), "block_table", {5, 4}, std::vector<std::int32_t>(20, 0),
            "expected a row for each of the 4 sequences");
    // What k's pages say holds for v: a cache with fewer pages, or shorter ones, would be read beyond its end.
    const auto other_cache = [&](std::vector<std::int64_t> shape) {
        TensorSet set = paged();
        const std::int64_t count = shape[0] * shape[1] * shape[2] * shape[3];
        set.tensors.erase("l.v");
        add(set, "v", std::move(shape), std::vector<float>(static_cast<std::size_t>(count), 1));
        return set;
    };
    const std::vector<std::int64_t> cache = paged().at("l.k").shape;
    refused(other_cache({cache[0] - 1, cache[1], cache[2], cache[3]}), "none", {}, {}, "pages of the cache");
    refused(other_cache({cache[0], cache[1] / 2, cache[2], cache[3]}), "none", {}, {}, "pages of the cache");
    // Two lists of one side's lengths.
    refused(packed(), "seqused_k", {4}, {9, 12, 33, 60}, "stands beside \"l.cu_seqlens_k\": expected one of them");
    refused(packed(), "cu_seqlens_k", {}, {},
            "tensor \"l.cu_seqlens_k\" is missing: expected it beside \"l.cu_seqlens_q\"");
    refused(packed(), "cu_seqlens_q", {}, {},
            "tensor \"l.cu_seqlens_q\" is missing: expected it beside \"l.cu_seqlens_k\"");
    refused(packed(), "seqused_q", {4}, {5, 12, 1, 70}, "stands beside \"l.cu_seqlens_q\": expected one of them");
    refused(packed(), "cu_seqlens", {5}, {0, 5, 17, 18, 88}, "expected one of them");
    refused(paged(), "cu_seqlens_k", {5}, {0, 9, 21, 54, 124}, "stands beside \"l.block_table\"");
    // Heads are not the third axis from the end there.
    TensorSet scaled = packed();
    add(scaled, "k_descale", {3}, {1, 2, 3});
    refused(std::move(scaled), "none", {}, {}, "or [4, 2] (sequences, heads)");
    TensorSet cached = paged();
    add(cached, "k_descale", {4, 2}, std::vector<float>(8, 1));
    refused(std::move(cached), "none", {}, {}, "a page may be of several sequences");
    TensorSet floats = packed();
    floats.tensors.erase("l.cu_seqlens_q");
    add(floats, "cu_seqlens_q", {5}, {0, 5, 17, 18, 88});
    EXPECT_THROW((void)capture_of(floats), RequestError);
}

}  // namespace
}  // namespace faultline
