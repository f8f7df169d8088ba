// SPDX-License-Identifier: Apache-2.0
// With a recorder on a part of the tiles a kernel is two launches, one for what is looked at and one beside it for the rest. What
// they leave together has the bits of the plain kernel, and the cells that are written are those of the tiles that were drawn.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <stdexcept>
#include <vector>

#include <cuda_runtime_api.h>

#include <faultline/tensor_kernel/backward_recording.hpp>
#include <faultline/tensor_kernel/recording.hpp>

#include "on_hopper.hpp"

namespace faultline::tensor_kernel {
namespace {

using Bits = std::vector<std::uint16_t>;  // of bf16

void expect_success(cudaError_t error) {
    if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

template <class T>
class OnCard {
  public:
    explicit OnCard(std::size_t count) : count_(count) { expect_success(cudaMalloc(&data_, count * sizeof(T))); }
    explicit OnCard(const std::vector<T>& from) : OnCard(from.size()) {
        expect_success(cudaMemcpy(data_, from.data(), count_ * sizeof(T), cudaMemcpyHostToDevice));
    }
    OnCard(const OnCard&) = delete;
    OnCard& operator=(const OnCard&) = delete;
    ~OnCard() { (void)cudaFree(data_); }
    [[nodiscard]] T* data() const { return static_cast<T*>(data_); }
    void fill(int byte) const { expect_success(cudaMemset(data_, byte, bytes())); }
    [[nodiscard]] std::size_t bytes() const { return count_ * sizeof(T); }
    [[nodiscard]] std::vector<T> host() const {
        std::vector<T> x(count_);
        expect_success(cudaMemcpy(x.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost));
        return x;
    }

  private:
    std::size_t count_;
    void* data_ = nullptr;
};

double value_of(std::uint16_t bf16_bits) {
    const std::uint32_t word = static_cast<std::uint32_t>(bf16_bits) << 16;
    float x = 0;
    std::memcpy(&x, &word, sizeof x);
    return static_cast<double>(x);
}

struct Sizes {
    int d, heads, kv_heads, n_q, n_k;
    bool causal;
};
std::ostream& operator<<(std::ostream& to, const Sizes& s) {
    return to << "d " << s.d << ", heads " << s.heads << " of " << s.kv_heads << ", " << s.n_q << " x " << s.n_k
              << (s.causal ? " causal" : " full");
}

/// Numbers within 2 in bf16.
Bits drawn(std::size_t count, unsigned seed) {
    std::mt19937 random(seed);
    Bits x(count);
    for (std::uint16_t& bits : x) {
        const float value = static_cast<float>(static_cast<std::int32_t>(random())) * 0x1p-30f;
        std::uint32_t word = 0;
        std::memcpy(&word, &value, sizeof word);
        bits = static_cast<std::uint16_t>(word >> 16);
    }
    return x;
}

std::size_t elements(int heads, int rows, int columns) {
    return std::size_t{1} * static_cast<std::size_t>(heads) * static_cast<std::size_t>(rows) *
           static_cast<std::size_t>(columns);
}

/// A seed by which a tile is looked at, or is not.
template <class BitsOf>
std::uint32_t seed_by_which(bool looked_at, double fraction, const BitsOf& bits_of) {
    std::uint32_t seed = 1;
    while ((bits_of(seed) < sample::threshold(fraction)) != looked_at) ++seed;
    return seed;
}

/// Whether nothing was written to a cell since all of its bytes were set.
bool is_untouched(const RecordedCell& cell) {
    unsigned char bytes[sizeof cell];
    std::memcpy(bytes, &cell, sizeof cell);
    return std::ranges::all_of(bytes, [](unsigned char b) { return b == 0xFF; });
}

// ---- forward --------------------------------------------------------------------------------------------------------

class Forward {
  public:
    explicit Forward(const Sizes& s)
        : q(drawn(elements(s.heads, s.n_q, s.d), 1)),
          k(drawn(elements(s.kv_heads, s.n_k, s.d), 2)),
          v(drawn(elements(s.kv_heads, s.n_k, s.d), 3)),
          o(elements(s.heads, s.n_q, s.d)),
          unrounded(elements(s.heads, s.n_q, s.d)),
          lse(elements(s.heads, s.n_q, 1)) {
        call.heads = s.heads;
        call.kv_heads = s.kv_heads;
        call.n_q = s.n_q;
        call.n_k = s.n_k;
        call.head_dim = s.d;
        call.causal = s.causal;
        call.scale = 1 / std::sqrt(static_cast<double>(s.d));
        call.q = q.data();
        call.k = k.data();
        call.v = v.data();
        call.o = o.data();
        call.o_unrounded = unrounded.data();
        call.lse = lse.data();
        call.q_strides = call.o_strides = contiguous(s.heads, s.n_q, s.d);
        call.k_strides = call.v_strides = contiguous(s.kv_heads, s.n_k, s.d);
    }
    /// What a launch writes, all of it other than before.
    struct Written {
        Bits o;
        std::vector<std::uint32_t> unrounded, lse;
        bool operator==(const Written&) const = default;
    };
    template <class Launch>
    Written written_by(const Launch& launch) const {
        o.fill(0xAA);
        unrounded.fill(0xAA);
        lse.fill(0xAA);
        launch();
        expect_success(cudaDeviceSynchronize());
        const auto words = [](const std::vector<float>& from) {
            std::vector<std::uint32_t> to(from.size());
            std::memcpy(to.data(), from.data(), from.size() * sizeof(float));
            return to;
        };
        return {o.host(), words(unrounded.host()), words(lse.host())};
    }
    OnCard<std::uint16_t> q, k, v, o;
    OnCard<float> unrounded, lse;
    ForwardCall call;
};

int query_tiles(const ForwardCall& call) { return (call.n_q + 127) / 128; }

/// The cells of the query tiles that were drawn are written, bit for bit as where all are (many blocks have another loop than few),
/// and no others.
void expect_drawn_cells(const ForwardCall& call, double fraction, std::uint32_t seed,
                        const std::vector<RecordedCell>& cells, const std::vector<RecordedCell>& of_all) {
    const RecordedShape shape(call);
    int wrong = 0;
    for (int head = 0; head < shape.heads; ++head)
        for (int group = 0; group < shape.row_groups; ++group) {
            const int q_tile = group / 8, last = std::min(call.n_q, 16 * (group + 1)) - 1;
            const bool is_drawn = sample::tile_bits(seed, head, q_tile) < sample::threshold(fraction);
            const bool sees_keys = !call.causal || last + call.n_k - call.n_q >= 0;
            if (is_drawn && sees_keys) wrong += is_untouched(cells[shape.index(head, group, 0, 1)]);
            for (int k_tile = 0; k_tile < shape.k_tiles; ++k_tile)
                for (std::size_t site = 0; site < recorded_sites.size(); ++site) {
                    const std::size_t at = shape.index(head, group, k_tile, site);
                    wrong += is_drawn ? std::memcmp(&cells[at], &of_all[at], sizeof cells[at]) != 0
                                      : !is_untouched(cells[at]);
                }
        }
    EXPECT_EQ(wrong, 0);
}

void expect_plain_forward(const Sizes& sizes, const RoundingPlan& plan) {
    SCOPED_TRACE(::testing::Message() << sizes);
    const Forward on(sizes);
    const ForwardKernel kernel = supported(plan, sizes.d, sizes.causal).kernel;
    const OnCard<RecordedCell> cells(RecordedShape(on.call).cells());
    const Forward::Written plain = on.written_by([&] { launch_forward(on.call, kernel); });
    for (const double fraction : {1e-9, 0.01, 0.3, 0.99, 1.0})
        for (const bool last : {false, true}) {
            if (last ? fraction < 1e-6 : fraction == 1) continue;
            const std::uint32_t seed = seed_by_which(last, fraction, [&](std::uint32_t s) {
                return sample::tile_bits(s, sizes.heads - 1, query_tiles(on.call) - 1);
            });
            SCOPED_TRACE(::testing::Message() << "recorder on " << fraction << ", seed " << seed);
            const auto record = [&](double share) {
                cells.fill(0xFF);
                const Forward::Written recorded = on.written_by([&] {
                    launch_recorded_forward(on.call, kernel, {share, seed, cells.data()});
                });
                EXPECT_TRUE(recorded == plain);
                return cells.host();
            };
            const std::vector<RecordedCell> of_all = record(1);
            expect_drawn_cells(on.call, fraction, seed, record(fraction), of_all);
        }
}

TEST(TensorRecorderLaunches, LeaveTheForwardsBits) {
    NEEDS_HOPPER();
    for (const int d : {64, 128}) {
        expect_plain_forward({d, 1, 1, 1, 1, false}, forward_plan());
        expect_plain_forward({d, 6, 2, 777, 901, true}, forward_plan());
        expect_plain_forward({d, 4, 4, 333, 300, true}, forward_plan());  // rows that see no key
        expect_plain_forward({d, 6, 3, 129, 257, false}, forward_plan());
        expect_plain_forward({d, 1000, 250, 300, 130, true}, forward_plan());  // 3000 query tiles
    }
    RoundingPlan stable = forward_plan();
    stable.schedule.max_policy = MaxPolicy::stable;
    stable.set(Site::row_max, Rule{fp32});
    expect_plain_forward({64, 6, 2, 777, 901, true}, stable);
}

/// Each launch leaves the counters from which its blocks draw as it found them: a stream's launches take turns at
/// a few pairs (launch_counters.hpp).
TEST(TensorRecorderLaunches, LeaveTheirCountersForTheNext) {
    NEEDS_HOPPER();
    const Forward on({64, 40, 40, 700, 300, true});
    const ForwardKernel kernel = supported(forward_plan(), 64, true).kernel;
    const OnCard<RecordedCell> cells(RecordedShape(on.call).cells());
    const Forward::Written plain = on.written_by([&] { launch_forward(on.call, kernel); });
    for (int launch = 0; launch < 130; ++launch) {
        const double fraction = launch % 2 == 0 ? 0.01 : 0.3;
        const Forward::Written recorded = on.written_by([&] {
            launch_recorded_forward(on.call, kernel, {fraction, 3, cells.data()});
        });
        ASSERT_TRUE(recorded == plain) << "launch " << launch;
    }
    for (int launch = 0; launch < 64; ++launch)
        ASSERT_TRUE(on.written_by([&] { launch_forward(on.call, kernel); }) == plain) << "launch " << launch;
}

/// In a graph the first of the two launches may have anything before it: here what clears its cells and its output, and a kernel.
TEST(TensorRecorderLaunches, AreTheSameInAGraph) {
    NEEDS_HOPPER();
    const Forward on({64, 40, 40, 700, 300, true});
    const ForwardKernel kernel = supported(forward_plan(), 64, true).kernel;
    const OnCard<RecordedCell> cells(RecordedShape(on.call).cells());
    const Forward::Written plain = on.written_by([&] { launch_forward(on.call, kernel); });
    for (const double fraction : {0.01, 1.0}) {
        SCOPED_TRACE(fraction);
        cells.fill(0xFF);
        launch_recorded_forward(on.call, kernel, {fraction, 3, cells.data()});
        const std::vector<RecordedCell> expected = cells.host();
        cudaStream_t stream = nullptr;
        expect_success(cudaStreamCreate(&stream));
        cudaGraph_t graph = nullptr;
        cudaGraphExec_t ready = nullptr;
        expect_success(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        launch_forward(on.call, kernel, stream);
        for (int twice = 0; twice < 2; ++twice) {
            launch_recorded_forward(on.call, kernel, {fraction, 3, cells.data()}, stream);
            expect_success(cudaMemsetAsync(cells.data(), 0xFF, cells.bytes(), stream));
            expect_success(cudaMemsetAsync(on.call.o, 0xAA, on.o.bytes(), stream));
        }
        launch_recorded_forward(on.call, kernel, {fraction, 3, cells.data()}, stream);
        expect_success(cudaStreamEndCapture(stream, &graph));
        expect_success(cudaGraphInstantiate(&ready, graph, 0));
        const Forward::Written recorded = on.written_by([&] {
            for (int run = 0; run < 3; ++run) expect_success(cudaGraphLaunch(ready, stream));
        });
        EXPECT_TRUE(recorded == plain);
        const std::vector<RecordedCell> found = cells.host();
        EXPECT_EQ(std::memcmp(found.data(), expected.data(), cells.bytes()), 0);
        expect_success(cudaGraphExecDestroy(ready));
        expect_success(cudaGraphDestroy(graph));
        expect_success(cudaStreamDestroy(stream));
    }
}

// ---- backward -------------------------------------------------------------------------------------------------------

class Backward {
  public:
    explicit Backward(const Sizes& s)
        : forward(s),
          host_dout(drawn(elements(s.heads, s.n_q, s.d), 4)),
          dout(host_dout),
          dq(elements(s.heads, s.n_q, s.d)),
          dk(elements(s.kv_heads, s.n_k, s.d)),
          dv(elements(s.kv_heads, s.n_k, s.d)) {
        launch_forward(forward.call, supported(forward_plan(), s.d, s.causal).kernel);
        const ForwardCall& of = forward.call;
        call.heads = of.heads;
        call.kv_heads = of.kv_heads;
        call.n_q = of.n_q;
        call.n_k = of.n_k;
        call.head_dim = of.head_dim;
        call.causal = of.causal;
        call.scale = of.scale;
        call.q = of.q;
        call.k = of.k;
        call.v = of.v;
        call.o = of.o;
        call.o_unrounded = of.o_unrounded;
        call.lse = of.lse;
        call.dout = dout.data();
        call.dq = dq.data();
        call.dk = dk.data();
        call.dv = dv.data();
        call.q_strides = call.o_strides = call.dout_strides = call.dq_strides = of.q_strides;
        call.k_strides = call.v_strides = call.dk_strides = call.dv_strides = of.k_strides;
    }
    struct Written {
        Bits dq, dk, dv;
    };
    template <class Launch>
    Written written_by(bool deterministic, const Launch& launch) {
        dq.fill(0xAA);
        dk.fill(0xAA);
        dv.fill(0xAA);
        call.deterministic = deterministic;
        const OnCard<unsigned char> workspace(backward_workspace(call));
        workspace.fill(0xAA);
        call.workspace = workspace.data();
        launch();
        expect_success(cudaDeviceSynchronize());
        return {dq.host(), dk.host(), dv.host()};
    }
    Forward forward;
    Bits host_dout;
    OnCard<std::uint16_t> dout, dq, dk, dv;
    BackwardCall call;
};

int key_tiles(const BackwardCall& call) { return (call.n_k + 127) / 128; }

/// By how much sums of a row's dq over key tiles may differ in two orders. m fp32 terms t summed in any order are off by at most
/// (m - 1) 2^-24 sum |t|, and the factor that follows by 2^-24 of the result, for each of the two. Of dS = p (dp - delta) a row has
/// sum p = 1, |dp| and |delta| at most |dO_i| max_j |v_j|, so that at a column c, with the scale,
///   sum |t| <= 2 |dO_i| max_j |v_j| scale max_j |k_jc|;
/// 1 + 2^-5 takes up the roundings of p, ds, o (2^-8 each) and of the products. Both sums are then cast to bf16, whose unit
/// roundoff is 2^-8, so that two casts of nearly one number may be neighbours, 2^-7 apart.
class ReorderingBound {
  public:
    explicit ReorderingBound(const Backward& b)
        : call_(b.call),
          dout_(b.host_dout),
          largest_key_(elements(b.call.kv_heads, 1, b.call.head_dim)),
          longest_value_(elements(b.call.kv_heads, 1, 1)) {
        const Bits k = b.forward.k.host(), v = b.forward.v.host();
        const auto d = static_cast<std::size_t>(call_.head_dim);
        for (std::size_t row = 0; row < k.size() / d; ++row) {
            const std::size_t head = row / static_cast<std::size_t>(call_.n_k);
            double squares = 0;
            for (std::size_t c = 0; c < d; ++c) {
                double& largest = largest_key_[head * d + c];
                largest = std::max(largest, std::abs(value_of(k[row * d + c])));
                squares += value_of(v[row * d + c]) * value_of(v[row * d + c]);
            }
            longest_value_[head] = std::max(longest_value_[head], std::sqrt(squares));
        }
    }
    /// Elements of dq that are further apart.
    [[nodiscard]] std::size_t beyond(const Bits& a, const Bits& b) const {
        const auto d = static_cast<std::size_t>(call_.head_dim);
        const double orders = 2.0 * key_tiles(call_) * 0x1p-24;
        std::size_t count = 0;
        for (std::size_t row = 0; row < a.size() / d; ++row) {
            const std::size_t head =
                row / static_cast<std::size_t>(call_.n_q) / static_cast<std::size_t>(call_.heads / call_.kv_heads);
            double squares = 0;
            for (std::size_t c = 0; c < d; ++c) squares += value_of(dout_[row * d + c]) * value_of(dout_[row * d + c]);
            const double of_row = 2 * std::sqrt(squares) * longest_value_[head] * call_.scale * (1 + 0x1p-5);
            for (std::size_t c = 0; c < d; ++c) {
                const double x = value_of(a[row * d + c]), y = value_of(b[row * d + c]);
                const double cast = 0x1p-7 * (1 + 0x1p-7) * std::max(std::abs(x), std::abs(y)) + 0x1p-133;
                count += !(std::abs(x - y) <= orders * of_row * largest_key_[head * d + c] + cast);
            }
        }
        return count;
    }

  private:
    const BackwardCall& call_;
    const Bits& dout_;
    std::vector<double> largest_key_, longest_value_;
};

/// The cells of the key tiles that were drawn are written (where there is no mask: all of them), and no others.
void expect_drawn_cells(const BackwardCall& call, double fraction, std::uint32_t seed,
                        const std::vector<RecordedCell>& cells) {
    const RecordedBackwardShape shape(call);
    std::size_t wrong = 0;
    for (int head = 0; head < shape.heads; ++head)
        for (int group = 0; group < shape.key_groups; ++group) {
            const bool is_drawn = sample::key_tile_bits(seed, head / (call.heads / call.kv_heads), group / 8) <
                                  sample::threshold(fraction);
            if (is_drawn && call.causal) continue;
            for (int step = 0; step < shape.q_steps; ++step)
                for (std::size_t site = 0; site < recorded_backward_sites.size(); ++site)
                    wrong += is_untouched(cells[shape.index(head, step, group, site)]) == is_drawn;
        }
    EXPECT_EQ(wrong, 0u);
}

/// dk and dv of a launch have one order of sums, and so has dq with `deterministic`, and of two terms, whose sum is the same
/// either way.
void expect_plain_backward(const Sizes& sizes, const RoundingPlan& plan, const std::vector<double>& fractions) {
    SCOPED_TRACE(::testing::Message() << sizes);
    Backward on(sizes);
    const BackwardKernel kernel = supported_backward(plan, sizes.d, sizes.causal).kernel;
    const OnCard<RecordedCell> cells(RecordedBackwardShape(on.call).cells());
    const ReorderingBound bound(on);
    for (const bool deterministic : {true, false}) {
        const Backward::Written plain = on.written_by(deterministic, [&] { launch_backward(on.call, kernel); });
        for (const double fraction : fractions)
            for (const bool last : {false, true}) {
                if (last ? fraction < 1e-6 : fraction == 1) continue;
                const std::uint32_t seed = seed_by_which(last, fraction, [&](std::uint32_t s) {
                    return sample::key_tile_bits(s, sizes.kv_heads - 1, key_tiles(on.call) - 1);
                });
                SCOPED_TRACE(::testing::Message() << "recorder on " << fraction << ", seed " << seed
                                                  << (deterministic ? ", deterministic" : ""));
                cells.fill(0xFF);
                const Backward::Written recorded = on.written_by(deterministic, [&] {
                    launch_recorded_backward(on.call, kernel, {fraction, seed, cells.data()});
                });
                EXPECT_TRUE(recorded.dk == plain.dk);
                EXPECT_TRUE(recorded.dv == plain.dv);
                if (deterministic || key_tiles(on.call) <= 2)
                    EXPECT_TRUE(recorded.dq == plain.dq);
                else
                    EXPECT_EQ(bound.beyond(recorded.dq, plain.dq), 0u);
                expect_drawn_cells(on.call, fraction, seed, cells.host());
            }
    }
}

TEST(TensorRecorderLaunches, LeaveTheBackwardsBits) {
    NEEDS_HOPPER();
    const std::vector<double> fractions{1e-9, 0.01, 0.3, 0.99, 1.0};
    for (const int d : {64, 128}) {
        const RoundingPlan plan = backward_plan(d);
        expect_plain_backward({d, 1, 1, 1, 1, false}, plan, fractions);
        expect_plain_backward({d, 6, 2, 777, 901, true}, plan, fractions);
        expect_plain_backward({d, 4, 4, 333, 300, true}, plan, fractions);  // rows that see no key
        expect_plain_backward({d, 6, 3, 129, 257, false}, plan, fractions);
        expect_plain_backward({d, 8, 8, 190, 256, false}, plan, fractions);
        expect_plain_backward({d, 300, 100, 200, 500, true}, plan, fractions);
    }
    RoundingPlan projected = backward_plan(64);
    projected.schedule.zero_sum = ZeroSum::weighted;
    expect_plain_backward({64, 6, 2, 333, 255, true}, projected, fractions);
}

/// A fraction by which exactly so many of the key tiles are looked at.
double fraction_of(std::size_t count, const BackwardCall& call, std::uint32_t seed) {
    std::vector<std::uint32_t> bits;
    for (int head = 0; head < call.kv_heads; ++head)
        for (int tile = 0; tile < key_tiles(call); ++tile) bits.push_back(sample::key_tile_bits(seed, head, tile));
    std::ranges::sort(bits);
    if (bits[count - 1] == bits[count]) throw std::logic_error("two tiles of the same bits: another seed");
    return bits[count] * 0x1p-32;
}

/// Of at most 16,384 key tiles at most 512 are listed for a launch of their own; of more each block decides by itself.
TEST(TensorRecorderLaunches, ListKeyTilesAsFarAsThereIsPlace) {
    NEEDS_HOPPER();
    for (const int heads : {2000, 16384, 16385}) {
        const Sizes sizes{64, heads, heads, 9, 17, false};
        SCOPED_TRACE(::testing::Message() << sizes);
        Backward on(sizes);
        const BackwardKernel kernel = supported_backward(backward_plan(64), 64, false).kernel;
        const OnCard<RecordedCell> cells(RecordedBackwardShape(on.call).cells());
        const Backward::Written plain = on.written_by(false, [&] { launch_backward(on.call, kernel); });
        for (const std::size_t count : {1u, 511u, 512u, 513u}) {
            const double fraction = fraction_of(count, on.call, 1);
            SCOPED_TRACE(::testing::Message() << count << " key tiles");
            cells.fill(0xFF);
            const Backward::Written recorded = on.written_by(false, [&] {
                launch_recorded_backward(on.call, kernel, {fraction, 1, cells.data()});
            });
            EXPECT_TRUE(recorded.dq == plain.dq);  // one key tile a row
            EXPECT_TRUE(recorded.dk == plain.dk);
            EXPECT_TRUE(recorded.dv == plain.dv);
            expect_drawn_cells(on.call, fraction, 1, cells.host());
        }
    }
}

}  // namespace
}  // namespace faultline::tensor_kernel
