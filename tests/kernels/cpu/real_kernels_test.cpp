// SPDX-License-Identifier: Apache-2.0
// The plans of real kernels against what the kernels returned: tensors captured on an H200 from PyTorch 2.11's
// FlashAttention-2 back end. Skipped where the captures are absent.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>

#include <faultline/tensor/safetensors.hpp>

#include "heads.hpp"
#include "paths.hpp"

namespace faultline::testing {
namespace {

std::filesystem::path captures() {
    if (const char* set = std::getenv("FAULTLINE_CAPTURES")) return set;
    return test::source_dir() / ".." / "shared" / "captures";
}

struct Equal {
    std::size_t same = 0, within_one_ulp = 0, total = 0;
    [[nodiscard]] double share() const { return static_cast<double>(same) / static_cast<double>(total); }
    [[nodiscard]] double near() const { return static_cast<double>(within_one_ulp) / static_cast<double>(total); }
};

struct Case {
    const char* file;
    const char* layer;
    const char* plan;
    double o, dq, dk, dv;  ///< least share of equal elements
};
void PrintTo(const Case& c, std::ostream* out) { *out << c.file << " " << c.layer << " " << c.plan; }

class FlashAttention2 : public ::testing::TestWithParam<Case> {};

// What is left over: from 512 keys on the split-KV combine kernel uses the full-accuracy expf and logf, which the plan has
// correctly rounded, and dq is summed by atomics whose order differs from run to run. In a collapsed layer of tiny
// gradients the atomics also flush fp32 subnormals, which the plan keeps.
TEST_P(FlashAttention2, PlanReproducesTheKernel) {
    const Case& c = GetParam();
    const std::filesystem::path file = captures() / c.file;
    if (!std::filesystem::exists(file)) GTEST_SKIP() << "no captures at " << captures() << " (set FAULTLINE_CAPTURES)";
    const TensorSet set = read_safetensors(file.string());
    const std::string layer = c.layer;
    const auto& shape = set.at(layer + ".q").shape;
    const std::ptrdiff_t heads = shape[1], n = shape[2], d = shape[3];
    std::map<std::string, std::vector<double>> values;
    for (const char* name : {"q", "k", "v", "do", "flash.o", "flash.dq", "flash.dk", "flash.dv"})
        values[name] = set.at(layer + "." + name).to_double();
    const auto view = [&](const char* name, std::ptrdiff_t h) {
        return MatrixView<const double>(values.at(name).data() + h * n * d, n, d);
    };

    const RoundingPlan fa2 = preset(c.plan, d);
    std::map<std::string, Equal> equal;
    for (std::ptrdiff_t h = 0; h < heads; ++h) {
        HeadGroup in;
        in.q = {view("q", h)};
        in.dout = {view("do", h)};
        in.k = view("k", h);
        in.v = view("v", h);
        in.scale = 1.0 / std::sqrt(static_cast<double>(d));
        const GroupForward fwd = attention_forward(in, fa2);
        const GroupBackward bwd = attention_backward(in, fwd, fa2);
        const auto compare = [&](const char* name, const Matrix& ours) {
            const MatrixView<const double> theirs = view(name, h);
            for (std::ptrdiff_t i = 0; i < ours.rows; ++i)
                for (std::ptrdiff_t j = 0; j < ours.cols; ++j) {
                    Equal& e = equal[name];
                    e.same += ours(i, j) == theirs(i, j);
                    e.within_one_ulp += std::abs(ours(i, j) - theirs(i, j)) <= ulp(theirs(i, j), bf16);
                    ++e.total;
                }
        };
        compare("flash.o", fwd.heads[0].o);
        compare("flash.dq", bwd.dq[0]);
        compare("flash.dk", bwd.dk);
        compare("flash.dv", bwd.dv);
    }
    const auto check = [&](const char* name, double least) {
        EXPECT_GE(equal[name].share(), least)
            << name << ": " << equal[name].total - equal[name].same << " elements differ";
        EXPECT_GE(equal[name].near(), 0.99) << name;
    };
    check("flash.o", c.o);
    check("flash.dq", c.dq);
    check("flash.dk", c.dk);
    check("flash.dv", c.dv);
}

INSTANTIATE_TEST_SUITE_P(
    Captures, FlashAttention2,
    ::testing::Values(Case{"healthy64-3000.safetensors", "layer0", "fa2-unfused", 1.0, 1.0, 1.0, 1.0},
                      Case{"biased64-1500.safetensors", "layer2", "fa2-unfused", 1.0, 1.0, 1.0, 1.0},
                      Case{"biased64-1500.safetensors", "layer3", "fa2-unfused", 1.0, 0.989, 1.0, 1.0},
                      Case{"healthy128-2000.safetensors", "layer0", "fa2-unfused-splitkv", 0.9999, 0.999, 0.999,
                           0.9999},
                      Case{"biased128-600.safetensors", "layer0", "fa2-unfused-splitkv", 0.99999, 0.9999, 0.9998, 1.0},
                      Case{"biased128-600.safetensors", "layer1", "fa2-unfused-splitkv", 1.0, 0.99998, 1.0, 1.0}),
    [](const auto& tested) {
        std::string name = std::string(tested.param.file).substr(0, 10) + tested.param.layer;
        std::erase_if(name, [](char ch) { return !std::isalnum(static_cast<unsigned char>(ch)); });
        return name;
    });

// The same captures tell the fused exponent from the unfused one and one tiling from another, so equality is not cheap.
TEST(FlashAttention2Captures, OtherPlansAreTold) {
    const std::filesystem::path file = captures() / "healthy128-2000.safetensors";
    if (!std::filesystem::exists(file)) GTEST_SKIP() << "no captures at " << captures() << " (set FAULTLINE_CAPTURES)";
    const TensorSet set = read_safetensors(file.string());
    const std::ptrdiff_t n = 512, d = 128;
    std::map<std::string, std::vector<double>> values;
    for (const char* name : {"q", "k", "v", "flash.o"})
        values[name] = set.at(std::string("layer0.") + name).to_double();
    HeadGroup in;
    in.q = {{values["q"].data(), n, d}};
    in.k = {values["k"].data(), n, d};
    in.v = {values["v"].data(), n, d};
    in.scale = 1.0 / std::sqrt(static_cast<double>(d));
    const Matrix o = attention_forward(in, preset("fa2-unfused", d)).heads[0].o;
    std::size_t same = 0;
    for (std::size_t i = 0; i < o.values.size(); ++i) same += o.values[i] == values["flash.o"][i];
    EXPECT_LT(static_cast<double>(same) / static_cast<double>(o.values.size()), 0.99)
        << "the unsplit schedule is not what ran";
}

}  // namespace
}  // namespace faultline::testing
