// SPDX-License-Identifier: Apache-2.0
// Sources that are one in other words, and those that change nothing: they are refused, and runs of them are the same in every
// bit; words that are taken are not.
#include <cmath>
#include <functional>

#include <gmock/gmock.h>

#include <faultline/cpu/attention.hpp>
#include <faultline/dissociation/matrix_words.hpp>
#include <faultline/dissociation/passed_faults.hpp>
#include <faultline/plan/presets.hpp>
#include <faultline/random/random_stream.hpp>

#include "matrix_support.hpp"

namespace faultline::test {
namespace {

using ::testing::HasSubstr;

std::string said(const std::function<void()>& request) {
    try {
        request();
    } catch (const RequestError& error) {
        return error.what();
    }
    return "";
}

/// Two layers of two heads, six steps, no control but none.
MatrixConfig runs_of_sources(const std::vector<std::string>& sources) {
    MatrixConfig config = small();
    config.train.steps = 6;
    config.train.monitor_every = 1;
    config.sources = sources;
    config.interventions = {"none"};
    config.controls = {};
    config.seeds = {3};
    return config;
}

RunResult run_of(const std::string& source) { return run(runs_of_sources({source})).runs.back(); }

TEST(SourceWords, ThatAreOneMakeOneRun) {
    const std::vector<std::pair<std::string, std::string>> one{
        {"delta:fixed:0.1", "delta:fixed:0.1:layers=1,0"},
        {"delta:fixed:0.1:heads=1,0:until=6", "delta:fixed:10%"},
        {"layer_norm_statistics:fixed:0.1", "layer_norm_statistics:fixed:0.1:layers=0,1,2"},
        {"logits:fixed:0.1", "logits:fixed:0.1:layers=2"},
        {"delta:fixed:0.1+ffn_output:per_column:0.1", "ffn_output:per_column:0.1+delta:fixed:0.1"},
        {"ds:fixed:0.1:layers=0+ds:random:0.3:layers=1", "ds:random:0.3:layers=1+ds:fixed:0.1:layers=0"},
        {"plan:fa2", "plan:fa2:layers=0,1"},
        {"plan:fa2:layers=0", "plan:fa2:layers=0:heads=1,0"},
        {"plan:fa2:layers=0+plan:math:layers=1", "plan:math+plan:fa2:layers=0"},
        {"plan:fa2+delta:fixed:0.1", "delta:fixed:0.1+plan:fa2:heads=0,1"}};
    for (const auto& [a, b] : one) {
        EXPECT_THAT(said([&] {
                        expect_different_sources({a, b}, runs_of_sources({}).train);
                    }),
                    HasSubstr("\"" + b + "\": is there twice, as \"" + a + "\" too"));
        const RunResult of_a = run_of(a), of_b = run_of(b);
        ASSERT_FALSE(of_a.loss.empty()) << a;
        EXPECT_EQ(of_a.loss, of_b.loss) << a;
        EXPECT_EQ(of_a.sigma_q, of_b.sigma_q) << a;
    }
}

TEST(SourceWords, ThatAreNotOneMakeOtherRuns) {
    const std::vector<std::pair<std::string, std::string>> two{
        // The embeddings' updates are of no layer; the later fault meets what the other has left.
        {"optimizer_update:fixed:0.1", "optimizer_update:fixed:0.1:layers=0,1"},
        {"ds:fixed:0.9+ds:operand:0.9", "ds:operand:0.9+ds:fixed:0.9"},
        {"delta:fixed:0.1", "delta:fixed:0.1:until=5"},
        {"plan:repo-2510.04212", "plan:exact"},
        {"plan:exact", "plan:exact:heads=0"}};
    for (const auto& [a, b] : two) {
        EXPECT_EQ(said([&] { expect_different_sources({a, b}, runs_of_sources({}).train); }), "");
        const RunResult of_a = run_of(a), of_b = run_of(b);
        EXPECT_NE(std::pair(of_a.loss, of_a.sigma_q), std::pair(of_b.loss, of_b.sigma_q)) << a;
    }
}

TEST(SourceWords, OfAPlanThatHoldsAnywayAreRefused) {
    MatrixConfig config = runs_of_sources({"plan:fa2"});
    config.train.model.attention = {{-1, {}, std::make_shared<const RoundingPlan>(plan("fa2"))}};
    EXPECT_THAT(refusal(config),
                HasSubstr("source \"plan:fa2\", intervention \"none\": plan \"fa2\" in every layer: does"));
    config.sources = {"plan:math:layers=1"};
    EXPECT_EQ(refusal(config), "");
    EXPECT_THAT(refusal(runs_of_sources({"plan:math+plan:fa2"})),
                HasSubstr("plan \"math\" in every layer: does nothing"));
    EXPECT_THAT(refusal(runs_of_sources({"plan:math:layers=0+plan:fa2:layers=0"})),
                HasSubstr("plan \"math\" in layer 0: does nothing"));
    EXPECT_EQ(refusal(runs_of_sources({"plan:math+plan:fa2:layers=0"})), "");
}

// The zero of a series of magnitudes is its control, and changes no bit; alone it is the run without a fault.
TEST(SourceWords, OfMagnitude0) {
    const gpt::TrainConfig config = runs_of_sources({}).train;
    const auto met = [&](const std::vector<std::string>& sources) {
        return said([&] { expect_magnitudes_met(sources, config); });
    };
    EXPECT_THAT(met({"delta:fixed:0"}), HasSubstr("\"delta:fixed:0\": magnitude 0: changes nothing"));
    EXPECT_THAT(met({"delta:fixed:0", "ds:fixed:0.1"}), HasSubstr("\"delta:fixed:0\": magnitude 0"));
    EXPECT_THAT(met({"delta:fixed:0", "delta:random:0.1"}), HasSubstr("magnitude 0"));
    EXPECT_THAT(met({"delta:fixed:0.1+ds:fixed:0"}), HasSubstr("magnitude 0"));
    EXPECT_EQ(met({"delta:fixed:0", "delta:fixed:0.1", "delta:fixed:2ulp"}), "");
    EXPECT_EQ(met({"delta:fixed:0.1+ds:fixed:0", "delta:fixed:0.1+ds:fixed:0.1"}), "");
    EXPECT_THAT(said([&] {
                    expect_different_sources({"delta:fixed:0", "delta:fixed:-0ulp"}, config);
                }),
                HasSubstr("is there twice"));
    EXPECT_THAT(said([] {
                    expect_magnitudes({parse_fault("delta:fixed:0.1"), parse_fault("o_cast:operand:0ulp")});
                }),
                HasSubstr("fault \"o_cast:operand:0ulp\": magnitude 0: changes nothing"));
    EXPECT_EQ(run_of("delta:fixed:0").loss, run_of("none").loss);
    EXPECT_EQ(run_of("ffn_output:random:0").loss, run_of("none").loss);
}

/// o, dq, dk and dv of a head under the plan.
std::vector<double> results(const RoundingPlan& plan, int rows, int columns) {
    const auto drawn = [&](std::uint64_t number) {
        Matrix values(rows, columns);
        for (std::size_t a = 0; a < values.values.size(); ++a) values.values[a] = RandomStream(number).normal(a);
        return values;
    };
    const Matrix q = drawn(0), k = drawn(1), v = drawn(2), dout = drawn(3);
    HeadGroup group;
    group.q = {q.view()};
    group.k = k.view();
    group.v = v.view();
    group.dout = {dout.view()};
    group.scale = 1 / std::sqrt(static_cast<double>(columns));
    const GroupForward forward = attention_forward(group, plan);
    const GroupBackward backward = attention_backward(group, forward, plan);
    std::vector<double> all = forward.heads[0].o.values;
    for (const Matrix* part : {&backward.dq[0], &backward.dk, &backward.dv})
        all.insert(all.end(), part->values.begin(), part->values.end());
    return all;
}

// exact=SITE is refused where the plan has no rounding there or the kernel does not come by: of every plan and site, the results
// are the same bits then; and most of those that are taken change some.
TEST(SourceWords, OfASiteThatIsExactAnywayAreRefused) {
    constexpr int rows = 16, columns = 8;
    gpt::ModelConfig model = small().train.model;
    ASSERT_EQ(model.context, rows);
    ASSERT_EQ(model.head_dim(), columns);
    int refused = 0, not_passed = 0, changed = 0;
    for (const RoundingPlan& preset : presets()) {
        const RoundingPlan whole = for_head_dim(preset, columns);
        const std::vector<double> expected = results(whole, rows, columns);
        for (const SiteInfo& site : sites()) {
            const std::string word = "plan:" + preset.name + ":exact=" + std::string(site.name);
            const std::string why = said([&] { expect_repairs_passed(parse_source(word, columns), model); });
            const bool same = results(whole.repaired(site.site), rows, columns) == expected;
            if (!why.empty()) {
                EXPECT_TRUE(same) << why;
                EXPECT_THAT(why, HasSubstr("exact=" + std::string(site.name) + ": does nothing"));
                ++refused;
                not_passed += why.find("is not passed") != std::string::npos ? 1 : 0;
            }
            changed += same ? 0 : 1;
        }
    }
    EXPECT_GT(changed, 100);
    EXPECT_GT(refused, not_passed);
    EXPECT_GT(not_passed, 10);
}

TEST(SourceWords, OfCorrectionsAndTilesThatAPlanHasAnyway) {
    const auto read = [](const char* word) { return said([&] { (void)parse_source(word, 8); }); };
    EXPECT_THAT(read("plan:exact:untiled"), HasSubstr("untiled: does nothing: plan \"exact\" is the same without it"));
    EXPECT_THAT(read("plan:fa2:correction=delta_p_dp:correction=delta_p_dp"),
                HasSubstr("correction=delta_p_dp: does nothing"));
    EXPECT_THAT(read("plan:fa2:exact=o_cast:exact=o_cast"), HasSubstr("exact=o_cast: does nothing"));
    EXPECT_THAT(read("plan:fa2:layers=0,0"), HasSubstr("0 is there twice in \"0,0\""));
    EXPECT_EQ(read("plan:fa2:untiled:exact=o_cast:correction=delta_p_dp"), "");
}

}  // namespace
}  // namespace faultline::test
