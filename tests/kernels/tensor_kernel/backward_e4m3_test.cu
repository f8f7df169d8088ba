// SPDX-License-Identifier: Apache-2.0
// The tensor-core backward of q, k and v in e4m3 against kernels/cpu under preset fa3-fp8, bit for bit, and its descale factors.
#include <gtest/gtest.h>

#include <faultline/agreement/backward_bound.hpp>
#include <faultline/tensor_kernel/device_memory.cuh>

#include "backward_bits.hpp"
#include "on_hopper.hpp"

namespace faultline::tensor_kernel {
namespace {

using testing::Head;
using Byte = __nv_fp8_e4m3;

void round_to_e4m3(Matrix& m) {
    for (double& x : m.values) x = round(x, e4m3, Rounding::nearest_even);
}
void round_to_e4m3(Head& head) {
    for (Matrix& q : head.q) round_to_e4m3(q);
    round_to_e4m3(head.k);
    round_to_e4m3(head.v);
}

TEST(TensorE4m3Backward, HasTheEmulationsBits) {
    NEEDS_HOPPER();
    struct Shape {
        int n_q, n_k;
        bool causal;
    };
    for (const int d : {64, 128})
        for (const Shape& s : {Shape{128, 128, true}, Shape{301, 301, true}, Shape{260, 515, false},
                               Shape{1, 300, false}, Shape{400, 150, true}, Shape{200, 17, false}})
            for (const double logits : {1.0, 20.0}) {
                if (s.n_q == 1 && logits > 1) continue;  // dk and dv of a p below 2^-126 alone, which is 0 here
                SCOPED_TRACE(::testing::Message() << "head_dim " << d << ", " << s.n_q << " x " << s.n_k
                                                  << (s.causal ? " causal" : " full") << ", logits " << logits);
                Head head(s.n_q, s.n_k, d, 1 + s.n_q, 1, logits);
                head.causal = s.causal;
                expect_same_gradients(head, backward_plan(d, Element::e4m3));
            }
}

TEST(TensorE4m3Backward, HasTheEmulationsBitsForEveryVariant) {
    NEEDS_HOPPER();
    for (const int d : {64, 128}) {
        SCOPED_TRACE(d);
        std::vector<RoundingPlan> plans(4, backward_plan(d, Element::e4m3));
        plans[0].schedule.bwd_argument = ArgumentForm::unfused;
        plans[1].schedule.ds_scale = DsScale::before;
        plans[2].schedule.functions = Functions::correctly_rounded;
        plans[3].schedule.delta_from = DeltaFrom::o_unrounded;
        for (const RoundingPlan& plan : plans) expect_same_gradients(Head(260, 260, d, 7, 1, 2.0), plan);
    }
}

/// One call on the device of groups alike, [batches, groups / batches] heads of keys, with factors of each.
struct Scaled {
    std::vector<GroupBackward> out;

    Scaled(const std::vector<Head>& groups, const std::vector<GroupForward>& forwards, int batches,
           const std::vector<float>& q_factors, const std::vector<float>& k_factors,
           const std::vector<float>& v_factors) {
        const Head& first = groups.front();
        const auto d = static_cast<int>(first.k.cols), n_q = static_cast<int>(first.q[0].rows),
                   n_k = static_cast<int>(first.k.rows);
        std::vector<Byte> q, k, v;
        std::vector<__nv_bfloat16> o, dout;
        std::vector<float> lse;
        for (std::size_t g = 0; g < groups.size(); ++g) {
            for (const Matrix& m : groups[g].q) append(q, m);
            append(k, groups[g].k);
            append(v, groups[g].v);
            for (const Matrix& m : groups[g].dout) append(dout, m);
            for (const HeadForward& head : forwards[g].heads) {
                append(o, head.o);
                for (const double x : head.lse) lse.push_back(static_cast<float>(x));
            }
        }
        const DeviceMemory<Byte> device_q(q), device_k(k), device_v(v);
        const DeviceMemory<__nv_bfloat16> device_o(o), device_dout(dout), dq(q.size()), dk(k.size()), dv(k.size());
        const DeviceMemory<float> device_lse(lse), by_q(q_factors), by_k(k_factors), by_v(v_factors);
        BackwardCall call{.batch = batches,
                          .heads = static_cast<int>(groups.size() * first.q.size()) / batches,
                          .kv_heads = static_cast<int>(groups.size()) / batches,
                          .n_q = n_q,
                          .n_k = n_k,
                          .head_dim = d,
                          .causal = first.causal,
                          .deterministic = true,
                          .scale = 1 / std::sqrt(static_cast<double>(d)),
                          .q = device_q.data(),
                          .k = device_k.data(),
                          .v = device_v.data(),
                          .o = device_o.data(),
                          .dout = device_dout.data(),
                          .lse = device_lse.data(),
                          .dq = dq.data(),
                          .dk = dk.data(),
                          .dv = dv.data()};
        call.q_strides = call.o_strides = call.dout_strides = call.dq_strides = contiguous(call.heads, n_q, d);
        call.k_strides = call.v_strides = call.dk_strides = call.dv_strides = contiguous(call.kv_heads, n_k, d);
        call.q_descale = by_q.data();
        call.k_descale = by_k.data();
        call.v_descale = by_v.data();
        const DeviceMemory<unsigned char> workspace(backward_workspace(call, Element::e4m3));
        call.workspace = workspace.data();
        launch_backward(call, supported_backward(backward_plan(d, Element::e4m3), d, call.causal).kernel);
        check(cudaDeviceSynchronize(), "running the backward");
        const std::vector<__nv_bfloat16> host_dq = dq.host(), host_dk = dk.host(), host_dv = dv.host();
        const __nv_bfloat16 *next_dq = host_dq.data(), *next_dk = host_dk.data(), *next_dv = host_dv.data();
        out.resize(groups.size());
        for (GroupBackward& g : out) {
            for (std::size_t h = 0; h < first.q.size(); ++h) g.dq.push_back(next(next_dq, n_q, d));
            g.dk = next(next_dk, n_k, d);
            g.dv = next(next_dv, n_k, d);
        }
    }

