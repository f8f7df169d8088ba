// SPDX-License-Identifier: Apache-2.0
// The plans of PyTorch 2.11's other back ends against what they returned on an H200: memory-efficient attention, cuDNN 9.19
// and plain operations. FlashAttention is in real_kernels_test.cpp. Skipped where the captures are absent.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <map>

#include <faultline/tensor/safetensors.hpp>

#include "heads.hpp"
#include "paths.hpp"

namespace faultline::testing {
namespace {

std::filesystem::path folder() {
    if (const char* set = std::getenv("FAULTLINE_CAPTURES")) return set;
    return test::source_dir() / ".." / "shared" / "captures";
}

struct Row {
    const char *file, *layer, *kernel, *plan;
    double o, dq, dk, dv;  ///< least shares of equal elements: those measured, cut after the third digit
};
void PrintTo(const Row& row, std::ostream* out) { *out << row.file << " " << row.layer << " " << row.kernel; }

class OtherKernel : public ::testing::TestWithParam<Row> {};

// What is left over on collapsed layers, by kernel (docs/kernels.md has the evidence):
// - cudnn: dk of collapsed layers in 0.4% and 1%, dq in 1% of a layer of tiny gradients, where atomic sums flush fp32
//   subnormals.
// - efficient: key tiles add to dq in whatever order they take the lock; and with four threads a row delta joins neighbours
//   first, lse divides the maximum by log2(e).
// - math: the reductions of the softmax kernel go over a warp, and its backward is p dp - p delta.
TEST_P(OtherKernel, IsReproducedByItsPlan) {
    const Row& row = GetParam();
    const std::filesystem::path file = folder() / row.file;
    if (!std::filesystem::exists(file)) GTEST_SKIP() << "no captures at " << folder() << " (set FAULTLINE_CAPTURES)";
    const TensorSet set = read_safetensors(file.string());
    const std::string layer = std::string(row.layer) + ".";
    const auto& shape = set.at(layer + "q").shape;
    const std::ptrdiff_t heads = shape[1], n = shape[2], d = shape[3];
    const auto values = [&](const std::string& name) { return set.at(layer + name).to_double(); };
    const std::vector<double> q = values("q"), k = values("k"), v = values("v"), dout = values("do");
    const auto head = [&](const std::vector<double>& x, std::ptrdiff_t h) {
        return MatrixView<const double>(x.data() + h * n * d, n, d);
    };

    const RoundingPlan plan = preset(row.plan, d);
    std::map<std::string, std::vector<Matrix>> ours;
    for (std::ptrdiff_t h = 0; h < heads; ++h) {
        HeadGroup in;
        in.q = {head(q, h)};
        in.dout = {head(dout, h)};
        in.k = head(k, h);
        in.v = head(v, h);
        in.scale = 1.0 / std::sqrt(static_cast<double>(d));
        GroupForward fwd = attention_forward(in, plan);
        GroupBackward bwd = attention_backward(in, fwd, plan);
        ours["o"].push_back(std::move(fwd.heads[0].o));
        ours["dq"].push_back(std::move(bwd.dq[0]));
        ours["dk"].push_back(std::move(bwd.dk));
        ours["dv"].push_back(std::move(bwd.dv));
    }
    const auto check = [&](const std::string& output, double least) {
        const std::vector<double> theirs = values(std::string(row.kernel) + "." + output);
        std::size_t same = 0;
        for (std::ptrdiff_t h = 0; h < heads; ++h)
            for (std::size_t i = 0; i < static_cast<std::size_t>(n * d); ++i)
                same += ours[output][static_cast<std::size_t>(h)].values[i] ==
                        theirs[static_cast<std::size_t>(h * n * d) + i];
        EXPECT_GE(static_cast<double>(same) / static_cast<double>(theirs.size()), least)
            << output << ": " << theirs.size() - same << " of " << theirs.size() << " elements differ";
    };
    check("o", row.o);
    check("dq", row.dq);
    check("dk", row.dk);
    check("dv", row.dv);
}

constexpr const char* healthy64 = "healthy64-3000.safetensors";
constexpr const char* biased64 = "biased64-1500.safetensors";
constexpr const char* healthy128 = "healthy128-2000.safetensors";
constexpr const char* biased128 = "biased128-600.safetensors";

INSTANTIATE_TEST_SUITE_P(
    Captures, OtherKernel,
    ::testing::Values(Row{healthy64, "layer0", "cudnn", "cudnn-like", 1.0, 0.9994, 0.9996, 0.9991},
                      Row{healthy64, "layer0", "efficient", "efficient", 0.9998, 0.9998, 0.9999, 1.0},
                      Row{healthy64, "layer0", "math", "math", 0.9999, 0.9997, 0.9997, 0.9999},
                      Row{biased64, "layer2", "cudnn", "cudnn-like", 1.0, 0.9999, 0.9999, 1.0},
                      Row{biased64, "layer2", "efficient", "efficient", 1.0, 1.0, 1.0, 1.0},
                      Row{biased64, "layer2", "math", "math", 1.0, 1.0, 1.0, 1.0},
                      Row{biased64, "layer3", "cudnn", "cudnn-like", 1.0, 0.9903, 0.9893, 0.9999},
                      Row{biased64, "layer3", "efficient", "efficient", 1.0, 0.9983, 0.9983, 0.9985},
                      Row{biased64, "layer3", "math", "math", 1.0, 0.7358, 0.9963, 0.9999},
                      Row{healthy128, "layer0", "cudnn", "cudnn-like", 0.9999, 0.9998, 0.9999, 0.9997},
                      Row{healthy128, "layer0", "efficient", "efficient", 0.9999, 0.9974, 0.9998, 0.9998},
                      Row{healthy128, "layer0", "math", "math", 0.9999, 0.9993, 0.9997, 0.9999},
                      Row{biased128, "layer0", "cudnn", "cudnn-like", 1.0, 0.9997, 0.9997, 0.9998},
                      Row{biased128, "layer0", "efficient", "efficient", 0.9999, 0.9983, 0.9994, 0.9998},
                      Row{biased128, "layer0", "math", "math", 0.9999, 0.9980, 0.9996, 0.9999},
                      Row{biased128, "layer1", "cudnn", "cudnn-like", 1.0, 0.9999, 0.9961, 0.9999},
                      Row{biased128, "layer1", "efficient", "efficient", 1.0, 0.7517, 0.9966, 0.9999},
                      Row{biased128, "layer1", "math", "math", 1.0, 0.8089, 0.9978, 1.0}),
    [](const auto& tested) {
        const std::string file = tested.param.file;
        return file.substr(0, file.find('-')) + tested.param.layer + tested.param.kernel;
    });

}  // namespace
}  // namespace faultline::testing
