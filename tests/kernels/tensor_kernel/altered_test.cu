// SPDX-License-Identifier: Apache-2.0
// Faults in the registers of the tensor-core kernels against the emulation with the same faults, bit for bit, and what they
// say that they did.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include <faultline/injectors/apply.hpp>
#include <faultline/injectors/attention_injector.hpp>
#include <faultline/tensor_kernel/altering.hpp>
#include <faultline/tensor_kernel/backward_kernel.hpp>
#include <faultline/tensor_kernel/group_memory.cuh>
#include <faultline/tensor_kernel/scaling.hpp>

#include "forward_bits.hpp"
#include "heads.hpp"
#include "on_hopper.hpp"

namespace faultline::tensor_kernel {
namespace {

using testing::Head;

template <class T>
inline constexpr Element element_of = std::is_same_v<T, __half> ? Element::fp16 : Element::bf16;

constexpr int heads = 2;

const std::pair<Site, AlteredSite> altered_sites[] = {
    {Site::row_max, AlteredSite::row_max}, {Site::p_cast, AlteredSite::p_cast},
    {Site::row_sum, AlteredSite::row_sum}, {Site::pv_accumulate, AlteredSite::pv_accumulate},
    {Site::delta, AlteredSite::delta},     {Site::dp_accumulate, AlteredSite::dp_accumulate},
    {Site::ds, AlteredSite::ds},           {Site::bwd_p_cast, AlteredSite::bwd_p_cast},
    {Site::ds_cast, AlteredSite::ds_cast},
};

/// The faults of a layer of two heads, for both sides.
struct Planted {
    std::vector<std::unique_ptr<AttentionInjector>> injectors;
    std::vector<std::unique_ptr<DeviceMemory<HeadAlteration>>> tables;
    std::vector<std::unique_ptr<DeviceMemory<AlteredSums>>> sums;
    Alterations on_device;