  private:
    template <class T>
    static void append(std::vector<T>& to, const Matrix& m) {
        for (const double x : m.values) to.push_back(rounded<T>(x));
    }
    static Matrix next(const __nv_bfloat16*& from, int rows, int cols) {
        Matrix m(rows, cols);
        for (double& x : m.values) x = static_cast<double>(static_cast<float>(*from++));
        return m;
    }
};

Matrix times(Matrix m, double factor) {
    for (double& x : m.values) x *= factor;
    return m;
}

/// Factors that are powers of two round nothing: the emulation of q and k under the scale times their factors, and of v times its
/// own, which is a number of e4m3 here, has gradients that are the kernel's times the factors, bit for bit.
TEST(TensorE4m3Backward, FactorsOfTwoRoundNothing) {
    NEEDS_HOPPER();
    for (const int d : {64, 128}) {
        const std::vector<float> q_factors{2, 0.25f, 1, 4}, k_factors{0.5f, 8, 1, 2}, v_factors{2, 1, 2, 1};
        const RoundingPlan plan = backward_plan(d, Element::e4m3);
        std::vector<Head> groups;
        std::vector<GroupForward> forwards;
        std::vector<GroupBackward> expected;
        for (std::size_t g = 0; g < q_factors.size(); ++g) {
            Head& head = groups.emplace_back(200, 333, d, 60 + g, 1, 1.0);
            round_to_e4m3(head);
            Head scaled = head;
            scaled.scale = static_cast<float>(head.scale) * (q_factors[g] * k_factors[g]);
            scaled.v = times(head.v, v_factors[g]);
            forwards.push_back(faultline::attention_forward(scaled.group(), plan));
            expected.push_back(faultline::attention_backward(scaled.group(), forwards.back(), plan));
        }
        const Scaled device(groups, forwards, 2, q_factors, k_factors, v_factors);
        for (std::size_t g = 0; g < groups.size(); ++g) {
            SCOPED_TRACE(::testing::Message() << "head_dim " << d << ", group " << g);
            EXPECT_EQ(differing(times(device.out[g].dq[0], q_factors[g]), expected[g].dq[0]), 0u) << "dq";
            EXPECT_EQ(differing(times(device.out[g].dk, k_factors[g]), expected[g].dk), 0u) << "dk";
            EXPECT_EQ(differing(device.out[g].dv, expected[g].dv), 0u) << "dv";
        }
    }
}

/// Any factors, and query heads that share keys: within the roundings of a backward in bf16 of the gradients in binary64 with
/// respect to the elements times their factors. o and lse are those of the exact forward, so that the part of the bound that is
/// lse's takes the roundings that factors add (2^-24 each of scale, of dP and of the gradients' scales).
TEST(TensorE4m3Backward, IsWithinThePlansRoundingsWithAnyFactors) {
    NEEDS_HOPPER();
    for (const int d : {64, 128}) {
        const std::vector<float> q_factors{0.7f, 1.9f}, k_factors{1.3f, 0.11f}, v_factors{0.3f, 5.1f};
        std::vector<Head> groups, products;
        std::vector<GroupForward> forwards;
        for (std::size_t g = 0; g < q_factors.size(); ++g) {
            Head& head = groups.emplace_back(200, 300, d, 70 + g, 3, 1.0);
            round_to_e4m3(head);
            Head& product = products.emplace_back(head);
            for (Matrix& q : product.q) q = times(q, q_factors[g]);
            product.k = times(head.k, k_factors[g]);
            product.v = times(head.v, v_factors[g]);
            forwards.push_back(faultline::attention_forward(product.group(), plan("exact")));
        }
        const Scaled device(groups, forwards, 1, q_factors, k_factors, v_factors);
        for (std::size_t g = 0; g < groups.size(); ++g) {
            SCOPED_TRACE(::testing::Message() << "head_dim " << d << ", group " << g);
            const Bounded truth(products[g].group());
            for (std::size_t h = 0; h < products[g].q.size(); ++h)
                EXPECT_EQ(beyond(device.out[g].dq[h], truth.dq[h], truth.dq_bound[h]), 0u) << "dq of head " << h;
            EXPECT_EQ(beyond(device.out[g].dk, truth.dk, truth.dk_bound), 0u) << "dk";
            EXPECT_EQ(beyond(device.out[g].dv, truth.dv, truth.dv_bound), 0u) << "dv";
        }
    }
}

}  // namespace
}  // namespace faultline::tensor_kernel
