// SPDX-License-Identifier: Apache-2.0
// Truth of captured heads, layer by layer, verified against MPFR on samples. Skipped where the captures are not.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>

#include <gtest/gtest.h>

#include <faultline/tensor/safetensors.hpp>
#include <faultline/truth/truth.hpp>

#include "compare.hpp"
#include "paths.hpp"
#include "problems.hpp"

namespace faultline {
namespace {

std::filesystem::path captures() {
    if (const char* named = std::getenv("FAULTLINE_CAPTURES")) return named;
    return test::source_dir() / ".." / "shared" / "captures";
}

/// One head of one layer, causal, scale 1/sqrt(head_dim).
test::OwnedProblem captured(const TensorSet& set, const std::string& layer, std::ptrdiff_t head) {
    test::OwnedProblem owned;
    const auto matrix = [&](const std::string& name) {
        const Tensor& tensor = set.at(layer + "." + name);
        const std::vector<double> values = tensor.to_double();
        Matrix m(tensor.shape[2], tensor.shape[3]);
        std::copy_n(values.begin() + head * m.rows * m.cols, m.values.size(), m.values.begin());
        return owned.keep(std::move(m));
    };
    owned.problem.q = {matrix("q")};
    owned.problem.dout = {matrix("do")};
    owned.problem.k = matrix("k");
    owned.problem.v = matrix("v");
    owned.problem.causal = true;
    return owned;
}

struct Layer {
    const char* file;
    const char* layer;
    double dq_norm;  // over all heads, from the captures' README, to its three digits; 0: underflows double
};

TEST(Captures, TruthOfEveryHeadOfALayer) {
    for (const Layer& l : {Layer{"healthy64-3000", "layer0", 1.57e-3}, Layer{"healthy128-2000", "layer0", 1.14e-3},
                           Layer{"biased128-600", "layer1", 1.24e-6}, Layer{"biased64-1500", "layer3", 2.80e-7},
                           Layer{"biased64-1500", "layer2", 0}}) {
        const auto path = captures() / (std::string(l.file) + ".safetensors");
        if (!std::filesystem::exists(path)) GTEST_SKIP() << "no captures (set FAULTLINE_CAPTURES)";
        const TensorSet set = read_safetensors(path);
        const std::string name = std::string(l.file) + " " + l.layer;
        WideReal squares, bound_squares;
        std::size_t slow = 0;
        std::size_t elements = 0;
        const std::int64_t heads = set.at(std::string(l.layer) + ".q").shape[1];
        for (std::int64_t h = 0; h < heads; ++h) {
            const auto owned = captured(set, l.layer, h);
            const GroupTruth truth = attention_truth(owned.problem);
            const WideReal norm = frobenius_norm(truth.heads[0].dq);
            const WideReal bound = frobenius_bound(truth.heads[0].dq);
            squares = squares + norm * norm;
            bound_squares = bound_squares + bound * bound;
            slow += truth.slow_elements;
            elements += truth.elements;
            EXPECT_EQ(truth.undecided_elements, 0U) << name << " head " << h;
            if (h == 0) {
                const TruthVerification found = verify_truth(owned.problem, truth, 40, 3);
                EXPECT_EQ(found.outside, 0U) << name << ": " << found.worst << " ratio " << found.worst_ratio;
            }
        }
        const WideReal norm = sqrt(squares);
        std::printf("%s: |dq| = %s +- %s, %zu of %zu elements by interval arithmetic\n", name.c_str(),
                    norm.to_string(6).c_str(), sqrt(bound_squares).to_string(2).c_str(), slow, elements);
        EXPECT_LE(sqrt(bound_squares), norm * WideReal(0x1p-50));
        if (l.dq_norm > 0) {
            EXPECT_NEAR(norm.to_double(), l.dq_norm,
                        0.005 * l.dq_norm);  // half a unit of its third digit, at most 0.5%
        } else {
            EXPECT_GT(norm, WideReal(0.0));
            EXPECT_EQ(norm.to_double(), 0.0) << "this one is known to underflow double";
        }
    }
}

}  // namespace
}  // namespace faultline