    Planted(const std::vector<std::string>& words, const RoundingPlan& plan, std::size_t slots) {
        for (const std::string& word : words) {
            const Fault fault = parse_fault(word);
            const auto& injector = injectors.emplace_back(std::make_unique<AttentionInjector>(fault, plan, heads));
            std::vector<HeadAlteration> table(heads);
            for (int h = 0; h < heads; ++h) {
                std::vector<Alteration> of_head;
                injector->alterations(0, h, of_head);
                if (of_head.empty()) continue;
                table[h].change = of_head.front();
                table[h].touched = 1;
            }
            // What a launch leaves unwritten would be seen.
            const std::vector<AlteredSums> unwritten(slots, AlteredSums{-1e9, 0, 0, 0, 0, 0, 0});
            on_device.at[on_device.count++] = {
                std::ranges::find(altered_sites, std::get<Site>(fault.site), &std::pair<Site, AlteredSite>::first)
                    ->second,
                tables.emplace_back(std::make_unique<DeviceMemory<HeadAlteration>>(table))->data(),
                sums.emplace_back(std::make_unique<DeviceMemory<AlteredSums>>(unwritten))->data()};
        }
    }
    [[nodiscard]] Instruments on_cpu() const {
        std::vector<Instrument*> parts;
        for (const auto& injector : injectors) parts.push_back(injector.get());
        return Instruments(parts);
    }
    /// Sums of the same numbers in another order: n 2^-53 of their magnitudes' sum.
    void expect_what_was_done() const {
        for (std::size_t f = 0; f < injectors.size(); ++f) {
            const std::vector<AlteredSums> parts = sums[f]->host();
            for (int h = 0; h < heads; ++h) {
                AlteredSums all{};
                for (std::size_t i = parts.size() / heads * h; i < parts.size() / heads * (h + 1); ++i) {
                    all.count += parts[i].count;
                    all.sum += parts[i].sum;
                    all.sum_squared += parts[i].sum_squared;
                    all.value_squared += parts[i].value_squared;
                }
                const Realised& wanted = injectors[f]->realised()[h];
                const double order = 0x1p-52 * wanted.count;
                EXPECT_EQ(all.count, wanted.count) << f << ", head " << h;
                EXPECT_NEAR(all.sum, wanted.sum, order * wanted.sum_abs) << f << ", head " << h;
                EXPECT_NEAR(all.sum_squared, wanted.sum_squared, order * wanted.sum_squared) << f << ", head " << h;
                EXPECT_NEAR(all.value_squared, wanted.value_squared, order * wanted.value_squared) << f;
            }
            EXPECT_GT(injectors[f]->total().sum_abs, 0) << f;
        }
    }
};

std::vector<HeadGroup> groups_of(const std::vector<Head>& all) {
    std::vector<HeadGroup> groups;
    for (const Head& head : all) {
        groups.push_back(head.group());
        groups.back().first_head = static_cast<int>(groups.size()) - 1;
    }
    return groups;
}
template <class T>
std::vector<T> stored_of(const std::vector<Head>& all, const Matrix& (*select)(const Head&)) {
    return stored<T>(all.size(), [&](std::size_t g) { return std::vector{select(all[g]).view()}; });
}

/// The kernels hold a row maximum in fp32; the plan is told to. They hold the sums of products in it, too, where a fault without
/// a format would leave the emulation a sum of 53 bits.
RoundingPlan plan_of(int d, Element element) {
    RoundingPlan plan = forward_plan(element, Unit::wgmma, d);
    plan.set(Site::row_max, Rule{fp32});
    return plan;
}

/// Whether a kernel that multiplies makes all of these faults.
bool are_scalings(const std::vector<std::string>& words, const RoundingPlan& plan) {
    return std::ranges::all_of(words, [&](const std::string& word) {
        const Fault fault = parse_fault(word);
        const Site site = std::get<Site>(fault.site);
        const Alteration change = alteration_of(fault, {}, plan[site].format);
        switch (site) {
            case Site::p_cast:
            case Site::bwd_p_cast:
            case Site::ds_cast:
                return is_scaling_of_bf16(change);
            case Site::row_max:
            case Site::row_sum:
            case Site::pv_accumulate:
            case Site::dp_accumulate:
            case Site::ds:
                return is_scaling(change);
            default:
                return false;
        }
    });
}

template <class T>
void expect_forwards_of_the_emulation() {
    for (const int d : {64, 128})
        for (const std::vector<std::string>& words :
             {std::vector<std::string>{"row_max:fixed:0.02:shape=value"},
              {"row_max:random:1000ulp"},
              {"row_sum:random:0.05:shape=value"},
              {"row_sum:multiplicative:0.1:hold=nearest"},
              {"row_sum:fixed:30ulp:heads=1"},
              {"row_sum:multiplicative:0.125:hold=nearest:heads=1"},
              {"p_cast:multiplicative:0.125:hold=nearest"},
              {"p_cast:flip@2:0.25:shape=value:hold=nearest:heads=1", "row_sum:multiplicative:-0.1875:hold=nearest"},
              {"row_max:multiplicative:-0.03125:hold=nearest"},
              {"pv_accumulate:multiplicative:-0.125:hold=nearest:format=fp32:heads=1"},
              {"row_max:per_head:0.03125:shape=value:hold=nearest", "p_cast:multiplicative:0.125:hold=nearest:heads=1",
               "row_sum:multiplicative:-0.1875:hold=nearest",
               "pv_accumulate:multiplicative:0.125:hold=nearest:format=fp32"},
              {"pv_accumulate:operand:-0.5ulp:format=bf16"},
              {"pv_accumulate:random:0.01:shape=value:format=fp32", "row_max:multiplicative:0.01",
               "row_sum:per_head:5%:shape=value", "p_cast:multiplicative:0.1"}}) {
            SCOPED_TRACE(::testing::Message() << "head_dim " << d << ", " << ::testing::PrintToString(words));
            std::vector<Head> all;
            for (int h = 0; h < heads; ++h) all.emplace_back(300, 333, d, 60 + h, 1, 2.0);
            const std::vector<HeadGroup> groups = groups_of(all);
            const RoundingPlan plan = plan_of(d, element_of<T>);
            auto call = call_of<ForwardCall>(groups);
            Planted faults(words, plan, altered_sums(call));
            const DeviceMemory<T> q(stored_of<T>(all, [](const Head&h) -> const Matrix& { return h.q[0]; })),
                k(stored_of<T>(all, [](const Head&h) -> const Matrix& { return h.k; })),
                v(stored_of<T>(all, [](const Head&h) -> const Matrix& { return h.v; }));
            const std::size_t count = static_cast<std::size_t>(heads) * call.n_q * d;
            const DeviceMemory<T> o(count);
            const DeviceMemory<float> lse(static_cast<std::size_t>(heads) * call.n_q);
            call.q = q.data();
            call.k = k.data();
            call.v = v.data();
            call.o = o.data();
            call.lse = lse.data();
            const ForwardSupport support = supported(plan, d, true);
            ASSERT_TRUE(support) << support.why;
            launch_altered_forward(call, support.kernel, faults.on_device, nullptr);
            check(cudaDeviceSynchronize(), "running the altered forward");
            const std::vector<T> host_o = o.host();
            const std::vector<float> host_lse = lse.host();
            Instruments on_cpu = faults.on_cpu();
            int differ = 0;
            for (int h = 0; h < heads; ++h) {
                const HeadForward cpu = faultline::attention_forward(groups[h], plan, &on_cpu).heads.front();
                for (std::size_t i = 0; i < cpu.o.values.size(); ++i)
                    differ += static_cast<float>(host_o[cpu.o.values.size() * h + i]) != cpu.o.values[i];
                for (std::size_t i = 0; i < cpu.lse.size(); ++i)
                    differ += host_lse[cpu.lse.size() * h + i] != cpu.lse[i];
            }
            EXPECT_EQ(differ, 0);
            faults.expect_what_was_done();
            // The kernel that multiplies, where that is what the faults do, leaves the same.
            if (!are_scalings(words, plan) || std::is_same_v<T, __half>) continue;  // that kernel is there in bf16
            check(cudaMemset(o.data(), 0xFF, count * sizeof(T)), "clearing");
            check(cudaMemset(lse.data(), 0xFF, host_lse.size() * sizeof(float)), "clearing");
            for (const auto& sums : faults.sums)
                check(cudaMemset(sums->data(), 0xFF, altered_sums(call) * sizeof(AlteredSums)), "clearing");
            launch_scaled_forward(call, support.kernel, faults.on_device, nullptr);
            check(cudaDeviceSynchronize(), "running the scaled forward");
            EXPECT_EQ(std::memcmp(o.host().data(), host_o.data(), count * sizeof(T)), 0);
            EXPECT_EQ(lse.host(), host_lse);
            faults.expect_what_was_done();
        }
}

template <class T>
void expect_backwards_of_the_emulation() {
    for (const int d : {64, 128})
        for (const std::vector<std::string>& words :
             {std::vector<std::string>{"delta:multiplicative:0.1"},
              {"delta:random:0.05:shape=value:heads=0"},
              {"delta:fixed:100ulp:hold=nearest", "ds_cast:random:0.02:shape=value",
               "dp_accumulate:multiplicative:0.01:format=fp32"},
              {"ds:multiplicative:0.125:hold=nearest"},
              {"bwd_p_cast:multiplicative:0.125:hold=nearest"},
              {"ds_cast:flip@2:0.25:shape=value:hold=nearest:heads=1"},
              {"dp_accumulate:multiplicative:0.25:hold=nearest:format=fp32", "ds:multiplicative:-0.125:hold=nearest",
               "bwd_p_cast:multiplicative:-0.25:hold=nearest:heads=1", "ds_cast:multiplicative:0.125:hold=nearest"},
              {"dp_accumulate:multiplicative:-0.10000002384185791:hold=nearest:format=fp32:heads=1",
               "ds:per_head:0.25:shape=value:hold=nearest"}}) {
            SCOPED_TRACE(::testing::Message() << "head_dim " << d << ", " << ::testing::PrintToString(words));
            std::vector<Head> all;
            for (int h = 0; h < heads; ++h) all.emplace_back(300, 300, d, 70 + h, 1, 2.0);
            const std::vector<HeadGroup> groups = groups_of(all);
            const RoundingPlan plan = backward_plan(d, element_of<T>);
            auto call = call_of<BackwardCall>(groups);
            Planted faults(words, plan, altered_sums(call));
            std::vector<GroupForward> forwards;
            std::vector<T> host_o;
            std::vector<float> host_lse;
            for (const HeadGroup& g : groups) {
                const HeadForward& f = forwards.emplace_back(faultline::attention_forward(g, plan)).heads.front();
                for (const double x : f.o.values) host_o.push_back(rounded<T>(x));
                for (const double x : f.lse) host_lse.push_back(static_cast<float>(x));
            }
            const DeviceMemory<T> q(stored_of<T>(all, [](const Head&h) -> const Matrix& { return h.q[0]; })),
                k(stored_of<T>(all, [](const Head&h) -> const Matrix& { return h.k; })),
                v(stored_of<T>(all, [](const Head&h) -> const Matrix& { return h.v; })),
                dout(stored_of<T>(all, [](const Head&h) -> const Matrix& { return h.dout[0]; })), o(host_o);
            const DeviceMemory<float> lse(host_lse);
            const DeviceMemory<T> dq(host_o.size()), dk(host_o.size()), dv(host_o.size());
            const DeviceMemory<unsigned char> workspace(backward_workspace(call));
            call.dout_strides = call.dq_strides = call.q_strides;
            call.dk_strides = call.dv_strides = call.k_strides;
            call.q = q.data();
            call.k = k.data();
            call.v = v.data();
            call.o = o.data();
            call.dout = dout.data();
            call.lse = lse.data();
            call.dq = dq.data();
            call.dk = dk.data();
            call.dv = dv.data();
            call.workspace = workspace.data();
            call.deterministic = true;
            const auto support = supported_backward(plan, d, true);
            ASSERT_TRUE(support) << support.why;
            launch_altered_backward(call, support.kernel, faults.on_device, nullptr);
            check(cudaDeviceSynchronize(), "running the altered backward");
            const std::vector<T> found[] = {dq.host(), dk.host(), dv.host()};
            Instruments on_cpu = faults.on_cpu();
            int differ = 0;
            for (int h = 0; h < heads; ++h) {
                const GroupBackward cpu = faultline::attention_backward(groups[h], forwards[h], plan, &on_cpu);
                const Matrix* const wanted[] = {&cpu.dq.front(), &cpu.dk, &cpu.dv};
                for (int g = 0; g < 3; ++g)
                    for (std::size_t i = 0; i < wanted[g]->values.size(); ++i)
                        differ +=
                            static_cast<float>(found[g][wanted[g]->values.size() * h + i]) != wanted[g]->values[i];
            }
            EXPECT_EQ(differ, 0);
            faults.expect_what_was_done();
            // The kernel that multiplies, where that is what the faults do, leaves the same.
            if (!are_scalings(words, plan) || std::is_same_v<T, __half>) continue;  // that kernel is there in bf16
            for (const DeviceMemory<T>* out : {&dq, &dk, &dv})
                check(cudaMemset(out->data(), 0xFF, host_o.size() * sizeof(T)), "clearing");
            for (const auto& sums : faults.sums)
                check(cudaMemset(sums->data(), 0xFF, altered_sums(call) * sizeof(AlteredSums)), "clearing");
            launch_scaled_backward(call, support.kernel, faults.on_device, nullptr);
            check(cudaDeviceSynchronize(), "running the scaled backward");
            const std::vector<T> by_factor[] = {dq.host(), dk.host(), dv.host()};
            for (int g = 0; g < 3; ++g)
                EXPECT_EQ(std::memcmp(by_factor[g].data(), found[g].data(), found[g].size() * sizeof(T)), 0) << g;
            faults.expect_what_was_done();
        }
}

TEST(TensorAltered, ForwardsAreTheEmulationsWithTheSameFaults) {
    NEEDS_HOPPER();
    expect_forwards_of_the_emulation<__nv_bfloat16>();
}
TEST(TensorAltered, ForwardsOfFp16AreTheEmulationsWithTheSameFaults) {
    NEEDS_HOPPER();
    expect_forwards_of_the_emulation<__half>();
}
TEST(TensorAltered, BackwardsAreTheEmulationsWithTheSameFaults) {
    NEEDS_HOPPER();
    expect_backwards_of_the_emulation<__nv_bfloat16>();
}
TEST(TensorAltered, BackwardsOfFp16AreTheEmulationsWithTheSameFaults) {
    NEEDS_HOPPER();
    expect_backwards_of_the_emulation<__half>();
}

}  // namespace
}  // namespace faultline::tensor_kernel
