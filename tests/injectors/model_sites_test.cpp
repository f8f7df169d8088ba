// SPDX-License-Identifier: Apache-2.0
// Faults outside the kernel: where they act, and that elsewhere no bit changes.
#include <gtest/gtest.h>

#include <faultline/base/error.hpp>
#include <faultline/base/parallel.hpp>
#include <faultline/injectors/model_injector.hpp>

#include "../kernels/cpu/heads.hpp"

namespace faultline::testing {
namespace {

TEST(ModelSites, ActInTheirStepsAndLayersAlone) {
    const Matrix x = random_matrix(20, 12, 1.0, 3);
    const Fault fault{
        .site = ModelSite::ffn_output, .law = Law::random, .magnitude = 0.1, .layers = {1}, .from = 10, .until = 12};
    for (const std::int64_t step : {9, 10, 11, 12})
        for (const int layer : {0, 1}) {
            Matrix y = x;
            const Realised r = inject(fault, step, layer, 1, 0, y.view());
            const bool active = layer == 1 && (step == 10 || step == 11);
            EXPECT_EQ(y != x, active);
            EXPECT_EQ(r.count > 0, active);
        }
}

TEST(ModelSites, HeadsAreBlocksOfColumns) {
    const Matrix x = random_matrix(20, 12, 1.0, 4);
    Matrix y = x;
    const Fault fault{.site = ModelSite::attention_projection, .law = Law::fixed, .magnitude = 0.1, .heads = {2}};
    const Realised r = inject(fault, 0, 0, 3, 0, y.view());
    EXPECT_EQ(r.count, 80.0);
    for (std::ptrdiff_t i = 0; i < 20; ++i)
        for (std::ptrdiff_t j = 0; j < 12; ++j) EXPECT_EQ(x.view()(i, j) != y.view()(i, j), j >= 8);
}

// Layer normalisation subtracts the mean over channels: a fixed sign on the residual stream is gone behind it, a fixed sign
// for each column is not. Which law reaches the network is not a matter of its size.
TEST(ModelSites, LayerNormRemovesAConstantAndKeepsADirection) {
    const auto normalised = [](Matrix m) {
        for (std::ptrdiff_t i = 0; i < m.rows; ++i) {
            double mean = 0, squares = 0;
            for (std::ptrdiff_t j = 0; j < m.cols; ++j) mean += m.view()(i, j) / static_cast<double>(m.cols);
            for (std::ptrdiff_t j = 0; j < m.cols; ++j) squares += (m.view()(i, j) - mean) * (m.view()(i, j) - mean);
            const double size = std::sqrt(squares / static_cast<double>(m.cols));
            for (std::ptrdiff_t j = 0; j < m.cols; ++j) m.view()(i, j) = (m.view()(i, j) - mean) / size;
        }
        return m;
    };
    const Matrix x = random_matrix(16, 64, 1.0, 6);
    const auto moved = [&](Law law) {
        Matrix y = x;
        (void)inject(Fault{.site = ModelSite::residual_add, .law = law, .magnitude = 0.1}, 0, 0, 1, 0, y.view());
        double largest = 0;
        const Matrix before = normalised(x), after = normalised(y);
        for (std::size_t i = 0; i < x.values.size(); ++i)
            largest = std::max(largest, std::abs(after.values[i] - before.values[i]));
        return largest;
    };
    EXPECT_LT(moved(Law::fixed), 1e-13);  // 64 terms of binary64
    EXPECT_GT(moved(Law::per_column), 0.05);
}

TEST(ModelSites, StridedFloatsOutsideTheViewStay) {
    std::vector<float> storage(10 * 8, 1.0F);
    const MatrixView<float> view(storage.data(), 10, 5, 8);
    (void)inject(Fault{.site = ModelSite::optimizer_update, .law = Law::fixed, .magnitude = 0.5}, 0, 0, 1, 0, view);
    for (std::size_t i = 0; i < storage.size(); ++i) EXPECT_EQ(storage[i], i % 8 < 5 ? 1.5F : 1.0F);
}

// Mean and reciprocal deviation are of different sizes: a magnitude is relative to each by itself.
TEST(ModelSites, LayerNormStatisticsAreTwoKinds) {
    Matrix statistics(30, 2, 1e-3);
    for (std::ptrdiff_t i = 0; i < 30; ++i) statistics.view()(i, 1) = 50;
    Matrix both = statistics, one = statistics;
    Fault fault{.site = ModelSite::layer_norm_statistics, .law = Law::fixed, .magnitude = 0.5};
    (void)inject(fault, 0, 0, 1, 0, both.view());
    fault.column = 1;
    (void)inject(fault, 0, 0, 1, 0, one.view());
    EXPECT_NEAR(both.view()(3, 0), 1.5e-3, 1e-15);
    EXPECT_NEAR(both.view()(3, 1), 75, 1e-10);
    EXPECT_EQ(one.view()(3, 0), 1e-3);
    EXPECT_EQ(one.view()(3, 1), both.view()(3, 1));
    fault.column = 2;
    EXPECT_THROW(inject(fault, 0, 0, 1, 0, one.view()), RequestError);
}

// Row blocks come from any thread in any order; values and statistics are those of one thread in order.
TEST(ModelSites, TheHookDoesNotDependOnThreads) {
    constexpr std::ptrdiff_t blocks = 8, rows = 16;
    const Matrix x = random_matrix(blocks * rows, 24, 1.0, 8);
    const std::vector<float> start(x.values.begin(), x.values.end());
    const Fault fault{.site = ModelSite::ffn_output, .law = Law::random, .magnitude = 0.1};
    const auto run = [&](int threads, bool backward, std::vector<float>& values) {
        values = start;
        ModelInjector injector(fault, 2);
        parallel_for(blocks, threads, [&](std::size_t task) {
            const std::ptrdiff_t block =
                backward ? blocks - 1 - static_cast<std::ptrdiff_t>(task) : static_cast<std::ptrdiff_t>(task);
            ModelAt where;
            where.layer = 1;
            where.row0 = block * rows;
            injector.at(ModelSite::ffn_output, where, {values.data() + block * rows * 24, rows, 24}, {});
        });
        EXPECT_EQ(injector.of_layer(0).count, 0.0);
        EXPECT_EQ(injector.of_layer(1), injector.total());
        return injector.total();
    };
    std::vector<float> a, b;
    EXPECT_EQ(run(1, false, a), run(4, true, b));
    EXPECT_EQ(a, b);
    EXPECT_NE(a, start);
}

}  // namespace
}  // namespace faultline::testing
